"""What a call costs beside its arithmetic: the same operator warm, cold, alone and shrunk.

``python -m bench.kernels.breakdown --set resnet32`` times ``gram_ema_`` and
``preconditioned_step_`` on one parameter set

- with every mode cut to a size of 1 or 2: what is left is Python, the dispatcher, checks, plan;
- repeated, on one thread and on all: its inputs in the caches;
- after a copy of 256 MiB: its inputs in memory;
- after 10 ms of sleep: the other threads asleep, the processor's clock low;
- after the same in plain torch: how the benchmarks time it;

and writes the medians, beside what the machine's limits leave at least, as JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.kernels import baselines
from bench.kernels.inputs import copies, generator, normal, symmetric_modes
from bench.kernels.limits import COPY_NUMBERS, measure_limits
from bench.kernels.work import gram_work, step_work
from tnt_kernels import gram_ema_, preconditioned_step_
from tools.measuring.clock import busy_share
from tools.measuring.parameter_sets import PARAMETER_SETS, ParameterSet
from tools.measuring.provenance import provenance
from tools.measuring.records import check_writable, write_json
from tools.measuring.tables import milliseconds, table

ROUNDS = 100
Calls = tuple[Callable[[], object], Callable[[], object]]  # ours, the same in plain torch


def gram_calls(parameter_set: ParameterSet) -> Calls:
    """One refresh of all statistics."""
    rng = generator()
    tensors = normal(parameter_set.views, rng)
    ours, theirs = symmetric_modes(parameter_set, rng), symmetric_modes(parameter_set, rng)
    return (
        lambda: gram_ema_(ours, tensors, 0.9),
        lambda: baselines.gram_addmm_(theirs, tensors, 0.9),
    )


def step_calls(parameter_set: ParameterSet) -> Calls:
    """One update of all parameters."""
    rng = generator()
    params, momenta, grads = (normal(parameter_set.views, rng) for _ in range(3))
    others = copies([params, momenta])
    factors = symmetric_modes(parameter_set, rng)
    # So small a rate that nothing grows, however often it is called.
    rates = (1e-9, 0.9, 0.0)
    return (
        lambda: preconditioned_step_(params, momenta, grads, factors, *rates),
        lambda: baselines.step_tensordot_(others[0], others[1], grads, factors, *rates),
    )


def shrunk(parameter_set: ParameterSet) -> ParameterSet:
    """As many tensors of as many modes, each of size 1 or 2."""
    shapes = tuple(tuple(min(d, 2) for d in view) for view in parameter_set.views)
    return replace(parameter_set, shapes=shapes, each_dimension_a_mode=True)


def median_seconds(run: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """The median time of ``run``, each time after ``before``."""
    samples = []
    for _ in range(ROUNDS):
        if before is not None:
            before()
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def breakdown(
    make: Callable[[ParameterSet], Calls], parameter_set: ParameterSet
) -> dict[str, float]:
    """The medians of one operator, in seconds."""
    threads = torch.get_num_threads()
    ours, theirs = make(parameter_set)
    source = torch.zeros(COPY_NUMBERS)
    target = torch.zeros_like(source)
    for call in (ours, theirs):
        call()
    found = {"shrunk": median_seconds(make(shrunk(parameter_set))[0])}
    torch.set_num_threads(1)
    found["repeated, one thread"] = median_seconds(ours)
    torch.set_num_threads(threads)
    found[f"repeated, {threads} threads"] = median_seconds(ours)
    found["after a copy of 256 MiB"] = median_seconds(ours, lambda: target.copy_(source))
    found["after 10 ms of sleep"] = median_seconds(ours, lambda: time.sleep(0.01))
    found["after plain torch"] = median_seconds(ours, theirs)
    found["plain torch"] = median_seconds(theirs, ours)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a table and writes the record."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.breakdown")
    parser.add_argument("--set", choices=PARAMETER_SETS, default="resnet32")
    parser.add_argument("--output", type=Path, default=Path("bench/results/breakdown.json"))
    options = parser.parse_args(arguments)
    check_writable(options.output)
    origin, busy = provenance(), busy_share()
    parameter_set = PARAMETER_SETS[options.set]
    limits = measure_limits()
    views, diagonal = parameter_set.views, parameter_set.diagonal
    least = {
        "gram_ema_": limits.seconds(gram_work(views, diagonal), symmetric=True),
        "preconditioned_step_": limits.seconds(step_work(views, diagonal), symmetric=False),
    }
    makers = {"gram_ema_": gram_calls, "preconditioned_step_": step_calls}
    measured = {
        op: {"at the machine's limit": least[op], **breakdown(make, parameter_set)}
        for op, make in makers.items()
    }
    record = {"provenance": origin, "set": options.set, "busy_before": busy, "seconds": measured}
    write_json(options.output, record)
    rows = [
        (name, *(milliseconds(measured[op][name]) for op in makers))
        for name in measured["gram_ema_"]
    ]
    print("\n".join(table((f"{options.set}, ms", *(f"`{op}`" for op in makers)), rows)))


if __name__ == "__main__":
    main()
