"""The paper's Table 2, measured: time and memory over sweeps of d, k, m, T1 and T2.

``python -m bench.kernels.complexity`` measures all sweeps and writes one JSON record. A time is the
least of several; an exponent is the slope of its logarithm over the abscissa's, fitted to what the
rules of ``fits`` leave, beside the exponent that Table 2 predicts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.kernels.memory import measure_in_subprocess
from bench.kernels.sweeps import SWEEPS, Run, Sweep
from bench.kernels.work import FLOAT_BYTES, factor_bytes
from tools.measuring.clock import busy_share
from tools.measuring.fits import (
    LAUNCH_FACTOR,
    LEAST_EXCESS,
    LEAST_POINTS,
    exponent,
    launch_bound,
    lost_in_noise,
)
from tools.measuring.parameter_sets import PARAMETER_SETS
from tools.measuring.provenance import provenance
from tools.measuring.records import check_writable, write_json

RULES = {
    "launch-bound": f"a time below {LAUNCH_FACTOR:g} times the smallest size's: not fitted",
    "below the fitted range": "smaller than the sweep's first fitted value, set beforehand",
    "lost in noise": f"adds less than {LEAST_EXCESS:g} of the bare step to it: not fitted",
    "least points": f"no exponent from fewer than {LEAST_POINTS} points",
}
TURNS = 5
SLOW_SECONDS, SLOW_TURNS = 1.0, 3  # what takes longer than that takes fewer turns
QUICK_LEAVES_OUT = 3  # of a sweep's sizes the largest
PROCESS_BYTES = 2 << 20  # for Python's own objects, and for buffers of the BLAS and of threads
MEMORY_SETS = ("mnist_ae", "faces_ae", "resnet32")


@dataclass(frozen=True)
class MemorySweep:
    """State over one variable; as in ``Sweep``, ``name`` being memory's name for the method."""

    method: str
    name: str
    part: str
    variable: str
    term: str
    predicted: float
    values: Sequence[int]
    shape: Callable[[int], tuple[int, ...]]
    abscissa: tuple[str, Callable[[int], float]] | None = None
    peak_fitted: bool = True  # not where the momentum, which SGD-m has too, outgrows the rest


def _power(base: int) -> tuple[str, Callable[[int], float]]:
    return "prod d", lambda k: float(base**k)


def _cube(base: int) -> Callable[[int], tuple[int, ...]]:
    return lambda k: (base,) * k


_D = (512, 1024, 2048, 4096)
_D_ROOTS = (64, 128, 256, 512, 1024)
_K = (1, 2, 3, 4, 5)
MEMORY_SWEEPS = (
    MemorySweep("TNT", "tnt", "k = 2", "d", "sum d^2", 2, _D, lambda d: (d, d)),
    MemorySweep("Shampoo", "shampoo", "k = 2", "d", "sum d^2", 2, _D_ROOTS, lambda d: (d, d)),
    MemorySweep("Adam", "adam", "k = 2", "d", "prod d", 2, _D, lambda d: (d, d)),
    MemorySweep(
        "Newton-like",
        "newton",
        "k = 2",
        "d",
        "prod d^2",
        4,
        (16, 32, 64, 96, 128),
        lambda d: (d, d),
    ),
    MemorySweep("TNT", "tnt", "d = 32", "k", "sum d^2", 1, _K, _cube(32), None, False),
    MemorySweep("Shampoo", "shampoo", "d = 32", "k", "sum d^2", 1, _K, _cube(32), None, False),
    MemorySweep("Adam", "adam", "d = 32", "k", "prod d", 1, _K, _cube(32), _power(32)),
    MemorySweep("Newton-like", "newton", "d = 8", "k", "prod d^2", 2, _K[:4], _cube(8), _power(8)),
)


def least_seconds(runs: Sequence[Run], seconds: float) -> list[float]:
    """The least time of one step of each run: what disturbs a measurement only slows it down.

    The runs take turns, so that a machine that changes its speed changes it for all of them.

    Args:
        runs: what to time.
        seconds: for each of them, unless once in every turn takes longer.
    """
    samples: list[list[float]] = [[] for _ in runs]
    first: list[float] = []
    for run in runs:
        start = time.perf_counter()
        run.run()
        first.append(time.perf_counter() - start)
    for turn in range(TURNS):
        for run, own, warm_up in zip(runs, samples, first, strict=True):
            if turn >= SLOW_TURNS and warm_up > SLOW_SECONDS:
                continue
            began = start = time.perf_counter()
            while start == began or start - began < seconds / TURNS:
                run.run()
                end = time.perf_counter()
                own.append(end - start)
                start = end
    return [min(own) / run.steps for run, own in zip(runs, samples, strict=True)]


def measure_sweep(sweep: Sweep, seconds: float, quick: bool = False) -> dict[str, Any]:
    """Times every value of a sweep and fits the exponent.

    Args:
        sweep: what to time.
        seconds: for each value.
        quick: leave out the three largest sizes.
    """
    shorter = quick and sweep.floor is None
    values = list(sweep.values[:-QUICK_LEAVES_OUT] if shorter else sweep.values)
    runs = [sweep.prepare(value) for value in values]
    if sweep.floor is None:
        return fitted(sweep, values, least_seconds(runs, seconds), None)
    *times, floor = least_seconds([*runs, sweep.floor()], seconds)
    return fitted(sweep, values, times, floor)


