"""Natural gradient with every layer's whole Fisher matrix: the reference method of Figure 1.

A layer's block has its weights and its bias together. Nothing is factored: a layer of n numbers has
an n x n matrix, so the method is for small networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

DECAY = 0.9  # of the momentum and of the matrices' moving average
# Martens & Grosse 2015, for MNIST's images scaled down to 16x16; there with tanh.
FIGURE_WIDTHS = (256, 20, 20, 20, 20, 20, 10)


ACTIVATIONS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def classifier(widths: Sequence[int], activation: str = "tanh") -> nn.Sequential:
    """A fully connected network; its outputs are logits.

    PyTorch's default initialisation; float64, so that no direction is lost in rounding.

    Args:
        widths: sizes from the input to the number of classes.
        activation: between the layers, "tanh" or "relu".
    """
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(inputs, outputs, dtype=torch.float64), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def linear_layers(model: nn.Sequential) -> list[nn.Linear]:
    """The layers with parameters, from the input on."""
    return [module for module in model if isinstance(module, nn.Linear)]


def layer_vector(weight: Tensor, bias: Tensor) -> Tensor:
    """A layer's weights and bias as one vector: row by row, each weight row with its bias last.

    weight: (out, in); bias: (out,); returns (out (in + 1),).
    """
    return torch.cat([weight, bias.unsqueeze(1)], dim=1).flatten()


def sampled_example_gradients(
    model: nn.Sequential, inputs: Tensor, generator: torch.Generator
) -> list[Tensor]:
    """Every example's gradient of -log p(y|x), layer by layer, at one y drawn from p(.|x).

    inputs: (m, widths[0]), float64. Returns (m, out (in + 1)) for each layer, in the order of
    `layer_vector`.
    """
    activations, preactivations, current = [], [], inputs
    for module in model:
        if isinstance(module, nn.Linear):
            activations.append(functional.pad(current.detach(), (0, 1), value=1.0))
            current = module(current)
            preactivations.append(current)
        else:
            current = module(current)
    labels = torch.multinomial(current.detach().softmax(dim=1), 1, generator=generator).squeeze(1)
    # A sum, not a mean: an example's preactivations depend on that example's loss only.
    loss = functional.cross_entropy(current, labels, reduction="sum")
    slopes = torch.autograd.grad(loss, preactivations)
    return [
        torch.einsum("no,ni->noi", slope, activation).flatten(1)
        for slope, activation in zip(slopes, activations, strict=True)
    ]


class BlockFisher:
    """The block-Fisher method: W <- W - lr (F_l + damping I)^-1 m_l for every layer l.

    F_l is a moving average of the minibatches' Fisher matrices: the mean over the examples of the
    outer product of an example's gradient at a label drawn from the model's own distribution. It
    starts with the first minibatch's matrix if there was no `warm_start`. m_l is the momentum,
    m <- 0.9 m + g, as in the compared methods.

    Args:
        model: a `classifier`; `step` changes its parameters.
        lr: the learning rate.
        damping: added to the diagonal of every F_l, in units of the squared gradient of one
            example.
        seed: of the sampled labels.
    """

    def __init__(self, model: nn.Sequential, lr: float, damping: float, seed: int = 0) -> None:
        self.model, self.layers = model, linear_layers(model)
        self.lr, self.damping = lr, damping
        self._generator = torch.Generator().manual_seed(seed)
        self.matrices: list[Tensor] = []
        self._momenta: list[Tensor] = []
        self._directions: list[Tensor] = []

    def warm_start(self, batches: Iterable[Tensor]) -> None:
        """Start the matrices with their plain average over batches of inputs."""
        self.matrices = []
        for count, inputs in enumerate(batches):
            self._blend(inputs, count / (count + 1))

    def directions(self, inputs: Tensor, labels: Tensor) -> tuple[list[Tensor], float]:
        """Update the matrices with a minibatch; return each layer's direction and the loss.

        inputs: (m, widths[0]), float64; labels: (m,), int64. The directions are `layer_vector`s;
        a step subtracts them.

        Raises:
            ArithmeticError: the loss or a matrix is not finite.
        """
        loss = functional.cross_entropy(self.model(inputs), labels)
        if not loss.isfinite():
            raise ArithmeticError(f"the loss is {loss.item()}: is the learning rate too large?")
        parameters = [p for layer in self.layers for p in (layer.weight, layer.bias)]
        gradients = torch.autograd.grad(loss, parameters)
        self._blend(inputs, DECAY)
        vectors = list(map(layer_vector, gradients[::2], gradients[1::2]))
        self._momenta = self._momenta or [torch.zeros_like(vector) for vector in vectors]
        for momentum, vector in zip(self._momenta, vectors, strict=True):
            momentum.mul_(DECAY).add_(vector)
        self._directions = [
            damped_solution(matrix, self.damping, momentum)
            for matrix, momentum in zip(self.matrices, self._momenta, strict=True)
        ]
        return self._directions, loss.item()

    @torch.no_grad()
    def step(self) -> None:
        """Subtract lr times the last directions from the parameters."""
        for layer, direction in zip(self.layers, self._directions, strict=True):
            rows = direction.reshape(layer.out_features, -1)
            layer.weight.sub_(rows[:, :-1], alpha=self.lr)
            layer.bias.sub_(rows[:, -1], alpha=self.lr)

    def _blend(self, inputs: Tensor, decay: float) -> None:
        gradients = sampled_example_gradients(self.model, inputs, self._generator)
        if not self.matrices:
            self.matrices = [torch.zeros(2 * g.shape[1:], dtype=g.dtype) for g in gradients]
            decay = 0.0
        for matrix, gradient in zip(self.matrices, gradients, strict=True):
            matrix.addmm_(gradient.T, gradient, beta=decay, alpha=(1 - decay) / gradient.shape[0])


def damped_solution(matrix: Tensor, damping: float, right: Tensor) -> Tensor:
    """(matrix + damping I)^-1 right, for a positive semidefinite matrix (n, n) and right (n,).

    By Cholesky for every size: with conjugate gradients for the first layer's 5140 rows, runs at
    damping 0.001 took three times as long, and one did not converge.

    Raises:
        ArithmeticError: the matrix is not finite.
    """
    if not matrix.trace().isfinite():
        raise ArithmeticError("the Fisher matrix is not finite: is the learning rate too large?")
    damped = matrix.clone()
    damped.diagonal().add_(damping)
    factor = torch.linalg.cholesky(damped)
    return torch.cholesky_solve(right.unsqueeze(1), factor).squeeze(1)
