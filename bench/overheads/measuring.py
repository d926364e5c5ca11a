"""What is measured, each in rounds of candidates that alternate."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.overheads.guards import watched_guards, without_guards
from bench.overheads.steps import BOTH, COMPANIONS, KINDS, NOTHING, STATISTICS, Bench, step_of
from tools.measuring.parameter_sets import PARAMETER_SETS

# As many rounds as take these seconds, within these bounds, unless a number is asked for.
SECONDS, FEWEST, MOST = 120.0, 15, 200

CALLS = ("diagnostics", "failures", "memory_estimate")

Samples = dict[str, list[float]]


def companions(name: str, rounds: int | None) -> dict[str, Any]:
    """Seconds of steps with nothing due, by what comes with them."""
    bench = Bench(name)
    candidates = {
        companion: _timed(step_of(bench.optimizer(settings), NOTHING))
        for companion, settings in COMPANIONS.items()
    }
    seconds = alternated(candidates, rounds)
    bench.check()
    return {"note": PARAMETER_SETS[name].note, "seconds": seconds}


def guards(name: str, rounds: int | None) -> dict[str, Any]:
    """Seconds of steps of each kind with and without the checks, and within the checks."""
    bench = Bench(name)
    opt = bench.optimizer({})
    seconds: dict[str, Samples] = {}
    for kind in KINDS:
        step = step_of(opt, kind)

        def without(step: Callable[[], None] = step) -> float:
            with without_guards():
                return _timed(step)()

        def within(step: Callable[[], None] = step) -> float:
            with watched_guards() as spent:
                step()
            return sum(spent)

        candidates = {"with": _timed(step), "without": without, "within": within}
        seconds[kind.name] = alternated(candidates, rounds)
    bench.check()
    return {"note": PARAMETER_SETS[name].note, "seconds": seconds}


def calls(name: str, rounds: int | None) -> dict[str, Any]:
    """Seconds of what is called beside steps, and of steps of each kind."""
    bench = Bench(name)
    opt = bench.optimizer({})
    candidates = {kind.name: _timed(step_of(opt, kind)) for kind in (NOTHING, STATISTICS, BOTH)}
    candidates.update({call: _timed(getattr(opt, call)) for call in CALLS})
    seconds = alternated(candidates, rounds)
    bench.check()
    return {"note": PARAMETER_SETS[name].note, "seconds": seconds}


PARTS: dict[str, Callable[[str, int | None], dict[str, Any]]] = {
    "companions": companions,
    "guards": guards,
    "calls": calls,
}


def alternated(candidates: Mapping[str, Callable[[], float]], rounds: int | None) -> Samples:
    """Every candidate once a round, in an order that rotates from round to round.

    Args:
        candidates: take their own time, in seconds.
        rounds: how many; None for as many as fit in ``SECONDS``.
    """
    for run in candidates.values():
        run()  # cold caches, page faults
    if rounds is None:
        start = time.perf_counter()
        for run in candidates.values():
            run()
        fitting = math.ceil(SECONDS / max(time.perf_counter() - start, 1e-9))
        rounds = min(MOST, max(FEWEST, fitting))
    names = list(candidates)
    seconds: Samples = {name: [] for name in names}
    gc.collect()
    gc.disable()  # a collection in the middle would be one candidate's alone
    try:
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(candidates[name]())
    finally:
        gc.enable()
    return seconds


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed
