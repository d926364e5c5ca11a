"""Owner ranks: each parameter has one process that keeps its statistics and refreshes its factors.

The owners depend only on the sizes and settings with which parameters were added, so all processes
compute the same owners, at any time and without communication.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_optim.distributed.process_group import ProcessGroup
from tnt_optim.modes import Settings, State
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
        candidates = [fraction(load + loads[index]) for load in owned]
        owner = candidates.index(min(candidates))
        owners[index], owned[owner] = owner, owned[owner] + loads[index]
    return owners


class Owners:
    """The owner rank of each parameter."""

    def __init__(self, shard: str | None) -> None:
        self._shard = shard or "directions"  # as fully_shard divides the work
        self._loads: list[list[Load]] = []  # by group, with its settings when it was added
        self._owners: dict[Tensor, int] = {}
        self._size = 0  # the number of processes

    def add(self, group: Settings) -> None:
        """Takes a group's parameters, frozen or not: they may be unfrozen later."""
        self._loads.append([load_of(p, group, self._shard) for p in group["params"]])

    def of(self, param: Tensor, groups: Sequence[Settings], size: int) -> int:
        """The owner of one parameter of ``groups``, among ``size`` processes."""
        if param not in self._owners or self._size != size:
            self._assign(groups, size)
        return self._owners[param]

    def _assign(self, groups: Sequence[Settings], size: int) -> None:
        self._size, self._owners = size, {}
        if list(map(len, self._loads)) != [len(group["params"]) for group in groups]:
            self._loads = []  # the user has changed the lists
            for group in groups:
                self.add(group)
        owned = [Load()] * size
        # Group by group: a group that is added later changes no earlier owner.
        for group, loads in zip(groups, self._loads, strict=True):
            owners = assign(loads, owned)
            for param, load, owner in zip(group["params"], loads, owners, strict=True):
                self._owners[param] = owner
                owned[owner] += load


def _on_cpu(entry: Any) -> Any:
    """A copy of an entry of a state on the CPU, without the rest of a view's storage."""
    if isinstance(entry, list):
        return [_on_cpu(tensor) for tensor in entry]
    return entry.to("cpu", copy=True) if isinstance(entry, Tensor) else entry


class OwnerRanks:
    """What distributions with owners share: ``owner`` gives the rank of a parameter's owner."""

    is_distributed = True
    shard: str | None = "directions"

    def __init__(self, processes: ProcessGroup, owner: Callable[[Tensor], int]) -> None:
        self.processes = processes
        self.size, self.global_index = processes.size, processes.global_index
        self.anywhere, self.check_alike = processes.anywhere, processes.check_alike
        self.owner = owner

    def is_owner(self, param: Tensor) -> bool:
        """Whether this process refreshes a parameter's statistics and factors."""
        return self.owner(param) == self.processes.rank

    def owned(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The parameters that this process owns."""
        return [p for p in params if self.is_owner(p)]

    def kept(self, param: Tensor) -> frozenset[str]:
        """See ``Processes.kept``."""
        return kept_names(self.shard, self.is_owner(param))

    def others_parts(
        self, params: Iterable[Tensor], states: Mapping[Tensor, State], to: int
    ) -> dict[Tensor, State]:
        """See ``Processes.others_parts``: one parameter after the other, to save memory."""
        if to not in range(self.size):
            raise ValueError(f"to must be a rank below {self.size}, got {to!r}")
        parts: dict[Tensor, State] = {}
        names = NAMES - kept_names(self.shard, is_owner=False)
        for param in params if names else ():
            state, owner = states.get(param, {}), self.owner(param)
            if owner != to:
                part = {name: _on_cpu(state[name]) for name in names & state.keys()}
                parts[param] = self.processes.hand_over(part, owner, to)
        return {param: part for param, part in parts.items() if part}

    def total(self, value: Tensor) -> Tensor:
        """See ``Processes.total``."""
        return self.processes.sums([value])[0]

    def codes(self, params: Sequence[Tensor], owned: Sequence[Tensor], codes: Tensor) -> Tensor:
        """See ``Processes.codes``."""
        zero = torch.zeros((), dtype=torch.int32, device=params[0].device)
        known = dict(zip(owned, codes.to(torch.int32).unbind(), strict=True))
        return self.processes.largest(torch.stack([known.get(p, zero) for p in params]))
