"""The oracle's definitions, and the paper's propositions for it and for `tnt_kernels`."""

import math

import pytest
import torch
from drawn import close
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracle import (
    DenseTNT,
    contraction,
    covariances,
    damped_kron,
    dense_kron,
    mode_product,
    unfolding,
    vec,
)
from tolerances import FLOAT64_BOUND, FLOAT64_FORMULA
from torch import Tensor

import tnt_kernels

examples = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
shapes = (
    st.lists(st.integers(1, 6), min_size=1, max_size=4)
    .map(tuple)
    .filter(lambda dims: math.prod(dims) <= 240)
)
seeds = st.integers(0, 2**31 - 1)
dampings = st.sampled_from([1e-3, 1e-2, 0.1, 1.0])


def draws(shape: tuple[int, ...], seed: int, count: int) -> list[Tensor]:
    """Correlated random gradients: white noise through a random matrix in every mode."""
    generator = torch.Generator().manual_seed(seed)
    scale = float(torch.exp(2 * torch.randn((), generator=generator, dtype=torch.float64)))
    mixers = [torch.randn(d, d, generator=generator, dtype=torch.float64) for d in shape]
    gradients = []
    for _ in range(count):
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        for i, mixer in enumerate(mixers):
            g = mode_product(g, mixer, i)
        gradients.append(scale * g)
    return gradients


def symmetric(d: int, seed: int) -> Tensor:
    """A random symmetric matrix, not necessarily definite."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return a + a.T


def mean_contractions(gradients: list[Tensor]) -> list[Tensor]:
    """E[G^(i)] for every mode."""
    k = gradients[0].dim()
    return [torch.stack([contraction(g, i) for g in gradients]).mean(0) for i in range(k)]


def second_moment(gradients: list[Tensor]) -> Tensor:
    """E[vec(G) vec(G)^T]."""
    return torch.stack([torch.outer(vec(g), vec(g)) for g in gradients]).mean(0)


def spectral(matrix: Tensor) -> float:
    """The paper's norm: the largest singular value."""
    return float(torch.linalg.matrix_norm(matrix, ord=2))


def library_covariances(stats: list[Tensor], damping: float) -> list[Tensor]:
    """U_i = A_i^{-1} - damping I, with the A_i of `tnt_kernels.damped_inverse`."""
    factors, info = tnt_kernels.damped_inverse([[s.clone() for s in stats]], damping)
    assert info.tolist() == [0]
    return [torch.linalg.inv(a) - damping * torch.eye(len(a), dtype=a.dtype) for a in factors[0]]


@examples
@given(shapes, seeds)
def test_vectorization_unfolding_and_mode_products(shape: tuple[int, ...], seed: int) -> None:
    (g,) = draws(shape, seed, 1)
    assert torch.equal(vec(g), g.reshape(-1))
    assert torch.equal(vec(unfolding(g, 0)), vec(g))
    for i, d in enumerate(shape):
        u = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        close(unfolding(mode_product(g, u, i), i), u @ unfolding(g, i))


