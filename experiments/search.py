"""Grid searches over any experiment: `python -m experiments.search --help`.

The paper's criterion chooses: the lowest training loss for autoencoders, the lowest validation
error for classifiers, here as means over the seeds; a setting that diverges from one seed is out.
A search that was interrupted goes on from its file.

The digits' search, which the demo takes its settings from, is
`python -m experiments.search autoencoder --data digits --seeds 1 2 3 4 5 --jobs 2
--out bench/results/digits_search.json`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiments.problems import Problem
from experiments.runs.command_line import (
    add_machine_arguments,
    checked_output,
    fraction,
    nonnegative_float,
    positive_float,
    positive_int,
    seed_int,
    set_machine,
)
from experiments.runs.methods import LABELS
from experiments.runs.pool import run_all
from experiments.runs.run_file import RunFile, RunFileError
from experiments.runs.settings import Settings
from experiments.tuning.experiments import EXPERIMENTS, Experiment
from experiments.tuning.grids import GRIDS, Grid, grid_of, grid_settings, interior
from experiments.tuning.heat_map import plot_search
from experiments.tuning.recorded_search import LOSS, Tried, best_of, tried

# What can be searched over, beside the paper's learning rate, damping and decay.
AXES: dict[str, tuple[Callable[[str], float], str]] = {
    "lr": (positive_float, "alpha"),
    "damping": (nonnegative_float, "epsilon"),
    "weight_decay": (nonnegative_float, "gamma"),
    "momentum": (fraction, "mu"),
    "stat_decay": (fraction, "beta"),
    "stat_interval": (positive_int, "T1"),
    "inverse_interval": (positive_int, "T2"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0."""
    parser, arguments = _parsed(argv)
    experiment = EXPERIMENTS[arguments.experiment]
    for given in ("flush_subnormals", "threads"):
        if getattr(arguments, given) and arguments.jobs > 1:
            option = f"--{given.replace('_', '-')}"
            parser.error(f"argument {option}: only one process does that, with --jobs 1")
    device = set_machine(parser, arguments, getattr(arguments, "data", ""))
    if arguments.threads is None:
        # As in the pool's processes: a run's numbers must not depend on the number of jobs.
        torch.set_num_threads(1)
    maker = experiment.maker(arguments)
    try:
        problem = maker()
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(f"argument --data: {error}")
    out = checked_output(parser, "--out", arguments.out)
    grids = _grids(parser, arguments, experiment, problem)
    todo = _settings(parser, arguments, experiment, problem, grids)
    try:
        file = RunFile(out, "search", _protocol(problem, experiment, todo[0], arguments), device)
    except RunFileError as error:
        parser.error(f"argument --out: {error}")
    _check_epochs(parser, file, todo)
    missing = [settings for settings in todo if file.find(asdict(settings)) is None]
    with tqdm(total=len(missing), desc="search", unit="run", disable=None) as bar:

        def done(settings: Settings, record: dict[str, Any]) -> None:
            file.add(asdict(settings), _kept(record, experiment.criterion))
            bar.update()

        run_all(maker, missing, arguments.jobs, done, device)
    entries = tried(file.runs, experiment.criterion)
    searched = {o: grid_of(entries, o, tuple(grid)) for o, grid in grids.items()}
    _report(entries, searched, experiment.criterion)
    plot_search(entries, searched, experiment.criterion, out.with_suffix(".png"), problem.label)
    print(f"wrote {out} and {out.with_suffix('.png')}")
    return 0


def _kept(record: dict[str, Any], criterion: str) -> dict[str, Any]:
    """What is kept of a run: hundreds of them stand in one file."""
    score = record[LOSS]
    if criterion != LOSS:
        # The best of the epochs, as the paper chooses by the best validation accuracy.
        score = min(epoch["metrics"][criterion] for epoch in record["epochs"])
    names = ("diverged_at_step", "seconds_per_epoch", "warm_start_seconds")
    return {criterion: score, **{name: record[name] for name in names}}


def _check_epochs(parser: argparse.ArgumentParser, file: RunFile, todo: Sequence[Settings]) -> None:
    """Exits where the file has a method's runs of another length: the longer ones would win."""
    wanted = {settings.optimizer: settings.epochs for settings in todo}
    for run in file.runs:
        optimizer, epochs = run["key"]["optimizer"], run["key"]["epochs"]
        if wanted.get(optimizer, epochs) != epochs:
            parser.error(
                f"argument --out: {file.path} holds runs of {optimizer} over {epochs} epochs, not "
                f"{wanted[optimizer]}: give another file"
            )


