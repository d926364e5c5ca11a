"""The interface of a problem: data, a model, a loss, and further figures to measure."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

# There are as many examples as places in a text: a warm start takes a sample of them.
WARM_START_BATCHES = 20


class Problem(ABC):
    """One data set with the model that is trained on it.

    Attributes:
        name: in commands and records.
        label: in plots.
        likelihood: the distribution that the model's outputs parametrise, for tnt_optim.
        loss_label: the loss with its unit.
        examples: number of training examples.
        loss_floor: a lower bound of the loss, if one is known.
    """

    name: str
    label: str
    likelihood: str
    loss_label: str
    examples: int
    loss_floor: float | None = None

    @abstractmethod
    def build(self) -> nn.Module:
        """A new model, on the CPU, from torch's global random state."""

    def to(self, device: torch.device) -> Self:
        """The problem with all tensors of its attributes on a device."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            setattr(moved, name, _moved(value, device))
        return moved

    @abstractmethod
    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the training examples with these indices.

        Args:
            indices: (batch,), on the data's device.
            augment: generator of the augmentation, on the same device.
        """

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """What the model makes of a batch's inputs, for the loss."""
        outputs: Tensor = model(inputs)
        return outputs

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch: a mean over its examples."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Everything that defines the problem, JSON-ready; the same for all runs of a record."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures measured at the end of an epoch, outside its time.

        The model is in evaluation mode meanwhile, which changes no buffer.
        """
        was_training = model.training
        model.eval()
        with torch.no_grad():
            found = self.metrics(model)
        model.train(was_training)
        return found

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """The figures of a model in evaluation mode, by their names; none by default."""
        return {}

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of whole batches in the data; the rest of each shuffle is dropped.

        Raises:
            ValueError: the data have no whole batch.
        """
        if not 1 <= batch_size <= self.examples:
            raise ValueError(
                f"batch_size must be from 1 to the number of examples, {self.examples}, "
                f"got {batch_size}"
            )
        return self.examples // batch_size

    def order(self, batch_size: int, shuffle: torch.Generator) -> Tensor:
        """The indices of one epoch's batches, (steps, batch_size), on the CPU."""
        steps = self.steps_per_epoch(batch_size)
        order = torch.randperm(self.examples, generator=shuffle)
        return order[: steps * batch_size].reshape(steps, batch_size)

    def warm_start_order(self, batch_size: int) -> Tensor:
        """The indices of a warm start's batches: the data set, in its own order."""
        steps = self.steps_per_epoch(batch_size)
        return torch.arange(steps * batch_size).reshape(steps, batch_size)


class Endless(Problem):
    """A problem whose steps draw their batches with replacement.

    Attributes:
        epoch_steps: steps in an "epoch", which means nothing else.
    """

    epoch_steps: int

    def steps_per_epoch(self, batch_size: int) -> int:
        """The same for every batch size."""
        return self.epoch_steps

    def order(self, batch_size: int, shuffle: torch.Generator) -> Tensor:
        """Random examples, uniform and independent."""
        return torch.randint(self.examples, (self.epoch_steps, batch_size), generator=shuffle)

    def warm_start_order(self, batch_size: int) -> Tensor:
        """Some batches of random examples, the same for every seed."""
        fixed = torch.Generator().manual_seed(0)
        return torch.randint(self.examples, (WARM_START_BATCHES, batch_size), generator=fixed)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: _moved(part, device) for name, part in parts.items()})
    return value
