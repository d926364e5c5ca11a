"""SOAP (Vyas et al. 2024) on the core of this package: Adam in the eigenbasis of Shampoo.

S_i <- beta S_i + (1 - beta) G G^T in every mode i, with eigenvectors Q_i. With rotated gradients G'
and momenta M', v <- 0.95 v + 0.05 G'^2, and W moves along Q (M' / (sqrt(v) + eps)) Q^T.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.options import arguments, documented

SECOND_DECAY, EPS = 0.95, 1e-8


@documented()
class SOAP(KroneckerOptimizer):
    """Adam in the eigenbasis of the statistics.

    Args:
        params: parameters or parameter groups.
        {options}
    """

    _method = "SOAP"

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        *,
        momentum: float = 0.95,
        stat_decay: float = 0.95,
        weight_decay: float = 0.01,
        stat_interval: int = 1,
        inverse_interval: int = 10,
        precondition_1d: bool = False,
        process_group: Any = None,
        shard: str | None = None,
    ) -> None:
        # "adam": the state has a second moment.
        super().__init__(params, arguments(locals()) | {"graft": "adam"})

    def _factors(self, group: Any, stats: Any, out: Any) -> Tensor:
        """The eigenvectors of full statistics; a mode with a diagonal one is not rotated."""
        for stat, basis in ((s, b) for pair in zip(stats, out) for s, b in zip(*pair)):  # noqa: B905
            if stat.dim() == 2:
                basis.copy_(torch.linalg.eigh(stat).eigenvectors)
        return torch.zeros(len(stats), dtype=torch.int32, device=stats[0][0].device)

    def _directions(self, group: Any, states: Any, grads: Any, layouts: Any) -> Any:
        mu, directions, moments = group["momentum"], [], []
        for state, grad, layout in zip(states, grads, layouts, strict=True):
            bases, t = state["factors"], state["updates"] + 1
            g = layout.view(grad).to(state["momentum"].dtype)
            m = mu * state["momentum"] + g
            v = SECOND_DECAY * state["second_moment"]
            v.add_(rotated(g, bases).square(), alpha=1 - SECOND_DECAY)
            average = rotated(m, bases) * ((1 - mu) / (1 - mu**t))
            scale = (v / (1 - SECOND_DECAY**t)).sqrt() + EPS
            back = [basis.mT if basis.dim() == 2 else basis for basis in bases]
            directions.append(rotated(average / scale, back))
            moments += [(state["momentum"], m), (state["second_moment"], v)]
        for old, new in moments:  # last: an error before leaves them as they were
            old.copy_(new)
        return directions, None


def rotated(tensor: Tensor, bases: list[Tensor]) -> Tensor:
    """A tensor times Q_i^T in every mode i that has a basis."""
    for i, basis in enumerate(bases):
        if basis.dim() == 2:
            tensor = torch.tensordot(basis, tensor, dims=([0], [i])).movedim(0, i)
    return tensor


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = torch.randn(256, 20), torch.randint(5, (256,))
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = SOAP(model.parameters())
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"loss of the last step: {loss.item():.4f}")
