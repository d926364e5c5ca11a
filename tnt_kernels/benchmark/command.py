"""``python -m tnt_kernels bench``: every operator against plain PyTorch, in about a minute."""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tnt_kernels import backends
from tnt_kernels.benchmark.clock import alternate, busy_share
from tnt_kernels.benchmark.comparison import OURS, Comparison
from tnt_kernels.benchmark.inputs import TensorSet
from tnt_kernels.benchmark.limits import binding, finish, matmul_precision, measure_limits
from tnt_kernels.benchmark.operators import OPERATORS
from tnt_kernels.benchmark.records import check_writable, write_json
from tnt_kernels.benchmark.report import DIGITS, new_record, rates, results
from tnt_kernels.benchmark.tables import disturbance, table

SHAPES = ("64x64x3x3", "256x256", "512x512", "1024x1024")
SECONDS = 40.0
LIMIT_SIZE = {"cpu": 1024, "cuda": 4096}  # of the matrices that measure the limits
MOSTLY_BUSY = 0.5  # share of the machine that other processes use
MAX_MODES = 24  # an einsum has a letter for each
MAX_ENTRIES = 1 << 26  # 256 MiB in float32; a case holds about 20 such tensors
# About how many times the least seconds of a call its case takes: right results in float64, three
# runs of each candidate.
PACE = 40.0
COLUMNS = {
    "set": "shape",
    **{name: name for name in ("candidate", "ms", "quartiles", "ratio", "error", "of the limit")},
    "rounds": "rounds",
}
LEGEND = """\
ratio: time of plain PyTorch / time of tnt_kernels. tnt_kernels is faster above 1, **slower** below.
quartiles: of ms. error: largest difference from float64 / largest entry of the result.
of the limit: 100 % is as fast as the limits above allow. They are those of large tensors; small
tensors stay in a cache and can exceed 100 %."""
GROWTH = """\
Growth of the time of tnt_kernels from one shape to the next larger one with as many modes, and what
Table 2 of Ren & Goldfarb 2021 predicts: sum_i d_i prod_j d_j for products, sum_i d_i^3 for inverses
and roots, prod_j d_j for scaled_step_. From a small shape it is less, because a call has a fixed
time; to a shape that no longer fits into a cache it is more."""


@dataclass(frozen=True)
class Case:
    """One operator on one tensor."""

    op: str
    tensor: TensorSet
    least_seconds: float  # of one call, at the limits of the machine


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--shape",
        dest="shapes",
        action="extend",
        nargs="+",
        type=_tensor,
        metavar="SHAPE",
        help="sizes of the modes, joined by x (one size: a vector); may be repeated; a mode above "
        f"8192 has a diagonal statistic (default: {' '.join(SHAPES)})",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="on a GPU the first run also compiles the kernels, so run it twice (default: cpu)",
    )
    parser.add_argument(
        "--threads",
        type=_threads,
        metavar="N",
        help="(default: PyTorch's own; 1 on a busy machine)",
    )
    parser.add_argument(
        "--precision",
        choices=("highest", "high", "medium"),
        default="highest",
        help="PyTorch's float32 matmul precision (default: highest)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=SECONDS,
        metavar="S",
        help="it ends about then: shapes that take too long are left out, and say so (default: "
        f"{SECONDS:g})",
    )
    parser.add_argument("--json", type=_path, metavar="FILE.json", help="write a record, too")


def _tensor(text: str) -> TensorSet:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(
            f"must be positive sizes joined by x, such as 768x3072, got {text!r}"
        )
    shape = tuple(map(int, text.split("x")))
    if len(shape) > MAX_MODES:
        raise argparse.ArgumentTypeError(f"must have at most {MAX_MODES} sizes, got {len(shape)}")
    if math.prod(shape) > MAX_ENTRIES:
        raise argparse.ArgumentTypeError(
            f"must have at most {MAX_ENTRIES} entries, got {math.prod(shape)} in {text}"
        )
    return TensorSet(text, (shape,))


