"""First-order baselines that torch has only in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class DecoupledSGD(torch.optim.SGD):
    """SGD with momentum and decoupled weight decay: m <- mu m + g; W <- W - lr (m + decay W).

    In torch's fused kernel, as a baseline should be. torch's own SGD adds the decay to the
    gradient, so that it passes through the momentum; the paper decays all methods' weights alike.

    Args:
        params: parameters, named parameters or groups.
        lr: alpha in the paper.
        momentum: mu in the paper.
        weight_decay: gamma in the paper.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, fused=True)
        self.defaults["decoupled_decay"] = weight_decay
        for group in self.param_groups:
            group.setdefault("decoupled_decay", weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; returns what the closure returned, else None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["decoupled_decay"] != 0:
                moving = [p for p in group["params"] if p.grad is not None]
                torch._foreach_mul_(moving, 1 - group["lr"] * group["decoupled_decay"])
        super().step()
        return loss


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon on the matrices of the hidden layers, AdamW on everything else.

    Everything else: embeddings, the output layer, vectors. Muon's updates are scaled to the root
    mean square of AdamW's (`match_rms_adamw`), so that one learning rate serves both.

    Args:
        model: its parameters, embeddings and its last linear layer are looked up.
        lr: of both.
        momentum: Muon's.
        weight_decay: of both, decoupled.
        betas: AdamW's.

    Raises:
        ValueError: the model has no matrix in a hidden layer.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        hidden = hidden_matrices(model)
        if not hidden:
            raise ValueError("model must have a matrix in a hidden layer for Muon, got none")
        chosen = {id(p) for _, p in hidden}
        rest = [(n, p) for n, p in model.named_parameters() if id(p) not in chosen]
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                hidden,
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay, fused=True),
        )
        groups = [group for part in self._parts for group in part.param_groups]
        shared = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas}
        super().__init__(groups, shared)
        # The parts' groups themselves: a learning rate set here is theirs.
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; returns what the closure returned, else None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Both parts' states."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self._parts for group in part.param_groups]


def hidden_matrices(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Named weights of all linear layers but the last one defined, which makes the outputs.

    Embeddings are no linear layers, and so not among them.
    """
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [(f"{name}.weight", module.weight) for name, module in linears[:-1]]
