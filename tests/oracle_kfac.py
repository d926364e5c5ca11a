"""KFAC with a dense Fisher matrix for every layer, in float64: the tests compare `KFAC` with it.

Written from Martens & Grosse 2015, Grosse & Martens 2016 and section 14 of Ren & Goldfarb 2021; it
shares no code with the packages. It also computes the network: patches by loops over positions and
offsets, layers as products with [W | b], gradients for the loss of one example after the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from oracle import dense_kron
from torch import Tensor


@dataclass
class Layer:
    """A convolution, or a linear layer (kernel None), with its names in a state_dict."""

    weight: str
    bias: str | None
    kernel: tuple[int, int] | None = None
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


@dataclass
class Norm:
    """Batch normalisation by the batch's own statistics."""

    weight: str
    bias: str


@dataclass
class Tanh:
    """The activation."""


def patch_rows(x: Tensor, layer: Layer) -> tuple[Tensor, tuple[int, ...]]:
    """The rows a without their 1, (N * positions, in * kernel), and (N, *positions)."""
    if layer.kernel is None:
        return x.reshape(len(x), -1), (len(x),)
    n, channels, height, width = x.shape
    (pad_h, pad_w), (step_h, step_w), (dil_h, dil_w) = layer.padding, layer.stride, layer.dilation
    kernel_h, kernel_w = layer.kernel
    out_h = (height + 2 * pad_h - dil_h * (kernel_h - 1) - 1) // step_h + 1
    out_w = (width + 2 * pad_w - dil_w * (kernel_w - 1) - 1) // step_w + 1
    positions = []
    for i in range(out_h):
        for j in range(out_w):
            offsets = []
            for p in range(kernel_h):
                for q in range(kernel_w):
                    row, column = i * step_h + p * dil_h - pad_h, j * step_w + q * dil_w - pad_w
                    inside = 0 <= row < height and 0 <= column < width
                    offsets.append(x[:, :, row, column] if inside else x.new_zeros(n, channels))
            positions.append(torch.stack(offsets, dim=2).reshape(n, -1))  # channel-major
    return torch.stack(positions, dim=1).reshape(n * out_h * out_w, -1), (n, out_h, out_w)


