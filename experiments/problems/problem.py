"""What can be trained on: data, a model, a loss, and what is measured besides the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn

from experiments.models import seeded


class Problem(ABC):
    """One data set with the model that is trained on it.

    Attributes:
        name: what commands and records call it.
        label: what plots call it.
        likelihood: what the model's output parametrises, for tnt_optim.
        loss_label: the loss with its unit.
        examples: how many training examples there are.
        loss_floor: a loss that no model can go below, if one is known.
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

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """The problem with its data on a device."""

    @abstractmethod
    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the training examples with these indices.

        Args:
            indices: (batch,), on the data's device.
            augment: where augmentation draws from, on the same device.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch: a mean over its examples."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """All that makes this problem what it is, JSON-ready: runs of one record share it."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures measured at an epoch's end, outside its time; none by default."""
        return {}

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of whole batches in the data: the rest of an epoch's shuffle is dropped.

        Raises:
            ValueError: not even one batch is whole.
        """
        if batch_size > self.examples:
            raise ValueError(
                f"batch_size must be at most the number of examples, {self.examples}, "
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


def seeded_model(problem: Problem, seed: int) -> nn.Module:
    """The problem's model, the same for the same seed; the caller's random state is untouched.

    Built on the CPU, so that a run on a GPU starts from the same parameters.
    """
    return seeded(problem.build, seed)
