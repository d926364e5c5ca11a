"""How processes share the work: each parameter's statistics and factors have one owner.

What then travels is, by ``shard``,

- "directions": the owner alone has factors and moments, and sends the direction of every step;
- "inverses": the owner sends new factors when it has made them, and every process makes its own
  step from them and moments of its own.

The first takes the least memory: what is kept for a parameter is kept once. The second sends
nothing in most steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from tnt_optim.directions import directions_, move_
from tnt_optim.ownership import Load, assign, load_of
from tnt_optim.processes import LOT_BYTES, Team, parts
from tnt_optim.states import State, layout, layout_of, put_back, state_dtype

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

    def loads(self) -> list[Load]:
        """What each process has."""
        return list(self._taken)

    def _assign(self, groups: Sequence[Group], processes: int, moments_too: bool) -> None:
        if len(self._taken) != processes:
            self._owners, self._taken = {}, [Load()] * processes
        new = [(p, g) for g in groups for p in g["params"] if p not in self._owners]
        loads = [_load(p, g, moments_too) for p, g in new]
        for (param, _), load, owner in zip(new, loads, assign(loads, self._taken), strict=True):
            self._owners[param] = owner
            self._taken[owner] += load


def _load(param: Tensor, group: Group, moments_too: bool) -> Load:
    shapes = layout(param, group).statistic_shapes(group["max_factor_dim"])
    moments = (1 + (group["graft"] == "adam")) * moments_too
    return load_of(shapes, param.numel(), state_dtype(param).itemsize, moments)


@dataclass(frozen=True)
class Sharing:
    """How one step is shared.

    Attributes:
        team: the processes.
        shard: "directions" or "inverses".
        owner: who owns a parameter.
    """

    team: Team
    shard: str
    owner: Callable[[Tensor], int]

    def owned(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``params`` that this process owns."""
        return [p for p in params if self.owner(p) == self.team.rank]

    def codes(self, params: Sequence[Tensor], owned: Sequence[Tensor], own: Tensor) -> Tensor:
        """What the owners say of their parameters, made known to all.

        Args:
            params: all of them, in the same order everywhere, on one device.
            owned: those that this process owns.
            own: a code for each of these, on the device.
        """
        codes = torch.zeros(len(params), dtype=torch.int32, device=params[0].device)
        place = {p: index for index, p in enumerate(params)}
        if owned:
            codes[[place[p] for p in owned]] = own
        return self.team.worst(codes)

    def exchange(
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


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of some tensors, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def send_factors(
    sharing: Sharing, params: Sequence[Tensor], states: Mapping[Tensor, State]
) -> None:
    """Brings the owners' factors of ``params`` to all."""

    def held_of(lot: Iterable[Tensor]) -> list[Tensor]:
        return [factor for p in lot for factor in states[p]["factors"]]

    def take(lot: list[Tensor], flat: Tensor) -> None:
        held = held_of(lot)
        if sharing.owner(lot[0]) != sharing.team.rank:
            for factor, sent in zip(held, parts(flat, [f.shape for f in held]), strict=True):
                factor.copy_(sent)

    for alike in by_kind(params):
        sharing.exchange(
            alike,
            lambda p: sum(factor.numel() for factor in states[p]["factors"]),
            lambda lot: flattened(held_of(lot)),
            take,
        )


def send_directions(
    sharing: Sharing,
    group: Group,
    grads: Mapping[Tensor, Tensor],
    states: Mapping[Tensor, State],
) -> None:
    """One group's step: each direction made by its owner, each parameter moved everywhere.

    Args:
        sharing: the processes.
        group: the settings.
        grads: of the parameters that move.
        states: what this process has.
    """

    def make(lot: list[Tensor]) -> Tensor:
        own = [states[p] for p in lot]
        seen = [layout_of(state) for state in own]
        made = iter(directions_([grads[p] for p in lot], own, seen, group))
        whole = [look.assembled([next(made) for _ in range(look.count)]) for look in seen]
        return flattened(whole)

    def take(lot: list[Tensor], flat: Tensor) -> None:
        seen = [layout(p, group) for p in lot]
        weights = [look.view(p) for p, look in zip(lot, seen, strict=True)]
        move_(weights, parts(flat, [look.sizes for look in seen]), group)
        put_back(lot, weights)

    for alike in by_kind(grads):
        sharing.exchange(alike, lambda p: p.numel(), make, take)
