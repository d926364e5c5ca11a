"""The device's part of a step: refresh statistics, refresh factors, update the parameters.

The host plans a step (``step``); here it becomes calls of operators. Nothing waits for
the device or reads a value on it, so that a CUDA graph can record a step.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from tnt_kernels import preconditioned_step_, scaled_step_
from tnt_optim.attempt import Stage
from tnt_optim.autograd import Gradients
from tnt_optim.directions import Weights, decayed, graft_scales
from tnt_optim.modes import (
    Batch,
    Group,
    Layout,
    Rows,
    Settings,
    State,
    States,
    blocks,
    cuts,
    each,
    layout_for,
    layout_of,
    rows,
)
from tnt_optim.processes import Processes
from tnt_optim.units import Member

# The entries of one bucket, on the CPU and on a GPU: its directions, or its float32 copies, are in
# memory together. A larger parameter is a bucket of its own.
_BUCKET, _LARGE_BUCKET = 1 << 22, 1 << 28


class Method(Protocol):
    """What a method computes: ``KroneckerOptimizer``."""

    _parts: Sequence[str]  # names of what has inverses

    @property
    def multiplies(self) -> bool:
        """Whether directions are products with the factors, which the fused step computes."""

    def _factors(self, group: Settings, stats: Rows, out: Rows) -> Tensor:
        """See ``KroneckerOptimizer._factors``."""

    def _directions(
        self,
        group: Settings,
        states: Sequence[State],
        grads: Sequence[Tensor],
        layouts: Sequence[Layout],
    ) -> tuple[list[Tensor], Tensor | None]:
        """See ``KroneckerOptimizer._directions``."""


class Source(Protocol):
    """Where the statistics come from: ``observations.Empirical``."""

    def witnesses(self, observed: Iterable[Any]) -> list[Tensor]:
        """Tensors to check: statistics take what was observed if their squared norms are finite."""

    def accumulate_(
        self,
        stats: Sequence[list[Tensor]],
        observed: Sequence[Any],
        layouts: Sequence[Layout],
        decay: float | Tensor,
        factors: Sequence[list[Tensor]] | None,
    ) -> None:
        """Statistics <- decay * statistics + (1 - decay) * those of what was observed."""


@dataclass
class Part:
    """Parameters of one group on one device, to update; see ``processes.Work``.

    Attributes:
        grads: by parameter; of layers those of [W | b], by weight.
        group: the settings.
        number: counts the parts of a step.
        members: of each unit, if some have several; else empty.
        settings: of any group at this step.
    """

    grads: Gradients
    states: States
    group: Settings
    number: int
    method: Method
    members: Mapping[Tensor, Sequence[Member]]
    settings: Callable[[Group], Settings]

    def stages(self) -> list[Stage]:
        """See ``processes.Work``."""
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
        """See ``processes.Work``."""
        if not whole:
            return {}
        grads, own = list(whole.values()), [self.states[p] for p in whole]
        layouts = list(map(layout_of, own))
        found, norms = self.method._directions(self.group, own, grads, layouts)
        scales = graft_scales(norms, found, self.group)
        if scales is not None and found:
            pairs = zip(scales.unbind(), found, strict=True)
            torch._foreach_mul_(found, [scale.to(p.dtype) for scale, p in pairs])
        rest = iter(found)
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
        """See ``processes.Work``."""
        layouts = (
            None if pieces is not None else [_whole(layout_for(p, self.group)) for p in params]
        )
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

        ``layouts`` have the blocks of the directions; None for tensors of one shape with them.
        """
        key = (self.number, *key)
        if not self.members:
            tensors = params if pieces is None else pieces
            weights = Weights(tensors, self.states, self.group, layouts, key=key)
            return [_Move(weights, self.group, decayed(params, self.group), layouts)]
        by_group: dict[int, list[tuple[int, Member]]] = {}
        for place, param in enumerate(params):
            for member in self.members[param]:
                by_group.setdefault(id(member.group), []).append((place, member))
        return [self._move_of(own, key) for own in by_group.values()]

    def _move_of(self, members: Sequence[tuple[int, Member]], key: tuple[int, ...]) -> "_Move":
        """The move of members of units, all of one group."""
        group, params = self.settings(members[0][1].group), [m.param for _, m in members]
        weights = Weights(params, self.states, group, key=key)
        return _Move(weights, group, decayed(params, group), None, members)


