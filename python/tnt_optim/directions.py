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
from tnt_optim.processes import Team
from tnt_optim.states import Layout, State, blocks, each, rows

# Adam's second moment, kept for its norm alone: decay, and the constant beside the root.
SECOND_MOMENT_DECAY = 0.99
EPS = 1e-8


# Adam's arithmetic goes over a tensor several times: on the CPU in pieces that stay in the cache,
# on a GPU, where a launch costs more than that, over all tensors at once.
_CHUNK = 1 << 17


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
    if scales:
        torch._foreach_mul_(moved, scales)
    return moved


def clipped(
    directions: Sequence[Tensor],
    momenta: Sequence[Tensor],
    scales: Sequence[Tensor] | None,
    group: Mapping[str, Any],
    team: Team | None = None,
) -> list[Tensor]:
    """The factors s of directions, times min(1, sqrt(kl_clip / (lr^2 sum s^2 P . m))).

    With P = F^-1 m the sum is that of (s P)^T F (s P), twice the divergence of the step in the
    model of F that the factors are; it is not negative.

    Args:
        directions: the P before their factors.
        momenta: the m.
        scales: the factors so far; None for 1.
        group: the settings.
        team: processes that have the rest of the sum.
    """
    products = [(p * m).sum() for p, m in zip(directions, momenta, strict=True)]
    if scales is not None:
        products = [product * s**2 for product, s in zip(products, scales, strict=True)]
    device = group["params"][0].device
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.stack([nothing, *(product.to(nothing) for product in products)]).sum()
    if team is not None:
        total = team.sums([total])[0]
    bound = group["kl_clip"] / (group["lr"] ** 2 * total)
    factor = torch.where(total > 0, bound, torch.ones_like(total)).sqrt().clamp(max=1.0)
    own = [factor.to(p.device, p.dtype) for p in directions]
    return own if scales is None else [a * b for a, b in zip(scales, own, strict=True)]


def scaled_directions_(
    grads: Sequence[Tensor],
    states: Sequence[State],
    layouts: Sequence[Layout],
    group: Mapping[str, Any],
) -> tuple[list[Tensor], list[Tensor] | None]:
    """What ``directions_`` returns, with the factors that are still to be multiplied in, if any."""
    graft = group["graft"]
    momenta = blocks(each(states, "momentum"), layouts)
    gradients = blocks(grads, layouts)
    for momentum, grad in zip(momenta, gradients, strict=True):
        _add_up_(momentum, grad, group["momentum"])
    directions = mode_products(momenta, rows(each(states, "factors"), layouts))
    if graft is None or not directions:
        return directions, None
    norms = torch._foreach_norm(directions)
    if graft == "adam":
        wanted = _adam_norms_(gradients, momenta, states, layouts, group["momentum"])
    else:
        wanted = list(torch._foreach_norm(momenta))
    zero = torch.zeros_like(norms[0])
    pairs = zip(wanted, norms, strict=True)
    return directions, [torch.where(norm == 0, zero, want / norm) for want, norm in pairs]


def move_(
    weights: Sequence[Tensor],
    directions: Sequence[Tensor],
    group: Mapping[str, Any],
    scales: Sequence[Tensor] | None = None,
) -> None:
    """W <- W - lr (s P + weight_decay W), half-precision W rounded once.

    Args:
        weights: the W.
        directions: the P.
        group: the settings.
        scales: the s, 0-dim; None for 1.
    """
    lr, decay = group["lr"], group["weight_decay"]
    for index, (weight, direction) in enumerate(zip(weights, directions, strict=True)):
        rate = lr if scales is None else lr * scales[index]
        if weight.dtype != direction.dtype:
            wide = weight.to(direction.dtype)
            weight.copy_(wide - lr * decay * wide - rate * direction)
            continue
        if isinstance(decay, Tensor) or decay != 0:
            weight.mul_(1 - lr * decay)
        if isinstance(rate, Tensor):
            weight.addcmul_(direction, -rate.to(weight.device, weight.dtype))
        else:
            weight.add_(direction, alpha=-rate)


def _add_up_(momentum: Tensor, grad: Tensor, mu: float | Tensor) -> None:
    """m <- mu m + g."""
    if isinstance(mu, Tensor):
        momentum.mul_(mu).add_(grad)
    else:
        torch.add(grad, momentum, alpha=mu, out=momentum)


def _adam_norms_(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    states: Sequence[State],
    layouts: Sequence[Layout],
    mu: float | Tensor,
) -> list[Tensor]:
    """Moves the second moments; returns the norm of each block's direction of Adam's."""
    squares = blocks(each(states, "second_moment"), layouts)
    # The momentum is a plain sum, Adam's first moment (1 - mu) times it.
    corrections = [
        (
            (1 - mu) / (1 - mu ** state["updates"]),
            1 - SECOND_MOMENT_DECAY ** state["second_moment_updates"],
        )
        for state, seen in zip(states, layouts, strict=True)
        for _ in range(seen.count)
    ]
    norms: dict[int, Tensor] = {}
    together = []
    for index, square in enumerate(squares):
        if square.is_cpu and square.numel() > _CHUNK and square.is_contiguous():
            norms[index] = _adam_norm_in_pieces_(
                grads[index], momenta[index], square, corrections[index]
            )
        else:
            together.append(index)
    if together:
        found = _adam_norm_(
            [grads[i] for i in together],
            [momenta[i] for i in together],
            [squares[i] for i in together],
            [corrections[i] for i in together],
        )
        norms.update(zip(together, found, strict=True))
    return [norms[index] for index in range(len(squares))]


def _adam_norm_in_pieces_(
    grad: Tensor, momentum: Tensor, square: Tensor, corrections: tuple[Any, Any]
) -> Tensor:
    """The same as ``_adam_norm_`` for one tensor, piece by piece, each in the cache throughout."""
    first, second = corrections
    scratch = torch.empty(_CHUNK, dtype=square.dtype)
    pieces = [tensor.reshape(-1).split(_CHUNK) for tensor in (grad, momentum, square)]
    parts = []
    for g, m, v in zip(*pieces, strict=True):
        g, root = g.to(v.dtype), scratch[: v.numel()]
        v.mul_(SECOND_MOMENT_DECAY).addcmul_(g, g, value=1 - SECOND_MOMENT_DECAY)
        torch.sqrt(v, out=root).add_(EPS * second**0.5)
        parts.append(torch.div(m, root, out=root).norm())
    norm: Tensor = torch.stack(parts).norm() * (first * second**0.5)
    return norm


def _adam_norm_(
    grads: list[Tensor],
    momenta: list[Tensor],
    squares: list[Tensor],
    corrections: list[tuple[Any, Any]],
) -> list[Tensor]:
    """||c m / (sqrt(v / d) + eps)|| = |c| sqrt(d) ||m / (sqrt(v) + eps sqrt(d))|| of new v."""
    wide = [g.to(v.dtype) for g, v in zip(grads, squares, strict=True)]
    torch._foreach_mul_(squares, SECOND_MOMENT_DECAY)
    torch._foreach_addcmul_(squares, wide, wide, 1 - SECOND_MOMENT_DECAY)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, [EPS * second**0.5 for _, second in corrections])
    norms = torch._foreach_norm(torch._foreach_div(momenta, roots))
    return list(torch._foreach_mul(norms, [first * second**0.5 for first, second in corrections]))
