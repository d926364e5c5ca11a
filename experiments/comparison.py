"""Many trainings of one problem into one file, in this process or several, and their summary."""

from __future__ import annotations

import math
import os
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import typer

from experiments.methods import METHODS, Settings
from experiments.options import FILE_ERRORS, user_errors
from experiments.plots import grouped, plot_runs
from experiments.problems.problem import Problem
from experiments.run_files import RunFile
from experiments.training import Run, StationaryParametersError, train
from tools.measuring.tables import table


def run_comparison(
    experiment: str,
    problem: Problem,
    wanted: Sequence[Settings],
    out: Path,
    device: torch.device,
    metric: str | None = None,
) -> list[Run]:
    """Make the runs that a file lacks; draw and return all runs of the file.

    Args:
        experiment: the experiment's name.
        problem: all runs train on it.
        wanted: the runs' settings; all with one batch size.
        out: the record; the picture is written beside it as .png.
        device: where to train.
        metric: a metric of the epochs to draw, too.

    Raises:
        typer.BadParameter: the file holds runs of other settings or another machine (their seconds
            would not compare), or a learning rate changes nothing.
    """
    with user_errors():
        problem.steps_per_epoch(wanted[0].batch_size)
        # Not the number of epochs: the paper's first-order runs have more of them.
        protocol = problem.description() | {"batch_size": wanted[0].batch_size}
        file = RunFile(out, experiment, protocol, device)
        file.check_same_machine()
    for settings in wanted:
        if file.find(asdict(settings)) is not None:
            continue
        name = f"{out.stem}-{settings.optimizer}-seed{settings.seed}.partial.pt"
        try:
            run = train(problem, settings, device, checkpoint=out.with_name(name))
            file.add(asdict(settings), run.record())
        except (*FILE_ERRORS, StationaryParametersError) as error:
            raise typer.BadParameter(str(error)) from error
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
    header += ["s/epoch", "warm start s", "" if goal is None else f"s to {goal:.4g}"]
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
    return "\n".join(table(header, rows))


def mean_and_spread(values: Sequence[float]) -> str:
    """`mean ± standard deviation` to four digits; the one value; "-" without values.

    >>> mean_and_spread([1.0, 3.0]), mean_and_spread([2.0]), mean_and_spread([])
    ('2 ± 1.4', '2', '-')
    """
    if not values:
        return "-"
    text = f"{statistics.mean(values):.4g}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.2g}"


def run_all(
    problem_maker: Callable[[], Problem],
    settings: Sequence[Settings],
    jobs: int,
    on_done: Callable[[Settings, dict[str, Any]], None],
) -> None:
    """Train once with each of the settings on the CPU, `jobs` of them at a time.

    With one job all runs are in this process. With more, each is in a process with one thread:
    matrices of these sizes gain more from a second run than from a second thread. The seconds are
    then those of a shared machine. If this process dies, so do the others.

    Args:
        problem_maker: makes the problem, once in each process; must be picklable.
        settings: of each run.
        jobs: runs at a time.
        on_done: called in this process with a run's settings and its record, in the order in which
            the runs finish.
    """
    if jobs == 1 or len(settings) < 2:
        problem = problem_maker() if settings else None
        for one in settings:
            assert problem is not None
            on_done(one, train(problem, one, report_every=0, check_moved=False).record())
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    pool = ProcessPoolExecutor(
        min(jobs, len(settings)), get_context("spawn"), _start_worker, (problem_maker,)
    )
    try:
        futures = {pool.submit(_train, one): one for one in settings}
        for future in as_completed(futures):
            on_done(futures[future], future.result())
    finally:
        pool.shutdown(cancel_futures=True)


_problem: Problem | None = None  # of a worker


def _start_worker(problem_maker: Callable[[], Problem]) -> None:
    global _problem
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _problem = problem_maker()


def _train(settings: Settings) -> dict[str, Any]:
    assert _problem is not None
    return train(_problem, settings, report_every=0, check_moved=False).record()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
