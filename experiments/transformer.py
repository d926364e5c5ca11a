"""Train a character-level transformer: `python -m experiments.transformer --help`.

Beyond the paper: TNT, TNT-EF and Shampoo with steps of Adam's length and relative damping, so that
one learning rate serves problems of every scale, against AdamW and Muon. The whole comparison, with
searched learning rates, is `experiments.language_table`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.language.forms import FORMS, command_form, form_settings
from experiments.problems.language import CONTEXT, EPOCH_STEPS, Language, load_language
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

OPTIMIZERS = tuple(dict.fromkeys(form.optimizer for form in FORMS.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0. A training that diverges is a result like another."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    device = set_machine(parser, arguments, "text")
    if arguments.epochs is not None:
        parser.error("argument --epochs: give --steps instead")
    arguments.epochs, epoch_steps = _epochs(parser, arguments.steps)
    problem = checked_problem(parser, arguments, epoch_steps)
    wanted = run_settings(
        parser,
        arguments,
        problem,
        OPTIMIZERS,
        lambda name: form_settings(command_form(name, arguments.paper_form), arguments.epochs),
    )
    name = "-".join([problem.name, *dict.fromkeys(arguments.optimizer)])
    out = arguments.out or Path(f"results/transformer/{name}.json")
    runs = run_comparison(
        parser, "transformer", problem, wanted, out, device, metric="validation_loss"
    )
    print(f"\n{validation_summary(runs)}\n\n{summary(runs, arguments.reach)}")
    print(f"\nwrote {out} and {out.with_suffix('.png')}")
    return 0


def validation_summary(runs: Sequence[Run]) -> str:
    """A table: for every method the last validation loss, mean and standard deviation."""
    rows = [("", "validation loss")]
    for label, members in grouped(runs):
        lost = sum(run.diverged_at_step is not None for run in members)
        final = [run.epochs[-1].metrics["validation_loss"] for run in members]
        rows.append(
            (label, f"diverged ({lost} of {len(members)})" if lost else mean_and_spread(final, 4))
        )
    return aligned(rows)


def add_text_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--data`."""
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE.txt",
        help="a text in UTF-8, such as tiny Shakespeare; its last tenth is for validation",
    )


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the problem."""
    add_text_argument(parser)
    parser.add_argument("--width", type=positive_int, default=128, metavar="N")
    parser.add_argument("--layers", type=positive_int, default=2, metavar="N")
    parser.add_argument("--heads", type=positive_int, default=4, metavar="N")
    parser.add_argument(
        "--context",
        type=positive_int,
        default=CONTEXT,
        metavar="N",
        help="characters in a window (default: %(default)s)",
    )


def checked_problem(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, epoch_steps: int
) -> Language:
    """The problem of the command line; exits with a usage error where it cannot be made."""
    try:
        problem = load_language(
            arguments.data,
            width=arguments.width,
            layers=arguments.layers,
            heads=arguments.heads,
            context=arguments.context,
            epoch_steps=epoch_steps,
        )
    except (OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")
    if arguments.width % arguments.heads:
        parser.error(
            f"argument --heads: must divide the width, {arguments.width}, got {arguments.heads}"
        )
    return problem


def _epochs(parser: argparse.ArgumentParser, steps: int) -> tuple[int, int]:
    """The number of epochs, and of the steps in one."""
    epoch_steps = min(EPOCH_STEPS, steps)
    if steps % epoch_steps:
        parser.error(
            f"argument --steps: must be at most {EPOCH_STEPS} or a multiple of it, since the "
            f"validation loss is measured every {EPOCH_STEPS} steps, got {steps}"
        )
    return steps // epoch_steps, epoch_steps


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.transformer",
        description="Train a character-level transformer with one optimizer or several. TNT, "
        "TNT-EF and Shampoo take steps of Adam's length with relative damping unless --paper-form "
        "is given. A command that was interrupted goes on where it stopped; runs that are in the "
        "file already are not made again, so that several forms can go into one file.",
    )
    add_data_arguments(parser)
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=400,
        metavar="N",
        help="default: %(default)s; one epoch is 50",
    )
    add_run_arguments(parser, OPTIMIZERS)
    parser.add_argument(
        "--paper-form",
        action="store_true",
        help="TNT, TNT-EF and Shampoo as in the paper: neither grafts nor relative damping",
    )
    add_machine_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
