"""The definition of every operator, in plain torch, for any float dtype and any device.

Each function has the name, arguments and result of the function in ``ops`` that documents its
contract. Nothing here is tuned or validated. The fast implementations are tested against these
formulas, which also run on devices without a fast implementation.

Every function computes all new values of a call before it writes the first. If memory runs out, or
anything else raises, no argument has changed. All results of a call exist beside the old values.

A statistic of a mode of size d is full, (d, d), or diagonal, (d,).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Number = float | Tensor
Modes = Sequence[Sequence[Tensor]]

# A Cholesky pivot of at most this many roundings of its diagonal entry counts as zero.
PIVOT_ROUNDINGS = 16

# The coupled Newton iteration's limits: Ren & Goldfarb 2021, appendix, and Anil et al. 2021.
NEWTON_ITERATIONS = 100
NEWTON_TOLERANCE = 1e-6
NEWTON_GROWTH = 1.2
# Larger entries of |M - I| mean that H is not the root. So does an entry of NEWTON_TRACE / d: a
# negative eigenvalue lowers the trace of M by more than 1, so a diagonal entry by more than 1 / d.
NEWTON_CONVERGED = 0.1
NEWTON_TRACE = 0.5


def gram_ema_(
    stats: Modes, tensors: Sequence[Tensor], decay: Number, factors: Modes | None = None
) -> None:
    """S_i <- decay S_i + (1 - decay) s_i mat_i(G x_{j != i} A_j) mat_i(G)^T, for each G and i.

    s_i = |G|^2 / tr H_i (0 if tr H_i is not positive), H_i the product; A_j by default identities.
    """
    blended = []
    for t, (modes, tensor) in enumerate(zip(stats, tensors, strict=True)):
        for i, stat in enumerate(modes):
            weight = _scalar_like(stat, decay)
            g, diagonal = tensor.to(stat.dtype), stat.dim() == 1
            if factors is None:
                gram = _gram(g, g, i, diagonal)
            else:
                others = [a if j != i else a.new_ones(len(a)) for j, a in enumerate(factors[t])]
                (whitened,) = mode_products([g], [others])
                gram = _gram(whitened, g, i, diagonal)
                scale = g.square().sum() / _trace(gram)
                gram = gram * torch.where(_trace(gram) <= 0, 0, scale)
            # where(), because 0 * NaN is NaN: a side of weight 0 may hold anything.
            kept = stat if stat.dim() == 1 else _mirror_lower(stat)
            old = torch.where(weight == 0, torch.zeros_like(stat), weight * kept)
            new = torch.where(weight == 1, torch.zeros_like(stat), (1 - weight) * gram)
            blended.append(old + new)
    _write([stat for modes in stats for stat in modes], blended)


def damped_inverse(
    stats: Modes, damping: Number, out: Modes | None = None, relative: bool = False
) -> tuple[Modes, Tensor]:
    """A_i = (U_i + eps I)^-1 with U_i from eq. 13; relative: eps c in place of eps."""

    def invert(modes: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        # c = (tr S_1 / prod d)^(1/k), and c^(k-1) prod_{j != i} d_j = tr S_1 / (c d_i), a form that
        # does not overflow or underflow in float32.
        k, size = len(modes), math.prod(s.shape[0] for s in modes)
        trace = _trace(modes[0])
        # Where products of gradients are no normal numbers, their matrix may be indefinite.
        limits = torch.finfo(trace.dtype)
        average = trace / max(len(modes[0]), 1)
        nothing = (average.abs() < limits.tiny / limits.eps) | (size == 0)
        c = torch.where(nothing, 0, trace.pow(1 / k) / max(size, 1) ** (1 / k))
        eps = _scalar_like(trace, damping)
        if relative:
            eps = torch.where(nothing, torch.ones_like(c), eps * c)
        scales = [torch.where(nothing, 0, c * s.shape[0] / trace) for s in modes]
        return [_inverse(s * scale, eps) for s, scale in zip(modes, scales, strict=True)]

    return _write_good_factors(stats, out, [invert(modes) for modes in stats])


def inverse_root(
    stats: Modes,
    damping: Number,
    root: int | Sequence[int],
    out: Modes | None = None,
    relative: bool = False,
) -> tuple[Modes, Tensor]:
    """A_i = (S_i + eps I)^(-1/root) by Newton's iteration; relative: eps tr(S_i) / d_i for eps."""

    def eps(stat: Tensor) -> Tensor:
        if not relative:
            return _scalar_like(stat, damping)
        average = (stat if stat.dim() == 1 else stat.diagonal()).double().mean()
        limits = torch.finfo(stat.dtype)
        nothing = average.abs() < limits.tiny / limits.eps
        return _scalar_like(stat, torch.where(nothing, 1.0, damping * average))

    roots = [root] * len(stats) if isinstance(root, int) else root
    results = [
        [_inverse_root(s, eps(s), p) for s in modes] for modes, p in zip(stats, roots, strict=True)
    ]
    return _write_good_factors(stats, out, results)


