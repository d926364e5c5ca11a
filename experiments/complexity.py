"""Table 2 for whole methods, measured: `python -m experiments.complexity --help`.

Memory and time per iteration beyond SGD with momentum, of whole training steps on one tensor
variable. A time is the least of several, of SGD-m and the method in turns; what is fitted is their
difference. The operators by themselves are in the kernels' table (`bench.kernels.complexity`).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiments.costs.complexity_methods import one_tensor_step, predicted_bytes
from experiments.costs.complexity_table import complexity_page, plot_complexity
from experiments.costs.step_kinds import (
    NEVER,
    PLAIN,
    Kind,
    Plan,
    TrainingStep,
    state_bytes,
    turned,
)
from experiments.runs.command_line import checked_output, positive_int
from experiments.runs.run_file import RunFile
from tools.measuring.clock import busy_share
from tools.measuring.fits import LEAST_EXCESS, exponent, launch_bound

# Of one pass.
QUICK = Plan(0.1, fewest=1, most=3, slow=1.0, slow_rounds=1)
FULL = Plan(0.3, fewest=1, most=10, slow=2.0, slow_rounds=1)
# Over all of a sweep's sizes: a machine that is slow for a while is so for all of them.
PASSES = 3
QUICK_LEAVES_OUT = 2  # of a sweep's sizes the largest
_LEAST_STEPS = 8  # of a sweep over intervals, in one sample

_STATISTICS, _INVERSES, _BOTH = Kind(True, False), Kind(False, True), Kind(True, True)


@dataclass(frozen=True)
class Sweep:
    """One variable varied.

    Attributes:
        method: whose cost.
        k: the number of modes.
        due: what is due at every step; over T1 and T2, what falls due at that interval.
        variable: d, m, T1 or T2.
        term: of Table 2, the one that rules here.
        predicted: its exponent of the variable.
        values: the variable's, from cheap to dear for sizes.
        fit_from: the least value that a fit may use, set beforehand: below it products have not
            reached the flat part of the BLAS's rate, or other terms are as large.
        d: where it does not vary.
        m: where it does not vary.
    """

    method: str
    k: int
    due: Kind
    variable: str
    term: str
    predicted: float
    values: Sequence[int]
    fit_from: int = 1
    d: int = 0
    m: int = 1

    @property
    def part(self) -> str:
        """What was timed, but for the variable."""
        sizes = [f"k = {self.k}"]
        sizes += [] if self.variable == "d" else [f"d = {self.d}"]
        sizes += [] if self.variable == "m" else [f"m = {self.m}"]
        every = "" if self.variable[0] == "T" else " at every step"
        return f"{', '.join(sizes)}; {_due(self.due)}{every}"

    @property
    def key(self) -> dict[str, Any]:
        """What its run is found by."""
        return {"of": "time", "method": self.method, "over": self.variable, "part": self.part}

    def timed(self, leave_out: int) -> list[int]:
        """The values that are timed: all, or so many of the largest sizes left out."""
        if self.variable[0] == "T":
            return list(self.values)
        return list(self.values[: len(self.values) - leave_out])


def _due(kind: Kind) -> str:
    return "nothing due" if kind == PLAIN else kind.label


_ALL_TERMS = "sum d prod d + sum d^3"
_INTERVALS = (1, 2, 4, 8, 16)
_M = (256, 512, 1024, 2048, 4096, 8192, 16384)
_D = (128, 256, 512, 1024, 1536, 2048, 3072)
_D_LARGE = (256, 512, 1024, 2048, 3072, 4096)
_D_ROOTS = (32, 64, 128, 256, 384, 512, 768)
TIME_SWEEPS = (
    Sweep("TNT", 1, _BOTH, "d", "sum d^3", 3, (*_D_LARGE, 6144, 8192), 4096),
    Sweep("TNT", 2, _BOTH, "d", _ALL_TERMS, 3, _D, 1536),
    Sweep("TNT", 3, _BOTH, "d", "sum d prod d", 4, (32, 64, 128, 256, 320, 384, 512), 320),
    Sweep("TNT", 2, _STATISTICS, "m", "m prod d", 1, _M, 2048, d=256),
    Sweep("TNT", 2, _STATISTICS, "T1", "m prod d / T1", -1, _INTERVALS, d=256, m=4096),
    Sweep("TNT", 1, _INVERSES, "T2", "sum d^3 / T2", -1, _INTERVALS, d=1024),
    Sweep("Shampoo", 2, _BOTH, "d", _ALL_TERMS, 3, _D_ROOTS, 256),
    Sweep("Shampoo", 2, _STATISTICS, "m", "no m", 0, (1, 4, 16, 64, 128), d=768),
    Sweep("Shampoo", 2, _INVERSES, "T2", "sum d^3 / T2", -1, _INTERVALS, d=256),
    Sweep("Shampoo, eigenvalues", 2, _BOTH, "d", _ALL_TERMS, 3, (*_D_ROOTS, 1024, 1536, 2048), 768),
    Sweep("Shampoo, eigenvalues", 2, _INVERSES, "T2", "sum d^3 / T2", -1, _INTERVALS, d=256),
    Sweep("Adam", 2, PLAIN, "d", "prod d", 2, (*_D_LARGE, 5120, 6144, 8192), 4096),
    Sweep("Newton-like", 2, _STATISTICS, "d", "prod d^2", 4, (16, 24, 32, 48, 64, 80, 96, 112), 64),
    Sweep("Newton-like", 2, _BOTH, "d", "prod d^3", 6, (16, 24, 32, 40, 48, 56, 64, 72), 48),
    Sweep("KFAC", 2, _BOTH, "d", _ALL_TERMS, 3, _D, 1536),
    Sweep("KFAC", 2, _STATISTICS, "m", "m sum d^2", 1, _M, 2048, d=256),
    Sweep("KFAC", 2, _INVERSES, "T2", "sum d^3 / T2", -1, _INTERVALS, d=1024),
)
_MEMORY_TERMS: dict[str, tuple[str, Callable[[int], float]]] = {
    "TNT": ("sum d^2", lambda k: 2),
    "Shampoo": ("sum d^2", lambda k: 2),
    "Shampoo, eigenvalues": ("sum d^2", lambda k: 2),
    "Adam": ("prod d", lambda k: k),
    "Newton-like": ("prod d^2", lambda k: 2 * k),
    "KFAC": ("sum d^2", lambda k: 2),
}
_MEMORY_D = (2, 4, 8)  # the count is exact at any size


def memory_cases() -> list[tuple[str, int]]:
    """Methods and numbers of modes."""
    return [
        (method, k) for method in _MEMORY_TERMS for k in (1, 2, 3) if method != "KFAC" or k == 2
    ]


def measure_memory(method: str, k: int, values: Sequence[int] = _MEMORY_D) -> dict[str, Any]:
    """Counts the state after one step, beyond SGD-m's, at every d, and fits its exponent."""
    term, predicted = _MEMORY_TERMS[method]
    counted = [_state(method, d, k) - _state("SGD-m", d, k) for d in values]
    formula = [predicted_bytes(method, d, k) for d in values]
    return {
        "term": term,
        "predicted": predicted(k),
        "fitted": exponent(values, counted),
        "values": list(values),
        "bytes": counted,
        "formula_bytes": formula,
        "equal": counted == formula,
    }


