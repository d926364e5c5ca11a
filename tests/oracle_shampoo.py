"""Shampoo with dense Kronecker products, in float64: the tests compare `Shampoo` with it.

Written from Algorithm 4 of Ren & Goldfarb 2021; it shares no code with `tnt_kernels` or
`tnt_optim`. It inherits momentum, schedule, weight decay and grafting from `oracle.DenseTNT`.
"""

from collections.abc import Sequence

import torch
from oracle import DenseTNT, _Block, dense_kron
from torch import Tensor


def eigen_root(matrix: Tensor, p: int) -> Tensor:
    """The inverse p-th root of a symmetric positive definite matrix, by its eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values ** (-1 / p)) @ vectors.T


def damped_stats(stats: Sequence[Tensor], damping: float, relative: bool) -> list[Tensor]:
    """S_i + e I for every mode; e is damping, or damping times tr(S_i) / d_i (1 if S_i = 0)."""
    result = []
    for s in stats:
        average = float(torch.trace(s)) / len(s)
        shift = (damping * average if average > 0.0 else 1.0) if relative else damping
        result.append(s + shift * torch.eye(len(s), dtype=s.dtype))
    return result


class DenseShampoo(DenseTNT):
    """Algorithm 4: forms the dense preconditioner of every parameter.

    The arguments are those of `DenseTNT`. The caller passes the training gradients as the sampled
    ones.
    """

    def _refresh(self, block: _Block) -> None:
        assert block.stats is not None
        k = len(block.stats)
        damped = damped_stats(block.stats, self.damping, self.relative_damping)
        roots = [eigen_root(s, 2 * k) for s in damped]
        # The base solves with it.
        block.fisher = torch.linalg.inv(dense_kron(roots))
