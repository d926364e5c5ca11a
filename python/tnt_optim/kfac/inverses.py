r"""The two ways in which KFAC inverts G ⊗ A + damping I for a layer's matrix [W | b].

Both take the statistics [G, A] of each layer and make factors that stand for an inverse on the
matrix M, (out, in): "damped" is that of (G + √damping I) ⊗ (A + √damping I), Martens & Grosse 2015,
section 6.3, without their factor between the two; "eigenbasis" is that of the sum itself, by the
eigenvectors of both. Ren & Goldfarb 2021 take the first for autoencoders, the second for CNNs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tnt_kernels import damped_inverse, mode_products
from tnt_optim.autograd import without_autocast

# What codes 1 and 2 say could not be inverted.
PARTS = ("gradient factor G", "input factor A")

# Without damping, an eigenvalue of so many roundings of the largest counts as zero: as many as
# ``damped_inverse`` takes a pivot for zero at. With damping none does: a layer of 4609 inputs has
# true ones below n eps of the largest.
SINGULAR_ROUNDINGS = 16

Matrices = list[list[Tensor]]
Shapes = list[tuple[int, int]]


@dataclass(frozen=True)
class Inverse:
    """One way to invert.

    Attributes:
        shapes: of a layer's factors, from (out, in).
        make: (stats, damping, out) to (factors, codes): for each layer 0, or 1 where G, 2 where A
            could not be inverted, as in ``PARTS``. What failed leaves ``out`` as it was.
        apply: (M, factors) to the directions, for each layer.
    """

    shapes: Callable[[int, int], Shapes]
    make: Callable[[Matrices, float | Tensor, Matrices | None], tuple[Matrices, Tensor]]
    apply: Callable[[Sequence[Tensor], Matrices], list[Tensor]]


def _damped(
    stats: Matrices, damping: float | Tensor, out: Matrices | None
) -> tuple[Matrices, Tensor]:
    """[(G + √damping I)^-1, (A + √damping I)^-1]."""
    root = damping.sqrt() if isinstance(damping, Tensor) else math.sqrt(damping)
    # With one mode, equation 13 rescales by c^0 = 1.
    single = [[matrix] for pair in stats for matrix in pair]
    target = None if out is None else [[matrix] for pair in out for matrix in pair]
    factors, info = damped_inverse(single, root, target)
    failed = info.view(-1, 2) != 0
    codes = torch.where(failed[:, 0], 1, 2 * failed[:, 1].to(torch.int32)).to(torch.int32)
    flat = [factor for (factor,) in factors]
    return [flat[i : i + 2] for i in range(0, len(flat), 2)], codes


def _eigenbasis(
    stats: Matrices, damping: float | Tensor, out: Matrices | None
) -> tuple[Matrices, Tensor]:
    """[Q_G, Q_A, 1 / (λ_G λ_Aᵀ + damping)]. Waits for the device: ``eigh`` does."""
    made, codes = [], []
    for layer, pair in enumerate(stats):
        (values_g, vectors_g), (values_a, vectors_a) = map(_spectrum, pair)
        scale = torch.outer(values_g.clamp(min=0), values_a.clamp(min=0)).add(damping).reciprocal()
        singular_g, singular_a = _is_singular(values_g), _is_singular(values_a)
        good = scale.isfinite().all() & ((damping > 0) | ~(singular_g | singular_a))
        finite_g, finite_a = values_g.isfinite().all(), values_a.isfinite().all()
        blamed = torch.where(~finite_g | (finite_a & singular_g), 1, 2)
        codes.append(torch.where(good, 0, blamed).to(torch.int32))
        factors = [vectors_g, vectors_a, scale]
        if out is not None:
            for old, new in zip(out[layer], factors, strict=True):
                old.copy_(torch.where(good, new, old))
            factors = out[layer]
        made.append(factors)
    return made, torch.stack(codes)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors; NaN where they do not come."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return matrix.new_full((len(matrix),), math.nan), torch.full_like(matrix, math.nan)
    return values, vectors


def _is_singular(values: Tensor) -> Tensor:
    """Whether the smallest of ascending eigenvalues is zero to working precision."""
    eps = torch.finfo(values.dtype).eps
    return values[0] <= SINGULAR_ROUNDINGS * eps * values[-1].clamp(min=0)


def _rotated(matrices: Sequence[Tensor], factors: Matrices) -> list[Tensor]:
    """Q_G ((Q_Gᵀ M Q_A) ∘ scale) Q_Aᵀ; not by ``mode_products``, which is for symmetric factors."""
    with without_autocast(matrices[0]):
        return [
            q_g @ ((q_g.T @ matrix @ q_a) * scale) @ q_a.T
            for matrix, (q_g, q_a, scale) in zip(matrices, factors, strict=True)
        ]


INVERSES: dict[str, Inverse] = {
    "damped": Inverse(
        lambda rows, columns: [(rows, rows), (columns, columns)], _damped, mode_products
    ),
    "eigenbasis": Inverse(
        lambda rows, columns: [(rows, rows), (columns, columns), (rows, columns)],
        _eigenbasis,
        _rotated,
    ),
}
