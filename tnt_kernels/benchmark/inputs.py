"""Sets of tensors, and their random inputs: never zeros, never subnormal numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tnt_kernels import reference

Modes = list[list[Tensor]]
Shape = tuple[int, ...]

MAX_FACTOR_DIM = 8192  # as in the paper's form


@dataclass(frozen=True)
class TensorSet:
    """The tensors of one call. Each dimension is a mode."""

    name: str  # as in the tables
    shapes: tuple[Shape, ...]  # each tensor's shape
    note: str = ""  # what the set leaves out; every report of the set repeats it
    max_factor_dim: int = MAX_FACTOR_DIM  # a larger mode has only a diagonal

    @property
    def views(self) -> list[Shape]:
        """Each tensor's mode sizes."""
        return list(self.shapes)

    @property
    def matrices(self) -> list[list[Shape]]:
        """For each tensor and mode, the shape of its statistic: (d, d), or (d,) if diagonal."""
        largest = self.max_factor_dim
        return [[(d,) if d > largest else (d, d) for d in view] for view in self.views]


def generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator: the inputs of one benchmark do not depend on the benchmarks before it."""
    return torch.Generator(device).manual_seed(0)


def normal(
    shapes: Sequence[Sequence[int]], rng: torch.Generator, scale: float = 1.0
) -> list[Tensor]:
    """Independent normal entries of standard deviation ``scale``, on the generator's device."""
    return [torch.randn(*s, generator=rng, device=rng.device).mul_(scale) for s in shapes]


def symmetric_modes(tensor_set: TensorSet, rng: torch.Generator) -> Modes:
    """For every mode a symmetric matrix, eigenvalues from 0.5 to about 2.5, or such a diagonal."""

    def draw(shape: Sequence[int]) -> Tensor:
        if len(shape) == 1:
            return torch.rand(*shape, generator=rng, device=rng.device).add_(0.5)
        (root,) = normal([shape], rng, 1 / math.sqrt(2 * shape[0]))
        square = root @ root.mT
        square.diagonal().add_(0.5)
        return square.add_(square.mT.clone()).div_(2)  # symmetric to the bit

    return [[draw(shape) for shape in shapes] for shapes in tensor_set.matrices]


def gram_statistics(tensor_set: TensorSet, rng: torch.Generator) -> Modes:
    """The Gram matrices of one normal gradient for each parameter, by the reference.

    The gradient's scale makes the average eigenvalue of the largest mode 1; a vector's only nonzero
    eigenvalue is then its length.
    """
    views = tensor_set.views
    tensors = normal(views, rng)
    for tensor, view in zip(tensors, views, strict=True):
        tensor.mul_(math.sqrt(max(view) / math.prod(view)))
    stats = [[torch.empty(s, device=rng.device) for s in row] for row in tensor_set.matrices]
    reference.gram_ema_(stats, tensors, 0.0)
    return stats


def copies(modes: Sequence[Sequence[Tensor]]) -> Modes:
    """Copies of every matrix."""
    return [[matrix.clone() for matrix in row] for row in modes]


def in_float64(modes: Sequence[Sequence[Tensor]]) -> Modes:
    """Copies in float64."""
    return [[matrix.double() for matrix in row] for row in modes]


def poisoned(modes: Modes) -> Modes:
    """Matrices of the same shapes to write to, all NaN: an entry not written stays NaN."""
    return [[torch.full_like(matrix, math.nan) for matrix in row] for row in modes]


def flat(modes: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """All matrices in one list."""
    return [matrix for row in modes for matrix in row]
