"""Random inputs of the benchmarks: never zeros, never near the subnormal numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels import gram_ema_
from tools.measuring.parameter_sets import ParameterSet

Modes = list[list[Tensor]]


def generator(seed: int = 0) -> torch.Generator:
    """A generator of its own for each benchmark: its inputs do not depend on which ran before."""
    return torch.Generator().manual_seed(seed)


def normal(
    shapes: Sequence[Sequence[int]], rng: torch.Generator, scale: float = 1.0
) -> list[Tensor]:
    """Independent normal entries of standard deviation ``scale``."""
    return [torch.randn(*shape, generator=rng).mul_(scale) for shape in shapes]


def symmetric_modes(parameter_set: ParameterSet, rng: torch.Generator) -> Modes:
    """For every mode a symmetric matrix, eigenvalues in about [0, 2], or a positive diagonal."""

    def draw(d: int, diagonal: bool) -> Tensor:
        if diagonal:
            return torch.rand(d, generator=rng).add_(0.5)
        square = torch.randn(d, d, generator=rng).mul_(0.35 / math.sqrt(d))
        square.add_(square.mT.clone())
        square.diagonal().add_(1.0)
        return square

    return [
        [draw(d, flat) for d, flat in zip(view, kinds, strict=True)]
        for view, kinds in zip(parameter_set.views, parameter_set.diagonal, strict=True)
    ]


def gram_statistics(parameter_set: ParameterSet, rng: torch.Generator) -> Modes:
    """The Gram matrices of one normal gradient for each parameter.

    Its entries are scaled for the largest mode's average eigenvalue to be 1 (a vector's only
    nonzero eigenvalue is then its length).
    """
    views = parameter_set.views
    tensors = normal(views, rng)
    for tensor, view in zip(tensors, views, strict=True):
        tensor.mul_(math.sqrt(max(view) / math.prod(view)))
    stats = [
        [torch.empty((d,) if flat else (d, d)) for d, flat in zip(view, kinds, strict=True)]
        for view, kinds in zip(views, parameter_set.diagonal, strict=True)
    ]
    gram_ema_(stats, tensors, 0.0)
    return stats


def copies(modes: Modes) -> Modes:
    """Copies of every matrix."""
    return [[matrix.clone() for matrix in row] for row in modes]


def empty_like(modes: Modes) -> Modes:
    """Matrices to write to, poisoned: what is not written shows up as NaN."""
    return [[torch.full_like(matrix, math.nan) for matrix in row] for row in modes]


def flat(modes: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """All matrices in one list."""
    return [matrix for row in modes for matrix in row]
