"""``python -m experiments.figures``: runs the stages and builds the page, or builds it alone.

Exit status: 0 where no stage failed (one without its data is said, and no failure), 1 where one
failed or ran out of time. What the claims' verdicts are does not matter to it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.stage_runs import CHECKOUT, exit_status, summary
from experiments.figures.driver import run_stages
from experiments.figures.evidence import load_folder
from experiments.figures.page import build_page, write_page
from experiments.figures.stages import DATA, STAGES, Stage, checked_data, chosen

MINUTES = 40.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.records is not None:
        return _page_of_records(parser, options)
    stages, data = _stages_and_data(parser, options)
    folder = (options.out_dir or CHECKOUT / "results" / "figures").resolve()
    _make(parser, folder)
    # Ended from outside, it still ends its stage.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    outcomes = run_stages(stages, folder, data, 60 * options.minutes)
    # A part of the stages still makes the whole page: of those before, what they left.
    records, unread = load_folder(folder, [stage.file for stage in STAGES])
    page = write_page(build_page(records, folder, STAGES, outcomes, unread), folder)
    print(f"\n{summary(outcomes)}\npage: {page} and {page.with_suffix('.html')}")
    return exit_status(outcomes)


def _page_of_records(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if not options.records.is_dir():
        parser.error(f"argument --records: must be a folder, got {options.records}")
    if options.stage:
        parser.error("argument --stage: runs something, which --records does not")
    records, unread = load_folder(options.records.resolve())
    if not records:
        parser.error(f"argument --records: holds no record of an experiment: {options.records}")
    folder = (options.out_dir or options.records).resolve()
    _make(parser, folder)
    page = write_page(build_page(records, folder, (), (), unread), folder)
    print(f"page: {page} and {page.with_suffix('.html')}")
    return 0


def _stages_and_data(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> tuple[list[Stage], dict[str, Path | None]]:
    try:
        stages = chosen(options.stage)
    except ValueError as error:
        parser.error(f"argument --stage: {error}")
    data: dict[str, Path | None] = {}
    for name in DATA:
        try:
            data[name] = checked_data(name, getattr(options, name))
        except ValueError as error:
            parser.error(f"argument --{name}: {error}")
    return stages, data


def _make(parser: argparse.ArgumentParser, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out-dir: cannot write there: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.figures",
        description="Run scaled-down versions of all experiments, each stage in a process of its "
        "own and within a time limit, and build one page (figures.md and figures.html) with every "
        "figure beside the paper's claim and what this run says of it. Started again, stages go on "
        "from their files.",
    )
    for name, need in DATA.items():
        parser.add_argument(
            f"--{name}",
            type=Path,
            metavar="FILE" if need.is_file else "DIR",
            help=f"{need.what} (default: {need.default}, and without it its stages are left out)",
        )
    names = ", ".join(stage.name for stage in STAGES)
    parser.add_argument(
        "--stage", nargs="+", metavar="NAME", help=f"only some of {names} (default: all)"
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=MINUTES,
        help="for all stages; a stage that is still running then is ended (default: %(default)g)",
    )
    parser.add_argument(
        "--records",
        type=Path,
        metavar="DIR",
        help="run nothing: build the page from the records in this folder and those below it",
    )
    parser.add_argument(
        "--out-dir",
        type=Path,
        metavar="DIR",
        help="where records, pictures and the page go (default: results/figures, or the records')",
    )
    return parser


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
