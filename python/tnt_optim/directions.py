"""Directions: momenta times factors, and the length of the step along them.

Grafting uses the step length of another method on our direction, so that one learning rate serves
all parameters and methods (Agarwal et al. 2020, "Disentangling adaptive gradient methods from
learning rates"). It is not part of the TNT paper.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import grafted_directions_
from tnt_optim.modes import (
    Layout,
    Settings,
    State,
    blocks,
    each,
    rows,
)

# The root mean square of a direction with graft="rms", as for Muon: about that of Adam's direction.
RMS = 0.2
# The largest scale: it must fit in float32. A momentum of 1e-43 would need more.
LARGEST = torch.finfo(torch.float32).max


def directions_(
    grads: Sequence[Tensor],
    states: Sequence[State],
    layouts: Sequence[Layout],
    group: Settings,
) -> tuple[list[Tensor], Tensor]:
    """Updates the moments and computes directions, in one call: an error leaves the moments alone.

    The states must still have the counts of updates before this one.

    Returns:
        The directions, and for each two norms: of the grafted direction, and of itself. The grafted
        direction is Adam's m^ / (sqrt(v^) + 1e-8), bias-corrected, or the momentum; ``nesterov``
        takes both one gradient ahead. See ``graft_scales``.
    """
    ahead = group["nesterov"]
    momenta = blocks(each(states, "momentum"), layouts)
    gradients = blocks(grads, layouts)
    factors = rows(each(states, "factors"), layouts)
    if group["graft"] != "adam":
        return grafted_directions_(momenta, gradients, factors, group["momentum"], nesterov=ahead)
    squares = blocks(each(states, "second_moment"), layouts)
    counts = [
        [state["updates"], state["second_moment_updates"]]
        for state, layout in zip(states, layouts, strict=True)
        for _ in layout.cuts
    ]
    table, mu = _table(counts) + 1, group["momentum"]
    return grafted_directions_(momenta, gradients, factors, mu, squares, table, nesterov=ahead)


def graft_scales(
    norms: Tensor | None, directions: Sequence[Tensor], group: Settings
) -> Tensor | None:
    """The scales still to apply to directions, from the norms of ``directions_``; None for 1.

    With ``graft`` "rms" a direction gets a fixed root mean square, else the norm of the grafted
    direction. A zero direction stays zero.
    """
    if group["graft"] is None or norms is None or not directions:
        return None
    wanted, present = norms.unbind(1)
    if group["graft"] == "rms":
        lengths = [RMS * math.sqrt(p.numel()) for p in directions]
        wanted = torch.stack(torch._foreach_mul(torch.ones_like(present).unbind(), lengths))
    scales = torch.where(present == 0, 0.0, wanted / present)
    return scales.clamp_max(LARGEST) if group["graft"] == "rms" else scales


def decayed(params: Iterable[Tensor], group: Settings) -> list[bool]:
    """Whether each parameter decays: biases and norms only in the paper's form."""
    decays_vectors = group["graft"] is None if "units" in group else group["precondition_1d"]
    return [p.dim() > 1 or decays_vectors for p in params]


def _table(counts: list[list[Any]]) -> Tensor:
    """Two counts for each momentum, as one tensor; CUDA graphs keep each count in a tensor."""
    if counts and isinstance(counts[0][0], Tensor):
        return torch.stack([torch.stack(pair) for pair in counts])
    return torch.tensor(counts, dtype=torch.float64, device="cpu").reshape(-1, 2)
