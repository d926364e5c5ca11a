"""The oracle against a known covariance, and against steps worked out by hand."""

import math

import pytest
import torch
from drawn import close
from oracle import DenseTNT, contraction, covariances, dense_kron
from torch import Tensor


def symmetric(d: int, seed: int) -> Tensor:
    """A random symmetric matrix, not necessarily definite."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return a + a.T


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