def _threads(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 9999, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return seconds


def _path(text: str) -> Path:
    try:
        return check_writable(text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@torch.no_grad()
def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measures and prints; returns the exit status, 1 if a result is wrong."""
    deadline = time.monotonic() + options.seconds
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: PyTorch has no GPU here")
    # Several threads that wait for a core make plain PyTorch look slow.
    if device.type == "cpu" and not options.threads and (busy_share() or 0) > MOSTLY_BUSY:
        print("Other processes use most of this machine, so one thread is used (see --threads)")
        options.threads = 1
    if options.threads:
        torch.set_num_threads(options.threads)
    tensors = {tensor.name: tensor for tensor in options.shapes or map(_tensor, SHAPES)}
    record = new_record(options.json, device, seconds=options.seconds)
    record["backends"] = asdict(backends())
    _print_machine(record, device, options.precision)
    _warn(record)
    record["limits"] = measure_limits(device, LIMIT_SIZE[device.type])
    cases = []
    for op, operator in OPERATORS.items():
        for tensor in tensors.values():
            _, seconds = binding(record["limits"], operator.work(tensor), options.precision)
            cases.append(Case(op, tensor, seconds))
    cases.sort(key=lambda case: case.least_seconds)
    with matmul_precision(options.precision):
        record["rows"], record["left_out"] = measure(cases, device, options.precision, deadline)
    finish(record, measure_limits(device, LIMIT_SIZE[device.type]))
    record["growth"] = growth(record["rows"], tensors)
    record["protocol"]["busy_after"] = busy_share()
    _print_results(record)
    _warn(record)
    if options.json:
        write_json(options.json, record, DIGITS)
        print(f"wrote {options.json}")
    return int(any(entry["wrong"] for entry in record["left_out"]))


def measure(
    cases: Sequence[Case], device: torch.device, precision: str, deadline: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measures cases in this order, the cheap ones first, until about the deadline.

    Args:
        cases: what to measure.
        device: where to compute.
        precision: PyTorch's float32 matmul precision, already set.
        deadline: of `time.monotonic()`.

    Returns:
        The rows, and for each case without rows why it has none and whether a result was wrong.
    """
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    spent = 0.0  # seconds of the case before, with one round
    for i, case in enumerate(cases):
        if sys.stderr.isatty():
            print(f"\r{i + 1} of {len(cases)}", end="\r", file=sys.stderr, flush=True)
        start = time.monotonic()
        left, needed = deadline - start, spent + PACE * case.least_seconds
        why, wrong = "", False
        if needed > left:
            why = f"it takes about {needed:.1f} s, {max(left, 0):.1f} s are left (--seconds)"
        else:
            later = sum(spent + PACE * other.least_seconds for other in cases[i + 1 :])
            seconds = (left - later) / (len(cases) - i)
            try:
                found = _compared(case, device, precision, seconds, deadline)
            except ValueError as error:
                why, wrong = str(error), True
            else:
                rows += found
                repeated = (found[0]["rounds"] - 1) * sum(row["median"] for row in found)
                spent = time.monotonic() - start - repeated
        if why:
            left_out.append({"op": case.op, "set": case.tensor.name, "why": why, "wrong": wrong})
    return rows, left_out


def _compared(
    case: Case, device: torch.device, precision: str, seconds: float, deadline: float
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    timed = functools.partial(alternate, seconds=seconds, device=device, deadline=deadline)
    operator = OPERATORS[case.op]
    problem = operator.problem(case.tensor, device)
    compare = Comparison(device, precision, timed, rows.extend)
    work = operator.work(case.tensor)
    compare(case.op, case.tensor, problem.candidates, problem.expected, work)
    return rows


def growth(
    rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, TensorSet]
) -> list[dict[str, Any]]:
    """Ratios of our times, from each shape to the next one with as many modes.

    Args:
        rows: of the record; other candidates than ours are ignored.
        tensors: by name, those of the rows.

    Returns:
        For each pair the operator, both names, the ratio by Table 2 and the measured one.
    """
    found = []
    for op, operator in OPERATORS.items():
        seconds = {
            row["set"]: row["median"] for row in rows if (row["op"], row["candidate"]) == (op, OURS)
        }
        groups: dict[int, list[TensorSet]] = {}
        for name in seconds:
            groups.setdefault(len(tensors[name].shapes[0]), []).append(tensors[name])
        for group in groups.values():
            group.sort(key=operator.growth)
            for small, large in zip(group, group[1:], strict=False):
                found.append(
                    {
                        "op": op,
                        "from": small.name,
                        "to": large.name,
                        "predicted": operator.growth(large) / operator.growth(small),
                        "measured": seconds[large.name] / seconds[small.name],
                    }
                )
    return found


def _print_results(record: Mapping[str, Any]) -> None:
    print(f"limits, GF/s or GB/s: {', '.join(map(' '.join, rates(record['limits'])))}\n\n{LEGEND}")
    for op in OPERATORS:
        rows = [row for row in record["rows"] if row["op"] == op]
        print(f"\n{op}")
        if rows:
            print("\n".join(results(rows, COLUMNS)).rstrip())
        for entry in record["left_out"]:
            if entry["op"] == op:
                said = "WRONG" if entry["wrong"] else "not measured"
                print(f"{entry['set']}: {said}: {entry['why']}")
    lines = [
        [row["op"], row["from"], row["to"], f"{row['predicted']:.3g}", f"{row['measured']:.3g}"]
        for row in record["growth"]
    ]
    if lines:
        header = ("operator", "from", "to", "predicted", "measured")
        print("", GROWTH, "", *table(header, lines), sep="\n")


def _print_machine(record: Mapping[str, Any], device: torch.device, precision: str) -> None:
    source = record["provenance"]
    machine = source["machine"]
    served = {engines[device.type] for engines in record["backends"]["ops"].values()}
    print(
        machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores",
        f"threads {source['threads']['torch']}",
        f"torch {source['versions']['torch']}",
        f"engine {' and '.join(sorted(served))}",
        f"precision {precision}; about {record['protocol']['seconds']:g} seconds",
        sep=", ",
        flush=True,
    )


def _warn(record: Mapping[str, Any]) -> None:
    if warning := disturbance(record["protocol"]):
        hint = " --threads 1 suffers less." if record["provenance"]["threads"]["torch"] > 1 else ""
        print(f"\nwarning: {warning.strip(' *')}{hint}\n", flush=True)
