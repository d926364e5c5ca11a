"""Owner ranks: each parameter has one process that keeps its statistics and refreshes its factors.

Owners follow from the sizes and settings with which parameters were added, so that all processes
come to the same result without a message, whenever they ask.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_optim.directions import (
    clipped,
    directions_,
    graft_scales,
    preconditioned_momenta,
)
from tnt_optim.distributed.process_group import ProcessGroup
from tnt_optim.modes import Settings, State, layout_of
from tnt_optim.state import NAMES, kept_names, owned_bytes, statistic_shapes


@dataclass(frozen=True)
class Load:
    """The cost of a parameter, or of all parameters of one owner."""

    # Multiplications: d^3 for the factor of each full mode and numel(W) d for the product with it.
    # One refresh counts as much as one product: T2 decides their true ratio.
    work: float = 0.0
    size: float = 0.0  # bytes of the state that only the owner keeps

    def __add__(self, other: "Load") -> "Load":
        return Load(self.work + other.work, self.size + other.size)


def load_of(param: Tensor, group: Settings, shard: str) -> Load:
    """The cost of a parameter for its owner."""
    numel = param.numel()
    full = [s[0] for s in statistic_shapes(param, group) if s[1:]]
    work = sum(float(d) ** 3 + float(numel) * d for d in full)
    return Load(work + numel, float(owned_bytes(param, group, shard)))


def assign(loads: Sequence[Load], existing: Sequence[Load]) -> list[int]:
    """Greedy: in decreasing cost, assign each parameter to the least loaded process.

    The load of a process is its fraction of all work or of all bytes, whichever is larger, and
    starts at ``existing``. Returns the owner rank for each of ``loads``.

    >>> assign([Load(w, w) for w in (2, 3, 5, 4)], [Load(), Load()])
    [0, 1, 0, 1]
    """
    total = sum((*loads, *existing), Load())

    def fraction(load: Load) -> float:
        return max(load.work / (total.work or 1.0), load.size / (total.size or 1.0))

    owned, owners = list(existing), [0] * len(loads)
    for index in sorted(range(len(loads)), key=lambda i: (-fraction(loads[i]), i)):
        candidates = [fraction(own + loads[index]) for own in owned]
        owner = candidates.index(min(candidates))
        owners[index], owned[owner] = owner, owned[owner] + loads[index]
    return owners


class Owners:
    """The owner rank of each parameter."""

    def __init__(self, shard: str | None) -> None:
        self._shard = shard or "directions"  # as fully_shard divides the work
        self._loads: list[list[Load]] = []  # of each group, with the settings when it was added
        self._owners: dict[Tensor, int] = {}
        self._processes = 0

    def add(self, group: Settings) -> None:
        """Takes a group's parameters, frozen or not: they may be unfrozen later."""
        self._loads.append([load_of(p, group, self._shard) for p in group["params"]])

    def of(self, param: Tensor, groups: Sequence[Settings], processes: int) -> int:
        """The owner of one parameter of ``groups``."""
        if param not in self._owners or self._processes != processes:
            self._assign(groups, processes)
        return self._owners[param]

    def _assign(self, groups: Sequence[Settings], processes: int) -> None:
        self._processes, self._owners = processes, {}
        if list(map(len, self._loads)) != [len(group["params"]) for group in groups]:
            self._loads = []  # the user has changed the lists
            for group in groups:
                self.add(group)
        owned = [Load()] * processes
        # Group by group: one that is added later changes no earlier owner.
        for group, loads in zip(groups, self._loads, strict=True):
            owners = assign(loads, owned)
            for param, load, owner in zip(group["params"], loads, owners, strict=True):
                self._owners[param] = owner
                owned[owner] += load


def _on_cpu(entry: Any) -> Any:
    """A copy of an entry of a state on the CPU; of a view, its own numbers only."""
    if isinstance(entry, list):
        return [_on_cpu(tensor) for tensor in entry]
    return entry.to("cpu", copy=True) if isinstance(entry, Tensor) else entry


class OwnerRanks:
    """The part of a distribution that follows from owners: ``owner`` gives a parameter's rank."""

    is_distributed = True
    shard: str | None = "directions"

    def __init__(self, processes: ProcessGroup, owner: Callable[[Tensor], int]) -> None:
        self.processes = processes
        self.size, self.number = processes.size, processes.number
        self.anywhere, self.check_alike = processes.anywhere, processes.check_alike
        self.owner = owner

    def is_owner(self, param: Tensor) -> bool:
        """Whether this process refreshes a parameter's statistics and factors."""
        return self.owner(param) == self.processes.rank

    def owned(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The parameters that this process owns."""
        return [p for p in params if self.is_owner(p)]

    def kept(self, param: Tensor) -> frozenset[str]:
        """See ``Local.kept``."""
        return kept_names(self.shard, self.is_owner(param))

    def others_parts(
        self, params: Iterable[Tensor], states: Mapping[Tensor, State], to: int
    ) -> dict[Tensor, State]:
        """See ``Local.others_parts``: one parameter after the other, to save memory."""
        if to not in range(self.size):
            raise ValueError(f"to must be a rank below {self.size}, got {to!r}")
        found: dict[Tensor, State] = {}
        names = NAMES - kept_names(self.shard, is_owner=False)
        for param in params if names else ():
            state, owner = states.get(param, {}), self.owner(param)
            if owner != to:
                part = {name: _on_cpu(state[name]) for name in names & state.keys()}
                found[param] = self.processes.hand_over(part, owner, to)
        return {param: part for param, part in found.items() if part}

    def total(self, value: Tensor) -> Tensor:
        """See ``Local.total``."""
        return self.processes.sums([value])[0]

    def codes(self, params: Sequence[Tensor], owned: Sequence[Tensor], own: Tensor) -> Tensor:
        """See ``Local.codes``."""
        zero = torch.zeros((), dtype=torch.int32, device=params[0].device)
        known = dict(zip(owned, own.to(torch.int32).unbind(), strict=True))
        return self.processes.largest(torch.stack([known.get(p, zero) for p in params]))

    def directions_(
        self, whole: Mapping[Tensor, Tensor], states: Mapping[Tensor, State], group: Settings
    ) -> dict[Tensor, Tensor]:
        """Updates the moments of the parameters this process owns; returns their directions.

        They are scaled, without weight decay. Where directions are clipped, ``whole`` must hold all
        gradients of the group.
        """
        params = self.owned(whole)
        own = [states[p] for p in params]
        seen = [layout_of(state) for state in own]
        grads = [whole[p] for p in params]
        found, norms = directions_(grads, own, seen, group)
        scales = graft_scales(norms, found, group)
        if group["kl_clip"] is not None:
            momenta = preconditioned_momenta(grads, own, seen, group)
            sums = self.processes.sums
            scales = clipped(found, momenta, scales, group, lambda total: sums([total])[0])
        if scales is not None and found:
            pairs = zip(scales.unbind(), found, strict=True)
            torch._foreach_mul_(found, [scale.to(p.dtype) for scale, p in pairs])
        rest = iter(found)
        return {
            p: look.assembled([next(rest) for _ in look.cuts])
            for p, look in zip(params, seen, strict=True)
        }
