"""Directions and weights: the update of the parameters, in buckets.

Nothing here waits for the device or reads a value on it, so that a CUDA graph can record it.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from tnt_kernels import preconditioned_step_, scaled_step_
from tnt_optim.attempt import Stage
from tnt_optim.autograd import Gradients
from tnt_optim.directions import decayed, graft_scales
from tnt_optim.interfaces import Method
from tnt_optim.modes import (
    Layout,
    Settings,
    States,
    blocks,
    buckets_of,
    each,
    layout_for,
    layout_of,
    rows,
)
from tnt_optim.rounding import Weights
from tnt_optim.units import Member


@dataclass
class Part:
    """Parameters of one group on one device, to update.

    Attributes:
        grads: by parameter; for a layer the gradient of [W | b], by its weight.
        group: the settings.
        index: of this part in the step.
        members: of each unit; empty if no unit has several.
    """

    grads: Gradients
    states: States
    group: Settings
    index: int
    method: Method
    members: Mapping[Tensor, Sequence[Member]]

    def stages(self) -> list[Stage]:
        """The stages that update all parameters, without other processes."""
        params, group = list(self.grads), self.group
        is_plain = not group["nesterov"] and group["graft"] is None and not self.members
        fuses = is_plain and self.method.multiplies
        # The fused step has no directions in memory.
        in_buckets = not fuses or group["rounding"] == "stochastic"
        stages: list[Stage] = []
        for index, part in enumerate(buckets_of(params) if in_buckets else [slice(None)]):
            bucket = _Bucket(self, params[part], index)
            stages += bucket.fused_stages() if fuses else bucket.stages()
        return stages

    def directions(self, whole: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Updates the moments of some parameters by whole gradients; returns scaled directions."""
        if not whole:
            return {}
        grads, states = list(whole.values()), [self.states[p] for p in whole]
        layouts = list(map(layout_of, states))
        directions, norms = self.method._directions(self.group, states, grads, layouts)
        scales = graft_scales(norms, directions, self.group)
        if scales is not None and directions:
            pairs = zip(scales.unbind(), directions, strict=True)
            torch._foreach_mul_(directions, [scale.to(p.dtype) for scale, p in pairs])
        rest = iter(directions)
        return {
            p: layout.assembled([next(rest) for _ in layout.cuts])
            for p, layout in zip(whole, layouts, strict=True)
        }

    def move(
        self,
        params: Sequence[Tensor],
        directions: Sequence[Tensor],
        *key: int,
        pieces: Sequence[Tensor] | None = None,
    ) -> None:
        """Updates parameters, or these ``pieces`` of them, by scaled directions.

        ``key`` names the random stream within the part; copies in other processes have the same.
        """
        uncut = {**self.group, "block_size": None}  # directions are whole here
        layouts = None if pieces is not None else [layout_for(p, uncut) for p in params]
        for move in self.moves(params, layouts, *key, pieces=pieces):
            move.along(directions, None)
            move.weights.write()

    def moves(
        self,
        params: Sequence[Tensor],
        layouts: Sequence[Layout] | None,
        *key: int,
        pieces: Sequence[Tensor] | None = None,
    ) -> list["_Move"]:
        """The moves of parameters, or of their ``pieces``: one for each group's rates.

        ``layouts`` cut parameters into the directions' blocks; None if the shapes are the same.
        """
        key = (self.index, *key)
        if not self.members:
            tensors = params if pieces is None else pieces
            weights = Weights(tensors, self.states, self.group, layouts, key=key)
            return [_Move(weights, self.group, decayed(params, self.group), layouts)]
        by_group: dict[int, list[tuple[int, Member]]] = {}
        for place, param in enumerate(params):
            for member in self.members[param]:
                by_group.setdefault(id(member.settings), []).append((place, member))
        return [self._move_of(members, key) for members in by_group.values()]

    def _move_of(self, members: Sequence[tuple[int, Member]], key: tuple[int, ...]) -> "_Move":
        """The move of members of units, all of one group."""
        group, params = members[0][1].settings, [m.param for _, m in members]
        weights = Weights(params, self.states, group, key=key)
        return _Move(weights, group, decayed(params, group), None, members)


class _Move:
    """The move of weights along directions, at one group's rates.

    Args:
        weights: the tensors to update.
        group: the settings.
        decays: whether each parameter decays.
        layouts: cut each parameter into blocks; None for the parameters' own shapes.
        members: of units, each with the place of its unit's direction; None: directions are in the
            order of the weights.
    """

    def __init__(
        self,
        weights: Weights,
        group: Settings,
        decays: Sequence[bool],
        layouts: Sequence[Layout] | None,
        members: Sequence[tuple[int, Member]] | None = None,
    ) -> None:
        self.weights, self._group, self.decays = weights, group, decays
        self._layouts, self._members = layouts, members

    def along(self, directions: Sequence[Tensor], scales: Tensor | None) -> None:
        """W <- W - lr (s P + weight_decay W), for the blocks of all parameters."""
        tensors, decays = self.weights.take(), self.decays
        if self._layouts is not None:
            counted = zip(decays, self._layouts, strict=True)
            decays = [value for value, layout in counted for _ in layout.cuts]
            tensors = blocks(tensors, self._layouts)
        if self._members is not None:
            tensors = list(map(torch.atleast_1d, tensors))  # operators take no scalars
            directions = [member.part(directions[place]) for place, member in self._members]
            if scales is not None:
                each_scale = scales.unbind()  # an index would be copied to the device
                scales = torch.stack([each_scale[place] for place, _ in self._members])
        rates = self._group["lr"], self._group["weight_decay"]
        scaled_step_(tensors, directions, *rates, decays, scales)


class _Bucket:
    """The update of some parameters, whose directions are in memory together."""

    def __init__(self, part: Part, params: Sequence[Tensor], index: int) -> None:
        self.group, self.method = part.group, part.method
        self.states = [part.states[p] for p in params]
        self.grads = [g for g in map(part.grads.__getitem__, params) if g is not None]
        self.layouts = list(map(layout_of, self.states))
        self.moves = part.moves(params, self.layouts, index)
        self.directions: list[Tensor] = []
        self.norms: Tensor | None = None  # from the method's ``_directions``

    def stages(self) -> list[Stage]:
        """Stages for moments and directions, then for the weights, then for their rounding."""
        pairs = [(functools.partial(self._move, m), m.weights.write) for m in self.moves]
        return [self._make_directions, *(stage for pair in pairs for stage in pair)]

    def fused_stages(self) -> list[Stage]:
        """Momenta and weights: one call for parameters with weight decay, one for the others."""
        (move,) = self.moves
        steps = [functools.partial(self._step, move, value) for value in set(move.decays)]
        return [*steps, move.weights.write]

    def _make_directions(self) -> None:
        for move in self.moves:
            move.weights.take()
        self.directions, self.norms = self.method._directions(
            self.group, self.states, self.grads, self.layouts
        )

    def _move(self, move: _Move) -> None:
        scales = graft_scales(self.norms, self.directions, self.group)
        move.along(self.directions, scales)

    def _step(self, move: _Move, decays: bool) -> None:
        same = [decay == decays for decay in move.decays]
        layouts, states = list(compress(self.layouts, same)), list(compress(self.states, same))
        preconditioned_step_(
            blocks(compress(move.weights.take(), same), layouts),
            blocks(each(states, "momentum"), layouts),
            blocks(compress(self.grads, same), layouts),
            rows(each(states, "factors"), layouts),
            self.group["lr"],
            self.group["momentum"],
            self.group["weight_decay"] if decays else 0.0,
        )
