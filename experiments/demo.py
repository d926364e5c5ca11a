"""TNT beside SGD-m and Adam from the same start: `python -m experiments.demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.autoencoder import checked_problem
from experiments.problems.autoencoders import default_settings
from experiments.runs.command_line import (
    add_machine_arguments,
    checked_output,
    positive_int,
    seed_int,
    set_machine,
)
from experiments.runs.comparison import aligned
from experiments.runs.plots import plot_runs
from experiments.runs.training import Run, train
from tools.measuring.provenance import provenance
from tools.measuring.records import write_json

_OPTIMIZERS = ("sgd", "adam", "tnt")
# An epoch of TNT on MNIST takes some 16 s on two cores (bench/results), one on the digits 0.05 s.
_MNIST_EPOCHS = 3
# A typical start: each of the three ends within 0.3 of its mean over the search's five seeds, of
# which this is none. From seed 6 or 12 SGD-m ends well above its mean: that flatters TNT.
_SEED = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 when a training diverged."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.demo",
        description="Train an autoencoder with SGD-m, Adam and TNT from the same start, print a "
        "table and draw the losses. Every optimizer has its best settings of the recorded search "
        "on the digits, and the paper's on MNIST.",
    )
    parser.add_argument(
        "--data",
        default="digits",
        metavar="DIR",
        help="folder with MNIST's IDX files (default: scikit-learn's digits, no download)",
    )
    parser.add_argument("--epochs", type=positive_int, metavar="N")
    parser.add_argument("--seed", type=seed_int, default=_SEED, help=f"default: {_SEED}")
    parser.add_argument("--out-dir", type=Path, default=Path("results/demo"), metavar="DIR")
    add_machine_arguments(parser)
    arguments = parser.parse_args(argv)
    device = set_machine(parser, arguments, arguments.data)
    problem = checked_problem(parser, arguments.data)
    out = checked_output(parser, "--out-dir", arguments.out_dir / f"{problem.name}.json")
    origin = provenance(device)

    runs = []
    for optimizer in _OPTIMIZERS:
        settings = replace(default_settings(problem.name, optimizer), seed=arguments.seed)
        epochs = arguments.epochs or (_MNIST_EPOCHS if problem.name == "mnist" else settings.epochs)
        settings = replace(settings, epochs=epochs)
        # ten lines a run at most: the table at the end says what counts
        runs.append(train(problem, settings, device, report_every=-(-epochs // 10)))

    target = runs[0].final_loss
    table = _table(runs, target)
    record = {
        "experiment": "demo",
        "runs": [run.record() | {"seconds_to_sgd_final": run.seconds_to(target)} for run in runs],
        "provenance": origin,
    }
    write_json(out, record)
    picture = out.with_suffix(".png")
    title = f"{problem.label} ({problem.examples}), same start"
    plot_runs(runs, picture, title, problem.loss_label)
    print(f"\n{table}\n\npicture: {picture}\nrecord:  {out}")
    return 0 if all(run.diverged_at_step is None for run in runs) else 1


def _table(runs: Sequence[Run], target: float) -> str:
    """The comparison; `target` is the final loss of SGD-m."""
    rows = [("", "final loss", "s/epoch", "warm start s", f"s to loss {target:.2f} (SGD-m's)")]
    for run in runs:
        warm, reached = run.warm_start_seconds, run.seconds_to(target)
        rows.append(
            (
                run.label,
                "diverged" if run.diverged_at_step is not None else f"{run.final_loss:.2f}",
                f"{run.seconds_per_epoch:.3f}",
                "-" if warm is None else f"{warm:.2f}",
                "not reached" if reached is None else f"{reached:.2f}",
            )
        )
    return aligned(rows)


if __name__ == "__main__":
    sys.exit(main())
