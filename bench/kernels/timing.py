"""Candidates that alternate in one process, driven by pytest-benchmark.

The benchmark is ours; its setup runs and times every other candidate, in an order that rotates
from round to round. So all are timed under the same clock and with both thread pools warm, and each
finds the caches as the others left them.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bench.kernels.checks import (
    BASELINE_TOLERANCE,
    TOLERANCES,
    check_close,
    check_finite,
    check_moved,
    relative_error,
)
from bench.kernels.limits import Limits
from bench.kernels.work import Work
from tools.measuring.parameter_sets import ParameterSet

OURS = "tnt_kernels"
MIN_ROUNDS, MAX_ROUNDS = 3, 50


@dataclass(frozen=True)
class Candidate:
    """One way to compute the same thing.

    Attributes:
        name: as in the tables.
        run: does it once, on its own copies of what it changes.
        results: what it has computed, to be compared and to stay finite.
        moving: what every run must change.
        compared: whether its results are to equal the expected ones.
    """

    name: str
    run: Callable[[], object]
    results: Callable[[], Sequence[Tensor]]
    moving: Sequence[Tensor] = ()
    compared: bool = True


@dataclass
class Comparison:
    """Checks, times and records candidates; ``records`` collects one entry a call."""

    benchmark: Any  # pytest_benchmark.fixture.BenchmarkFixture
    seconds: float  # the time to spend, unless MIN_ROUNDS take longer
    records: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self,
        op: str,
        parameter_set: ParameterSet,
        candidates: Sequence[Candidate],
        expected: Sequence[Tensor],
        work: Work,
        *,
        symmetric: bool = False,
        kind: str = "",
        steps: int = 1,
        note: str = "",
    ) -> None:
        """Compares ``candidates``, of which the first is ours.

        Args:
            op: the operator, a key of ``TOLERANCES``.
            parameter_set: what it works on.
            candidates: ours, then the baselines.
            expected: what the reference gives after one run.
            work: of one run.
            symmetric: whether its flops are a symmetric product's.
            kind: which of several benchmarks of this operator it is.
            steps: into how many equal parts a run's time is divided.
            note: to be said beside the numbers.
        """
        errors, round_seconds = {}, 0.0
        for candidate in candidates:
            first = _timed(candidate.run)
            if candidate.compared:
                error = relative_error(candidate.results(), expected)
                slack = 1 if candidate.name == OURS else BASELINE_TOLERANCE
                check_close(candidate.name, error, TOLERANCES[op] * slack)
                errors[candidate.name] = error
            # The first run also pays for cold caches and page faults: no guide to a short one.
            round_seconds += first if first > 0.5 else _timed(candidate.run)
        before = [[tensor.clone() for tensor in c.moving] for c in candidates]
        samples = self._rounds(candidates, rounds_for(round_seconds, self.seconds))
        for candidate, old in zip(candidates, before, strict=True):
            check_finite(candidate.name, candidate.results())
            check_moved(candidate.name, old, candidate.moving)
        self._record(
            {
                "op": op,
                "kind": kind,
                "set": parameter_set.name,
                "note": "; ".join(filter(None, (parameter_set.note, note))),
                "parameters": len(parameter_set.shapes),
                "modes": parameter_set.modes,
                "useful_flops": work.useful_flops // steps,
                "effective_flops": work.effective_flops // steps,
                "bytes": work.bytes // steps,
                "symmetric": symmetric,
                "errors": errors,
                "candidates": {
                    name: summary([second / steps for second in seconds])
                    for name, seconds in samples.items()
                },
            }
        )

    def _rounds(self, candidates: Sequence[Candidate], rounds: int) -> dict[str, list[float]]:
        ours, *baselines = candidates
        samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
        turn = 0

        def time_baselines() -> None:
            nonlocal turn
            for candidate in rotated(baselines, turn):
                samples[candidate.name].append(_timed(candidate.run))
            turn += 1

        gc.collect()
        gc.disable()  # a collection in the middle would be one candidate's alone
        try:
            self.benchmark.pedantic(ours.run, setup=time_baselines, rounds=rounds)
        finally:
            gc.enable()
        samples[ours.name] = list(self.benchmark.stats.stats.data)
        return samples

    def _record(self, record: dict[str, Any]) -> None:
        for name in record["errors"]:  # the others do not do the work that was counted
            candidate = record["candidates"][name]
            candidate.update(rates(candidate["median"], record))
        self.benchmark.group = record["op"]
        self.benchmark.extra_info.update(record)
        self.records.append(record)


def rounds_for(round_seconds: float, seconds: float) -> int:
    """How many rounds to time: as many as fit in ``seconds``, but at least 3 and at most 50."""
    return min(MAX_ROUNDS, max(MIN_ROUNDS, math.ceil(seconds / max(round_seconds, 1e-9))))


def rotated(candidates: Sequence[Candidate], turn: int) -> list[Candidate]:
    """The same candidates, another one first."""
    start = turn % len(candidates) if candidates else 0
    return [*candidates[start:], *candidates[:start]]


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and spread in seconds, and the samples themselves."""
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "median": median,
        "quartiles": [lower, upper],
        "least": min(samples),
        "most": max(samples),
        "samples": list(samples),
    }


def rates(median: float, record: dict[str, Any]) -> dict[str, float]:
    """Flops and bytes a second at the median."""
    return {
        "useful_gflops": record["useful_flops"] / median / 1e9,
        "effective_gflops": record["effective_flops"] / median / 1e9,
        "gbytes": record["bytes"] / median / 1e9,
    }


def add_shares(records: Sequence[dict[str, Any]], limits: Limits) -> None:
    """Adds to every benchmark its least possible time, and which share of it each candidate has."""
    for record in records:
        work = Work(record["useful_flops"], record["effective_flops"], record["bytes"])
        record["limit"] = limits.binding(work, symmetric=record["symmetric"])
        record["limit_seconds"] = limits.seconds(work, symmetric=record["symmetric"])
        for name in record["errors"]:
            candidate = record["candidates"][name]
            candidate["share_of_limit"] = record["limit_seconds"] / candidate["median"]


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
