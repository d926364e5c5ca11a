"""One tensor variable, and the methods of the paper's Table 2 on it.

The model is linear in the variable, so that forward and backward cost what the paper says of SGD,
m prod d: with two modes a linear layer, (m, d) to (m, d), otherwise its inner product with every
example, (m, d, ..., d) to (m, 1). The loss is half the squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.baselines import root_eigh
from experiments.costs.step_kinds import NEVER, TrainingStep
from experiments.models import squared_error
from experiments.runs.first_order import DecoupledSGD
from tnt_optim import KFAC, TNT, Shampoo

DAMPING = 0.1
_LR = 1e-6


class InnerProducts(nn.Module):
    """<W, X_n> for every example X_n.

    Args:
        shape: of W.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, inputs: Tensor) -> Tensor:
        """(m, prod d) to (m, 1)."""
        return (inputs @ self.weight.flatten()).unsqueeze(1)


class DenseNewton(torch.optim.Optimizer):
    """A Newton-like method: one dense matrix over all numbers of each parameter, and its inverse.

    F <- 0.9 F + 0.1 g gᵀ at t % T1 == 0, its damped inverse at t % T2 == 0, W <- W - lr F⁻¹ m, with
    t from 1; before the first inverse the identity stands for it.

    Args:
        params: parameters.
        lr: the step size.
        stat_interval: T1.
        inverse_interval: T2.
    """

    def __init__(
        self, params: Any, lr: float = _LR, *, stat_interval: int = 1, inverse_interval: int = 1
    ) -> None:
        intervals = {"stat_interval": stat_interval, "inverse_interval": inverse_interval}
        super().__init__(params, {"lr": lr, **intervals, "step": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; returns what the closure returned, else None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                self._step(param, group)
            group["step"] += 1
        return loss

    def _step(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        assert param.grad is not None
        gradient = param.grad.flatten()
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
            state["fisher"] = torch.outer(gradient, gradient)
            state["inverse"] = torch.eye(len(gradient), device=param.device)
        if group["step"] % group["stat_interval"] == 0:
            state["fisher"].addr_(gradient, gradient, beta=0.9, alpha=0.1)
        if group["step"] % group["inverse_interval"] == 0:
            damped = state["fisher"].clone()
            damped.diagonal().add_(DAMPING)
            torch.linalg.inv(damped, out=state["inverse"])
        state["momentum"].mul_(0.9).add_(gradient)
        direction = state["inverse"] @ state["momentum"]
        param.add_(direction.view_as(param), alpha=-group["lr"])


class EigenShampoo(Shampoo):
    """Shampoo whose roots are made from the eigenvalues: the paper's "if using SVD"."""

    def _factors(
        self,
        group: Any,
        stats: Sequence[Sequence[Tensor]],
        out: Sequence[Sequence[Tensor]] | None = None,
    ) -> tuple[list[list[Tensor]], Tensor]:
        made = [[torch.empty_like(s) for s in modes] for modes in stats] if out is None else out
        root_eigh(stats, group["damping"], [2 * len(modes) for modes in stats], made)
        return [list(modes) for modes in made], torch.zeros(len(stats), dtype=torch.int32)


_BOTH: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 1}
BUILDERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD-m": lambda model: DecoupledSGD(model.parameters(), lr=_LR, momentum=0.9),
    "TNT": lambda model: TNT(
        model.parameters(), lr=_LR, damping=DAMPING, likelihood="gaussian", **_BOTH
    ),
    "Shampoo": lambda model: Shampoo(model.parameters(), lr=_LR, damping=DAMPING, **_BOTH),
    "Shampoo, eigenvalues": lambda model: EigenShampoo(
        model.parameters(), lr=_LR, damping=DAMPING, **_BOTH
    ),
    "Adam": lambda model: torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0),
    # No inverse at the first step: over the largest tensors it would take minutes.
    "Newton-like": lambda model: DenseNewton(model.parameters(), inverse_interval=NEVER),
    "KFAC": lambda model: KFAC(model, lr=_LR, damping=DAMPING, likelihood="gaussian", **_BOTH),
}


def one_tensor_step(method: str, d: int, k: int, m: int) -> TrainingStep:
    """A method's training step on one tensor of k modes of size d, on m examples.

    Raises:
        ValueError: KFAC has no layer but with two modes.
    """
    if method == "KFAC" and k != 2:
        raise ValueError(f"k must be 2 for KFAC, which wants a layer, got {k}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if k == 2:
            model: nn.Module = nn.Linear(d, d, bias=False)
            inputs, targets = torch.randn(m, d), torch.randn(m, d)
        else:
            model = InnerProducts((d,) * k)
            inputs, targets = torch.randn(m, d**k), torch.randn(m, 1)
        # Gradients of size about 1 per number, whatever the sizes.
        inputs /= d ** (0.5 if k == 2 else k / 2)
    return TrainingStep(
        model=model,
        optimizer=BUILDERS[method](model),
        inputs=inputs,
        targets=targets,
        loss=squared_error,
        observes=method in ("TNT", "KFAC"),
    )


def predicted_bytes(method: str, d: int, k: int) -> int:
    """What Table 2 counts, in float32: the state beyond SGD with momentum.

    Statistics and what is made of them count both, so twice the matrices; Adam has one more number
    for each of the parameter's than SGD-m.
    """
    parameter: int = d**k
    numbers = {
        "SGD-m": 0,
        "TNT": 2 * k * d**2,
        "Shampoo": 2 * k * d**2,
        "Shampoo, eigenvalues": 2 * k * d**2,
        "KFAC": 2 * k * d**2,
        "Adam": parameter,
        "Newton-like": 2 * parameter * parameter,
    }
    return 4 * numbers[method]
