"""Seconds per training step of every method: `python -m experiments.step_times --help`.

Whole steps, forward and backward included, on random data of the right shape. Each kind of step
(plain, with statistics, with statistics and inverses) is timed by itself, and the mean step of a
pair (T1, T2) put together from the medians: exactly what a period of T2 steps holds. Where a period
is short enough it is also timed as it is, beside what was put together.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiments.costs.step_kinds import (
    PLAIN,
    Kind,
    Plan,
    TrainingStep,
    amortised,
    components,
    shares,
    state_bytes,
    summary,
    time_kinds,
)
from experiments.costs.step_sets import QUICK_SETS, STEP_SETS, StepSet, factor_sizes
from experiments.costs.step_times_report import plot_step_times, step_times_page
from experiments.runs.command_line import (
    add_machine_arguments,
    checked_output,
    positive_float,
    set_machine,
)
from experiments.runs.methods import LABELS, METHODS, has_statistics
from experiments.runs.run_file import RunFile
from tnt_kernels import inverse_root
from tools.measuring.clock import busy_share

# The paper's two choices of T1 and T2: its autoencoders', and its convolutional networks'.
INTERVALS = ((1, 20), (10, 100))
QUICK, FULL = Plan(5.0, fewest=2, most=5, slow=4.0, slow_rounds=1), Plan(30.0)
PERIOD_SECONDS = 8.0  # a whole period is timed where it takes no longer than that
_PROBE = 512  # the size at which the cost of a root or an eigenbasis is measured

Intervals = Sequence[tuple[int, int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    device = set_machine(parser, arguments, "")
    out = checked_output(parser, "--out", arguments.out)
    names = arguments.sets or (QUICK_SETS if arguments.quick else tuple(STEP_SETS))
    plan = QUICK if arguments.quick else FULL
    protocol = {
        "data": "random, of the right shape; the same batch at every step",
        "device": device.type,
        "threads": torch.get_num_threads(),
        "flush_subnormals": arguments.flush_subnormals,
        "quick": arguments.quick,
        "longest_refresh": arguments.longest_refresh,
    }
    try:
        runs = RunFile(out, "step times", protocol, device)
    except (OSError, ValueError) as error:
        parser.error(f"argument --out: {error}")
    limit = 0.0 if arguments.quick else PERIOD_SECONDS
    for name in tqdm(list(dict.fromkeys(names)), "step times", unit="set", disable=None):
        step_set = STEP_SETS[name]
        allowed = arguments.methods or step_set.methods()
        methods = [method for method in step_set.methods() if method in allowed]
        began = time.perf_counter()
        measure_set(runs, step_set, methods, plan, device, arguments.longest_refresh, limit)
        tqdm.write(f"{name}: {time.perf_counter() - began:.0f} s")
    page, picture = out.with_suffix(".md"), out.with_suffix(".png")
    text = step_times_page(runs.runs, protocol)
    page.write_text(text, encoding="utf-8")
    plot_step_times(runs.runs, picture)
    print(f"\n{text}\npage:    {page}\npicture: {picture}\nrecord:  {out}")
    return 0


def measure_set(
    runs: RunFile,
    step_set: StepSet,
    methods: Sequence[str],
    plan: Plan,
    device: torch.device,
    longest_refresh: float = math.inf,
    period_seconds: float = 0.0,
    intervals: Intervals = INTERVALS,
) -> None:
    """Adds what the file lacks of a set's methods: a run for each pair of intervals.

    SGD-m takes its turn among them whenever anything is measured: every run's ratio is to the
    SGD-m that it alternated with.

    Args:
        runs: the file.
        step_set: the model and its batch.
        methods: of the set's.
        plan: how many samples.
        device: where.
        longest_refresh: a method is left out where one refresh of its inverses is estimated to
            take longer than so many seconds.
        period_seconds: whole periods up to so long are timed, too.
        intervals: pairs (T1, T2).
    """
    missing = [
        method
        for method in methods
        if any(runs.find(key) is None for key in keys(step_set.name, method, intervals))
    ]
    if not missing:
        return
    estimates = {method: refresh_estimate(step_set, method) for method in missing}
    steps: dict[str, TrainingStep] = {}
    for method in dict.fromkeys(["sgd", *missing]):
        if estimates.get(method, 0.0) <= longest_refresh:
            steps[method] = step_set.training_step(method, device)
            steps[method]()  # the first: state, first statistics, first inverses
    busy_before = busy_share()
    kinds = dict.fromkeys([PLAIN, Kind(True, False), *(k for p in intervals for k in shares(*p))])
    samples = time_kinds(steps, list(kinds), plan)
    times = {
        method: {kind: summary(taken) for kind, taken in own.items()}
        for method, own in samples.items()
    }
    sgd = times["sgd"][PLAIN]["median"]
    shared = {
        "batch_size": step_set.batch_size,
        "note": step_set.note,
        "parameter_bytes": sum(p.nbytes for p in steps["sgd"].model.parameters()),
        "sgd_seconds": sgd,
        "alternated_with": list(steps),
        "busy_before": busy_before,
    }
    results: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for method in missing:
        for key, pair in zip(
            keys(step_set.name, method, intervals), _pairs(method, intervals), strict=True
        ):
            if method not in steps:
                result = _left_out(estimates[method], pair, sgd, longest_refresh)
            else:
                result = mean_step(times[method], pair, sgd)
                result["state_bytes"] = state_bytes(steps[method].optimizer)
                result["whole_period_mean"] = _whole_period(
                    steps[method], pair, result["seconds"], period_seconds, step_set.intervals
                )
            results.append((key, result))
    shared["busy_after"] = busy_share()
    for key, result in results:
        runs.add(key, {**shared, **result})


def keys(name: str, method: str, intervals: Intervals = INTERVALS) -> list[dict[str, Any]]:
    """What a method's runs on a set are found by; a first-order method has one, without T1, T2."""
    return [
        {
            "set": name,
            "method": method,
            "stat_interval": pair[0] if pair else None,
            "inverse_interval": pair[1] if pair else None,
        }
        for pair in _pairs(method, intervals)
    ]


