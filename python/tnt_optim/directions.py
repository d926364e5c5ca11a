"""Directions apart from the update, for what comes between them: grafting, other processes.

Grafting is another method's step length on our direction. It makes the learning rate comparable
between parameters and between methods (Agarwal et al. 2020, "Disentangling adaptive gradient
methods from learning rates"). Beyond the TNT paper, and off by default.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import mode_products
from tnt_optim.states import Layout, State, blocks, each, rows

# Adam's second moment, kept for its norm alone: decay, and the constant beside the root.
SECOND_MOMENT_DECAY = 0.99
EPS = 1e-8


def directions_(
    grads: Sequence[Tensor],
    states: Sequence[State],
    layouts: Sequence[Layout],
    group: Mapping[str, Any],
) -> list[Tensor]:
    """Moves the moments; returns the direction of every block, without weight decay.

    With ``graft`` each block's direction is rescaled to the norm of another method's: Adam's
    m^ / (sqrt(v^) + 1e-8), bias-corrected, or the momentum's ("sgd"). A zero direction stays zero.

    Args:
        grads: the g.
        states: of the parameters.
        layouts: theirs.
        group: their settings.
    """
    mu, graft = group["momentum"], group["graft"]
    momenta = each(states, "momentum")
    gradients = [seen.view(grad) for seen, grad in zip(layouts, grads, strict=True)]
    for momentum, grad in zip(momenta, gradients, strict=True):
        momentum.mul_(mu).add_(grad)
    directions = mode_products(blocks(momenta, layouts), rows(each(states, "factors"), layouts))
    if graft is None:
        return directions
    models = momenta
    if graft == "adam":
        models = [_adam_(s, g, mu) for s, g in zip(states, gradients, strict=True)]
    for direction, model in zip(directions, blocks(models, layouts), strict=True):
        norm = direction.norm()
        direction.mul_(torch.where(norm == 0, torch.zeros_like(norm), model.norm() / norm))
    return directions


def move_(
    weights: Sequence[Tensor], directions: Sequence[Tensor], group: Mapping[str, Any]
) -> None:
    """W <- W - lr (P + weight_decay W), rounded once."""
    for weight, direction in zip(weights, directions, strict=True):
        wide = weight.to(direction.dtype)
        weight.copy_(wide - group["lr"] * (direction + group["weight_decay"] * wide))


def _adam_(state: State, grad: Tensor, mu: float | Tensor) -> Tensor:
    """Moves the second moment; returns Adam's direction."""
    square: Tensor = state["second_moment"]
    square.mul_(SECOND_MOMENT_DECAY).add_(
        grad.to(square.dtype).square(), alpha=1 - SECOND_MOMENT_DECAY
    )
    # The momentum is a plain sum, Adam's first moment (1 - mu) times it.
    momentum: Tensor = state["momentum"]
    first = momentum * ((1 - mu) / (1 - mu ** state["updates"]))
    second = square / (1 - SECOND_MOMENT_DECAY ** state["second_moment_updates"])
    direction: Tensor = first / (second.sqrt() + EPS)
    return direction
