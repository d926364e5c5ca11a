"""``grafted_directions_`` in Triton: the momenta in one launch, their products, then the lengths.

The lengths are PyTorch's operations on whole lists: a few launches for all tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import mark_written, programs_at_once, scalar_on
from tnt_kernels.triton.momentum import move_momenta


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
    """The operator, with ``factors`` flat; see ``tnt_kernels.grafted_directions_``.

    Args:
        momenta: the m.
        second_moments: the v; empty for the momentum's length.
        out: where the P go.
        grads: the g.
        factors: the symmetric A_i, mode after mode of tensor after tensor.
        momentum: mu.
        counts: how many updates each m and v has had.
        second_decay: of v.
        eps: beside the root of v.
        programs: how many programs the device runs at once; by default asked of it.
    """
    if not momenta:
        return torch.zeros(0, dtype=torch.float64, device=momentum.device)
    device = momenta[0].device
    programs = programs or programs_at_once(device)
    move_momenta(momenta, grads, momentum, programs)
    unused = torch.empty((), dtype=torch.float64, device=device)
    products(momenta, out, factors, unused, unused, update=False, programs=programs)
    lengths = _lengths(out)
    if second_moments:
        mu = scalar_on(device, momentum)
        wanted = _adam(
            momenta,
            second_moments,
            grads,
            mu,
            counts.to(device, non_blocking=True),
            second_decay,
            eps,
        )
    else:
        wanted = _lengths(momenta)
    mark_written([*momenta, *second_moments, *out])
    return torch.where(lengths == 0, torch.zeros_like(lengths), wanted / lengths)


def _lengths(tensors: Sequence[Tensor]) -> Tensor:
    # In float64: squares leave float32's range early.
    return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64))


def _adam(
    momenta: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    grads: Sequence[Tensor],
    mu: Tensor,
    counts: Tensor,
    decay: float,
    eps: float,
) -> Tensor:
    """Moves v; returns |c m / (sqrt(v / d) + eps)| as c sqrt(d) |m / (sqrt(v) + eps sqrt(d))|."""
    squares = list(second_moments)
    wide = [g.to(v.dtype) for g, v in zip(grads, squares, strict=True)]
    torch._foreach_mul_(squares, decay)
    torch._foreach_addcmul_(squares, wide, wide, 1 - decay)
    roots = torch._foreach_sqrt(squares)
    mu, updates, second_updates = mu.double(), *counts.unbind(1)
    # The momentum is a plain sum: Adam's first moment is 1 - mu times it.
    first, second = (1 - mu) / (1 - mu**updates), (1 - decay**second_updates).sqrt()
    floors = eps * second
    torch._foreach_add_(roots, [floor.to(r) for floor, r in zip(floors, roots, strict=True)])
    return _lengths(torch._foreach_div(list(momenta), roots)) * first * second
