"""Inverse roots of statistics: the factors of Shampoo, and the first ones of TNT."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels import inverse_root
from tnt_optim.modes import Rows


def relatively_damped_roots(
    stats: Rows, damping: float | Tensor, roots: Sequence[int], out: Rows
) -> Tensor:
    """Computes (S + damping (tr(S) / d) I)^(-1/root), one root for each row of statistics S.

    ``out`` and the result are those of ``tnt_kernels.inverse_root``.
    """
    # Each mode has its own damping; the operator takes one for all.
    damped = [[_damped(stat, damping) for stat in modes] for modes in stats]
    return inverse_root(damped, 0.0, roots, out)[1]


def _damped(stat: Tensor, damping: float | Tensor) -> Tensor:
    """S + damping (tr(S) / d) I, or S + I where S is zero; (d, d), or (d,) for a diagonal S.

    An average eigenvalue counts as zero if eps times it, the least damping that changes S, is not a
    normal number of its dtype: below 1e-31 in float32.
    """
    damped = stat.clone()
    diagonal = damped if damped.dim() == 1 else damped.diagonal()
    average = diagonal.double().mean()
    limits = torch.finfo(stat.dtype)
    zero = average.abs() < limits.tiny / limits.eps
    diagonal.add_(torch.where(zero, 1.0, damping * average))
    return damped
