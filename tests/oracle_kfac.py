"""KFAC with a dense Fisher matrix for every layer, in float64: the tests compare `KFAC` with it.

Written from Martens & Grosse 2015, Grosse & Martens 2016 and section 14 of Ren & Goldfarb 2021; it
shares no code with the packages. Patches are taken by loops over positions and offsets; PyTorch
computes the layers, and the gradients at their outputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from oracle import dense_kron
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def patch_rows(x: Tensor, layer: nn.Module) -> Tensor:
    """The rows a of a layer's input, with a 1 for the bias: (N * positions, in * kernel (+ 1))."""
    rows = x
    if isinstance(layer, nn.Conv2d):
        n, channels, height, width = x.shape
        (pad_h, pad_w), (step_h, step_w) = layer.padding, layer.stride
        (dil_h, dil_w), (kernel_h, kernel_w) = layer.dilation, layer.kernel_size
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
        rows = torch.cat(positions)
    return rows if layer.bias is None else torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


class Network:
    """A float64 model; its convolutions and linear layers have a Fisher block."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.params = dict(model.named_parameters())
        kinds = nn.Conv2d | nn.Linear
        self.blocks = {name: m for name, m in model.named_children() if isinstance(m, kinds)}

    def matrix(self, block: str, values: dict[str, Tensor]) -> Tensor:
        """[W | b] of parameters, gradients or momenta."""
        parts = [values[f"{block}.weight"].flatten(1)]
        if f"{block}.bias" in values:
            parts.append(values[f"{block}.bias"][:, None])
        return torch.cat(parts, dim=1)

    def gradients(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Of the mean loss, by name."""
        loss = cross_entropy(self.model(x), labels)
        found = torch.autograd.grad(loss, list(self.params.values()))
        return dict(zip(self.params, found, strict=True))

    def statistics(self, x: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(G, A) of every block, from the sum of the losses of the examples."""
        inputs, outputs, h = [], [], x
        for name, module in self.model.named_children():
            if name in self.blocks:
                inputs.append(patch_rows(h.detach(), module))
            h = module(h)
            if name in self.blocks:
                outputs.append(h)
        found = torch.autograd.grad(cross_entropy(h, labels, reduction="sum"), outputs)
        rows = [g.movedim(1, -1).reshape(-1, g.shape[1]) for g in found]
        return [(g.T @ g / len(g), a.T @ a / len(x)) for g, a in zip(rows, inputs, strict=True)]


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
        for block, fisher in zip(self.network.blocks, self.fishers, strict=True):
            matrix = self.network.matrix(block, self.momenta)
            solved = torch.linalg.solve(fisher, matrix.reshape(-1)).reshape(matrix.shape)
            weight = self.network.params[f"{block}.weight"]
            columns = math.prod(weight.shape[1:])
            directions[f"{block}.weight"] = solved[:, :columns].reshape(weight.shape)
            if columns < solved.shape[1]:
                directions[f"{block}.bias"] = solved[:, columns]
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
