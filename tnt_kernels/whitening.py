"""A function made of the operators: it runs wherever they do, and has no kernel of its own.

The conventions are those of ``ops``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels.arguments import (
    Modes,
    Number,
    check_device,
    check_modes,
    check_overlaps,
    check_tensors,
    scalar,
)
from tnt_kernels.ops import mode_products


@torch.no_grad()
def whitened_gram_ema_(
    stats: Modes, tensors: Sequence[Tensor], factors: Modes, decay: Number
) -> None:
    """S_i <- decay S_i + (1 - decay) s_i H_i, with H_i = mat_i(G x_{j != i} A_j) mat_i(G)^T.

    s_i = |G|^2 / tr H_i (0 if G is): the trace is that of a Gram matrix, as ``gram_ema_`` has it.
    With A_j the inverse of the covariance of mode j, these are the alternating updates that
    maximise the likelihood of a tensor-normal distribution, up to the scale, which its factors
    share. Made of ``mode_products`` and matrix products of torch.

    Args:
        stats: the moving averages S_i, updated in place; symmetric to the bit. A diagonal mode
            keeps only the diagonal.
        tensors: the tensors G.
        factors: the symmetric positive definite A_j.
        decay: in [0, 1]. At 1, S does not change and G may hold NaN.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Dutilleul 1999, "The MLE algorithm for the matrix normal distribution"; in optimizers
    Lin et al. 2025, "Understanding and improving Shampoo and SOAP via Kullback-Leibler
    minimization".

    >>> stats = [[torch.zeros(2, 2), torch.zeros(2)]]
    >>> halves = [[torch.eye(2), torch.tensor([1.0, 0.5])]]
    >>> whitened_gram_ema_(stats, [torch.tensor([[1.0, 0.0], [0.0, 2.0]])], halves, decay=0.0)
    >>> stats[0]  # H_1 = diag(1, 2), of trace 3, and |G|^2 = 5
    [tensor([[1.6667, 0.0000],
            [0.0000, 3.3333]]), tensor([1., 4.])]
    """
    weight = scalar("decay", decay, low=0.0, high=1.0)
    check_tensors("tensors", tensors)
    check_modes("stats", stats, "tensors", tensors, written=True)
    check_modes("factors", factors, "tensors", tensors)
    flat, flat_factors = [s for row in stats for s in row], [a for row in factors for a in row]
    check_device(stats=flat, tensors=tensors, factors=flat_factors, decay=weight)
    check_overlaps({"stats": flat}, {"tensors": tensors, "factors": flat_factors})
    if not tensors:
        return
    weight = weight.to(tensors[0].device)
    found: list[tuple[Tensor, Tensor]] = []
    with torch.autocast(tensors[0].device.type, enabled=False):
        state = [row[0].dtype for row in stats]
        grads = [g.to(dtype).contiguous() for g, dtype in zip(tensors, state, strict=True)]
        squares = [torch.linalg.vector_norm(g).square() for g in grads]
        for mode in range(max(g.dim() for g in grads)):
            own = [t for t, g in enumerate(grads) if g.dim() > mode]
            others = [[*factors[t]] for t in own]
            for row in others:
                row[mode] = row[mode].new_ones(len(row[mode]))
            products = mode_products([grads[t] for t in own], others)
            for t, product in zip(own, products, strict=True):
                stat = stats[t][mode]
                gram = _gram(product, grads[t], squares[t], mode, diagonal=stat.dim() == 1)
                found.append((stat, gram.lerp_(stat, weight.to(stat.dtype))))
    keep = weight == 1
    for stat, new in found:  # not before everything is there: memory may run out
        torch.where(keep, stat, new, out=stat)


def _gram(product: Tensor, tensor: Tensor, square: Tensor, mode: int, diagonal: bool) -> Tensor:
    """mat(product) mat(tensor)^T, or its diagonal, of the trace ``square``; uses up ``product``."""
    d = tensor.shape[mode]
    shape = (d, tensor.numel() // max(1, d))
    if diagonal:
        gram = product.mul_(tensor).movedim(mode, 0).reshape(shape).sum(1)
        trace = gram.sum()
    else:
        left, right = (x.movedim(mode, 0).reshape(shape) for x in (product, tensor))
        gram = left @ right.mT
        trace = gram.diagonal().sum()
        gram = gram + gram.mT
        trace = trace * 2
    return gram.mul_(torch.where(trace > 0, square / trace, 0))
