"""Many runs on one problem, into one file: those that it has already are not made again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from experiments.problems import Problem
from experiments.runs.checkpoint import CheckpointError
from experiments.runs.command_line import checked_output
from experiments.runs.methods import METHODS
from experiments.runs.plots import grouped, plot_runs
from experiments.runs.run_file import RunFile, RunFileError
from experiments.runs.settings import Settings
from experiments.runs.training import ParametersStill, Run, train


def run_comparison(
    parser: argparse.ArgumentParser,
    experiment: str,
    problem: Problem,
    wanted: Sequence[Settings],
    out: Path,
    device: torch.device,
    *,
    common: Sequence[str] = ("batch_size", "epochs"),
    metric: str | None = None,
) -> list[Run]:
    """Makes a command's runs; exits with a usage error where a file does not fit.

    Returns and draws all runs that the file has then: also those of earlier commands, which the
    picture beside it must not lose.

    Args:
        parser: the command's, whose usage an error shows.
        experiment: the experiment's name.
        problem: what all runs train on.
        wanted: the runs' settings.
        out: the record; the picture is written beside it as .png.
        device: where to train.
        common: the settings that all runs of a file share.
        metric: a metric of the epochs that is drawn, too.
    """
    out = checked_output(parser, "--out", out)
    try:
        file = open_runs(out, experiment, problem, wanted, device, common)
        for settings in wanted:
            if file.find(asdict(settings)) is None:
                name = f"{file.path.stem}-{settings.optimizer}-seed{settings.seed}.partial.pt"
                checkpoint = file.path.with_name(name)
                run = train(problem, settings, device, checkpoint=checkpoint)
                file.add(asdict(settings), run.record())
    except (RunFileError, CheckpointError, OSError) as error:
        parser.error(f"argument --out: {error}")
    except ParametersStill as error:
        parser.error(f"argument --lr: {error}")
    runs = [Run.from_record(run) for run in file.runs]
    runs.sort(key=lambda run: list(METHODS).index(run.settings.optimizer))
    methods = {run.label for run in runs}
    title = problem.label + (f", {runs[0].label}" if len(methods) == 1 else "")
    plot_runs(runs, out.with_suffix(".png"), title, problem.loss_label, metric)
    return runs


def open_runs(
    path: Path,
    experiment: str,
    problem: Problem,
    runs: Sequence[Settings],
    device: torch.device,
    common: Sequence[str] = ("batch_size", "epochs"),
) -> RunFile:
    """The file for these runs.

    Args:
        path: the file; it need not exist.
        experiment: the experiment's name.
        problem: what all its runs train on.
        runs: those that are wanted of it.
        device: where they compute.
        common: the settings that all its runs share.

    Raises:
        RunFileError: the file is of another experiment, its runs of other settings, another
            machine, device or number of threads (their seconds would not compare); it is left
            alone.
        ValueError: the wanted runs do not share what they must.
        OSError: nothing can be written there.
    """
    shared = {name: getattr(runs[0], name) for name in common}
    for settings in runs:
        own = {name: getattr(settings, name) for name in common}
        if own != shared:
            raise ValueError(f"runs of one file must share {shared}, got {own}")
    file = RunFile(path, experiment, problem.description() | shared, device)
    file.check_same_machine()
    return file


def summary(runs: Sequence[Run], losses: Sequence[float] = ()) -> str:
    """A table: for every method the final loss and times, mean and standard deviation over seeds.

    Args:
        runs: runs on one problem.
        losses: smoothed losses; the seconds to reach each are shown.
    """
    header = ["", "epochs", "final loss", "s/epoch", "warm start s"]
    rows = [[*header, *(f"s to {loss:g}" for loss in losses)]]
    for label, members in grouped(runs):
        lost = sum(run.diverged_at_step is not None for run in members)
        final = [run.final_loss for run in members]
        warm = [run.warm_start_seconds for run in members if run.warm_start_seconds is not None]
        cells = [str(members[0].settings.epochs)]
        cells.append(f"diverged ({lost} of {len(members)})" if lost else mean_and_spread(final, 2))
        cells.append(mean_and_spread([run.seconds_per_epoch for run in members], 3))
        cells.append(mean_and_spread(warm, 2) if warm else "-")
        for loss in losses:
            times = [run.seconds_to(loss) for run in members]
            known = [time for time in times if time is not None]
            text = mean_and_spread(known, 1) if known else "not reached"
            if known and len(known) < len(times):
                text += f" ({len(known)} of {len(times)})"
            cells.append(text)
        rows.append([label, *cells])
    return aligned(rows)


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """`mean ± standard deviation`, or the one value."""
    numbers = torch.tensor(values, dtype=torch.float64)
    text = f"{numbers.mean().item():.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {numbers.std().item():.{digits}f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
