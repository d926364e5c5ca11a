"""What a competent user of plain torch writes instead of each operator.

Each function has the arguments and the meaning of its namesake in ``tnt_kernels``, in float32;
numbers are Python floats. Nothing is validated and nothing is written to be slow: no needless
copies, results written to their place, ``foreach`` for elementwise work, no wait for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Modes = Sequence[Sequence[Tensor]]
Inverse = Callable[[Tensor, Tensor], object]

_LETTERS = "abcdefghijklmnopqrstuvwxy"


# gram_ema_


def gram_einsum_(stats: Modes, tensors: Sequence[Tensor], decay: float) -> None:
    """(i): one einsum and one lerp_ for each mode."""
    for modes, tensor in zip(stats, tensors, strict=True):
        letters = _LETTERS[: tensor.dim()]
        for i, stat in enumerate(modes):
            if stat.dim() == 1:
                equation = f"{letters},{letters}->{letters[i]}"
            else:
                other = letters.replace(letters[i], "z")
                equation = f"{letters},{other}->{letters[i]}z"
            stat.lerp_(torch.einsum(equation, tensor, tensor), 1 - decay)


def gram_addmm_(stats: Modes, tensors: Sequence[Tensor], decay: float) -> None:
    """(ii): the unfolding times its transpose, straight into the moving average.

    A matrix's second unfolding is a view; a middle or last mode of a higher tensor is copied.
    """
    for modes, tensor in zip(stats, tensors, strict=True):
        for i, stat in enumerate(modes):
            if stat.dim() == 1:
                others = [j for j in range(tensor.dim()) if j != i]
                squares = tensor.square().sum(others) if others else tensor.square()
                stat.mul_(decay).add_(squares, alpha=1 - decay)
            elif tensor.dim() == 1:
                stat.addr_(tensor, tensor, beta=decay, alpha=1 - decay)
            else:
                unfolding = tensor.movedim(i, 0).reshape(stat.shape[0], -1)
                stat.addmm_(unfolding, unfolding.mT, beta=decay, alpha=1 - decay)


def gram_whitened_(stats: Modes, tensors: Sequence[Tensor], decay: float, factors: Modes) -> None:
    """Tensordots with the other modes' factors, the product with the unfolding, one lerp_."""
    for modes, tensor, row in zip(stats, tensors, factors, strict=True):
        square = tensor.square().sum()
        for i, stat in enumerate(modes):
            product = tensor
            for j, factor in enumerate(row):
                product = torch.movedim(product, 0, -1) if i == j else _times(product, factor)
            left, right = (x.movedim(i, 0).reshape(stat.shape[0], -1) for x in (product, tensor))
            gram = (left * right).sum(1) if stat.dim() == 1 else left @ right.mT
            trace = gram.sum() if stat.dim() == 1 else gram.diagonal().sum()
            stat.lerp_(gram.mul_(square / trace), 1 - decay)


# mode_products and preconditioned_step_


def _times(tensor: Tensor, factor: Tensor) -> Tensor:
    """Contracts the first mode with a factor and appends the new one at the end."""
    if factor.dim() == 1:
        return torch.movedim(tensor, 0, -1) * factor
    product: Tensor = torch.tensordot(tensor, factor, dims=([0], [0]))
    return product


def products_tensordot(tensors: Sequence[Tensor], factors: Modes) -> list[Tensor]:
    """A chain of tensordots.

    After k products the modes are in their order again, with no permuted copy in between.
    """
    products = []
    for tensor, modes in zip(tensors, factors, strict=True):
        for factor in modes:
            tensor = _times(tensor, factor)
        products.append(tensor.contiguous())
    return products


def products_matmul(tensors: Sequence[Tensor], factors: Modes) -> list[Tensor]:
    """A @ G @ B for matrices, which gives cuBLAS better layouts than tensordot; else the chain."""
    products = []
    for tensor, modes in zip(tensors, factors, strict=True):
        if tensor.dim() != 2:
            products += products_tensordot([tensor], [modes])
            continue
        left, right = modes
        inner = tensor * right if right.dim() == 1 else tensor @ right
        products.append(left[:, None] * inner if left.dim() == 1 else left @ inner)
    return products


def step_tensordot_(
    params: list[Tensor],
    momenta: list[Tensor],
    grads: list[Tensor],
    factors: Modes,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """(iii): foreach momentum, the chain of tensordots, foreach decay and update."""
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, grads)
    directions = products_tensordot(momenta, factors)
    if weight_decay != 0:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, directions, alpha=-lr)