def _state(method: str, d: int, k: int) -> int:
    step = one_tensor_step(method, d, k, m=2)
    step()
    return state_bytes(step.optimizer)


def measure_time(sweep: Sweep, plan: Plan, leave_out: int = 0) -> dict[str, Any]:
    """Times every value of a sweep and fits the exponent.

    All sizes are held at once, up to some 8 GB in the largest sweep (TNT, k = 3).

    Args:
        sweep: what to time.
        plan: how many samples, for each value in each pass.
        leave_out: so many of the largest sizes.
    """
    values = sweep.timed(leave_out)
    if sweep.variable[0] == "T":
        step = _started(sweep.method, sweep.d, sweep.k, sweep.m)
        runs = [_interval_run(step, sweep, value) for value in values]
        runs.append(_interval_run(step, sweep, NEVER))
        *times, bare = _least(least_seconds(runs, plan) for _ in range(PASSES))
        return fitted(sweep, values, times, [bare] * len(values))
    pairs = []
    for value in values:
        d, m = (value, sweep.m) if sweep.variable == "d" else (sweep.d, value)
        steps = [_started(method, d, sweep.k, m) for method in (sweep.method, "SGD-m")]
        pairs.append([_due_run(step, sweep.due) for step in steps])
    least = _least(
        [seconds for pair in pairs for seconds in least_seconds(pair, plan)] for _ in range(PASSES)
    )
    return fitted(sweep, values, least[::2], least[1::2])


def _least(passes: Iterable[Sequence[float]]) -> list[float]:
    return [min(own) for own in zip(*passes, strict=True)]


