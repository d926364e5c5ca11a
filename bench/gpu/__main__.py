"""``python -m bench.gpu``: the whole job, or some of its stages.

Exit status: 0 where no stage failed (one that lacks a tool is said, and no failure), 1 where one
did, 2 where there is nothing to do the job with.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.driver import NO_DEVICE, run_stages
from bench.gpu.look import Surroundings, look
from bench.gpu.stages import STAGES, chosen
from bench.stage_runs import CHECKOUT, exit_status, summary

MINUTES = 9.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        stages = chosen(options.stage)
    except ValueError as error:
        parser.error(f"argument --stage: {error}")
    if any(stage.needs_device for stage in stages):
        surroundings = look()
        if surroundings.device is None:
            print(f"{NO_DEVICE} ({surroundings.why_no_device})", file=sys.stderr)
            return 2
        print(_described(surroundings))
    arguments = ["--results", str(options.results), "--data", str(options.data)]
    arguments += ["--commit", options.commit] if options.commit else []
    # Ended from outside, it still ends its stage (see driver.run_stage).
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    outcomes = run_stages(stages, options.folder.resolve(), 60 * options.minutes, arguments)
    print(f"\n{summary(outcomes)}\nlogs and raw numbers: {options.folder}")
    return exit_status(outcomes)


def _described(surroundings: Surroundings) -> str:
    lines = [f"{surroundings.device}, torch {surroundings.torch}, triton {surroundings.triton}"]
    lines += [f"missing: {what}" for what in surroundings.missing]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    names = ", ".join(stage.name for stage in STAGES)
    parser.add_argument("--stage", metavar="A,B", help=f"only some of {names}; all by default")
    parser.add_argument(
        "--minutes", type=_minutes, default=MINUTES, help="for all of them (default: %(default)g)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=CHECKOUT / "build" / "gpu",
        help="where logs and raw numbers go, as they come (default: build/gpu)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=CHECKOUT / "bench" / "results" / "gpu",
        help="where the report goes (default: bench/results/gpu)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=CHECKOUT / "data" / "mnist",
        help="folder with MNIST's IDX files (default: data/mnist)",
    )
    parser.add_argument("--commit", help="to be recorded where the files come without git")
    return parser


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
