"""``damped_inverse``: statistics rescaled, damped and inverted."""

import math
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import arguments
from tnt_kernels.arguments import Modes, Number, Tensors
from tnt_kernels.calls import call, flat, nested, new_factors
from tnt_kernels.formulas import eye_like, mirror_lower, scalar_like, trace_of, write_good_factors

SCHEMA = (
    "damped_inverse(Tensor(a!)[] out, Tensor[] stats, int[] orders, Tensor damping, "
    "bool relative) -> Tensor"
)

# A Cholesky pivot of at most this many roundings of its diagonal entry counts as zero.
PIVOT_ROUNDINGS = 16


@torch.no_grad()
def damped_inverse(
    stats: Modes, damping: Number, out: Modes | None = None, relative: bool = False
) -> tuple[list[list[Tensor]], Tensor]:
    """Rescales each tensor's statistics to equal average eigenvalues, damps and inverts them.

    With c = (tr S_1 / prod_j d_j)^(1/k) and U_i = S_i / (c^(k-1) prod_{j != i} d_j), so that every
    tr(U_i) / d_i is c: A_i = (U_i + damping I)^-1, elementwise for a diagonal mode. If tr S_1 / d_1
    is below tiny / eps of its dtype (1e-31 in float32), c and U_i count as 0.

    Args:
        stats: the S_i, positive semi-definite; the rescaling couples all modes of a tensor. Only
            their lower triangles are read.
        damping: eps >= 0, in the units of U_i.
        out: where the factors go, like ``stats`` in shape and dtype; by default new tensors.
        relative: damp with eps c instead of eps; c = 0 then gives the identity.

    Returns:
        The factors A_i, symmetric to the bit, and ``info``, int32 of shape (number of tensors,) on
        the device: 0, or i + 1 if mode i is the first that is not finite or not positive definite
        to working precision. A Cholesky pivot of at most 16 roundings of its diagonal entry fails,
        because its inverse would be noise. All factors of a failed tensor keep the values of
        ``out`` (NaN in new tensors).

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, equation 13 and Algorithm 2.

    >>> stats = [[torch.diag(torch.tensor([12.0, 4.0])), torch.tensor([8.0, 8.0])]]
    >>> factors, info = damped_inverse(stats, damping=1.0)  # c = 2, U = diag(3, 1), diag(2, 2)
    >>> factors[0], info
    ([tensor([[0.2500, 0.0000],
            [0.0000, 0.5000]]), tensor([0.3333, 0.3333])], tensor([0], dtype=torch.int32))
    """
    eps = arguments.scalar("damping", damping)

    def flattened() -> tuple[Any, ...]:
        return flat(target), flat(stats), [len(row) for row in stats], eps, bool(relative)

    target = new_factors(stats) if out is None else out
    info = call(SCHEMA, lambda: arguments.check_factors(stats, out, eps), flattened)
    return [list(row) for row in target], info


def definition(
    stats: Modes, damping: Number, out: Modes | None = None, relative: bool = False
) -> tuple[Modes, Tensor]:
    """A_i = (U_i + eps I)^-1 with U_i from eq. 13; relative: eps c in place of eps."""

    def invert(modes: Tensors) -> list[tuple[Tensor, Tensor]]:
        # c = (tr S_1 / prod d)^(1/k), and c^(k-1) prod_{j != i} d_j = tr S_1 / (c d_i), a form that
        # does not overflow or underflow in float32.
        k, size = len(modes), math.prod(s.shape[0] for s in modes)
        trace = trace_of(modes[0])
        # Where products of gradients are no normal numbers, their matrix may be indefinite.
        limits = torch.finfo(trace.dtype)
        average = trace / max(len(modes[0]), 1)
        nothing = (average.abs() < limits.tiny / limits.eps) | (size == 0)
        c = torch.where(nothing, 0, trace.pow(1 / k) / max(size, 1) ** (1 / k))
        eps = scalar_like(trace, damping)
        if relative:
            eps = torch.where(nothing, torch.ones_like(c), eps * c)
        scales = [torch.where(nothing, 0, c * s.shape[0] / trace) for s in modes]
        return [_inverse(s * scale, eps) for s, scale in zip(modes, scales, strict=True)]

    return write_good_factors(stats, out, [invert(modes) for modes in stats])


def _inverse(matrix: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """(matrix + eps I)^-1, and whether it is positive definite and finite."""
    if matrix.dim() == 1:
        damped = matrix + eps
        inverse, definite = 1 / damped, (damped > 0).all()
    else:
        matrix = matrix.tril()
        identity = eye_like(matrix)
        damped = matrix + eps * identity
        factor, info = torch.linalg.cholesky_ex(damped)
        # Not cholesky_inverse, which waits for its error code and raises.
        inverse = mirror_lower(torch.cholesky_solve(identity, factor))
        # A pivot of the size of a rounding error may be zero: the inverse would be noise.
        noise = PIVOT_ROUNDINGS * torch.finfo(matrix.dtype).eps * damped.diagonal()
        definite = (info == 0) & (factor.diagonal().square() > noise).all()
    # The matrix too, because the inverse of infinity is 0.
    return inverse, definite & matrix.isfinite().all() & inverse.isfinite().all()


def fake(out: Tensors, stats: Tensors, orders: list[int], damping: Tensor, *_: Any) -> Tensor:
    """The shape of ``info``."""
    like = stats[0] if stats else damping
    return like.new_empty(len(orders), dtype=torch.int32)


def from_flat(
    out: Tensors, stats: Tensors, orders: list[int], damping: Tensor, relative: bool
) -> Tensor:
    """The definition on flat lists; ``orders``: how many modes each tensor has."""
    return definition(nested(stats, orders), damping, nested(out, orders), relative)[1]
