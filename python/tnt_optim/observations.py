"""What TNT has observed since the last step, and which parameters its outputs did not reach."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tnt_optim.autograd import all_finite
from tnt_optim.distributed.process_group import Gradients, Team, pooled
from tnt_optim.state import state_dtype


@dataclass
class Observations:
    """Sampled gradients between ``observe`` and ``step``.

    Attributes:
        sampled: their sum, by parameter; of sharded parameters this process's pieces, if any.
        summed: how many are in it: those that were finite, if any was.
        count: how many outputs were observed.
        asked: parameters that an output was to reach.
        unreached: parameters without statistics that the last output missed that could have brought
            them.
        awaited: those of them that a loss has reached since, which every later output is asked for.
        partial: whether outputs may reach other parameters in another process.
        agreed: whether all processes know of ``partial``.
    """

    sampled: dict[Tensor, Any] = field(default_factory=dict)
    summed: int | Tensor = 0
    count: int = 0
    asked: set[Tensor] = field(default_factory=set)
    unreached: set[Tensor] = field(default_factory=set)
    awaited: set[Tensor] = field(default_factory=set)
    partial: bool = False
    agreed: bool = False

    def add(self, observed: Mapping[Tensor, Tensor], asked: Iterable[Tensor]) -> None:
        """Adds one to earlier ones; those that are not finite make room for others."""
        self.asked.update(asked)
        self.count += 1
        if not self.sampled or not observed:
            self.sampled.update(observed)
            self.summed = self.summed + 1
            return
        old, new = all_finite(self.sampled.values()), all_finite(observed.values())

        def chosen(earlier: Any, later: Any, both: Any, device: torch.device) -> Tensor:
            later = torch.where(old.to(device), both, later)
            return torch.where(new.to(device), later, earlier)

        for param, gradient in observed.items():
            if param in self.sampled:
                # Half precision adds up in float32. Out of place: autograd may share gradients.
                earlier = self.sampled[param].to(state_dtype(param))
                gradient = chosen(earlier, gradient, earlier + gradient, param.device)
            self.sampled[param] = gradient
        self.summed = chosen(self.summed, 1, self.summed + 1, old.device)

    def pool(
        self,
        team: Team,
        due: list[Tensor],
        has_statistics: Callable[[Tensor], bool],
        *,
        is_sharded: bool,
    ) -> None:
        """Takes the mean over all processes in place of what this one has observed.

        Whom the observations reached is asked only where it may matter and a step may wait for
        the answer: while there are first statistics to come, or where DistributedDataParallel asks
        such things, too. Otherwise no reach is a gradient of zero.

        Args:
            team: the processes.
            due: whose statistics are due; the same in all.
            has_statistics: whether a parameter has some already.
            is_sharded: whether the gradients are pieces, which are averaged as they are.
        """
        if not due:
            return
        reached = due
        known = self.agreed and all(map(has_statistics, due))
        if is_sharded or self.partial or not known:
            flags = [self.count > 0, self.partial, *(p in self.sampled for p in due)]
            anyone, self.partial, *found = team.anywhere(flags, due[0].device)
            if not anyone:
                return
            self.agreed = True
            reached = [p for p, is_reached in zip(due, found, strict=True) if is_reached]
        if is_sharded:
            self.sampled = {p: self.sampled.get(p) for p in reached}
        else:
            number = self.summed if self.count else 0
            means, observers = pooled(team, reached, self.sampled, number)
            if not self.count and not observers:  # it waits for the answer, where it must
                return
            self.sampled, self.summed = means, 1
        self.count = 1
        self.asked.update(due)

    def means(self) -> Gradients:
        """The gradients of the mean over the whole batch, from those over its micro-batches."""
        if self.count == 1:
            return dict(self.sampled)
        n = self.summed
        return {
            p: total / (n.to(total.device) if isinstance(n, Tensor) else n)
            for p, total in self.sampled.items()
        }

    def may_wait(self, param: Tensor) -> bool:
        """Whether no one forgot a parameter without statistics: the outputs did not reach it."""
        return param in self.unreached and param not in self.asked

    def note_unreached(self, has_statistics: Callable[[Tensor], bool]) -> None:
        """Remembers who was missed, at the end of a step that went well."""
        missed = {
            p
            for p in self.asked | self.unreached | self.awaited
            if not has_statistics(p) and p not in self.sampled
        }
        # A gradient without having been asked for: the outputs do reach it at times.
        seen = {p for p in missed - self.asked if p.grad is not None}
        self.awaited = missed & (self.awaited | seen)
        self.unreached = missed - self.awaited

    def use_up(self) -> None:
        """Forgets all but who was missed."""
        self.sampled, self.summed, self.asked, self.count = {}, 0, set(), 0

    def start_over(self) -> None:
        """Forgets everything but how the processes are."""
        self.use_up()
        self.unreached, self.awaited = set(), set()
