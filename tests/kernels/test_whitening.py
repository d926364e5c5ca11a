"""Whitened Gram matrices of `gram_ema_`: what they are for. The contract tests compare numbers."""

import math

import torch
from cases import mode_statistics, normal

from tnt_kernels import gram_ema_


def test_alternating_updates_find_the_covariances() -> None:
    """Of a matrix-normal sample: the likelihood's maximum, which the moments are not."""
    torch.manual_seed(0)
    true = [s @ s for s in mode_statistics((5, 4), "full", torch.float64)]
    roots = [torch.linalg.cholesky(s) for s in true]
    sample = roots[0] @ normal((4000, 5, 4), torch.float64) @ roots[1].mT
    # A whole sample is one more mode, with the identity as its covariance.
    ones = torch.ones(len(sample), dtype=torch.float64)
    stats = [ones.clone(), *(torch.eye(d, dtype=torch.float64) for d in (5, 4))]
    for _ in range(20):
        factors = [ones, *map(torch.linalg.inv, stats[1:])]
        gram_ema_([stats], [sample], 0.0, [factors])
    for found, wanted in zip(stats[1:], true, strict=True):
        ratio = found / found.trace() - wanted / wanted.trace()
        assert ratio.norm() < 3 / math.sqrt(len(sample)) * float((wanted / wanted.trace()).norm())
