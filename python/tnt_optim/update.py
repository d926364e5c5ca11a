"""The part of a step that runs on the device: what the host has decided, as calls of operators.

Nothing here waits for the device or looks at a value on it, so a CUDA graph can capture it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import gram_ema_, preconditioned_step_
from tnt_optim.autograd import all_finite
from tnt_optim.directions import Workspace, clipped, move_, scaled_directions_
from tnt_optim.distributed.process_group import Gradients
from tnt_optim.distributed.replicated import Sharing
from tnt_optim.rounding import to_be_moved
from tnt_optim.state import State, blocks, each, layout_of, rows

# Numbers of parameters whose directions, or copies in float32, exist at the same time: on the CPU
# and on a GPU. Those of a larger parameter exist whole.
_LOT, _LARGE_LOT = 1 << 22, 1 << 28

Group = dict[str, Any]
Settings = Mapping[str, Any]
States = Mapping[Tensor, State]
# Parameters of one group on one device: what one call of an operator can serve.
Batch = tuple[Group, list[Tensor]]
MakeFactors = Callable[[Settings, list[list[Tensor]], list[list[Tensor]]], Tensor]


@dataclass(frozen=True)
class Report:
    """How a refresh went.

    Attributes:
        kind: "statistics" or "inverses".
        codes: one for each of ``params``, on the device; 0 where all went well.
        params: whose they are.
    """

    kind: str
    codes: Tensor
    params: Sequence[Tensor]


@dataclass
class DeviceStep:
    """What one step does on the device.

    Attributes:
        blended: whose statistics take in what was observed.
        remade: whose factors are made anew, after that.
        updated: who moves, at last.
        observed: the gradients for the statistics.
        grads: the gradients of the loss; of sharded parameters this process's pieces, if any.
        sharing: how processes share the work; None where each does all of it.
        taken: whose statistics have what was observed, as where an earlier attempt at the same
            step raised after it; whose statistics take it in now is added.
        workspace: for directions that are used up at once; None for new memory.
    """

    blended: list[Batch]
    remade: list[Batch]
    updated: list[Batch]
    observed: dict[Tensor, Tensor]
    grads: Gradients
    sharing: Sharing | None = None
    taken: set[Tensor] = field(default_factory=set)
    workspace: Workspace | None = None

    def blend(self, states: States, settings: Callable[[Group], Settings]) -> list[Report]:
        """Blends what was observed into the statistics, if all of it is finite."""
        if not self.blended:
            return []
        reports: list[Report] = []
        finite = (self.sharing.all_finite if self.sharing else all_finite)(self.observed.values())
        for group, params in self.blended:
            # Decay 1 leaves the statistics alone, whatever the gradient holds.
            keep = torch.ones((), dtype=torch.float64, device=params[0].device)
            decay = keep * settings(group)["stat_decay"]
            decay = torch.where(finite.to(keep.device), decay, keep)
            owned = self._owned(params)
            own = [states[p] for p in owned]
            seen = list(map(layout_of, own))
            gradients = blocks([self.observed[p] for p in owned], seen)
            gram_ema_(rows(each(own, "stats"), seen), gradients, decay)
            self.taken.update(params)
            codes = (~finite).to(torch.int32).expand(len(params)).contiguous()
            reports.append(Report("statistics", codes, params))
        return reports

    def remake(
        self, states: States, settings: Callable[[Group], Settings], make: MakeFactors
    ) -> list[Report]:
        """Makes the factors that are due; those that fail stay what they were."""
        reports: list[Report] = []
        for group, params in self.remade:
            owned = self._owned(params)
            own = [states[p] for p in owned]
            seen = list(map(layout_of, own))
            stats, factors = rows(each(own, "stats"), seen), rows(each(own, "factors"), seen)
            info = make(settings(group), stats, factors)
            codes = worst_of_blocks(info, [look.count for look in seen])
            if self.sharing is not None:
                codes = self.sharing.codes(params, owned, codes)
                self.sharing.send_factors(params, states)
            reports.append(Report("inverses", codes, params))
        return reports

    def update(self, states: States, settings: Callable[[Group], Settings]) -> None:
        """Moves momenta and parameters."""
        for number, (group, params) in enumerate(self.updated):
            own = [states[p] for p in params]
            _count(own, "updates")
            if group["graft"] == "adam":
                _count(own, "second_moment_updates")
            grads = {p: self.grads[p] for p in params}
            sharing = self.sharing
            if sharing is None or not sharing.move(settings(group), grads, states, number):
                _update(grads, states, settings(group), number, self.workspace)

    def _owned(self, params: list[Tensor]) -> list[Tensor]:
        return params if self.sharing is None else self.sharing.owned(params)


def _update(
    grads: Gradients,
    states: States,
    settings: Settings,
    number: int,
    workspace: Workspace | None,
) -> None:
    params, gradients = list(grads), [g for g in grads.values() if g is not None]
    own = [states[p] for p in params]
    seen = list(map(layout_of, own))
    clips, grafts = settings["kl_clip"] is not None, settings["graft"] is not None
    # Copies in float32, or directions apart from the step, are not made of all at once.
    in_lots = not clips and (grafts or settings["rounding"] == "stochastic")
    for lot, part in enumerate(lots_of(params) if in_lots else [slice(None)]):
        looks, states_of_part = seen[part], own[part]
        key = (number, lot)
        with to_be_moved(params[part], states, settings, looks, key=key) as weights:
            if not clips and not grafts:
                preconditioned_step_(
                    blocks(weights, looks),
                    blocks(each(states_of_part, "momentum"), looks),
                    blocks(gradients[part], looks),
                    rows(each(states_of_part, "factors"), looks),
                    settings["lr"],
                    settings["momentum"],
                    settings["weight_decay"],
                )
                continue
            made, scales = scaled_directions_(
                gradients[part], states_of_part, looks, settings, None if clips else workspace
            )
            if clips:
                momenta = blocks(each(states_of_part, "momentum"), looks)
                scales = clipped(made, momenta, scales, settings)
            move_(blocks(weights, looks), made, settings, scales)


def lots_of(params: Sequence[Tensor]) -> list[slice]:
    """Neighbours whose directions exist at the same time.

    On the CPU a few million numbers: they are then still in the cache when they are used, and their
    memory serves again. On a GPU far more, for few launches.
    """
    limit = _LOT if params and params[0].is_cpu else _LARGE_LOT
    bounds, size = [0], 0
    for index, param in enumerate(params):
        if size and size + param.numel() > limit:
            bounds.append(index)
            size = 0
        size += param.numel()
    bounds.append(len(params))
    return [slice(first, last) for first, last in itertools.pairwise(bounds)]


def _count(states: Sequence[State], what: str) -> None:
    """One more of each; a count is a tensor where a CUDA graph has to find it."""
    counts = [state[what] for state in states]
    if counts and isinstance(counts[0], Tensor):
        torch._foreach_add_(counts, 1)
        return
    for state in states:
        state[what] += 1


def worst_of_blocks(codes: Tensor, counts: Sequence[int]) -> Tensor:
    """A code of each parameter: the largest of its blocks', on the device.

    Args:
        codes: of every block, one after the other.
        counts: how many blocks each parameter has.
    """
    if all(count == 1 for count in counts):
        return codes
    return torch.stack([own.amax() for own in codes.split(list(counts))])


def by_device(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Splits parameters by device."""
    lists: dict[torch.device, list[Tensor]] = {}
    for param in params:
        lists.setdefault(param.device, []).append(param)
    return list(lists.values())
