"""What comes with a step, and what it costs: `python -m bench.overheads --help`.

The record goes on where it was stopped. The page beside it is made of the record alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.overheads.measuring import CALLS, FEWEST, MOST, PARTS, SECONDS
from bench.overheads.page import page
from bench.overheads.steps import COMPANIONS, SETTINGS
from experiments.runs.command_line import checked_output, positive_int
from experiments.runs.run_file import RunFile, RunFileError
from tools.measuring.clock import busy_share
from tools.measuring.parameter_sets import PARAMETER_SETS

PROTOCOL: dict[str, Any] = {
    "settings": SETTINGS,
    "companions": COMPANIONS,
    "calls": CALLS,
    "cycles": [[1, 20], [10, 100]],
    "goals": {
        "graft": {
            "set": "gpt2",
            "companions": [name for name in COMPANIONS if name.startswith("graft")],
            "at_most": 0.10,
        },
        "faults": {"set": "mnist_ae", "cycle": [1, 20], "every": 100, "at_most": 0.02},
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    out = checked_output(parser, "--out", arguments.out)
    if arguments.rounds == 1:
        parser.error("argument --rounds: must be at least 2, got 1")
    try:
        record = RunFile(out, "overheads", {**PROTOCOL, "rounds": arguments.rounds})
        record.check_same_machine()
    except RunFileError as error:
        parser.error(f"argument --out: {error}")
    keys = [{"set": name, "part": "companions"} for name in dict.fromkeys(arguments.sets)]
    for name in dict.fromkeys(arguments.fault_sets):
        keys += [{"set": name, "part": part} for part in ("guards", "calls")]
    for key in tqdm([key for key in keys if record.find(key) is None]):
        busy = busy_share()
        result = PARTS[key["part"]](key["set"], arguments.rounds)
        record.add(key, {**result, "busy_before": busy, "busy_after": busy_share()})
    if not record.runs:
        return 0
    text = page(json.loads(out.read_text(encoding="utf-8")))
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"wrote {out} and {out.with_suffix('.md')}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overheads",
        description="Measure what grafting, kl_clip, weight decay and rounding add to TNT's step, "
        "what its checks for faults cost, and what its diagnostics take.",
    )
    sets = sorted(PARAMETER_SETS)
    parser.add_argument(
        "--sets", nargs="*", default=["mnist_ae", "gpt2"], choices=sets, metavar="SET",
        help=f"of shapes, for what comes with a step: {', '.join(sets)} (default: mnist_ae gpt2)",
    )  # fmt: skip
    parser.add_argument(
        "--fault-sets", nargs="*", default=["mnist_ae"], choices=sets, metavar="SET",
        help="for the checks and the diagnostics (default: mnist_ae)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=positive_int, metavar="N",
        help=f"of everything (default: what fits in {SECONDS:.0f} seconds, at least {FEWEST}, at "
        f"most {MOST})",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("results/overheads.json"), metavar="FILE.json",
        help="the record; the page is written beside it as .md (default: results/overheads.json)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
