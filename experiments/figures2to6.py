"""Figures 2 to 6: the methods train on one problem from the same starts, with the paper's settings.

Figure 2 compares TNT, KFAC, Shampoo, Adam and SGD-m on autoencoders (Table 3), Figure 4 TNT and
TNT-EF (Table 6), Figure 6 the methods after a search over more settings (Table 5): `mnist-tuned`.
Figures 3 and 5 are of ResNet-32 on CIFAR-10 and VGG16 on CIFAR-100 (Tables 4 and 7).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments import options
from experiments.methods import METHODS, Settings, build_optimizer
from experiments.options import Quick, chosen, numbers, overridden, user_errors
from experiments.plots import grouped, plot_runs
from experiments.problems.problem import Problem
from experiments.run_files import RunFile, RunFileError
from experiments.tasks import TASKS
from experiments.training import (
    CheckpointError,
    Run,
    StationaryParametersError,
    train_in_turn,
)
from tnt_kernels.benchmark.tables import table

# Shampoo is not in the quick runs on MNIST and FACES: its matrices have up to 1000 and 2000 rows
# there, and the 20 refreshes in the first 20 steps would take longer than everything else. The
# digits' settings come from a search over seeds 1 to 5, so their runs have other seeds.
QUICK = [
    Quick("digits", "digits --seeds 6,7,8,9,10"),
    Quick("mnist", "mnist --optimizer tnt,tnt-ef,kfac,adam,sgd --seeds 0,1 --epochs 2", True),
    Quick("mnist-tuned", "mnist-tuned --optimizer tnt,adam,sgd --seeds 0,1 --epochs 3", True),
    Quick("faces", "faces --examples 10000 --optimizer tnt,kfac,adam,sgd --seeds 0,1", True),
    Quick("resnet32", "resnet32 --examples 768 --epochs 2", True),
]


def main(
    problem: Annotated[str, options.problem_argument(TASKS)],
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            metavar="NAME[/SETTING=VALUE…],…",
            help="Several, or all; tnt/lr=3e-4/warm_start=false is TNT with other settings, "
            "tnt/default with the library's defaults.",
        ),
    ] = "all",
    data: options.Data = None,
    examples: options.Examples = None,
    seeds: options.Seeds = "0",
    epochs: options.Epochs = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    out: options.Out = None,
) -> None:
    """Figures 2 to 6: train methods on a problem with the settings of Tables 3 to 7."""
    task = TASKS[problem]
    # Two threads do not speed up matrices of 128 rows.
    where = options.set_machine(1 if threads is None and problem == "digits" else threads, device)
    with user_errors():
        loaded = task.load(data, examples)
    each = [
        overridden(task.settings(name, epochs), changes)
        for one, *changes in (part.split("/") for part in optimizer.split(","))
        for name in chosen(one, task.methods)
    ]
    wanted = [replace(settings, seed=seed) for seed in numbers(seeds) for settings in each]
    run_comparison(loaded, wanted, out or Path(f"results/{problem}.json"), where, task.metric)


def run_comparison(
    problem: Problem,
    wanted: Sequence[Settings],
    out: Path,
    device: torch.device,
    metric: str | None = None,
) -> list[Run]:
    """Make the runs that a file lacks; draw and return all runs of the file.

    Args:
        problem: all runs train on it.
        wanted: the runs' settings; all with one batch size.
        out: the record; the picture has its name with .png.
        device: where to train.
        metric: a metric of the epochs to draw, too.

    Raises:
        typer.BadParameter: the file is compact or holds runs of other settings or another machine
            (their seconds would not compare), a setting does not fit, or a learning rate changes
            nothing.
    """
    wanted = list(dict.fromkeys(wanted))
    with user_errors():
        sizes = {settings.batch_size for settings in wanted}
        if len(sizes) > 1:
            raise ValueError(f"the runs of a file must have one batch size, got {sorted(sizes)}")
        problem.steps_per_epoch(wanted[0].batch_size)
        for settings in wanted:
            build_optimizer(problem.build(), settings, problem.likelihood)
        # Not the number of epochs: the paper's first-order runs have more of them.
        protocol = problem.description() | {"batch_size": wanted[0].batch_size}
        file = RunFile(out, "comparison", protocol, device)
        file.check_same_machine()
        for record in file.runs:
            Run.from_record(record)
    missing = [settings for settings in wanted if file.find(asdict(settings)) is None]
    # The methods of a seed in turn: a slow hour of the machine slows all of them down.
    for seed in dict.fromkeys(settings.seed for settings in missing):
        own = [settings for settings in missing if settings.seed == seed]
        checkpoints = [file.checkpoint(asdict(settings)) for settings in own]
        with user_errors((RunFileError, CheckpointError, OSError, StationaryParametersError)):
            for run in train_in_turn(problem, own, device, checkpoints=checkpoints):
                file.add(asdict(run.settings), run.record())
    runs = [Run.from_record(run) for run in file.runs]
    runs.sort(key=lambda run: list(METHODS).index(run.settings.optimizer))
    plot_runs(runs, out.with_suffix(".png"), problem.label, problem.loss_label, metric)
    print(f"\n{summary(runs, metric)}\nwrote {out} and {out.with_suffix('.png')}")
    return runs


def summary(runs: Sequence[Run], metric: str | None = None) -> str:
    """A table with the final loss, the metric and the times of every method over its seeds.

    Seconds to a loss are to the largest last loss of the first-order methods.

    Args:
        runs: on one problem.
        metric: of the epochs: its last value and its least.
    """
    groups = grouped(runs)
    first_order = [
        statistics.mean(run.final_loss for run in members)
        for _, members in groups
        if METHODS[members[0].settings.optimizer].statistics is None
    ]
    goal = max((loss for loss in first_order if math.isfinite(loss)), default=None)
    header = ["", "epochs", "final loss"]
    header += [metric.replace("_", " "), "least"] if metric else []
    header += ["s/epoch", "warm start s", "" if goal is None else f"s to loss {goal:.4g}"]
    rows = []
    for label, members in groups:
        finished = [run for run in members if run.diverged_at_step is None]
        lost = len(members) - len(finished)
        cells = [label, str(members[0].settings.epochs)]
        cells.append(
            f"diverged ({lost} of {len(members)})"
            if lost
            else mean_and_spread([run.final_loss for run in members])
        )
        if metric:
            curves = [[epoch.metrics[metric] for epoch in run.epochs] for run in finished]
            cells.append(mean_and_spread([curve[-1] for curve in curves]))
            cells.append(mean_and_spread([min(curve) for curve in curves]))
        cells.append(mean_and_spread([run.seconds_per_epoch for run in members]))
        warm = [run.warm_start_seconds for run in members if run.warm_start_seconds is not None]
        cells.append(mean_and_spread(warm))
        times = [None if goal is None else run.seconds_to(goal) for run in members]
        known = [time for time in times if time is not None]
        part = f" ({len(known)} of {len(times)})" if 0 < len(known) < len(times) else ""
        rows.append([*cells, mean_and_spread(known) + part])
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] != "-" for row in rows)]
    return "\n".join(table([header[i] for i in kept], [[row[i] for i in kept] for row in rows]))


def mean_and_spread(values: Sequence[float]) -> str:
    """`mean ± standard deviation` to four digits; the one value; "-" without values.

    >>> mean_and_spread([1.0, 3.0]), mean_and_spread([2.0]), mean_and_spread([])
    ('2 ± 1.4', '2', '-')
    """
    if not values:
        return "-"
    text = f"{statistics.mean(values):.4g}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.2g}"
