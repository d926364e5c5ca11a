"""Muon (Jordan et al. 2024) on the core of this package: directions without statistics.

m <- mu m + g; W <- W - lr (sqrt(max(1, rows / columns)) orthogonal(g + mu m) + weight_decay W).
"""

from typing import Any

import torch
from torch import Tensor, nn

from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.options import arguments, documented
from tnt_optim.units import NOTHING


@documented()
class Muon(KroneckerOptimizer):
    """Steps along the orthogonal factor of the momentum, for matrices.

    Args:
        params: parameters or parameter groups, of two dimensions.
        {options}
    """

    _method = "Muon"
    _units = NOTHING  # no parameter has statistics

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        process_group: Any = None,
        shard: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def _directions(self, group: Any, states: Any, grads: Any, layouts: Any) -> Any:
        mu, momenta = group["momentum"], [state["momentum"] for state in states]
        grads = [grad.to(momenta[0].dtype) for grad in grads]
        torch._foreach_mul_(momenta, mu)
        torch._foreach_add_(momenta, grads)
        ahead = torch._foreach_add(grads, torch._foreach_mul(momenta, mu))
        found = [orthogonal(m) for m in (ahead if group["nesterov"] else momenta)]
        return [d * max(1.0, d.shape[0] / d.shape[1]) ** 0.5 for d in found], None


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of a matrix U S V^T, roughly: singular values between 0.7 and 1.2, in bfloat16."""
    x = matrix.bfloat16() / matrix.norm().clamp(min=1e-7).bfloat16()
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


if __name__ == "__main__":
    x, y = torch.randn(256, 20), torch.randint(5, (256,))
    model = nn.Sequential(nn.Linear(20, 32, bias=False), nn.Tanh(), nn.Linear(32, 5, bias=False))
    optimizer = Muon(model.parameters())
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"loss of the last step: {loss.item():.4f}")
