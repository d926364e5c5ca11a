"""The baselines of ``bench.kernels.baselines`` that would wait for the GPU, rewritten not to.

There the scale of a damped inverse is computed in Python's floats, which on a GPU would stop the
host once a tensor: no competent user's way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Modes = Sequence[Sequence[Tensor]]


def inverse_linalg(stats: Modes, damping: float, out: Modes) -> None:
    """(iv): rescale, then ``torch.linalg.inv`` for each factor."""
    _damped_inverse(stats, damping, out, lambda damped, to: torch.linalg.inv(damped, out=to))


def inverse_cholesky(stats: Modes, damping: float, out: Modes) -> None:
    """(v): rescale, then ``cholesky_ex`` and ``cholesky_inverse`` for each factor.

    Where the first fails the old inverse stays.
    """

    def invert(damped: Tensor, to: Tensor) -> None:
        factor, info = torch.linalg.cholesky_ex(damped)
        torch.where(info == 0, torch.cholesky_inverse(factor), to, out=to)

    _damped_inverse(stats, damping, out, invert)


def _damped_inverse(
    stats: Modes, damping: float, out: Modes, invert: Callable[[Tensor, Tensor], object]
) -> None:
    for modes, targets in zip(stats, out, strict=True):
        k, size = len(modes), math.prod(stat.shape[0] for stat in modes)
        first = modes[0]
        trace = (first if first.dim() == 1 else first.diagonal()).sum()
        # c / trace with c = (trace / size)^(1/k): see tnt_kernels.damped_inverse
        scale = (trace / size).pow_(1 / k) / trace
        for stat, target in zip(modes, targets, strict=True):
            damped = stat * (scale * stat.shape[0])
            if stat.dim() == 1:
                torch.reciprocal(damped.add_(damping), out=target)
            else:
                damped.diagonal().add_(damping)
                invert(damped, target)
