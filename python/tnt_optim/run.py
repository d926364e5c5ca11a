"""Carrying out a step whose first states are there: refreshes, the update, and their reports."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tnt_optim.attempt import Attempt, Stage
from tnt_optim.cuda_graphs import StepGraphs
from tnt_optim.early_roots import mean_is_small, takes_roots
from tnt_optim.failures import Delivery, Failures
from tnt_optim.groups import Groups
from tnt_optim.modes import Group, Settings, States
from tnt_optim.observations import Empirical
from tnt_optim.options import as_they_are
from tnt_optim.update import DeviceStep, Report, refresh_factors


@dataclass
class Run:
    """One step.

    Args:
        step: the work.
        states: of the optimizer, as are groups and source.
        attempt: what an earlier attempt at the step has done, which is not done again.
        failures: gets the reports.
        graphs: that record the step; None if it runs without.
    """

    step: DeviceStep
    states: States
    groups: Groups
    source: Empirical
    attempt: Attempt
    failures: Failures
    graphs: StepGraphs | None

    def __call__(self) -> None:
        """Refreshes statistics, then factors; then updates the parameters."""
        step, processes = self.step, self.step.processes
        reached = step.observed.keys() | self.attempt.accumulated
        missed = self.source.missed_after(reached, step.grads, is_sharded=processes.is_sharded)
        note_missed = functools.partial(setattr, self.source, "missed", missed)
        if self.graphs is not None and not any(takes_roots(group) for group, _ in step.factors):
            reports = self.graphs.run(step, self.states, self._recordable)
            # The first stage has run: what follows must not update again.
            self.attempt.finish([lambda: None, lambda: self._report(reports), note_missed])
            return
        for report in step.refresh_statistics(self.states, as_they_are, self._of_statistics):
            self.failures.report(report.kind, report.codes, report.params)
        self._end_early_roots()
        self._report(self._refresh_factors(step, as_they_are))
        self.attempt.inverted.update(p for _, params in step.factors for p in params)
        if not processes.is_distributed or not any(p.is_cuda for p in step.grads):
            self.failures.read(self.states, self.groups.name, groups=self.groups.all)
        stages: list[Stage] = [*step.update(self.states, as_they_are), note_missed]
        self.attempt.finish(stages, resumable=not processes.is_distributed)

    def _recordable(self, step: DeviceStep, settings: Callable[[Group], Settings]) -> list[Report]:
        """All of the step, without a look at its results."""
        reports = [*step.refresh_statistics(self.states, settings)]
        reports += self._refresh_factors(step, settings)
        self.attempt.finish(step.update(self.states, settings))
        return reports

    def _refresh_factors(
        self, step: DeviceStep, settings: Callable[[Group], Settings]
    ) -> list[Report]:
        return refresh_factors(step.factors, self.states, step.processes, settings, step.method)

    def _end_early_roots(self) -> None:
        """Ends early roots when their time is over; until then the host waits for the device."""
        batches = [batch for batch in self.step.factors if takes_roots(batch[0])]
        if batches and mean_is_small(batches, self.states, self.step.processes):
            for group in self.groups.all:
                group["takes_roots"] = False

    def _report(self, reports: Sequence[Report]) -> None:
        """Reports all refreshes, or none if memory runs out."""
        sent = [
            self._of_statistics(r.codes) if r.kind == "statistics" else Delivery(r.codes)
            for r in reports
        ]
        for report, codes in zip(reports, sent, strict=True):
            self.failures.report(report.kind, codes, report.params)

    def _of_statistics(self, codes: Tensor) -> Delivery:
        number = self.source.number
        if isinstance(number, Tensor):  # if every row was masked, this is no failure
            codes = codes * (number > 0).to(codes.device)
        return Delivery(codes)