class _Move:
    """The move of weights along directions, at one group's rates.

    Args:
        weights: of parameters.
        group: the settings.
        decays: whether each parameter decays.
        layouts: with the blocks of each; None for the parameters' own shapes.
        members: the place and the part of each one's direction, if these are not all in order.
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
        self.norms: Tensor | None = None  # as the method gives them

    def stages(self) -> list[Stage]:
        """Moments and directions; weights; with rounding, the parameters."""
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
        found = self.method._directions(self.group, self.states, self.grads, self.layouts)
        self.directions, self.norms = found

    def _move(self, move: _Move) -> None:
        scales = graft_scales(self.norms, self.directions, self.group)
        move.along(self.directions, scales)

    def _step(self, move: _Move, decays: bool) -> None:
        same = [decay == decays for decay in move.decays]
        layouts, own = list(compress(self.layouts, same)), list(compress(self.states, same))
        preconditioned_step_(
            blocks(compress(move.weights.take(), same), layouts),
            blocks(each(own, "momentum"), layouts),
            blocks(compress(self.grads, same), layouts),
            rows(each(own, "factors"), layouts),
            self.group["lr"],
            self.group["momentum"],
            self.group["weight_decay"] if decays else 0.0,
        )


@dataclass(frozen=True)
class Report:
    """The outcome of a refresh."""

    kind: str  # "statistics" or "inverses"
    codes: Any  # one for each parameter, on the device, 0 for success; or their delivery
    params: Sequence[Tensor]


@dataclass
class DeviceStep:
    """The work of one step on the device."""

    statistics: list[Batch]  # refreshed first
    factors: list[Batch]  # refreshed after that
    updated: list[Batch]  # updated at last
    observed: dict[Tensor, Any]  # for the statistics
    grads: Gradients  # of the loss; of sharded parameters this process's pieces
    processes: Processes
    method: Method
    source: Source
    members: Mapping[Tensor, Sequence[Member]]  # see ``Part``
    # Parameters whose statistics have this step's observations: a step that is repeated after a
    # failure does not add them again.
    accumulated: set[Tensor]

    @property
    def batches(self) -> list[Batch]:
        """All batches."""
        return [*self.statistics, *self.factors, *self.updated]

    def refresh_statistics(
        self,
        states: States,
        settings: Callable[[Group], Settings],
        deliver: Callable[[Tensor], Any] = lambda codes: codes,
    ) -> Iterator[Report]:
        """Adds the observations to the statistics, if all of them are finite.

        ``deliver`` takes the memory to report codes before anything is written.
        """
        if not self.statistics:
            return
        finite = self.processes.all_finite(self.source.witnesses(self.observed.values()))
        for group, params in self.statistics:
            codes = deliver((~finite).to(torch.int32).expand(len(params)).contiguous())
            # Decay 1 leaves the statistics as they are, whatever the gradient holds.
            keep = torch.ones((), dtype=torch.float64, device=params[0].device)
            decay = keep * settings(group)["stat_decay"]
            decay = torch.where(finite.to(keep.device), decay, keep)
            owned = self.processes.owned(params)
            own = [states[p] for p in owned]
            layouts = list(map(layout_of, own))
            stats, factors = each(own, "stats"), each(own, "factors")
            whitens = settings(group)["estimator"] == "mle"
            # Whitening copies gradients: those of a bucket at a time.
            for part in buckets_of(owned) if whitens else [slice(None)]:
                whitening = factors[part] if whitens else None
                new = [self.observed[p] for p in owned[part]]
                self.source.accumulate_(stats[part], new, layouts[part], decay, whitening)
                self.accumulated.update(owned[part])
            self.accumulated.update(params)
            yield Report("statistics", codes, params)

    def update(self, states: States, settings: Callable[[Group], Settings]) -> list[Stage]:
        """The stages that update momenta and parameters."""
        stages: list[Stage] = []
        for number, (group, params) in enumerate(self.updated):
            grads = {p: self.grads[p] for p in params}
            own = states, settings(group), number, self.method, self.members, settings
            stages += self.processes.update(Part(grads, *own))
            stages.append(functools.partial(_count, [states[p] for p in params], group["graft"]))
        return stages


def refresh_factors(
    batches: Iterable[Batch],
    states: States,
    processes: Processes,
    settings: Callable[[Group], Settings],
    method: Method,
) -> list[Report]:
    """Computes factors from the statistics; a factor that fails keeps its old value."""
    reports: list[Report] = []
    for group, params in batches:
        owned = processes.owned(params)
        own = [states[p] for p in owned]
        layouts = list(map(layout_of, own))
        stats, factors = rows(each(own, "stats"), layouts), rows(each(own, "factors"), layouts)
        info = torch.zeros(0, dtype=torch.int32, device=params[0].device)
        if owned:
            info = method._factors(settings(group), stats, factors)
        codes = _worst_of_blocks(info, [len(layout.cuts) for layout in layouts])
        codes = processes.codes(params, owned, codes)
        processes.send_factors(params, states)
        reports.append(Report("inverses", codes, params))
    return reports


def _whole(layout: Layout) -> Layout:
    """A layout without cuts."""
    return Layout(layout.sizes, cuts(layout.sizes, None))


def buckets_of(params: Sequence[Tensor]) -> list[slice]:
    """Buckets of neighbouring parameters.

    On the CPU a bucket's directions are still in the cache when the parameters are updated. On a
    GPU larger buckets need fewer launches.
    """
    limit = _BUCKET if params and params[0].is_cpu else _LARGE_BUCKET
    bounds, size = [0], 0
    for index, param in enumerate(params):
        if size and size + param.numel() > limit:
            bounds.append(index)
            size = 0
        size += param.numel()
    bounds.append(len(params))
    return [slice(first, last) for first, last in pairwise(bounds)]


def _count(states: Sequence[State], graft: str | None) -> None:
    """Adds one to the counts of updates; with CUDA graphs a count is a tensor."""
    for name in ("updates", "second_moment_updates")[: 2 if graft == "adam" else 1]:
        if states and isinstance(states[0][name], Tensor):
            torch._foreach_add_(each(states, name), 1)
            continue
        for state in states:
            state[name] += 1


def _worst_of_blocks(codes: Tensor, counts: Sequence[int]) -> Tensor:
    """The largest code of each parameter's blocks, on the device; ``counts`` are their numbers."""
    if all(count == 1 for count in counts):
        return codes
    return torch.stack([own.amax() for own in codes.split(list(counts))])
