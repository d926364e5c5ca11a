r"""KFAC's inverse factors, in two forms.

Both represent an inverse that acts on a layer's matrix [W | b], and are computed from its
statistics [G, A]. "damped" is the inverse of (G + √damping I) ⊗ (A + √damping I), Martens & Grosse
2015, section 6.3, without their factor π between the two. "eigenbasis" is the inverse of
G ⊗ A + damping I, by the eigenvectors of G and A. Ren & Goldfarb 2021 use the first for
autoencoders and the second for CNNs. Relative damping is in units of the average eigenvalue of
G ⊗ A. √damping is then in units of each factor's average eigenvalue, which gives their factor π.

The functions write the factors of each layer into ``out`` and return a code for each: 0, or 1 if G
and 2 if A could not be inverted. The layer's entry of ``out`` then stays as it was.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels import damped_inverse
from tnt_optim.autograd import without_autocast
from tnt_optim.modes import Rows

# The matrices that codes 1 and 2 stand for.
PARTS = ("gradient factor G", "input factor A")

# Without damping, an eigenvalue of at most this many eps times the largest counts as zero, like a
# pivot in ``damped_inverse``. With damping no eigenvalue does: a layer of n = 4609 inputs has true
# eigenvalues below n eps times the largest.
SINGULAR_ROUNDINGS = 16

Number = float | Tensor


def damped(stats: Rows, damping: Number, relative: bool, out: Rows) -> Tensor:
    """[(G + √damping I)^-1, (A + √damping I)^-1]."""
    root = damping.sqrt() if isinstance(damping, Tensor) else math.sqrt(damping)
    # As tensors of one mode each: for these, equation 13 rescales the damping by c^0 = 1.
    single, target = ([[matrix] for pair in rows for matrix in pair] for rows in (stats, out))
    _, info = damped_inverse(single, root, target, relative)
    failed_g, failed_a = (info.view(-1, 2) != 0).unbind(1)
    return torch.where(failed_g, 1, 2 * failed_a.to(torch.int32)).to(torch.int32)


def eigenbasis(stats: Rows, damping: Number, relative: bool, out: Rows) -> Tensor:
    """[Q_G, Q_A, 1 / (λ_G λ_Aᵀ + damping)]. Waits for the device, as ``eigh`` does."""
    codes = []
    for pair, factors in zip(stats, out, strict=True):
        (values_g, vectors_g), (values_a, vectors_a) = map(_spectrum, pair)
        products = torch.outer(values_g.clamp(min=0), values_a.clamp(min=0))
        unit = products.mean() if relative else torch.ones_like(products[0, 0])
        # Like ``damped_inverse``: the identity if the statistics are zero, or almost.
        limits = torch.finfo(unit.dtype)
        nothing = unit < limits.tiny / limits.eps
        scale = torch.where(nothing, 1.0, (products + damping * unit).reciprocal())
        singular_g, singular_a = _is_singular(values_g), _is_singular(values_a)
        good = scale.isfinite().all() & ((damping > 0) | ~(singular_g | singular_a))
        finite_g, finite_a = values_g.isfinite().all(), values_a.isfinite().all()
        failed = torch.where(~finite_g | (finite_a & singular_g), 1, 2)
        codes.append(torch.where(good, 0, failed).to(torch.int32))
        for factor, computed in zip(factors, (vectors_g, vectors_a, scale), strict=True):
            factor.copy_(torch.where(good, computed, factor))
    return torch.stack(codes)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors; NaN if the iteration does not converge.

    In float32 it often fails on a matrix with many zero rows, as from 3 x 3 patches of 1 x 1 maps.
    """
    for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        return values.to(matrix.dtype), vectors.to(matrix.dtype)
    return matrix.new_full((len(matrix),), math.nan), torch.full_like(matrix, math.nan)


def _is_singular(values: Tensor) -> Tensor:
    """Whether the smallest of ascending eigenvalues is zero to working precision."""
    eps = torch.finfo(values.dtype).eps
    return values[0] <= SINGULAR_ROUNDINGS * eps * values[-1].clamp(min=0)


def rotated(matrix: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Q_G ((Q_Gᵀ M Q_A) ∘ scale) Q_Aᵀ; ``mode_products`` takes symmetric factors only."""
    q_g, q_a, scale = factors
    with without_autocast(matrix):
        return q_g @ ((q_g.T @ matrix @ q_a) * scale) @ q_a.T