def fitted(
    sweep: Sweep, values: Sequence[int], times: Sequence[float], bare: Sequence[float]
) -> dict[str, Any]:
    """The record of a sweep whose times are known.

    Args:
        sweep: what was timed.
        values: the variable's.
        times: seconds of a step of the method.
        bare: seconds of what they are beyond: a step of SGD-m, or over T1 and T2 one of the method
            with nothing due.
    """
    excess = [own - less for own, less in zip(times, bare, strict=True)]
    small = launch_bound(excess) if sweep.variable == "d" else [False] * len(values)
    status = []
    for value, own, less, bound in zip(values, excess, bare, small, strict=True):
        if own < LEAST_EXCESS * less:
            status.append("lost in noise")
        elif bound:
            status.append("launch-bound")
        else:
            status.append("below the fitted range" if value < sweep.fit_from else "fitted")
    used = [i for i, state in enumerate(status) if state == "fitted"]
    return {
        "term": sweep.term,
        "predicted": sweep.predicted,
        "fitted": exponent([values[i] for i in used], [excess[i] for i in used]),
        "fitted_values": [values[i] for i in used],
        "values": list(values),
        "seconds": list(times),
        "bare_seconds": list(bare),
        "excess_seconds": excess,
        "status": status,
    }


def least_seconds(runs: Sequence[Callable[[], float]], plan: Plan) -> list[float]:
    """The least that each run returns: what disturbs a measurement only slows it down.

    The runs take turns; each is warmed up once.
    """
    began = time.perf_counter()
    warm = []
    for run in runs:
        start = time.perf_counter()
        run()
        warm.append(time.perf_counter() - start)
    samples: list[list[float]] = [[] for _ in runs]
    for turn in range(plan.rounds(time.perf_counter() - began)):
        for index in turned(range(len(runs)), turn):
            if warm[index] <= plan.slow or turn < plan.slow_rounds:
                samples[index].append(runs[index]())
    return [min(own) for own in samples]


def _started(method: str, d: int, k: int, m: int) -> TrainingStep:
    gc.collect()
    step = one_tensor_step(method, d, k, m)
    step()  # the first: state, first statistics, first inverses
    return step


def _due_run(step: TrainingStep, due: Kind) -> Callable[[], float]:
    def run() -> float:
        step.set_due(due)
        return step.seconds()

    return run


def _interval_run(step: TrainingStep, sweep: Sweep, interval: int) -> Callable[[], float]:
    """Whole periods, and enough steps to time; the mean step's seconds."""
    steps = _LEAST_STEPS if interval == NEVER else max(_LEAST_STEPS, interval)
    stat = interval if sweep.due.statistics else NEVER
    inverse = interval if sweep.due.inverses else NEVER

    def run() -> float:
        step.set_intervals(stat, inverse)
        return step.seconds(steps) / steps

    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.complexity",
        description="Measure memory and time per iteration of every method of the paper's Table 2 "
        "over d, m, T1 and T2. Started again, it measures what its file lacks.",
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads")
    parser.add_argument("--out", type=Path, default=Path("results/complexity.json"))
    arguments = parser.parse_args(argv)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    out = checked_output(parser, "--out", arguments.out)
    protocol = {"quick": arguments.quick, "threads": torch.get_num_threads()}
    try:
        runs = RunFile(out, "complexity of whole methods", protocol)
    except (OSError, ValueError) as error:
        parser.error(f"argument --out: {error}")
    plan, leave_out = (QUICK, QUICK_LEAVES_OUT) if arguments.quick else (FULL, 0)
    for sweep in TIME_SWEEPS:
        known = runs.find(sweep.key)
        if known is not None and known["values"] != sweep.timed(leave_out):
            parser.error(
                f"argument --out: {out} holds {sweep.method} over {sweep.variable} at "
                f"{known['values']}, not at {sweep.timed(leave_out)}: give another file"
            )
    for method, k in memory_cases():
        key = {"of": "memory", "method": method, "over": "d", "part": f"k = {k}"}
        if runs.find(key) is None:
            runs.add(key, measure_memory(method, k))
    for sweep in tqdm(TIME_SWEEPS, "complexity", unit="sweep", disable=None):
        if runs.find(sweep.key) is None:
            began = time.perf_counter()
            busy = {"busy_before": busy_share(0.3)}
            result = measure_time(sweep, plan, leave_out)
            runs.add(sweep.key, result | busy | {"busy_after": busy_share(0.3)})
            taken = time.perf_counter() - began
            tqdm.write(f"{sweep.method} over {sweep.variable}, {sweep.part}: {taken:.1f} s")
    page, picture = out.with_suffix(".md"), out.with_suffix(".png")
    text = complexity_page(runs.runs)
    page.write_text(text, encoding="utf-8")
    plot_complexity(runs.runs, picture)
    print(f"\n{text}\npage:    {page}\npicture: {picture}\nrecord:  {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