def _pairs(method: str, intervals: Intervals) -> Sequence[tuple[int, int] | None]:
    return list(intervals) if has_statistics(method) else [None]


def mean_step(
    times: Mapping[Kind, Mapping[str, Any]], pair: tuple[int, int] | None, sgd: float
) -> dict[str, Any]:
    """The mean step of a period, put together from its kinds.

    Args:
        times: the `summary` of every kind.
        pair: T1 and T2; None for a first-order method.
        sgd: the time of a step of SGD-m.

    Returns:
        Seconds and quartiles (the kinds' quartiles, weighted alike), the ratio to SGD-m, the parts
        that the mean is the sum of, and of each kind its share and its times.
    """
    parts = shares(*pair) if pair else {PLAIN: Fraction(1)}
    medians = {kind: known["median"] for kind, known in times.items()}
    quartiles = [
        amortised({kind: known["quartiles"][end] for kind, known in times.items()}, parts)
        for end in (0, 1)
    ]
    seconds = amortised(medians, parts)
    return {
        "seconds": seconds,
        "quartiles": quartiles,
        "ratio": seconds / sgd,
        "components": components(medians, parts)._asdict(),
        "kinds": {
            kind.label: {"share": float(parts.get(kind, 0)), **known}
            for kind, known in times.items()
        },
    }


def refresh_estimate(step_set: StepSet, method: str) -> float:
    """Seconds of one refresh of the inverses, from one matrix of 512 and the cubes of the sizes.

    Of Newton's roots and eigenbases, on the CPU. 0 for what is quicker: one inverse takes some d^3,
    one root some hundred.
    """
    if method not in ("shampoo", "kfac-eigen"):
        return 0.0
    with torch.device("meta"):
        cubes = sum(size**3 for size in factor_sizes(step_set.build(), method))
    if cubes <= _PROBE**3:
        return 0.0
    square = torch.randn(_PROBE, _PROBE, generator=torch.Generator().manual_seed(0))
    gram = square @ square.mT / _PROBE
    least = math.inf
    for _ in range(2):  # the first call of a process loads libraries
        began = time.perf_counter()
        if method == "shampoo":
            inverse_root([[gram]], 1e-2, [4])
        else:
            torch.linalg.eigh(gram)
        least = min(least, time.perf_counter() - began)
    return least * cubes / _PROBE**3


def _left_out(
    estimate: float, pair: tuple[int, int] | None, sgd: float, longest: float
) -> dict[str, Any]:
    assert pair is not None  # nothing of a first-order method is estimated
    return {
        "left_out": f"one refresh is estimated at {estimate:.0f} s, above {longest:g} s",
        "estimated_refresh_seconds": estimate,
        "ratio_at_least": 1 + estimate / pair[1] / sgd,
    }


def _whole_period(
    step: TrainingStep,
    pair: tuple[int, int] | None,
    mean: float,
    limit: float,
    intervals: tuple[int, int],
) -> float | None:
    """The measured mean step of a whole period, at the set's own intervals, or None."""
    if pair != intervals or math.lcm(*pair) * mean > limit:
        return None
    return step.period_seconds(*pair) / math.lcm(*pair)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.step_times",
        description="Time whole training steps of every method on every parameter set. Started "
        "again, it measures what its file lacks.",
    )
    parser.add_argument("--sets", nargs="+", choices=tuple(STEP_SETS), metavar="SET")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=tuple(METHODS),
        metavar="METHOD",
        help=f"SGD-m is always timed beside them: {', '.join(LABELS)}",
    )
    parser.add_argument("--quick", action="store_true", help="two sets, few repeats")
    parser.add_argument(
        "--longest-refresh",
        type=positive_float,
        default=25.0,
        metavar="SECONDS",
        help="leave out a method whose inverses would take longer (default: 25)",
    )
    parser.add_argument("--out", type=Path, default=Path("results/step_times.json"))
    add_machine_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
