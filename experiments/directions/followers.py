"""The methods of Figure 1: their directions along another method's run, and their own training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.directions.block_fisher import layer_vector, linear_layers
from experiments.runs.training import smoothed
from tnt_optim import KFAC, TNT, PreconditionerError, Shampoo

Batch = tuple[Tensor, Tensor]  # inputs (m, features), float64, and labels (m,), int64


@dataclass(frozen=True)
class ComparedMethod:
    """One method.

    Attributes:
        label: its name in tables and legends, as in the paper.
        colour: of its curve; Okabe and Ito's palette.
        statistics: labels "sampled" from the model's own distribution, the "empirical" training
            gradients, or None for a first-order method.
        dampings: the grid of the paper's search on its autoencoders, as its appendix lists it; None
            where the method has no damping.
        rates: learning rates with which it trains itself: half decades, as the paper's, around
            those that this network takes.
        build: makes it, from the model, a learning rate, a damping and a seed.
    """

    label: str
    colour: str
    statistics: Literal["sampled", "empirical"] | None
    dampings: tuple[float | None, ...]
    rates: tuple[float, ...]
    build: Callable[[nn.Module, float, Any, int], torch.optim.Optimizer]


# Momentum and moving averages of 0.9, nothing stale: T1 = T2 = 1, and no weight decay.
_SECOND_ORDER: dict[str, Any] = {
    "momentum": 0.9,
    "stat_decay": 0.9,
    "weight_decay": 0.0,
    "stat_interval": 1,
    "inverse_interval": 1,
}


def _tnt(model: nn.Module, lr: float, damping: Any, seed: int) -> torch.optim.Optimizer:
    parameters = model.named_parameters()
    return TNT(parameters, lr, damping=damping, seed=seed, **_SECOND_ORDER)


def _kfac(model: nn.Module, lr: float, damping: Any, seed: int) -> torch.optim.Optimizer:
    return KFAC(model, lr, damping=damping, seed=seed, **_SECOND_ORDER)


def _shampoo(model: nn.Module, lr: float, damping: Any, seed: int) -> torch.optim.Optimizer:
    return Shampoo(model.named_parameters(), lr, damping=damping, **_SECOND_ORDER)


def _sgd(model: nn.Module, lr: float, damping: Any, seed: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def _adam(model: nn.Module, lr: float, damping: Any, seed: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.999), eps=damping)


COMPARED: dict[str, ComparedMethod] = {
    "tnt": ComparedMethod(
        "TNT",
        "#0072B2",
        "sampled",
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
        (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        _tnt,
    ),
    "kfac": ComparedMethod(
        "KFAC",
        "#CC79A7",
        "sampled",
        (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
        _kfac,
    ),
    "shampoo": ComparedMethod(
        "Shampoo",
        "#E69F00",
        "empirical",
        (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
        (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
        _shampoo,
    ),
    "adam": ComparedMethod(
        "Adam", "#009E73", None, (1e-8, 1e-4, 1e-2), (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), _adam
    ),
    "sgd": ComparedMethod("SGD-m", "#D55E00", None, (None,), (1e-2, 3e-2, 1e-1, 3e-1), _sgd),
}


def shuffled_batches(
    inputs: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[Batch]:
    """Minibatches without end: epochs of whole batches, shuffled anew each time."""
    whole = inputs.shape[0] // batch_size * batch_size
    while True:
        order = torch.randperm(inputs.shape[0], generator=generator)[:whole]
        for batch in order.reshape(-1, batch_size):
            yield inputs[batch], labels[batch]


class Follower:
    """A method that says where it would go from each point of a run that is not its own.

    It has a copy of the model and the optimizer as it is; its momenta and statistics are those of
    the gradients along the run.

    Args:
        method: a key of `COMPARED`.
        damping: one of its dampings, or another.
        model: a `classifier`, which is copied.
        seed: of its sampled labels.
    """

    def __init__(self, method: str, damping: float | None, model: nn.Sequential, seed: int) -> None:
        self.method, self.damping = method, damping
        self.model = copy.deepcopy(model)
        self.optimizer = COMPARED[method].build(self.model, 1.0, damping, seed)
        self.refusals = 0

    def warm_start(self, batches: Sequence[Batch]) -> None:
        """Starts the statistics, where the method has some, at the model's present weights."""
        try:
            warm_start(self.optimizer, self.model, batches)
        except PreconditionerError:
            self.refusals += 1

    def directions(self, model: nn.Sequential, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        """Each layer's direction at the weights of `model`, as a `layer_vector`.

        It is what the optimizer's own step takes off the parameters at a learning rate of 1: zero
        where the optimizer refuses the step because it has no inverses; `refusals` counts those.
        """
        pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))
        with torch.no_grad():
            for own, other in pairs:
                own.copy_(other)
        backward(self.optimizer, self.model, inputs, labels)
        with torch.no_grad():
            # Without weight decay a step does not look at the weights: from zero it leaves its
            # direction in them, to the last digit.
            for own, _ in pairs:
                own.zero_()
        try:
            self.optimizer.step()
        except PreconditionerError:
            self.refusals += 1
        return [
            -layer_vector(layer.weight.detach(), layer.bias.detach())
            for layer in linear_layers(self.model)
        ]


def backward(
    optimizer: torch.optim.Optimizer, model: nn.Module, inputs: Tensor, labels: Tensor
) -> float:
    """Everything of a training step but the step; returns the loss."""
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = functional.cross_entropy(outputs, labels)
    if isinstance(optimizer, TNT | KFAC):
        optimizer.observe(outputs)
    loss.backward()
    return loss.item()


def warm_start(
    optimizer: torch.optim.Optimizer, model: nn.Module, batches: Sequence[Batch]
) -> None:
    """Averages the optimizer's statistics, if it has some, over the batches."""
    if not batches:
        return
    if isinstance(optimizer, TNT | KFAC):
        optimizer.warm_start((model(inputs) for inputs, _ in batches), model=model)
    elif isinstance(optimizer, Shampoo):
        losses = (functional.cross_entropy(model(x), labels) for x, labels in batches)
        optimizer.warm_start(losses, model=model)


def own_training_loss(
    method: str,
    damping: float | None,
    lr: float,
    model: nn.Sequential,
    warm: Sequence[Batch],
    batches: Sequence[Batch],
    seed: int,
) -> float:
    """The smoothed loss after the method has trained on `batches` itself.

    Infinite where it diverges. `model` is left as it is.
    """
    model = copy.deepcopy(model)
    optimizer = COMPARED[method].build(model, lr, damping, seed)
    losses: list[float] = []
    try:
        warm_start(optimizer, model, warm)
        for inputs, labels in batches:
            loss = backward(optimizer, model, inputs, labels)
            if not math.isfinite(loss):
                return math.inf
            optimizer.step()
            losses.append(loss)
    except PreconditionerError:
        return math.inf
    return smoothed(losses)[-1]
