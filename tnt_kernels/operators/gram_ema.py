"""``gram_ema_``: moving averages of Gram matrices, plain or whitened."""

from typing import Any

import torch
from torch import Tensor

from tnt_kernels import arguments
from tnt_kernels.arguments import Modes, Number, Tensors
from tnt_kernels.calls import by_mode, call, flat, listed
from tnt_kernels.formulas import mirror_lower, scalar_like, trace_of, write
from tnt_kernels.operators.mode_products import definition as products

SCHEMA = "gram_ema_(Tensor(a!)[] stats, Tensor[] tensors, Tensor decay, Tensor[] factors) -> ()"


@torch.no_grad()
def gram_ema_(stats: Modes, tensors: Tensors, decay: Number, factors: Modes | None = None) -> None:
    """S_i <- decay S_i + (1 - decay) mat_i(G) mat_i(G)^T, for each tensor G and mode i.

    With ``factors`` A_j the other modes of each Gram matrix are whitened: it is s_i H_i with
    H_i = mat_i(G x_{j != i} A_j) mat_i(G)^T. s_i = |G|^2 / tr H_i (0 if tr H_i is not positive)
    gives it the trace that it has without. With A_j the inverse of the covariance of mode j, these
    are the alternating updates that maximise the likelihood of a tensor-normal distribution, up to
    the scale, which its factors share.

    Args:
        stats: the moving averages S_i, updated in place; the result is symmetric to the bit. Only
            their lower triangles are read. A diagonal mode keeps only the diagonal.
        tensors: the tensors G.
        decay: in [0, 1]. At 0, S is overwritten without being read; at 1, S does not change and G
            is not read, so it may hold NaN.
        factors: the symmetric positive definite A_j; by default identities.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, Algorithm 2. With factors: Dutilleul 1999, "The MLE algorithm for
    the matrix normal distribution"; in optimizers Lin et al. 2025, "Understanding and improving
    Shampoo and SOAP via Kullback-Leibler minimization".

    >>> stats = [[torch.eye(2), torch.ones(3)]]  # a full and a diagonal mode
    >>> gram_ema_(stats, [torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])], decay=0.5)
    >>> stats[0]
    [tensor([[3., 0.],
            [0., 1.]]), tensor([1.0000, 1.0000, 2.5000])]
    >>> stats = [[torch.zeros(2, 2), torch.zeros(2)]]
    >>> halves = [[torch.eye(2), torch.tensor([1.0, 0.5])]]
    >>> gram_ema_(stats, [torch.tensor([[1.0, 0.0], [0.0, 2.0]])], 0.0, halves)
    >>> stats[0]  # H_1 = diag(1, 2), of trace 3, and |G|^2 = 5
    [tensor([[1.6667, 0.0000],
            [0.0000, 3.3333]]), tensor([1., 4.])]
    """
    weight = arguments.scalar("decay", decay, high=1.0)

    def check() -> None:
        arguments.check_tensors("tensors", tensors)
        arguments.check_modes("stats", stats, "tensors", tensors, written=True)
        if factors is not None:
            arguments.check_modes("factors", factors, "tensors", tensors)
        arguments.check_device(stats=stats, tensors=tensors, factors=factors or [], decay=weight)
        arguments.check_overlaps({"stats": stats}, {"tensors": tensors, "factors": factors or []})

    def flattened() -> tuple[Any, ...]:
        whitening = [] if factors is None else flat(factors, tensors)
        return flat(stats, tensors), listed(tensors), weight, whitening

    call(SCHEMA, check, flattened)


def definition(stats: Modes, tensors: Tensors, decay: Number, factors: Modes | None = None) -> None:
    """S_i <- decay S_i + (1 - decay) s_i mat_i(G x_{j != i} A_j) mat_i(G)^T, for each G and i.

    s_i = |G|^2 / tr H_i (0 if tr H_i is not positive), H_i the product; A_j by default identities.
    """
    blended = []
    for t, (modes, tensor) in enumerate(zip(stats, tensors, strict=True)):
        for i, stat in enumerate(modes):
            weight = scalar_like(stat, decay)
            g, diagonal = tensor.to(stat.dtype), stat.dim() == 1
            if factors is None:
                gram = _gram(g, g, i, diagonal)
            else:
                others = [a if j != i else a.new_ones(len(a)) for j, a in enumerate(factors[t])]
                (whitened,) = products([g], [others])
                gram = _gram(whitened, g, i, diagonal)
                scale = g.square().sum() / trace_of(gram)
                gram = gram * torch.where(trace_of(gram) <= 0, 0, scale)
            # where(), because 0 * NaN is NaN: a side of weight 0 may hold anything.
            kept = stat if stat.dim() == 1 else mirror_lower(stat)
            old = torch.where(weight == 0, torch.zeros_like(stat), weight * kept)
            new = torch.where(weight == 1, torch.zeros_like(stat), (1 - weight) * gram)
            blended.append(old + new)
    write([stat for modes in stats for stat in modes], blended)


def _gram(product: Tensor, tensor: Tensor, mode: int, diagonal: bool) -> Tensor:
    """mat_i(P) mat_i(G)^T, symmetric to the bit, or its diagonal."""
    left, right = (
        x.movedim(mode, 0).flatten(1) if x.dim() > 1 else x.unsqueeze(1) for x in (product, tensor)
    )
    if diagonal:
        return (left * right).sum(1)
    return mirror_lower(left @ right.mT)


def from_flat(stats: Tensors, tensors: Tensors, decay: Tensor, factors: Tensors) -> None:
    """The definition on flat lists."""
    whitening = by_mode(factors, tensors) if factors else None
    definition(by_mode(stats, tensors), tensors, decay, whitening)
