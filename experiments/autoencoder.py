"""Train autoencoders and compare: `python -m experiments.autoencoder --help`.

The paper's Figures 2, 4 and 6: MNIST and FACES, every method with the settings of its Tables 3, 5
and 6; and CURVES, which needs no data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.problems.autoencoders import (
    OPTIMIZERS,
    Autoencoder,
    default_settings,
    load_autoencoder,
)
from experiments.runs.command_line import (
    add_machine_arguments,
    add_run_arguments,
    positive_int,
    run_settings,
    set_machine,
)
from experiments.runs.comparison import run_comparison, summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0. A training that diverges is a result like another."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    device = set_machine(parser, arguments, arguments.data)
    problem = checked_problem(parser, arguments.data, arguments.examples)
    wanted = run_settings(
        parser,
        arguments,
        problem,
        OPTIMIZERS if arguments.table == 3 else [o for o in OPTIMIZERS if o != "tnt-ef"],
        lambda optimizer: default_settings(problem.name, optimizer, arguments.table),
    )
    name = "-".join([problem.name, *dict.fromkeys(arguments.optimizer)])
    out = arguments.out or Path(f"results/autoencoder/{name}.json")
    # Not the epochs: first-order methods may take more of them, in as many seconds.
    common = ("batch_size",)
    runs = run_comparison(parser, "autoencoder", problem, wanted, out, device, common=common)
    print(f"\n{summary(runs, arguments.reach)}\n\nwrote {out} and {out.with_suffix('.png')}")
    return 0


def checked_problem(
    parser: argparse.ArgumentParser, data: str, examples: int | None = None
) -> Autoencoder:
    """The problem that `--data` names; exits with a usage error where it cannot be read."""
    try:
        return load_autoencoder(data, examples)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(f"argument --data: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.autoencoder",
        description="Train an autoencoder with one optimizer or several. Settings not given are "
        "the paper's for MNIST and FACES (Tables 3 and 6, or 5), MNIST's for CURVES, and the "
        "recorded search's for the digits. A command that was interrupted goes on where it "
        "stopped; runs that are in the file already are not made again.",
    )
    add_data_arguments(parser)
    parser.add_argument(
        "--table", type=int, choices=(3, 5), default=3, help="the paper's table of settings"
    )
    add_run_arguments(parser, OPTIMIZERS)
    add_machine_arguments(parser)
    return parser


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--data` and `--examples`, which `checked_problem` reads."""
    parser.add_argument(
        "--data",
        required=True,
        metavar="DIR",
        help="folder with MNIST's IDX files, raw or .gz, in itself or in MNIST/raw, or with a "
        "FACES file (newfaces_rot_single.mat, or olivettifaces.mat to make patches of); "
        "`digits` for those that come with scikit-learn, `curves` for generated curves",
    )
    parser.add_argument(
        "--examples", type=positive_int, metavar="N", help="how many of them (default: all)"
    )


if __name__ == "__main__":
    sys.exit(main())