@examples
@given(shapes, seeds, st.data())
def test_proposition_1(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    """Mode products are a product with the Kronecker product; also those of the library."""
    (g,) = draws(shape, seed, 1)
    us = [torch.randn(d, d, dtype=torch.float64) for d in shape]  # any matrices
    product = g
    for i, u in enumerate(us):
        product = mode_product(product, u, i)
    close(vec(product), dense_kron(us) @ vec(g))
    diagonal = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    full = [symmetric(d, seed + i) for i, d in enumerate(shape)]
    dense = [
        torch.diag(u.diagonal()) if diag else u for u, diag in zip(full, diagonal, strict=True)
    ]
    factors = [u.diagonal().clone() if diag else u for u, diag in zip(full, diagonal, strict=True)]
    (product,) = tnt_kernels.mode_products([g], [factors])
    close(product.reshape(-1), dense_kron(dense) @ vec(g))


@examples
@given(shapes, seeds)
def test_every_contraction_has_the_squared_norm_as_trace(shape: tuple[int, ...], seed: int) -> None:
    (g,) = draws(shape, seed, 1)
    squared_norm = sum(float(x) ** 2 for x in vec(g))
    stats = [torch.full((d, d), math.nan, dtype=torch.float64) for d in shape]
    tnt_kernels.gram_ema_([stats], [g], 0.0)
    for i in range(len(shape)):
        assert float(contraction(g, i).trace()) == pytest.approx(squared_norm, rel=FLOAT64_FORMULA)
        close(stats[i], contraction(g, i))


@examples
@given(shapes, seeds, dampings)
def test_eq_13_gives_every_covariance_the_same_mean_eigenvalue(
    shape: tuple[int, ...], seed: int, relative: float
) -> None:
    stats = mean_contractions(draws(shape, seed, 3))
    expected, c = covariances(stats)
    # Damping of the covariances' own size, so that A^{-1} - damping I loses few digits.
    us = library_covariances(stats, relative * c)
    for u, wanted, d in zip(us, expected, shape, strict=True):
        # Inverting A back costs its condition number, at most (d c + e) / e, in digits.
        tolerance = FLOAT64_FORMULA * (1 + 10 * d / relative)
        assert float(u.trace()) / d == pytest.approx(c, rel=tolerance)
        close(u, wanted, tolerance)


@examples
@given(shapes, seeds)
def test_eq_13_scales_so_that_the_kronecker_product_has_the_fishers_trace(
    shape: tuple[int, ...], seed: int
) -> None:
    gradients = draws(shape, seed, 3)
    us, _ = covariances(mean_contractions(gradients))
    trace = math.prod(float(u.trace()) for u in us)
    assert trace == pytest.approx(float(second_moment(gradients).trace()), rel=FLOAT64_FORMULA)


def test_eq_13_recovers_a_tensor_normal_covariance() -> None:
    """Where Cov(vec G) is U_1 kron U_2 kron U_3, eq. 13 from the exact E[G^(i)] gives it back."""
    dims = (2, 3, 4)
    us = [symmetric(d, d) @ symmetric(d, d) + torch.eye(d, dtype=torch.float64) for d in dims]
    covariance = dense_kron(us)
    # E[G^(i)] is linear in the covariance: sum it over an orthogonal set of "draws".
    values, vectors = torch.linalg.eigh(covariance)
    stats = []
    for i in range(3):
        terms = [
            value * contraction(vectors[:, j].reshape(dims), i) for j, value in enumerate(values)
        ]
        stats.append(torch.stack(terms).sum(0))
    recovered, _ = covariances(stats)
    close(dense_kron(recovered), covariance)


@examples
@given(shapes, seeds, dampings, st.data())
def test_lemma_9(shape: tuple[int, ...], seed: int, damping: float, data: st.DataObject) -> None:
    """The inverse of the library's preconditioner obeys the bounds of Lemma 9, both ways."""
    gradients = draws(shape, seed, 3)
    stats = mean_contractions(gradients)
    fisher = spectral(second_moment(gradients))
    k = len(shape)
    upper = math.prod(d ** (1 - 1 / k) * fisher ** (1 / k) + damping for d in shape)
    # The test inverts what the library inverted: keep the condition number below 1e7.
    condition = upper / damping**k
    assume(condition < 1e7)
    diagonal = data.draw(st.lists(st.booleans(), min_size=k, max_size=k))
    kinds = [s.diagonal().clone() if d else s for s, d in zip(stats, diagonal, strict=True)]
    factors, info = tnt_kernels.damped_inverse([kinds], damping)
    assert info.tolist() == [0]
    preconditioner = dense_kron([torch.diag(a) if a.dim() == 1 else a for a in factors[0]])
    assert torch.allclose(preconditioner, preconditioner.T, rtol=0, atol=0)
    eigenvalues = 1 / torch.linalg.eigvalsh(preconditioner)
    assert float(eigenvalues.min()) >= damping**k * (1 - FLOAT64_BOUND)
    # The least eigenvalue of an inverse has a rounding relative to the largest one: above a
    # condition number of 1e6 more than the tolerance.
    rounding = max(FLOAT64_BOUND, 4 * torch.finfo(torch.float64).eps * condition)
    assert float(eigenvalues.max()) <= upper * (1 + rounding)
    if not any(diagonal):
        dense = damped_kron(stats, damping, relative=False)
        close(preconditioner, torch.linalg.inv(dense), FLOAT64_BOUND)


@examples
@given(shapes, seeds, dampings)
def test_relative_damping_makes_the_preconditioner_homogeneous(
    shape: tuple[int, ...], seed: int, damping: float
) -> None:
    """Scaling every gradient by s scales F_TNT by s^2: the damping follows the statistics."""
    gradients = draws(shape, seed, 3)
    scaled = [3.0 * g for g in gradients]
    before = damped_kron(mean_contractions(gradients), damping, relative=True)
    after = damped_kron(mean_contractions(scaled), damping, relative=True)
    close(after, 9.0 * before)
    factors, _ = tnt_kernels.damped_inverse([mean_contractions(gradients)], damping, relative=True)
    product = before @ dense_kron(factors[0])
    conditioning = float(before.norm() * torch.linalg.inv(before).norm())
    assert torch.allclose(
        product, torch.eye(len(product), dtype=product.dtype), atol=1e-14 * conditioning, rtol=0
    )


def test_oracle_takes_one_step_by_hand() -> None:
    """A 1 x 1 parameter, where every quantity is a number."""
    p = torch.tensor([[2.0]], dtype=torch.float64)
    oracle = DenseTNT([p], lr=0.5, damping=0.25, momentum=0.5, stat_decay=0.75, weight_decay=0.1)
    oracle.step([torch.tensor([[3.0]])], [torch.tensor([[4.0]])])
    # S_i = 16, c = 4, U_i = 16 / 4 = 4; P = 3 / 4.25^2; W = 2 - 0.5 (P + 0.2).
    expected = 2.0 - 0.5 * (3.0 / 4.25**2 + 0.2)
    assert float(p) == pytest.approx(expected, rel=1e-15)
    oracle.step([torch.tensor([[1.0]])], [torch.tensor([[2.0]])])
    u = math.sqrt(0.75 * 16.0 + 0.25 * 4.0)  # U = S / c with c = sqrt(S)
    expected -= 0.5 * ((0.5 * 3.0 + 1.0) / (u + 0.25) ** 2 + 0.1 * expected)
    assert float(p) == pytest.approx(expected, rel=1e-15)
