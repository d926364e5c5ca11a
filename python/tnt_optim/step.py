"""One step: what is due -> gradients -> statistics -> factors -> directions -> weights.

``plan_step`` says what is due and takes the gradients from their source; it changes nothing.
``Step.run`` carries the plan out. Refreshes and updates neither wait for the device nor read a
value on it, so that a CUDA graph can record them; what waits stands in ``Step._run``.
"""

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tnt_optim.attempt import Attempt, Stage, Stages
from tnt_optim.cuda_graphs import Recordable, StepGraphs
from tnt_optim.factors import mean_is_small, refresh_factors, takes_roots
from tnt_optim.failures import Delivery, Failures, Report
from tnt_optim.groups import Groups
from tnt_optim.interfaces import Method
from tnt_optim.modes import (
    Group,
    Settings,
    State,
    States,
    buckets_of,
    each,
    is_plain,
    layout_of,
)
from tnt_optim.observations import Empirical
from tnt_optim.processes import Processes
from tnt_optim.rounding import check_rounding
from tnt_optim.schedule import factors_due, statistics_due
from tnt_optim.state import ALLOCATED, has_entries, has_statistics
from tnt_optim.units import Member
from tnt_optim.update import Part


@dataclass(frozen=True)
class Plan:
    """What is due at a step.

    Attributes:
        first: what the source gives for the statistics of parameters that have none yet.
        refreshed: the same for statistics that parameters already have.
        inverted: parameters whose factors are due; first factors come with first statistics.
        updated: parameters to update.
    """

    first: dict[Tensor, Any]
    refreshed: dict[Tensor, Any]
    inverted: set[Tensor]
    updated: list[Tensor]


def plan_step(
    groups: Groups,
    states: States,
    source: Empirical,
    processes: Processes,
    accumulated: Set[Tensor],
) -> Plan:
    """Plans a step.

    Args:
        groups: the optimizer's.
        states: its state, by parameter.
        source: gives the gradients for the statistics.
        processes: how they divide the step.
        accumulated: parameters whose statistics an earlier attempt at this step has refreshed.

    Raises:
        RuntimeError: if a parameter cannot be updated.
    """
    name, units = groups.name, groups.units
    with_gradients = processes.with_gradients(groups.params)
    _check_dense(name, with_gradients)
    if units:
        with_gradients = {units.key(p) for p in with_gradients}
    held = {p: s for p in groups.params if has_statistics(s := states.get(p, {}))}
    due = statistics_due(groups.all, states, source.waits_for)
    gradients = source.gradients(processes, due, with_gradients, held)
    updated = []
    for group in groups.all:
        for param in group["params"]:
            if param in with_gradients:
                _check_update(name, param, group, states.get(param, {}), source, gradients)
                updated.append(param)
    observed: dict[Tensor, Any] = processes.whole(gradients)
    refreshed = {p: g for p, g in observed.items() if p in held}
    has_new = refreshed.keys() | accumulated
    return Plan(
        first={p: g for p, g in observed.items() if p not in held},
        refreshed=refreshed,
        inverted={p for group in groups.all for p in factors_due(group, held, has_new)},
        updated=updated,
    )


def _check_dense(name: Callable[[Tensor], str], params: Iterable[Tensor]) -> None:
    """Refuses sparse gradients."""
    for param in params:
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {name(param)} must be dense, got {param.grad.layout}"
            )


def _check_update(
    name: Callable[[Tensor], str],
    param: Tensor,
    group: Group,
    state: State,
    source: Empirical,
    observed: Container[Tensor],
) -> None:
    """Refuses a parameter that cannot be updated."""
    plain = is_plain(param, group)
    if plain and has_statistics(state):
        raise RuntimeError(
            "precondition_1d must be set to False before the first statistics: "
            f"{name(param)} has some"
        )
    if state.get("first_step") == ALLOCATED:
        state = {}  # it is replaced
    has = has_entries(state)
    lacks = not (has or plain or param in observed or param in source.asked)
    if lacks and param.requires_grad and source.requires(param):
        raise RuntimeError(
            f"step() has no statistics for {name(param)}, which has a gradient: call "
            "observe(output) before loss.backward(), or attach(model) once, with outputs "
            f"that depend on every parameter the loss depends on{source.hint}"
        )
    if group["rounding"] != "nearest":  # the dtype may have changed
        check_rounding(param, group["rounding"], name)
    if has and group["graft"] == "adam" and "second_moment_updates" not in state:
        raise RuntimeError(
            "graft='adam' must be set before the first statistics: "
            f"{name(param)} has no second moment in its state"
        )


