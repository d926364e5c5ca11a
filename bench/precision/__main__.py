"""Precision, resuming and the optimizer contract: `python -m bench.precision --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.precision import contract, resume, sampled, training
from bench.precision.digits import BATCH, data
from bench.precision.page import page
from experiments.runs.command_line import checked_output, positive_int
from experiments.runs.run_file import RunFile, RunFileError, load_runs

Case = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, and 1 where a test failed or resuming changed a number."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    out = checked_output(parser, "--out", arguments.out)
    torch.set_num_threads(arguments.threads)
    protocol = {
        "steps": arguments.steps,
        "batch": BATCH,
        "examples": [len(data()[0]), len(data()[2])],
        "training": {
            **training.SETTINGS, "first_lr": training.FIRST_LR, "last_lr": training.LAST_LR
        },
        "sampled": {"width": sampled.WIDTH, "head_deviation": sampled.HEAD_DEVIATION},
        "resume": {**resume.SETTINGS, **resume.FORM},
        "resume_steps": arguments.resume_steps,
    }  # fmt: skip
    try:
        record = RunFile(out, "precision", protocol)
    except RunFileError as error:
        parser.error(f"argument --out: {error}")
    cases = [case for case in _cases(arguments) if record.find(case[0]) is None]
    for key, measure in tqdm(cases):
        record.add(key, measure())
    written = load_runs(out)
    out.with_suffix(".md").write_text(page(written), encoding="utf-8")
    print(f"wrote {out} and {out.with_suffix('.md')}")
    return 0 if _good(written["runs"]) else 1


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """What is measured: its key in the record, and the measurement."""
    for seed in range(arguments.seeds):
        for way in training.WAYS:
            key = {"part": "training", "way": way, "seed": seed}
            yield key, partial(training.trained, way, seed, arguments.steps)
    for classes in dict.fromkeys(arguments.classes):
        for rows in dict.fromkeys(arguments.rows):
            key = {"part": "sampled", "classes": classes, "rows": rows}
            yield key, partial(sampled.measured, classes, rows)
    for optimizer, precision in resume.CASES:
        key = {"part": "resume", "optimizer": optimizer, "precision": precision}
        yield key, partial(resume.compared, optimizer, precision, arguments.resume_steps)
    key = {"part": "contract", "files": contract.files(), "expression": arguments.contract}
    yield key, partial(contract.counted, contract.files(), arguments.contract)


def _good(runs: Sequence[dict[str, Any]]) -> bool:
    resumed = [run for run in runs if run["key"]["part"] == "resume"]
    counts = [c for run in runs if run["key"]["part"] == "contract" for c in run["tests"].values()]
    return not any(run["parameters_differ"] or run["state_differs"] for run in resumed) and not any(
        count["failed"] for count in counts
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.precision",
        description="Train in each precision, compare the statistics of float16's sampled pass "
        "with float32's, count the numbers that differ after resuming, and the tests of PyTorch's "
        "optimizer contract that pass. Goes on where it was stopped.",
    )
    parser.add_argument("--seeds", type=positive_int, default=5, help="of trainings (default: 5)")
    parser.add_argument("--steps", type=positive_int, default=400, help="of each (default: 400)")
    parser.add_argument(
        "--classes", nargs="+", type=positive_int, default=[10, 100, 1000], metavar="N"
    )
    parser.add_argument(
        "--rows", nargs="+", type=positive_int, default=[1024, 8192, 32768], metavar="N"
    )
    parser.add_argument(
        "--resume-steps", type=positive_int, default=17, help="before the break, and after it"
    )
    parser.add_argument(
        "--contract", default="", metavar="EXPRESSION", help="some of its tests: pytest's -k"
    )
    parser.add_argument("--threads", type=positive_int, default=1, help="(default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/precision.json"), metavar="FILE.json"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
