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
    _units, _is_share_checked = NOTHING, True  # no parameter has statistics

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        shard: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def _directions(self, group: Any, states: Any, grads: Any, layouts: Any) -> Any:
        assert all(grad.dim() == 2 for grad in grads), "params must be matrices"
        mu, momenta = group["momentum"], [state["momentum"] for state in states]
        grads = [grad.to(momenta[0].dtype) for grad in grads]
        moved = torch._foreach_add(grads, torch._foreach_mul(momenta, mu))
        ahead = torch._foreach_add(grads, torch._foreach_mul(moved, mu))
        found = [orthogonal(m) for m in (ahead if group["nesterov"] else moved)]
        torch._foreach_copy_(momenta, moved)  # last: an error before leaves them as they were
        return found, None


def orthogonal(matrix: Tensor) -> Tensor:
    """sqrt(max(1, rows / columns)) U V^T of a matrix U S V^T, roughly, in bfloat16."""
    x = matrix.bfloat16() / matrix.norm().clamp(min=1e-7).bfloat16()
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    x = (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
    return x * max(1.0, x.shape[0] / x.shape[1]) ** 0.5


if __name__ == "__main__":
    x, y = torch.randn(256, 20), torch.randint(5, (256,))
    model = nn.Sequential(nn.Linear(20, 32, bias=False), nn.Tanh(), nn.Linear(32, 5, bias=False))
    optimizer = Muon(model.parameters())
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    print("loss:", nn.functional.cross_entropy(model(x), y).item())