@dataclass(kw_only=True)
class Step(Recordable):
    """A step to take, whose first states are there.

    Attributes:
        statistics: the batches whose statistics are refreshed, first.
        factors: the batches whose factors are refreshed, next.
        updated: the batches whose weights are updated, last.
        observed: what the source gives for the statistics, by parameter.
        grads: the gradients of the loss; this process's pieces if parameters are sharded.
        members: see ``Part``.
        groups, states, method, source: the optimizer's.
        processes: how they divide the step.
        attempt: what an earlier attempt at this step has done, and is not done again.
        failures: takes the reports of the refreshes.
        settings: resolves a group; in a CUDA graph numbers are device tensors.
    """

    members: Mapping[Tensor, Sequence[Member]]
    groups: Groups
    method: Method
    source: Empirical
    processes: Processes
    attempt: Attempt
    failures: Failures

    def run(self, graphs: StepGraphs | None) -> None:
        """Refreshes statistics, then factors; then makes directions, and updates the weights.

        One of ``graphs``, if there are any, may do all this at once.
        """
        reached = self.observed.keys() | self.attempt.accumulated
        is_sharded = self.processes.is_sharded
        missed = self.source.missed_after(reached, self.grads, is_sharded=is_sharded)
        note_missed = functools.partial(setattr, self.source, "missed", missed)
        if graphs is None or any(takes_roots(group) for group, _ in self.factors):
            self._run(note_missed)
            return
        step, reports = graphs.replayed(self)
        if reports is None:
            step._run(note_missed)
        else:
            report = functools.partial(self._report, reports)
            self.attempt.finish(Stages([report, note_missed], is_started=True))

    def _run(self, note_missed: Stage) -> None:
        for report in self.refresh_statistics(self._of_statistics):
            self.failures.report(report)
        self._end_early_roots()
        self._report(self.refresh_factors())
        self.attempt.inverted.update(p for _, params in self.factors for p in params)
        if not self.processes.is_distributed or not any(p.is_cuda for p in self.grads):
            self.failures.read(self.states, self.groups.name, groups=self.groups.all)
        stages = [*self.update(), note_missed]
        self.attempt.finish(Stages(stages, resumable=not self.processes.is_distributed))

    def recorded(self) -> list[Report]:
        """Makes the calls of ``_run`` for a graph to record; on the device nothing runs yet."""
        step = replace(self, attempt=Attempt())
        reports = [*step.refresh_statistics(), *step.refresh_factors()]
        for stage in step.update():
            stage()
        return reports

    def refresh_statistics(
        self, deliver: Callable[[Tensor], Any] = lambda codes: codes
    ) -> Iterator[Report]:
        """Adds this step's observations to the statistics; leaves them out if one is not finite.

        ``deliver`` allocates the memory to report codes before anything is written. A repeated step
        does not add an observation twice.
        """
        if not self.statistics:
            return
        finite = self.processes.all_finite(self.source.witnesses(self.observed.values()))
        for group, params in self.statistics:
            codes = deliver((~finite).to(torch.int32).expand(len(params)).contiguous())
            self._add_observed(self.settings(group), self.processes.owned(params), finite)
            self.attempt.accumulated.update(params)
            yield Report("statistics", codes, params)

    def _add_observed(self, group: Settings, params: Sequence[Tensor], finite: Tensor) -> None:
        if not params:
            return
        # Decay 1 leaves the statistics as they are, whatever the gradient holds.
        keep = torch.ones((), dtype=torch.float64, device=params[0].device)
        decay = torch.where(finite.to(keep.device), keep * group["stat_decay"], keep)
        states = [self.states[p] for p in params]
        layouts = list(map(layout_of, states))
        stats, factors = each(states, "stats"), each(states, "factors")
        whitens = group["estimator"] == "mle"
        # Whitening copies gradients, one bucket at a time.
        for part in buckets_of(params) if whitens else [slice(None)]:
            values = [self.observed[p] for p in params[part]]
            whitening = factors[part] if whitens else None
            self.source.accumulate_(stats[part], values, layouts[part], decay, whitening)
            self.attempt.accumulated.update(params[part])

    def refresh_factors(self) -> list[Report]:
        """Computes factors from the statistics."""
        batches = [(self.settings(group), params) for group, params in self.factors]
        return refresh_factors(batches, self.states, self.processes, self.method)

    def update(self) -> list[Stage]:
        """The stages that update momenta and parameters."""
        stages: list[Stage] = []
        for index, (group, params) in enumerate(self.updated):
            grads, settings = {p: self.grads[p] for p in params}, self.settings(group)
            part = Part(grads, self.states, settings, index, self.method, self.members)
            stages += self.processes.update(part)
            states = [self.states[p] for p in params]
            stages.append(functools.partial(_count, states, group["graft"]))
        return stages

    def _end_early_roots(self) -> None:
        """Ends early roots when their time is over; until then the host waits for the device."""
        batches = [batch for batch in self.factors if takes_roots(batch[0])]
        if batches and mean_is_small(batches, self.states, self.processes):
            for group in self.groups.all:
                group["takes_roots"] = False

    def _report(self, reports: Sequence[Report]) -> None:
        """Reports all refreshes, or none if memory runs out."""
        sent = [
            self._of_statistics(r.codes) if r.kind == "statistics" else Delivery(r.codes)
            for r in reports
        ]
        for report, codes in zip(reports, sent, strict=True):
            self.failures.report(replace(report, codes=codes))

    def _of_statistics(self, codes: Tensor) -> Delivery:
        summed = self.source.summed
        if isinstance(summed, Tensor):  # if every row was masked, this is no failure
            codes = codes * (summed > 0).to(codes.device)
        return Delivery(codes)


def _count(states: Sequence[State], graft: str | None) -> None:
    """Adds one to the counts of updates; with CUDA graphs a count is a tensor."""
    for name in ("updates", "second_moment_updates")[: 2 if graft == "adam" else 1]:
        if states and isinstance(states[0][name], Tensor):
            torch._foreach_add_(each(states, name), 1)
            continue
        for state in states:
            state[name] += 1
