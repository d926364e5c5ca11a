"""Train an autoencoder with one optimizer: `python -m bench.experiments.autoencoder --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.experiments.command_line import (
    add_machine_arguments,
    checked_output,
    checked_problem,
    fraction,
    nonnegative_float,
    positive_float,
    positive_int,
    seed_int,
    set_machine,
)
from bench.experiments.plots import plot_runs
from bench.experiments.problems import (
    LABELS,
    OPTIMIZERS,
    PROBLEM_LABELS,
    Problem,
    Settings,
    default_settings,
    has_statistics,
    steps_per_epoch,
)
from bench.experiments.training import train
from bench.provenance import provenance
from bench.records import write_json

_STATISTICS_OPTIONS = ("stat_interval", "inverse_interval", "warm_start")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 when the training diverged."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    device = set_machine(parser, arguments, arguments.data)
    problem = checked_problem(parser, arguments.data)
    settings = _settings(parser, arguments, problem)
    out = arguments.out or Path(f"results/autoencoder/{problem.name}-{settings.optimizer}.json")
    out = checked_output(parser, "--out", out)
    origin = provenance(device)

    run = train(problem, settings, device)

    write_json(out, {"experiment": "autoencoder", **run.record(), "provenance": origin})
    picture = out.with_suffix(".png")
    plot_runs([run], picture, f"Autoencoder on {PROBLEM_LABELS[problem.name]} images, {run.label}")
    warm = "" if run.warm_start_seconds is None else f", warm start {run.warm_start_seconds:.1f} s"
    print(
        f"{run.label}: smoothed loss {run.final_loss:.3f} after {len(run.epochs)} epochs, "
        f"{run.seconds_per_epoch:.2f} s an epoch{warm}"
    )
    print(f"wrote {out} and {picture}")
    return 0 if run.diverged_at_step is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.experiments.autoencoder",
        description="Train an autoencoder on MNIST or on scikit-learn's digits. Settings not given "
        "are the paper's for MNIST (Tables 3 and 6), and the recorded search's for the digits.",
    )
    parser.add_argument(
        "--data",
        required=True,
        metavar="DIR",
        help="folder with MNIST's IDX files, raw or .gz, in itself or in MNIST/raw; "
        "or `digits` for the ones that come with scikit-learn",
    )
    parser.add_argument("--optimizer", required=True, choices=OPTIMIZERS)
    parser.add_argument("--epochs", type=positive_int, metavar="N")
    parser.add_argument("--batch-size", type=positive_int, metavar="M")
    parser.add_argument("--lr", type=positive_float)
    parser.add_argument(
        "--damping", type=nonnegative_float, help="TNT's damping, Adam's epsilon; SGD has none"
    )
    parser.add_argument("--momentum", type=fraction, help="Adam's beta_1")
    parser.add_argument(
        "--stat-interval", type=positive_int, metavar="T1", help="TNT: steps between statistics"
    )
    parser.add_argument(
        "--inverse-interval", type=positive_int, metavar="T2", help="TNT: steps between inverses"
    )
    parser.add_argument(
        "--no-warm-start",
        dest="warm_start",
        action="store_false",
        default=None,
        help="TNT: begin with the first batch's statistics, not with the data set's",
    )
    parser.add_argument("--seed", type=seed_int, help="of the start, the batches and the samples")
    add_machine_arguments(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="the record; the plot is written beside it as .png "
        "(default: results/autoencoder/PROBLEM-OPTIMIZER.json)",
    )
    return parser


def _settings(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, problem: Problem
) -> Settings:
    """The problem's defaults with what the command line says instead."""
    optimizer: str = arguments.optimizer
    given = {
        name: getattr(arguments, name)
        for name in (
            "epochs",
            "batch_size",
            "lr",
            "damping",
            "momentum",
            "seed",
            *_STATISTICS_OPTIONS,
        )
        if getattr(arguments, name) is not None
    }
    foreign = [] if has_statistics(optimizer) else [n for n in _STATISTICS_OPTIONS if n in given]
    if optimizer == "sgd" and "damping" in given:
        foreign.append("damping")
    if foreign:
        option = "no-warm-start" if foreign[0] == "warm_start" else foreign[0].replace("_", "-")
        parser.error(f"argument --{option}: {LABELS[optimizer]} has no such setting")
    settings = replace(default_settings(problem.name, optimizer), **given)
    try:
        steps_per_epoch(problem, settings)
    except ValueError as error:
        parser.error(f"argument --batch-size: {error}")
    return settings


if __name__ == "__main__":
    sys.exit(main())
