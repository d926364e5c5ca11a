"""How processes share the work: each parameter's statistics and factors have one owner.

What then travels is, by ``shard``,

- "directions": the owner alone has factors and moments, and sends the direction of every step;
- "inverses": the owner sends new factors when it has made them, and every process makes its own
  step from them and moments of its own.

The first takes the least memory: what is kept for a parameter is kept once. The second sends
nothing in most steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from tnt_optim.autograd import all_finite
from tnt_optim.directions import directions_, move_
from tnt_optim.distributed.ownership import Load, assign, load_of
from tnt_optim.distributed.process_group import LOT_BYTES, Gradients, Team, flattened, parts
from tnt_optim.rounding import to_be_moved
from tnt_optim.state import TENSORS, State, layout, layout_of, state_dtype

SHARDS = (None, "directions", "inverses")

Group = Mapping[str, Any]


class Owners:
    """Who owns which parameter; those that come later go to whom has least by then."""

    def __init__(self) -> None:
        self._owners: dict[Tensor, int] = {}
        self._taken: list[Load] = []

    def of(self, param: Tensor, groups: Sequence[Group], processes: int, moments_too: bool) -> int:
        """The owner of one parameter of ``groups``."""
        if param not in self._owners or len(self._taken) != processes:
            self._assign(groups, processes, moments_too)
        return self._owners[param]

    def _assign(self, groups: Sequence[Group], processes: int, moments_too: bool) -> None:
        if len(self._taken) != processes:
            self._owners, self._taken = {}, [Load()] * processes
        # Group by group, as if each had been asked for when it was added: copies, and processes
        # that ask at other times, must come to the same.
        for group in groups:
            new = [p for p in group["params"] if p not in self._owners]
            loads = [_load(p, group, moments_too) for p in new]
            for param, load, owner in zip(new, loads, assign(loads, self._taken), strict=True):
                self._owners[param] = owner
                self._taken[owner] += load


def _load(param: Tensor, group: Group, moments_too: bool) -> Load:
    if not param.requires_grad:
        return Load()
    shapes = layout(param, group).statistic_shapes(group["max_factor_dim"])
    moments = (1 + (group["graft"] == "adam")) * moments_too
    return load_of(shapes, param.numel(), state_dtype(param).itemsize, moments)


class Sharing:
    """How steps are shared by processes that each have every parameter.

    Args:
        team: the processes.
        shard: "directions" or "inverses".
        owner: who owns a parameter.
    """

    def __init__(self, team: Team, shard: str, owner: Callable[[Tensor], int]) -> None:
        self.team = team
        self.shard = shard
        self.owner = owner

    def owned(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Those of ``params`` that this process owns."""
        return [p for p in params if self.owner(p) == self.team.rank]

    def keeps(self, param: Tensor) -> frozenset[str]:
        """Which tensors of a parameter's state this process keeps."""
        if self.owner(param) == self.team.rank:
            return TENSORS
        return TENSORS - {"stats"} if self.shard == "inverses" else frozenset()

    def whole(self, gradients: Gradients) -> dict[Tensor, Tensor]:
        """Gradients as the owners need them."""
        return {p: g for p, g in gradients.items() if g is not None}

    def all_finite(self, gradients: Iterable[Tensor]) -> Tensor:
        """Whether all gradients are finite, in all processes."""
        return all_finite(gradients)

    def codes(self, params: Sequence[Tensor], owned: Sequence[Tensor], own: Tensor) -> Tensor:
        """What the owners say of their parameters, made known to all.

        Args:
            params: all of them, in the same order everywhere, on one device.
            owned: those that this process owns.
            own: a code for each of these, on the device.
        """
        nothing = torch.zeros((), dtype=torch.int32, device=params[0].device)
        known = dict(zip(owned, own.to(torch.int32).unbind(), strict=True))
        return self.team.worst(torch.stack([known.get(p, nothing) for p in params]))

    def send_factors(self, params: Iterable[Tensor], states: Mapping[Tensor, State]) -> None:
        """Brings the owners' factors of ``params`` to those who keep them."""
        if self.shard != "inverses":
            return

        def held_of(lot: Iterable[Tensor]) -> list[Tensor]:
            return [factor for p in lot for factor in states[p]["factors"]]

        def take(lot: list[Tensor], flat: Tensor) -> None:
            held = held_of(lot)
            if self.owner(lot[0]) != self.team.rank:
                for factor, sent in zip(held, parts(flat, [f.shape for f in held]), strict=True):
                    factor.copy_(sent)

        for alike in by_kind(params):
            self._exchange(
                alike,
                lambda p: sum(factor.numel() for factor in states[p]["factors"]),
                lambda lot: flattened(held_of(lot)),
                take,
            )

    def move(
        self,
        group: Group,
        grads: Gradients,
        states: Mapping[Tensor, State],
        number: int,
    ) -> bool:
        """One group's step: each direction made by its owner, each parameter moved everywhere.

        Args:
            group: the settings.
            grads: of the parameters that move.
            states: what this process has.
            number: the group's among those that move.

        Returns:
            False where every process makes the step for itself, and nothing was done.
        """
        if self.shard != "directions":
            return False

        places = {p: place for place, p in enumerate(grads)}
        made: dict[Tensor, Tensor] = {}
        if group["kl_clip"] is not None:  # which takes all directions before any is sent
            made = self.directions_(grads, states, group)

        def make(lot: list[Tensor]) -> Tensor:
            if not made:
                directions = self.directions_({p: grads[p] for p in lot}, states, group)
                return flattened([directions[p] for p in lot])
            return flattened([made[p] for p in lot])

        def take(lot: list[Tensor], flat: Tensor) -> None:
            seen = [layout(p, group) for p in lot]
            key = (number, places[lot[0]])
            with to_be_moved(lot, states, group, seen, key=key) as weights:
                move_(weights, parts(flat, [look.sizes for look in seen]), group)

        for alike in by_kind(grads):
            self._exchange(alike, lambda p: p.numel(), make, take)
        return True

    def directions_(
        self, grads: Gradients, states: Mapping[Tensor, State], group: Group
    ) -> dict[Tensor, Tensor]:
        """Moves the moments of what this process owns; returns the directions of that.

        Args:
            grads: of parameters in the same order everywhere where ``kl_clip`` is set.
            states: what this process has.
            group: the settings.
        """
        params = self.owned(grads)
        whole = self.whole(grads)
        own = [states[p] for p in params]
        seen = [layout_of(state) for state in own]
        moved = directions_([whole[p] for p in params], own, seen, group, self.team)
        rest = iter(moved)
        return {
            p: look.assembled([next(rest) for _ in range(look.count)])
            for p, look in zip(params, seen, strict=True)
        }

    def _exchange(
        self,
        params: Sequence[Tensor],
        numel: Callable[[Tensor], int],
        make: Callable[[list[Tensor]], Tensor],
        take: Callable[[list[Tensor], Tensor], None],
    ) -> None:
        """Sends what owners have of their parameters to all, while the next of it is made.

        Args:
            params: all of them, in the same order everywhere, of one device and one state dtype.
            numel: how many numbers are sent of a parameter.
            make: makes those of some of this process's parameters, one after the other.
            take: takes in those of some parameters; also called for this process's own.
        """
        lots: list[list[list[Tensor]]] = [[] for _ in range(self.team.size)]
        dtype, device = state_dtype(params[0]), params[0].device
        for param in params:
            own = lots[self.owner(param)]
            full = own and sum(map(numel, own[-1])) + numel(param) > LOT_BYTES // dtype.itemsize
            if not own or full:
                own.append([])
            own[-1].append(param)
        on_the_way: list[tuple[list[Tensor], Tensor, Any]] = []
        for turn in zip_longest(*lots):
            mine = turn[self.team.rank]
            made = None if mine is None else make(mine)
            sent = []
            for owner, lot in enumerate(turn):
                if lot is not None:
                    flat = made if owner == self.team.rank else None
                    if flat is None:
                        flat = torch.empty(sum(map(numel, lot)), dtype=dtype, device=device)
                    sent.append((lot, flat, self.team.broadcast(flat, owner)))
            _take_all(on_the_way, take)
            on_the_way = sent
        _take_all(on_the_way, take)


def _take_all(
    sent: Sequence[tuple[list[Tensor], Tensor, Any]], take: Callable[[list[Tensor], Tensor], None]
) -> None:
    for lot, flat, work in sent:
        work.wait()
        take(lot, flat)


def by_kind(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Splits parameters by device and by their state's dtype."""
    lists: dict[tuple[Any, ...], list[Tensor]] = {}
    for param in params:
        lists.setdefault((param.device, state_dtype(param)), []).append(param)
    return list(lists.values())
