"""Formulas that the definitions of several operators share."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels.arguments import Modes, Number, Tensors


def scalar_like(tensor: Tensor, value: Number) -> Tensor:
    """``value`` as a 0-dim tensor of ``tensor``'s device and dtype, copied asynchronously."""
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float64, device="cpu")
    return value.to(tensor.device, tensor.dtype, non_blocking=True)


def write(targets: Tensors, values: Tensors) -> None:
    """Writes the results of a call. Copies between tensors of one dtype take no memory."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def write_good_factors(
    stats: Modes, out: Modes | None, results: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> tuple[Modes, Tensor]:
    """Writes a tensor's factors if all are good. info[t]: 0, or i + 1 for the first bad mode i."""
    if out is None:
        out = [[torch.full_like(s, math.nan) for s in modes] for modes in stats]
    infos, factors = [], []
    for kept, modes in zip(out, results, strict=True):
        info = torch.zeros((), dtype=torch.int32, device=kept[0].device)
        for i in reversed(range(len(modes))):
            info = torch.where(modes[i][1], info, torch.full_like(info, i + 1))
        for old, (new, _) in zip(kept, modes, strict=True):
            factors.append(torch.where(info == 0, new, old))
        infos.append(info)
    codes = torch.stack(infos) if infos else torch.zeros(0, dtype=torch.int32, device="cpu")
    write([factor for kept in out for factor in kept], factors)
    return out, codes


def moved(m: Tensor, grad: Tensor, momentum: Number) -> Tensor:
    """Momentum m + g."""
    return scalar_like(m, momentum) * m + grad.to(m.dtype)


def stepped(param: Tensor, step: Tensor, decay: Tensor) -> Tensor:
    """W - (step + decay W); an infinite W that does not decay stays."""
    weight = param.to(step.dtype)
    new = weight - (step + torch.where(decay == 0, 0, decay * weight))
    return new.to(param.dtype)


def mirror_lower(matrix: Tensor) -> Tensor:
    """The symmetric matrix with this lower triangle."""
    return matrix.tril() + matrix.tril(-1).mT


def trace_of(stat: Tensor) -> Tensor:
    """The trace of a statistic, full (d, d) or diagonal (d,)."""
    return (stat if stat.dim() == 1 else stat.diagonal()).sum()


def eye_like(matrix: Tensor) -> Tensor:
    """The identity of the size, dtype and device of ``matrix``."""
    return torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
