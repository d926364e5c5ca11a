"""An optimizer of one's own: one-sided Shampoo, which preconditions the first mode only.

S <- beta S + (1 - beta) G Gᵀ; W <- W - lr ((S + damping I)^(-1/2) momentum + weight_decay W).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tnt_kernels import inverse_root
from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.options import arguments, documented

Rows = Sequence[Sequence[Tensor]]


@documented(damping="added to every statistic; of the unit of the squared gradient.")
class OneSidedShampoo(KroneckerOptimizer):
    """Shampoo with a preconditioner for the first mode of each parameter.

    Args:
        params: parameters or parameter groups.
        {options}
    """

    _method = "OneSidedShampoo"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        damping: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        stat_interval: int = 1,
        inverse_interval: int = 10,
        process_group: Any = None,
        shard: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def _factors(self, group: Any, stats: Rows, out: Rows) -> Tensor:
        """(S + damping I)^(-1/2) for the first mode of each block; the others stay identities."""
        first, target = ([[modes[0]] for modes in rows] for rows in (stats, out))
        return inverse_root(first, group["damping"], [2] * len(first), target)[1]


def main(steps: int = 100) -> tuple[list[float], OneSidedShampoo]:
    """Trains a small classifier on random labels; returns the losses and the optimizer."""
    torch.manual_seed(0)
    x, y = torch.randn(256, 20), torch.randint(5, (256,))
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer, losses = OneSidedShampoo(model.parameters(), lr=0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


if __name__ == "__main__":
    print("loss after every tenth step:", [f"{loss:.4f}" for loss in main()[0][::10]])
