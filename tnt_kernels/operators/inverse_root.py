"""``inverse_root``: inverse p-th roots of damped statistics."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import arguments
from tnt_kernels.arguments import Modes, Number, Tensors
from tnt_kernels.calls import call, flat, nested, new_factors
from tnt_kernels.formulas import eye_like, mirror_lower, scalar_like, write_good_factors

SCHEMA = (
    "inverse_root(Tensor(a!)[] out, Tensor[] stats, int[] orders, Tensor damping, int[] roots, "
    "bool relative) -> Tensor"
)

# The coupled Newton iteration's limits: Ren & Goldfarb 2021, appendix, and Anil et al. 2021.
NEWTON_ITERATIONS = 100
NEWTON_TOLERANCE = 1e-6
NEWTON_GROWTH = 1.2
# Larger entries of |M - I| mean that H is not the root. So does an entry of NEWTON_TRACE / d: a
# negative eigenvalue lowers the trace of M by more than 1, so a diagonal entry by more than 1 / d.
NEWTON_CONVERGED = 0.1
NEWTON_TRACE = 0.5


@torch.no_grad()
def inverse_root(
    stats: Modes,
    damping: Number,
    root: int | Sequence[int],
    out: Modes | None = None,
    relative: bool = False,
) -> tuple[list[list[Tensor]], Tensor]:
    """A_i = (S_i + damping I)^(-1/root): by eigenvalues in C++, else by Newton's iteration.

    Args:
        stats: the S_i, positive semi-definite; of a matrix only the lower triangle is read.
        damping: eps >= 0, in the units of S_i.
        root: a positive integer (Shampoo: 2k), or one for each tensor.
        out: where the factors go, like ``stats`` in shape and dtype; by default new tensors.
        relative: damp each S_i with eps times its own average eigenvalue, tr S_i / d_i, instead of
            eps. If the average is below tiny / eps of its dtype (1e-31 in float32), S_i is damped
            with 1: the root is the identity.

    Returns:
        The factors and ``info``, as in ``damped_inverse``. A mode fails if an entry is not finite
        or if S_i + damping I is not positive definite to working precision. By eigenvalues: those
        between -sqrt(d) eps / 2 times the largest and 0 count as 0, because that is rounding;
        damped, each must exceed float64's roundings of the largest. Relative damping is added
        before, in the dtype of S_i. The coupled Newton iteration fails where it does not converge.
        In float32 the root's relative error grows with the condition number, which the damping
        bounds.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, Algorithm 4; Anil et al. 2021, "Scalable second order optimization
    for deep learning".

    >>> stats = [[torch.diag(torch.tensor([7.0, 1.0])), torch.tensor([2.0, 0.0])]]
    >>> factors, info = inverse_root(stats, 0.5, root=2, relative=True)  # damped with 2.0 and 0.5
    >>> factors[0][1], info
    (tensor([0.6325, 1.4142]), tensor([0], dtype=torch.int32))
    """
    eps = arguments.scalar("damping", damping)
    given: list[Any] = list(root) if isinstance(root, list | tuple) else [root]
    if any(not isinstance(p, Integral) or isinstance(p, bool) or p < 1 for p in given):
        raise ValueError(f"root must be a positive integer, or one for each tensor, got {root!r}")

    def flattened() -> tuple[Any, ...]:
        roots = list(map(int, given)) * (1 if isinstance(root, list | tuple) else len(stats))
        orders = [len(row) for row in stats]
        return flat(target), flat(stats), orders, eps, roots, bool(relative)

    def check() -> None:
        arguments.check_factors(stats, out, eps)
        if isinstance(root, list | tuple):
            arguments.check_length("root", given, "stats", stats)

    target = new_factors(stats) if out is None else out
    info = call(SCHEMA, check, flattened)
    return [list(row) for row in target], info


def definition(
    stats: Modes,
    damping: Number,
    root: int | Sequence[int],
    out: Modes | None = None,
    relative: bool = False,
) -> tuple[Modes, Tensor]:
    """A_i = (S_i + eps I)^(-1/root) by Newton's iteration; relative: eps tr(S_i) / d_i for eps."""

    def eps(stat: Tensor) -> Tensor:
        if not relative:
            return scalar_like(stat, damping)
        average = (stat if stat.dim() == 1 else stat.diagonal()).double().mean()
        limits = torch.finfo(stat.dtype)
        nothing = average.abs() < limits.tiny / limits.eps
        return scalar_like(stat, torch.where(nothing, 1.0, damping * average))

    roots = [root] * len(stats) if isinstance(root, int) else root
    results = [
        [_inverse_root(s, eps(s), p) for s in modes] for modes, p in zip(stats, roots, strict=True)
    ]
    return write_good_factors(stats, out, results)


def _inverse_root(stat: Tensor, eps: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """(stat + eps I)^(-1/p), and whether it converged. Reads errors on the host to stop early."""
    if stat.dim() == 1:
        damped = stat + eps
        result = damped.pow(-1 / p)
        return result, (damped > 0).all() & damped.isfinite().all() & result.isfinite().all()
    identity = eye_like(stat)
    damped = mirror_lower(stat) + eps * identity
    # The squares of the Frobenius norm would leave float32's range without this scaling.
    largest = _largest(damped)
    scaled = damped / largest
    z = (1 + p) / (2 * torch.linalg.matrix_norm(scaled))
    coupled, result = z * scaled, z.pow(1 / p) * identity  # M and H in the paper
    error = _largest(coupled - identity)
    for iteration in range(NEWTON_ITERATIONS):
        if not error > NEWTON_TOLERANCE:  # also ends at NaN
            break
        step = (1 + 1 / p) * identity - coupled / p
        next_coupled = torch.linalg.matrix_power(step, p) @ coupled
        next_error = _largest(next_coupled - identity)
        # An eigenvalue of M in (0, p + 1) is at most 1 after one iteration, and rises from then on:
        # I - M is positive semi-definite, and its largest entry, on the diagonal, shrinks. Growth
        # then means rounding or a negative eigenvalue. In the first iteration it may be correct:
        # for the (9, 9) ones + 1e-3 I, similar to a 3x3 kernel's statistic, from 0.61 to 0.98.
        if iteration > 0 and next_error > NEWTON_GROWTH * error:
            break
        coupled, result, error = next_coupled, result @ step, next_error
    result = largest.pow(-1 / p) * (result + result.mT) / 2
    converged = error < min(NEWTON_CONVERGED, NEWTON_TRACE / max(1, len(stat)))
    return result, converged & result.isfinite().all()


def _largest(matrix: Tensor) -> Tensor:
    """The largest absolute value, 0 for an empty matrix."""
    return matrix.abs().max() if matrix.numel() else matrix.sum()


def fake(out: Tensors, stats: Tensors, orders: list[int], damping: Tensor, *_: Any) -> Tensor:
    """The shape of ``info``."""
    like = stats[0] if stats else damping
    return like.new_empty(len(orders), dtype=torch.int32)


def from_flat(out: Tensors, stats: Tensors, orders: list[int], *rest: Any) -> Tensor:
    """The definition on flat lists; ``orders``: how many modes each tensor has."""
    damping, roots, relative = rest
    return definition(nested(stats, orders), damping, roots, nested(out, orders), relative)[1]
