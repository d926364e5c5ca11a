"""Train convolutional networks and compare: `python -m experiments.cnn --help`.

The paper's Figures 3 and 5: ResNet-32 on CIFAR-10 and VGG16 on CIFAR-100, every method with the
settings of its Tables 4 and 7, or the same for fewer epochs on fewer images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.problems.classifiers import (
    NETWORKS,
    OPTIMIZERS,
    Classifier,
    default_settings,
    load_classifier,
)
from experiments.runs.command_line import (
    add_machine_arguments,
    add_run_arguments,
    positive_int,
    run_settings,
    set_machine,
)
from experiments.runs.comparison import (
    aligned,
    mean_and_spread,
    run_comparison,
    summary,
)
from experiments.runs.plots import grouped
from experiments.runs.training import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0. A training that diverges is a result like another."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    device = set_machine(parser, arguments, arguments.model)
    problem = _checked_problem(parser, arguments)
    wanted = run_settings(
        parser,
        arguments,
        problem,
        OPTIMIZERS,
        lambda optimizer: default_settings(problem.name, optimizer, arguments.epochs),
    )
    name = "-".join([problem.name, *dict.fromkeys(arguments.optimizer)])
    out = arguments.out or Path(f"results/cnn/{name}.json")
    runs = run_comparison(
        *(parser, "cnn", problem, wanted, out, device),
        common=("batch_size",),  # not the epochs, of which the paper's first-order runs have more
        metric="validation_error",
    )
    print(f"\n{summary(runs, arguments.reach)}\n\n{validation_errors(runs)}")
    print(f"\nwrote {out} and {out.with_suffix('.png')}")
    return 0


def validation_errors(runs: Sequence[Run]) -> str:
    """A table: for every method its validation error, mean and standard deviation over seeds.

    After the last epoch, as in the paper, and after that epoch of each run where it was least. A
    run that diverged has none.
    """
    rows = [("validation error %", "last epoch", "least")]
    for label, members in grouped(runs):
        finished = [run for run in members if run.diverged_at_step is None]
        errors = [[100 * epoch.metrics["validation_error"] for epoch in r.epochs] for r in finished]
        if errors:
            last = mean_and_spread([run[-1] for run in errors], 2)
            least = mean_and_spread([min(run) for run in errors], 2)
            rows.append((label, last, least))
        else:
            rows.append((label, "diverged", "-"))
    return aligned(rows)


def _checked_problem(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Classifier:
    """The problem that the arguments name; exits with a usage error where they do not fit."""
    try:
        problem = load_classifier(arguments.model, arguments.data)
    except (OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")
    if arguments.subset is None:
        return problem
    try:
        return problem.first(arguments.subset)
    except ValueError as error:
        parser.error(f"argument --subset: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.cnn",
        description="Train a convolutional network with one optimizer or several. Settings not "
        "given are the paper's (Tables 4 and 7): 200 epochs with a tenth of the learning rate "
        "every 60 for first-order methods, 100 and 40 for second-order ones. With --epochs the "
        "learning rate falls at the same fractions of the run. A command that was interrupted goes "
        "on where it stopped; runs that are in the file already are not made again.",
    )
    add_data_arguments(parser)
    add_run_arguments(parser, OPTIMIZERS)
    add_machine_arguments(parser)
    return parser


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the problem."""
    parser.add_argument(
        "--data",
        required=True,
        metavar="DIR",
        help="folder with the Python version of CIFAR-10 (resnet32) or CIFAR-100 (vgg16), in "
        "itself or in cifar-10-batches-py or cifar-100-python",
    )
    parser.add_argument("--model", required=True, choices=tuple(NETWORKS))
    parser.add_argument(
        "--subset",
        type=positive_int,
        metavar="N",
        help="train on N images, the first of every class (default: all); the validation set "
        "stays whole",
    )


if __name__ == "__main__":
    sys.exit(main())
