"""Steps shared by processes on one machine: `python -m bench.processes --help`.

Every process gets the same gradients, as after DistributedDataParallel's averaging, so that one
process alone must end where several do; the difference is recorded. Seconds are of `step` alone: on
one machine the processes share its cores, and gloo copies through memory.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from tqdm import tqdm

from bench.processes.table import page
from bench.processes.worker import DAMPING, KINDS, T1, T2, WAYS, Case, Parameters, measure
from experiments.runs.command_line import checked_output, positive_int
from experiments.runs.run_file import RunFile, RunFileError
from tools.measuring.parameter_sets import PARAMETER_SETS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    out = checked_output(parser, "--out", arguments.out)
    protocol = {
        "t1": T1,
        "t2": T2,
        "damping": DAMPING,
        "periods": arguments.periods,
        "threads_of_all_processes": arguments.threads,
        "backend": "gloo",
    }
    try:
        record = RunFile(out, "processes", protocol)
        record.check_same_machine()
    except RunFileError as error:
        parser.error(f"argument --out: {error}")
    cases = [
        Case(name, way, processes, arguments.periods)
        for name in dict.fromkeys(arguments.sets)
        for processes in dict.fromkeys([1, *arguments.processes])
        for way in (WAYS if processes > 1 else WAYS[:1])
    ]
    for case in tqdm([case for case in cases if record.find(case.key) is None]):
        record.add(case.key, run(case, arguments.threads))
    out.with_suffix(".md").write_text(page(record.runs))
    print(f"wrote {out} and {out.with_suffix('.md')}")
    return 0


def run(case: Case, threads: int) -> dict[str, Any]:
    """One case, measured: of several processes the slowest, and what each sends and keeps."""
    ranks = _ranks(case, threads)
    alone = _alone(case.parameters, case.periods, threads)
    return {
        "seconds": {kind: max(rank["seconds"][kind] for rank in ranks) for kind in KINDS},
        "sent_bytes": {kind: [rank["sent"][kind][0] for rank in ranks] for kind in KINDS},
        "collectives": {kind: ranks[0]["sent"][kind][1] for kind in KINDS},
        "state_bytes": [rank["state"] for rank in ranks],
        "difference": max(_difference(rank["ends"], *alone) for rank in ranks),
        "processes_differ": max(_difference(rank["ends"], *alone, ranks[0]["ends"])
                                for rank in ranks),
    }  # fmt: skip


def _difference(
    ends: list[Tensor], start: list[Tensor], alone: list[Tensor], other: list[Tensor] | None = None
) -> float:
    """How far apart two ends are, relative to how far one process alone has moved."""
    wanted = alone if other is None else other
    apart = torch.stack([(a - b).norm() for a, b in zip(ends, wanted, strict=True)]).norm()
    moved = torch.stack([(a - b).norm() for a, b in zip(alone, start, strict=True)]).norm()
    return float(apart / moved)


@functools.cache
def _alone(parameters: str, periods: int, threads: int) -> tuple[list[Tensor], list[Tensor]]:
    """Start and end of one process's parameters."""
    start = [weight.detach() for weight in Parameters(parameters).weights]
    return start, _ranks(Case(parameters, "none", 1, periods), threads)[0]["ends"]


def _ranks(case: Case, threads: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        each = max(1, threads // case.processes)
        spawn(measure, (folder, case, each), nprocs=case.processes)
        paths = [f"{folder}/{rank}.pt" for rank in range(case.processes)]
        return [torch.load(path, weights_only=True) for path in paths]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.processes",
        description="Measure what processes that share TNT's steps send, keep and take, beside one "
        "process alone, and how far apart they end.",
    )
    parser.add_argument(
        "--sets", nargs="+", default=["mnist_ae"], choices=sorted(PARAMETER_SETS), help="of shapes"
    )
    parser.add_argument("--processes", nargs="+", type=positive_int, default=[2, 4], metavar="N")
    parser.add_argument("--periods", type=positive_int, default=5, help="of 4 steps (default: 5)")
    parser.add_argument(
        "--threads", type=positive_int, default=torch.get_num_threads(), help="of all processes"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
