"""Grafting: another method's step length on our direction.

It makes the learning rate comparable between parameters and between methods (Agarwal et al. 2020,
"Disentangling adaptive gradient methods from learning rates"). Beyond the TNT paper, and off by
default.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import mode_products

# Adam's second moment, kept for its norm alone: decay, and the constant beside the root.
SECOND_MOMENT_DECAY = 0.99
EPS = 1e-8


def grafted_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    group: Mapping[str, Any],
) -> None:
    """``preconditioned_step_`` with each direction rescaled to another method's norm.

    That of Adam's direction m^ / (sqrt(v^) + 1e-8), bias-corrected, or of the momentum ("sgd"). A
    zero direction stays zero.
    """
    mu = group["momentum"]
    momenta = [state["momentum"] for state in states]
    for momentum, grad in zip(momenta, grads, strict=True):
        momentum.mul_(mu).add_(grad)
    directions = mode_products(momenta, [state["factors"] for state in states])
    for param, grad, state, direction in zip(params, grads, states, directions, strict=True):
        momentum, model = state["momentum"], state["momentum"]
        if group["graft"] == "adam":
            square = state["second_moment"]
            square.mul_(SECOND_MOMENT_DECAY).add_(
                grad.to(square.dtype).square(), alpha=1 - SECOND_MOMENT_DECAY
            )
            # The momentum is a plain sum, Adam's first moment (1 - mu) times it.
            first = momentum * ((1 - mu) / (1 - mu ** state["updates"]))
            second = square / (1 - SECOND_MOMENT_DECAY ** state["second_moment_updates"])
            model = first / (second.sqrt() + EPS)
        norm = direction.norm()
        scale = torch.where(norm == 0, torch.zeros_like(norm), model.norm() / norm)
        weight = param.to(direction.dtype)
        param.copy_(weight - group["lr"] * (scale * direction + group["weight_decay"] * weight))