class Network:
    """The layers in their order, on named float64 parameters."""

    def __init__(self, layers: Sequence[Layer | Norm | Tanh], params: dict[str, Tensor]) -> None:
        self.layers = list(layers)
        self.params = params

    def blocks(self) -> list[Layer]:
        """The layers that have a Fisher block."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def matrix(self, layer: Layer, values: dict[str, Tensor]) -> Tensor:
        """[W | b] of parameters, gradients or momenta."""
        weight = values[layer.weight]
        parts = [weight.reshape(weight.shape[0], -1)]
        if layer.bias is not None:
            parts.append(values[layer.bias][:, None])
        return torch.cat(parts, dim=1)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Logits, every block's rows a, and the pre-activations (N * positions, out)."""
        inputs, outputs = [], []
        for layer in self.layers:
            if isinstance(layer, Tanh):
                x = torch.tanh(x)
            elif isinstance(layer, Norm):
                dims = [0, 2, 3]
                centred = x - x.mean(dims, keepdim=True)
                x = centred / (centred.square().mean(dims, keepdim=True) + 1e-5).sqrt()
                shape = (1, -1, 1, 1)
                x = x * self.params[layer.weight].reshape(shape)
                x = x + self.params[layer.bias].reshape(shape)
            else:
                rows, shape = patch_rows(x, layer)
                if layer.bias is not None:
                    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], dim=1)
                inputs.append(rows.detach())
                outputs.append(rows @ self.matrix(layer, self.params).T)
                x = outputs[-1].reshape(*shape, -1)
                x = x.permute(0, 3, 1, 2) if layer.kernel is not None else x
        return x, inputs, outputs

    def losses(self, logits: Tensor, labels: Tensor) -> list[Tensor]:
        """-log p(y|x) of each example."""
        return [
            torch.logsumexp(row, 0) - row[int(y)] for row, y in zip(logits, labels, strict=True)
        ]

    def gradients(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Of the mean loss, by name."""
        logits, _, _ = self.forward(x)
        loss = torch.stack(self.losses(logits, labels)).mean()
        found = torch.autograd.grad(loss, list(self.params.values()))
        return dict(zip(self.params, found, strict=True))

    def statistics(self, x: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(G, A) of every block, by loops over the losses of the examples and over the rows."""
        logits, inputs, outputs = self.forward(x)
        totals = [torch.zeros_like(s) for s in outputs]
        for loss in self.losses(logits, labels):
            for total, g in zip(
                totals, torch.autograd.grad(loss, outputs, retain_graph=True), strict=True
            ):
                total += g
        stats = []
        for rows, gradients in zip(inputs, totals, strict=True):
            a = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
            g = torch.zeros(gradients.shape[1], gradients.shape[1], dtype=torch.float64)
            for r in range(len(rows)):
                a += torch.outer(rows[r], rows[r])
                g += torch.outer(gradients[r], gradients[r])
            stats.append((g / len(gradients), a / len(x)))
        return stats


@dataclass
class DenseKFAC:
    """KFAC on a Network, whose parameters it updates in place."""

    network: Network
    lr: float
    damping: float
    inverse: str = "damped"
    momentum: float = 0.9
    stat_decay: float = 0.9
    weight_decay: float = 0.0
    stat_interval: int = 1
    inverse_interval: int = 1
    steps: int = 0
    first_statistic: int = 0
    stats: list[tuple[Tensor, Tensor]] | None = None
    fishers: list[Tensor] = field(default_factory=list)
    momenta: dict[str, Tensor] = field(default_factory=dict)

    def due(self) -> bool:
        """Whether this step refreshes the statistics."""
        return self.steps % self.stat_interval == 0 or self.stats is None

    def warm_start(self, batches: Sequence[list[tuple[Tensor, Tensor]]]) -> None:
        """The plain average of the batches' statistics."""
        count = len(batches)
        self.stats = [
            (sum(g for g, _ in each) / count, sum(a for _, a in each) / count)
            for each in zip(*batches, strict=True)
        ]
        self.first_statistic = self.steps
        self._refresh()

    def step(self, grads: dict[str, Tensor], observed: list[tuple[Tensor, Tensor]] | None) -> None:
        """One iteration; `observed` are the statistics of this batch, or None if not due."""
        t = self.steps
        if observed is not None:
            if self.stats is None:
                self.stats, self.first_statistic = observed, t
            else:
                beta = self.stat_decay
                self.stats = [
                    (beta * g + (1 - beta) * new_g, beta * a + (1 - beta) * new_a)
                    for (g, a), (new_g, new_a) in zip(self.stats, observed, strict=True)
                ]
        young = observed is not None and t - self.first_statistic < self.inverse_interval
        if t % self.inverse_interval == 0 or young:
            self._refresh()
        for name, g in grads.items():
            self.momenta[name] = self.momentum * self.momenta.get(name, torch.zeros_like(g)) + g
        directions = dict(self.momenta)
        for layer, fisher in zip(self.network.blocks(), self.fishers, strict=True):
            matrix = self.network.matrix(layer, self.momenta)
            solved = torch.linalg.solve(fisher, matrix.reshape(-1)).reshape(matrix.shape)
            weight = self.network.params[layer.weight]
            columns = math.prod(weight.shape[1:])
            directions[layer.weight] = solved[:, :columns].reshape(weight.shape)
            if layer.bias is not None:
                directions[layer.bias] = solved[:, columns]
        with torch.no_grad():
            for name, param in self.network.params.items():
                param -= self.lr * (directions[name] + self.weight_decay * param)
        self.steps += 1

    def _refresh(self) -> None:
        assert self.stats is not None
        self.fishers = [self._fisher(g, a) for g, a in self.stats]

    def _fisher(self, g: Tensor, a: Tensor) -> Tensor:
        eye_g, eye_a = (torch.eye(len(m), dtype=torch.float64) for m in (g, a))
        if self.inverse == "damped":
            root = math.sqrt(self.damping)
            return dense_kron([g + root * eye_g, a + root * eye_a])
        return dense_kron([g, a]) + self.damping * dense_kron([eye_g, eye_a])