def fitted(
    sweep: Sweep, values: Sequence[int], times: Sequence[float], floor: float | None
) -> dict[str, Any]:
    """The record of a sweep whose times are known."""
    name, abscissa = sweep.abscissa or (sweep.variable, float)
    xs = [abscissa(value) for value in values]
    if floor is None:
        ys, rule, ruled_out = list(times), "launch-bound", launch_bound(times)
    else:
        ys = [t - floor for t in times]
        rule, ruled_out = "lost in noise", lost_in_noise(times, floor)
    status = [
        rule if out else "below the fitted range" if value < sweep.fit_from else "fitted"
        for value, out in zip(values, ruled_out, strict=True)
    ]
    used = [i for i, state in enumerate(status) if state == "fitted"]
    return {
        "method": sweep.method,
        "part": sweep.part,
        "variable": sweep.variable,
        "abscissa": name,
        "term": sweep.term,
        "predicted": sweep.predicted,
        "fitted": exponent([xs[i] for i in used], [ys[i] for i in used]),
        "fitted_values": [values[i] for i in used],
        "values": list(values),
        "xs": xs,
        "seconds": list(times),
        "bare_step_seconds": floor,
        "status": status,
    }


def measure_memory(sweep: MemorySweep, quick: bool = False) -> dict[str, Any]:
    """Counts state and takes the peak at every value of a sweep; fits both exponents."""
    values = list(sweep.values[:-1] if quick else sweep.values)
    name, abscissa = sweep.abscissa or (sweep.variable, float)
    xs = [abscissa(value) for value in values]
    measured = measure_in_subprocess(sweep.name, [[sweep.shape(value)] for value in values])
    counted = [_without_momenta(case["state"]) for case in measured]
    peaks = [case["peak"] for case in measured]
    fits_peak = sweep.peak_fitted and all(peak is not None and peak > 0 for peak in peaks)
    used = [i for i, out in enumerate(launch_bound(peaks)) if not out] if fits_peak else []
    return {
        "method": sweep.method,
        "part": sweep.part,
        "variable": sweep.variable,
        "abscissa": name,
        "term": sweep.term,
        "predicted": sweep.predicted,
        "values": values,
        "xs": xs,
        "state": [case["state"] for case in measured],
        "counted_bytes": counted,
        "fitted": exponent(xs, counted),
        "peak_bytes": peaks,
        "peak_fitted": exponent([xs[i] for i in used], [peaks[i] for i in used]),
        "peak_fitted_values": [values[i] for i in used],
    }


def _without_momenta(state: dict[str, int]) -> int:
    """Beyond SGD with momentum, as the paper counts."""
    return sum(size for name, size in state.items() if name != "momenta")


def memory_of_sets(names: Sequence[str]) -> list[dict[str, Any]]:
    """TNT's state on whole models, and what a step needs beside it at once.

    The bound on the latter: a copy of one parameter and of its factors, of the largest, and what
    the process itself takes.
    """
    sets = [PARAMETER_SETS[name] for name in names]
    records = []
    for parameter_set in sets:
        (case,) = measure_in_subprocess("tnt", [parameter_set.views])
        state = sum(case["state"].values())
        bound = PROCESS_BYTES + max(
            FLOAT_BYTES * math.prod(view) + factor_bytes([view], [flat])
            for view, flat in zip(parameter_set.views, parameter_set.diagonal, strict=True)
        )
        records.append(
            {
                "set": parameter_set.name,
                "parameters": FLOAT_BYTES * parameter_set.numbers,
                "state": case["state"],
                "peak": case["peak"],
                "temporaries": None if case["peak"] is None else case["peak"] - state,
                "bound_on_temporaries": bound,
            }
        )
    return records


def measure_all(path: Path, quick: bool = False) -> None:
    """Measures every sweep and writes the record to ``path``."""
    check_writable(path)
    record: dict[str, Any] = {"provenance": provenance(), "rules": RULES}
    record["busy_before"] = busy_share()
    seconds = 0.05 if quick else 0.3
    record["time"] = [
        measure_sweep(sweep, seconds, quick)
        for sweep in tqdm(SWEEPS, "complexity, time", disable=None)
    ]
    record["memory"] = [
        measure_memory(sweep, quick)
        for sweep in tqdm(
            MEMORY_SWEEPS[:4] if quick else MEMORY_SWEEPS, "complexity, memory", disable=None
        )
    ]
    record["memory_of_sets"] = memory_of_sets(MEMORY_SETS[:1] if quick else MEMORY_SETS)
    record["busy_after"] = busy_share()
    write_json(path, record)


def main() -> None:
    """Measures and writes what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.complexity")
    parser.add_argument("--output", type=Path, default=Path("bench/results/complexity.json"))
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repetitions")
    arguments = parser.parse_args()
    measure_all(arguments.output, arguments.quick)


if __name__ == "__main__":
    main()