def mode_products(tensors: Sequence[Tensor], factors: Modes) -> list[Tensor]:
    """G x_1 A_1 ... x_k A_k, for each tensor G, in the factors' dtype."""
    products = []
    for tensor, modes in zip(tensors, factors, strict=True):
        product = tensor
        for i, factor in enumerate(modes):
            product = product.to(factor.dtype)
            if factor.dim() == 1:
                product = product * factor.view(-1, *[1] * (product.dim() - i - 1))
            else:
                product = torch.tensordot(factor, product, dims=([1], [i])).movedim(0, i)
        products.append(product.contiguous())
    return products


def preconditioned_step_(
    params: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Modes,
    lr: Number,
    momentum: Number,
    weight_decay: Number,
) -> None:
    """m <- momentum m + g;  W <- W - lr (m x_1 A_1 ... x_k A_k + weight_decay W)."""
    new_momenta = [_moved(m, g, momentum) for m, g in zip(momenta, grads, strict=True)]
    new_params = []
    for param, m, modes in zip(params, new_momenta, factors, strict=True):
        alpha, gamma = _scalar_like(m, lr), _scalar_like(m, weight_decay)
        (direction,) = mode_products([m], [modes])
        new_params.append(_stepped(param, alpha * direction, alpha * gamma))
    _write([*momenta, *params], [*new_momenta, *new_params])


def scaled_step_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    lr: Number,
    weight_decay: Number,
    decayed: Sequence[bool] | None = None,
    scales: Tensor | None = None,
) -> None:
    """W <- W - lr (s P + weight_decay W), s by default 1; no decay where ``decayed`` is False."""
    new_params = []
    for t, (param, direction) in enumerate(zip(params, directions, strict=True)):
        scale = 1.0 if scales is None else scales[t]
        decay = weight_decay if decayed is None or decayed[t] else 0.0
        alpha, gamma, s = (_scalar_like(direction, value) for value in (lr, decay, scale))
        new_params.append(_stepped(param, alpha * s * direction, alpha * gamma))
    _write(params, new_params)


