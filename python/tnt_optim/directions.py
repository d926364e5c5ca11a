"""Directions apart from the update, for what comes between them: grafting, other processes.

Grafting is another method's step length on our direction. It makes the learning rate comparable
between parameters and between methods (Agarwal et al. 2020, "Disentangling adaptive gradient
methods from learning rates"). Beyond the TNT paper, and off by default.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import grafted_directions_, mode_products
from tnt_optim.distributed.process_group import Team
from tnt_optim.state import Layout, State, blocks, each, rows

# Numbers of a sum in one go: few calls, and no more rounding than in a sum by pairs.
_PIECE = 1 << 20
# Of a tensor in memory that several share, in bytes.
_ALIGNMENT = 64


class Workspace:
    """Memory for directions on the CPU, kept from step to step: new memory costs a fault a page."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Contiguous tensors like these, good until the next call.

        None where they are on another device, whose memory PyTorch keeps itself.
        """
        ends = list(itertools.accumulate(-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors))
        if not tensors or not tensors[0].is_cpu:
            return None
        if self._memory is None or len(self._memory) < ends[-1]:
            self._memory = None  # first, so that the two never exist together
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
        return [
            self._memory[start : start + t.nbytes].view(t.dtype).view(t.shape)
            for t, start in zip(tensors, (0, *ends), strict=False)
        ]


def directions_(
    grads: Sequence[Tensor],
    states: Sequence[State],
    layouts: Sequence[Layout],
    group: Mapping[str, Any],
    team: Team | None = None,
) -> list[Tensor]:
    """Moves the moments; returns the direction of every block, without weight decay.

    With ``graft`` each block's direction is rescaled to the norm of another method's: Adam's
    m^ / (sqrt(v^) + 1e-8), bias-corrected, or the momentum's ("sgd"). A zero direction stays zero.
    With ``kl_clip`` all of them are then shortened alike.

    Args:
        grads: the g.
        states: of the parameters.
        layouts: theirs.
        group: their settings.
        team: processes that have other parameters of the same group, for ``kl_clip``.
    """
    moved, scales = scaled_directions_(grads, states, layouts, group)
    if group["kl_clip"] is not None:
        momenta = blocks(each(states, "momentum"), layouts)
        scales = clipped(moved, momenta, scales, group, team)
    if scales is not None and moved:
        own = zip(scales.unbind(), moved, strict=True)
        torch._foreach_mul_(moved, [scale.to(p.dtype) for scale, p in own])
    return moved


def clipped(
    directions: Sequence[Tensor],
    momenta: Sequence[Tensor],
    scales: Tensor | None,
    group: Mapping[str, Any],
    team: Team | None = None,
) -> Tensor:
    """The factors s of directions, times min(1, sqrt(kl_clip / (lr^2 sum s^2 P . m))).

    With P = F^-1 m the sum is that of (s P)^T F (s P), twice the divergence of the step in the
    model of F that the factors are; it is not negative.

    Args:
        directions: the P before their factors.
        momenta: the m.
        scales: the factors so far, float64, (number of directions,); None for 1.
        group: the settings.
        team: processes that have the rest of the sum.
    """
    # Theirs: the group's parameters may be on several.
    device = (directions or group["params"])[0].device
    products = [_dot(p, m) for p, m in zip(directions, momenta, strict=True)]
    own = torch.stack(products) if products else torch.zeros(0, dtype=torch.float64, device=device)
    factors = torch.ones_like(own) if scales is None else scales
    total = (own * factors**2).sum()
    if team is not None:
        total = team.sums([total])[0]
    bound = group["kl_clip"] / (group["lr"] ** 2 * total)
    return factors * torch.where(total > 0, bound, torch.ones_like(total)).sqrt().clamp(max=1.0)


def _dot(direction: Tensor, momentum: Tensor) -> Tensor:
    """P . m in float64; in pieces, so that neither all products exist nor their sum is a long one.

    Args:
        direction: P, contiguous.
        momentum: m.
    """
    pieces = zip(direction.view(-1).split(_PIECE), momentum.reshape(-1).split(_PIECE), strict=True)
    return torch.stack([torch.dot(p, m).double() for p, m in pieces]).sum()


def scaled_directions_(
    grads: Sequence[Tensor],
    states: Sequence[State],
    layouts: Sequence[Layout],
    group: Mapping[str, Any],
    workspace: Workspace | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """What ``directions_`` returns, with the factors that are still to be multiplied in, if any.

    With a workspace the directions may be in it.
    """
    momenta = blocks(each(states, "momentum"), layouts)
    gradients = blocks(grads, layouts)
    factors = rows(each(states, "factors"), layouts)
    mu, graft = group["momentum"], group["graft"]
    if graft is None:
        for momentum, grad in zip(momenta, gradients, strict=True):
            _add_up_(momentum, grad, mu)
        return mode_products(momenta, factors), None
    out = None if workspace is None else workspace.like(momenta)
    if graft == "sgd":
        return grafted_directions_(momenta, gradients, factors, mu, out=out)
    squares = blocks(each(states, "second_moment"), layouts)
    counts = [
        [state["updates"], state["second_moment_updates"]]
        for state, seen in zip(states, layouts, strict=True)
        for _ in range(seen.count)
    ]
    return grafted_directions_(momenta, gradients, factors, mu, squares, _table(counts), out)


def move_(
    weights: Sequence[Tensor],
    directions: Sequence[Tensor],
    group: Mapping[str, Any],
    scales: Tensor | None = None,
) -> None:
    """W <- W - lr (s P + weight_decay W), half-precision W rounded once.

    Args:
        weights: the W.
        directions: the P.
        group: the settings.
        scales: the s, (number of weights,); None for 1.
    """
    lr, decay = group["lr"], group["weight_decay"]
    rates: list[Any] = [lr] * len(weights)
    if scales is not None:
        # Numbers on the CPU, where there is nothing to wait for; unless a graph records the step.
        as_numbers = scales.is_cpu and not isinstance(lr, Tensor)
        rates = (lr * scales).tolist() if as_numbers else list((lr * scales).unbind())
    for weight, direction, rate in zip(weights, directions, rates, strict=True):
        if weight.dtype != direction.dtype:
            wide = weight.to(direction.dtype)
            weight.copy_(wide - lr * decay * wide - rate * direction)
            continue
        if isinstance(decay, Tensor) or decay != 0:
            # Not times 1 - lr decay, whose rounding would come back at every step.
            _subtract_(weight, weight, lr * decay)
        _subtract_(weight, direction, rate)


def _subtract_(weight: Tensor, other: Tensor, rate: float | Tensor) -> None:
    """W <- W - rate X."""
    if isinstance(rate, Tensor):
        weight.addcmul_(other, -rate.to(weight.device, weight.dtype))
    else:
        weight.add_(other, alpha=-rate)


def _add_up_(momentum: Tensor, grad: Tensor, mu: float | Tensor) -> None:
    """m <- mu m + g."""
    if isinstance(mu, Tensor):
        momentum.mul_(mu).add_(grad)
    else:
        torch.add(grad, momentum, alpha=mu, out=momentum)


def _table(counts: list[list[Any]]) -> Tensor:
    """Counts, two for each momentum; they are tensors where a CUDA graph goes on counting."""
    if counts and isinstance(counts[0][0], Tensor):
        return torch.stack([torch.stack(pair) for pair in counts])
    return torch.tensor(counts, dtype=torch.float64).reshape(-1, 2)