# grafted_directions_ and scaled_step_


def grafted_tensordot_(
    momenta: list[Tensor],
    grads: list[Tensor],
    factors: Modes,
    momentum: float,
    second_moments: list[Tensor],
    counts: Tensor,
    second_decay: float,
    eps: float,
) -> tuple[list[Tensor], Tensor]:
    """foreach momentum and Adam, the chain of tensordots, the norms."""
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, grads)
    torch._foreach_mul_(second_moments, second_decay)
    torch._foreach_addcmul_(second_moments, grads, grads, 1 - second_decay)
    directions = products_tensordot(momenta, factors)
    # Every tensor has the same counts. The norm of m^ / (sqrt(v^) + eps): first |m / (...)|.
    updates, second_updates = counts[0].tolist()
    roots = torch._foreach_sqrt(second_moments)
    torch._foreach_mul_(roots, (1 - second_decay**second_updates) ** -0.5)
    torch._foreach_add_(roots, eps)
    adam = _norms(torch._foreach_div(momenta, roots))
    first = (1 - momentum) / (1 - momentum**updates)
    return directions, torch.stack([adam.mul_(first), _norms(directions)], 1)


# MKL's dot of more numbers has errors of 1e-4 and more on AMD; foreach_norm is slower and worse.
_DOT = 1 << 20


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(tensors)))
    norms = []
    for flat in (tensor.view(-1) for tensor in tensors):
        pieces = (flat,) if len(flat) <= _DOT else flat.split(_DOT)
        first, *rest = [torch.dot(piece, piece) for piece in pieces]
        norms.append(sum(rest, first))
    return torch.stack(norms).sqrt_()


def scaled_foreach_(
    params: list[Tensor],
    directions: list[Tensor],
    lr: float,
    weight_decay: float,
    decayed: Sequence[bool],
    scales: Tensor,
) -> None:
    """foreach decay, foreach addcmul with the scales."""
    shrunk = [param for param, decays in zip(params, decayed, strict=True) if decays]
    if shrunk:
        torch._foreach_mul_(shrunk, 1 - lr * weight_decay)
    torch._foreach_addcmul_(params, directions, scales.float().unbind(), -lr)


# damped_inverse


def inverse_linalg(stats: Modes, damping: float, out: Modes) -> None:
    """(iv): rescale, then ``torch.linalg.inv`` for each factor."""
    _damped_inverse(stats, damping, out, lambda damped, to: torch.linalg.inv(damped, out=to))


def inverse_cholesky(stats: Modes, damping: float, out: Modes) -> None:
    """(v): rescale, then ``cholesky_ex`` and ``cholesky_inverse`` for each factor."""

    def invert(damped: Tensor, to: Tensor) -> None:
        factor, info = torch.linalg.cholesky_ex(damped)
        if damped.is_cuda:  # no wait for the GPU
            torch.where(info == 0, torch.cholesky_inverse(factor), to, out=to)
        elif info.item() == 0:  # else the old inverse stays
            torch.cholesky_inverse(factor, out=to)

    _damped_inverse(stats, damping, out, invert)


def _damped_inverse(stats: Modes, damping: float, out: Modes, invert: Inverse) -> None:
    for modes, targets in zip(stats, out, strict=True):
        k, size = len(modes), math.prod(stat.shape[0] for stat in modes)
        first = modes[0]
        total = (first if first.dim() == 1 else first.diagonal()).sum()
        trace = total if first.is_cuda else float(total)
        # c / trace with c = (trace / size)^(1/k): see tnt_kernels.damped_inverse
        scale = (trace / size) ** (1 / k) / trace
        for stat, target in zip(modes, targets, strict=True):
            damped = stat * (scale * stat.shape[0])
            if stat.dim() == 1:
                torch.reciprocal(damped.add_(damping), out=target)
            else:
                damped.diagonal().add_(damping)
                invert(damped, target)


# inverse_root


def root_eigh(stats: Modes, damping: float, roots: Sequence[int], out: Modes) -> None:
    """(S + eps I)^(-1/root) from the eigenvalues: the exact alternative to the iteration."""
    for modes, root, targets in zip(stats, roots, out, strict=True):
        for stat, target in zip(modes, targets, strict=True):
            if stat.dim() == 1:
                torch.pow(stat + damping, -1 / root, out=target)
            else:
                values, vectors = torch.linalg.eigh(stat)
                powers = values.clamp_min(0).add_(damping).pow_(-1 / root)
                torch.mm(vectors * powers, vectors.mT, out=target)