def grafted_directions_(
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Modes,
    momentum: Number,
    second_moments: Sequence[Tensor] | None = None,
    counts: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
    *,
    second_decay: float = 0.99,
    eps: float = 1e-8,
    nesterov: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """m <- momentum m + g; P = n x_1 A_1 ... x_k A_k; the norms |R| and |P|, R is n or Adam's.

    n = m; with ``nesterov`` momentum m + g.
    """
    new_momenta = [_moved(m, g, momentum) for m, g in zip(momenta, grads, strict=True)]
    ahead = new_momenta
    if nesterov:
        ahead = [_moved(m, g, momentum) for m, g in zip(new_momenta, grads, strict=True)]
    directions = mode_products(ahead, factors)
    others, new_moments = ahead, list[Tensor]()
    if second_moments is not None and counts is not None:
        new_moments = [
            second_decay * v + (1 - second_decay) * grad.to(v.dtype).square()
            for v, grad in zip(second_moments, grads, strict=True)
        ]
        powers = counts + torch.tensor([int(nesterov), 0], device=counts.device)
        others = [
            _adam(n, v, _scalar_like(v, momentum), count, second_decay, eps)
            for n, v, count in zip(ahead, new_moments, powers, strict=True)
        ]
    pairs = zip(others, directions, strict=True)
    norms = [torch.stack([t.double().norm() for t in pair]) for pair in pairs]
    returned = torch.stack(norms) if norms else torch.zeros(0, 2, dtype=torch.float64)
    _write([*momenta, *(second_moments or [])], [*new_momenta, *new_moments])
    if out is not None:
        _write(out, directions)
    return directions if out is None else list(out), returned


def _write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Writes the results of a call. Copies between tensors of one dtype take no memory."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def _moved(m: Tensor, grad: Tensor, momentum: Number) -> Tensor:
    """Momentum m + g."""
    return _scalar_like(m, momentum) * m + grad.to(m.dtype)


def _stepped(param: Tensor, step: Tensor, decay: Tensor) -> Tensor:
    """W - (step + decay W); an infinite W that does not decay stays."""
    weight = param.to(step.dtype)
    moved = weight - (step + torch.where(decay == 0, 0, decay * weight))
    return moved.to(param.dtype)


def _adam(n: Tensor, v: Tensor, mu: Tensor, powers: Tensor, decay: float, eps: float) -> Tensor:
    """Adam's bias-corrected direction, from sums of these numbers of powers of mu and decay."""
    updates, second_updates = powers.to(v.device, v.dtype, non_blocking=True)
    # The momentum is not averaged: Adam's first moment is 1 - mu times it.
    first = (1 - mu) / (1 - mu**updates) * n
    direction: Tensor = first / ((v / (1 - decay**second_updates)).sqrt() + eps)
    return direction


def _scalar_like(tensor: Tensor, value: Number) -> Tensor:
    """``value`` as a 0-dim tensor of ``tensor``'s device and dtype, copied asynchronously."""
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float64, device="cpu")
    return value.to(tensor.device, tensor.dtype, non_blocking=True)


def _gram(product: Tensor, tensor: Tensor, mode: int, diagonal: bool) -> Tensor:
    """mat_i(P) mat_i(G)^T, symmetric to the bit, or its diagonal."""
    left, right = (
        x.movedim(mode, 0).flatten(1) if x.dim() > 1 else x.unsqueeze(1) for x in (product, tensor)
    )
    if diagonal:
        return (left * right).sum(1)
    return _mirror_lower(left @ right.mT)


def _mirror_lower(matrix: Tensor) -> Tensor:
    return matrix.tril() + matrix.tril(-1).mT


def _trace(stat: Tensor) -> Tensor:
    return (stat if stat.dim() == 1 else stat.diagonal()).sum()


def _inverse(matrix: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """(matrix + eps I)^-1, and whether it is positive definite and finite."""
    if matrix.dim() == 1:
        damped = matrix + eps
        inverse, definite = 1 / damped, (damped > 0).all()
    else:
        matrix = matrix.tril()
        damped = _damped(matrix, eps)
        factor, info = torch.linalg.cholesky_ex(damped)
        # Not cholesky_inverse, which waits for its error code and raises.
        inverse = _mirror_lower(torch.cholesky_solve(_identity(matrix), factor))
        # A pivot of the size of a rounding error may be zero: the inverse would be noise.
        noise = PIVOT_ROUNDINGS * torch.finfo(matrix.dtype).eps * damped.diagonal()
        definite = (info == 0) & (factor.diagonal().square() > noise).all()
    # The matrix too, because the inverse of infinity is 0.
    return inverse, definite & matrix.isfinite().all() & inverse.isfinite().all()


def _inverse_root(stat: Tensor, eps: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """(stat + eps I)^(-1/p), and whether it converged. Reads errors on the host to stop early."""
    if stat.dim() == 1:
        damped = stat + eps
        result = damped.pow(-1 / p)
        return result, (damped > 0).all() & damped.isfinite().all() & result.isfinite().all()
    damped = _damped(_mirror_lower(stat), eps)
    identity = _identity(stat)
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


def _identity(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)


def _damped(matrix: Tensor, eps: Tensor) -> Tensor:
    return matrix + eps * _identity(matrix)


def _write_good_factors(
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
    _write([factor for kept in out for factor in kept], factors)
    return out, codes