def _report(entries: Sequence[Tried], grids: Mapping[str, Grid], criterion: str) -> None:
    for optimizer, grid in grids.items():
        try:
            best = best_of(entries, optimizer)
        except ValueError as error:
            print(f"{LABELS[optimizer]:6} {error}")
            continue
        at = ", ".join(f"{name} {getattr(best.settings, name):g}" for name in grid)
        where = "" if interior(best.settings, grid) else ", at an end of the grid"
        print(f"{LABELS[optimizer]:6} {at}: {criterion.replace('_', ' ')} {best.mean:.4g}{where}")


def _protocol(
    problem: Problem, experiment: Experiment, first: Settings, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What all runs of one file share; a search does not go on with the file of another one."""
    return {
        **problem.description(),
        "criterion": experiment.criterion,
        "seeds": arguments.seeds,
        "batch_size": first.batch_size,
    }


def _grids(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    experiment: Experiment,
    problem: Problem,
) -> dict[str, Grid]:
    """For every optimizer that is asked for, its grid with what the command line says instead."""
    chosen = list(dict.fromkeys(arguments.optimizer))
    if "all" in chosen:
        chosen = list(experiment.optimizers)
    given = {name: values for name in AXES if (values := getattr(arguments, f"grid_{name}"))}
    grids: dict[str, Grid] = {}
    for optimizer in chosen:
        known = GRIDS.get(problem.name, {}).get(optimizer)
        base = experiment.defaults(problem, optimizer, arguments.epochs)
        if known is None and "lr" not in given:
            parser.error(f"argument --lr: there is no grid of {optimizer} on {problem.name}")
        own = {name: v for name, v in given.items() if getattr(base, name) is not None}
        grids[optimizer] = {**(known or {}), **own}
    return grids


def _settings(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    experiment: Experiment,
    problem: Problem,
    grids: dict[str, Grid],
) -> list[Settings]:
    runs = []
    for optimizer, grid in grids.items():
        base = experiment.defaults(problem, optimizer, arguments.epochs)
        if arguments.batch_size is not None:
            base = replace(base, batch_size=arguments.batch_size)
        for settings in grid_settings(base, grid):
            runs += [replace(settings, seed=seed) for seed in dict.fromkeys(arguments.seeds)]
    try:
        problem.steps_per_epoch(runs[0].batch_size)
    except ValueError as error:
        parser.error(f"argument --batch-size: {error}")
    return runs


def _parsed(
    argv: Sequence[str] | None,
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.search",
        description="Search over a grid of settings. Without options for its axes each method has "
        "the paper's grid on the paper's problems. Runs that are in the file already are not made "
        "again.",
    )
    kinds = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for name, experiment in EXPERIMENTS.items():
        kind = kinds.add_parser(name, help=experiment.help)
        experiment.add_arguments(kind)
        kind.add_argument(
            "--optimizer", nargs="+", default=["all"], choices=(*experiment.optimizers, "all")
        )
        for axis, (number, symbol) in AXES.items():
            kind.add_argument(
                f"--{axis.replace('_', '-')}",
                dest=f"grid_{axis}",
                type=number,
                nargs="+",
                metavar="X",
                help=f"values of {symbol}",
            )
        kind.add_argument(
            "--seeds",
            type=seed_int,
            nargs="+",
            default=[1, 2, 3],
            metavar="N",
            help="a run from each (default: 1 2 3); not the seeds of the runs to come: a setting "
            "must not win by the luck of their starts",
        )
        kind.add_argument("--epochs", type=positive_int, metavar="N")
        kind.add_argument("--batch-size", type=positive_int, metavar="M")
        kind.add_argument(
            "--jobs",
            type=positive_int,
            default=1,
            metavar="N",
            help="processes, with one thread each where there are several (default: 1)",
        )
        kind.add_argument("--out", type=Path, required=True, metavar="FILE.json")
        add_machine_arguments(kind)
    arguments = parser.parse_args(argv)
    return parser, arguments


if __name__ == "__main__":
    sys.exit(main())
