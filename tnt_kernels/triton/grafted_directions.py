"""``grafted_directions_`` in Triton: one launch for the momenta, the mode products, then the norms.

The norms are PyTorch operations on whole lists: a few launches for all tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels.lists import mark_written
from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import programs_at_once, scalar_on
from tnt_kernels.triton.momentum import update_momenta


def grafted_directions_(
    momenta: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    out: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    momentum: Tensor,
    counts: Tensor,
    second_decay: float,
    eps: float,
    *,
    programs: int | None = None,
) -> Tensor:
    """The operator with ``factors`` flat, ``second_moments`` empty to graft the momentum's norm.

    ``programs`` defaults to the device's.
    """
    if not momenta:
        return torch.zeros(0, dtype=torch.float64, device=momentum.device)
    device = momenta[0].device
    programs = programs or programs_at_once(device)
    update_momenta(momenta, grads, momentum, programs)
    products(momenta, out, factors, programs)
    norms = _norms(out)
    if second_moments:
        mu, counts = scalar_on(device, momentum), counts.to(device, non_blocking=True)
        wanted = _adam_norms(momenta, second_moments, grads, mu, counts, second_decay, eps)
    else:
        wanted = _norms(momenta)
    mark_written([*momenta, *second_moments, *out])
    return torch.where(norms == 0, torch.zeros_like(norms), wanted / norms)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    # In float64: float32 squares overflow and underflow early.
    return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64))


def _adam_norms(
    momenta: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    grads: Sequence[Tensor],
    mu: Tensor,
    counts: Tensor,
    decay: float,
    eps: float,
) -> Tensor:
    """Updates v; returns |c m / (sqrt(v / d) + eps)| as c sqrt(d) |m / (sqrt(v) + eps sqrt(d))|."""
    squares = list(second_moments)
    wide = [g.to(v.dtype) for g, v in zip(grads, squares, strict=True)]
    torch._foreach_mul_(squares, decay)
    torch._foreach_addcmul_(squares, wide, wide, 1 - decay)
    roots = torch._foreach_sqrt(squares)
    mu, updates, second_updates = mu.double(), *counts.unbind(1)
    # The momentum is not averaged: Adam's first moment is 1 - mu times it.
    first, second = (1 - mu) / (1 - mu**updates), (1 - decay**second_updates).sqrt()
    floors = {dtype: (eps * second).to(dtype).unbind() for dtype in {r.dtype for r in roots}}
    torch._foreach_add_(roots, [floors[r.dtype][t] for t, r in enumerate(roots)])
    return _norms(torch._foreach_div(list(momenta), roots)) * first * second
