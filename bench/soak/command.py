"""A soak: `python -m bench.soak --steps 10000 --out FILE.json`; `--help` says the rest."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.soak.plan import KINDS, NAN, NEGATIVE, NUMERICAL, Fault, draw
from bench.soak.supervisor import Record, Supervisor, left_running
from bench.soak.training import BATCH, SCHEDULE, SETTINGS, SIZES, Training
from experiments.runs.command_line import checked_output, positive_int, seed_int
from tools.measuring.provenance import provenance
from tools.measuring.records import write_json

# Of the distance that the clean run has covered, in float64: sums in another order.
TOLERANCE = 1e-10
# What a process may have more at the end: a leak of 1 KiB a step would be 10 MiB after 10,000.
GROWTH_MIB = 4.0
MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, and 1 where a check failed."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    out = checked_output(parser, "--out", arguments.out)
    origin = provenance()
    steps, seed = arguments.steps, arguments.seed
    faults = draw(seed, steps, arguments.faults or max(1, steps // 25), SCHEDULE)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        work = Path(folder)
        with _bar(steps, "faults") as progress:
            supervisor = Supervisor(work, seed, steps, faults, progress)
            supervisor.prepare()
            files = _open_files()
            supervisor.train()
        seconds = time.monotonic() - began
        with _bar(steps, "clean") as progress:
            supervisor.say_progress_to(progress)
            clean_memory = supervisor.train_cleanly()
        soak = torch.load(work / "end.pt", weights_only=True)
        clean = torch.load(work / "clean.pt", weights_only=True)
        start = Training(work / "digits.pt", seed).parameters()
        kept = sorted(path.name for path in work.iterdir())
    result = {
        "seconds": round(seconds, 1),
        "seconds_clean": round(time.monotonic() - began - seconds, 1),
        "faults": dict(Counter(fault.kind for fault in faults)),
        **_ends(soak, clean, start),
        **_counted(soak, clean, faults),
        **_restarts(supervisor.record),
        "memory_mib": _memory(supervisor.record, clean_memory),
        "left": {
            "processes": left_running(supervisor.record),
            "open files": _open_files() - files,
            "files": [name for name in kept if not name.startswith("after-")],
            "checkpoints": sum(name.startswith("after-") for name in kept),
        },
    }
    checks = _checks(result, steps, faults, supervisor.record)
    write_json(out, {
        "experiment": "soak",
        "protocol": {
            "steps": steps, "seed": seed, "batch": BATCH, "model": list(SIZES), "tnt": SETTINGS,
            "checkpoint_interval": SCHEDULE.checkpoints, "tolerance": TOLERANCE,
        },
        "checks": checks,
        "result": result,
        "lives": supervisor.record.lives,
        "provenance": origin,
    })  # fmt: skip
    for name, good in checks.items():
        print(f"{'ok    ' if good else 'FAILED'} {name}")
    print(f"wrote {out}")
    return 0 if all(checks.values()) else 1


def _ends(soak: dict[str, Any], clean: dict[str, Any], start: list[torch.Tensor]) -> dict[str, Any]:
    """How far apart the two runs have ended, beside how far they have come."""
    pairs = list(zip(soak["parameters"], clean["parameters"], start, strict=True))
    apart = math.sqrt(sum(float((a - b).square().sum()) for a, b, _ in pairs))
    moved = math.sqrt(sum(float((b - c).square().sum()) for _, b, c in pairs))
    return {
        "apart": apart,
        "moved": moved,
        "relative": apart / moved,
        "loss": soak["loss"],
        "loss_clean": clean["loss"],
    }


def _counted(soak: dict[str, Any], clean: dict[str, Any], faults: list[Fault]) -> dict[str, Any]:
    alone = int((soak["left_out"][:, 0] == 1).sum())
    return {
        "steps_not_taken_once": int((soak["taken"] != 1).sum()),
        "step_counters": soak["steps"],
        "update_counters": sorted(set(soak["updates"])),
        "failures": soak["failures"],
        "failures_clean": clean["failures"],
        "failures_injected": {
            # Of one process of several its part is left out, and nothing is skipped.
            "skipped_statistics": alone,
            "failed_inverses": sum(fault.kind == NEGATIVE for fault in faults),
        },
        "parts_left_out": int((soak["left_out"][:, 0] > 1).sum()),
    }


def _restarts(record: Record) -> dict[str, Any]:
    counts = Counter(f"{life['processes']}, {life['shard']}" for life in record.lives)
    return {
        "starts": len(record.lives),
        "starts_by_processes_and_shard": dict(sorted(counts.items())),
        "ended_by": dict(sorted(Counter(record.fired).items())),
        "survivors_that_ended_on_their_own": record.noticed,
        "survivors_that_had_to_be_killed": record.not_noticed,
        "half_written_checkpoints": record.broken,
        "steps_lost_and_taken_again": record.retaken,
    }


def _memory(record: Record, clean: list[tuple[int, int]]) -> dict[str, Any]:
    """Medians over the first and the last tenth, in MiB, and how processes grew in their lives."""
    found: dict[str, Any] = {
        "clean run": _tenths([size for _, size in clean]),
        "supervisor": _tenths([size for _, size in record.own]),
    }
    for count in sorted({count for _, _, count in record.memory}):
        sizes = [size for _, size, processes in record.memory if processes == count]
        found[f"one of {count}"] = _tenths(sizes)
    steps = sum(steps for steps, _ in record.growth)
    grown = sum(grown for _, grown in record.growth)
    found["grown in lives"] = {"steps": steps, "mib": round(grown / MIB, 3)}
    return found


def _tenths(sizes: list[int]) -> list[float]:
    if not sizes:
        return []
    few = max(1, len(sizes) // 10)
    return [round(statistics.median(part) / MIB, 2) for part in (sizes[:few], sizes[-few:])]


def _checks(
    result: dict[str, Any], steps: int, faults: list[Fault], record: Record
) -> dict[str, bool]:
    injected = result["failures_injected"]
    crashes = Counter(fault.kind for fault in faults if fault.kind not in NUMERICAL)
    parts = sum(fault.kind == NAN for fault in faults) - injected["skipped_statistics"]
    memory = result["memory_mib"]
    flat = [pair for pair in memory.values() if isinstance(pair, list) and pair]
    return {
        "every step was taken once": result["steps_not_taken_once"] == 0
        and result["step_counters"] == [steps]
        and result["update_counters"] == [steps],
        "the clean run ends in the same place": result["relative"] <= TOLERANCE,
        "failures are what was injected": result["failures"] == injected
        and result["failures_clean"] == injected
        and result["parts_left_out"] == parts,
        "every planned end came": Counter(record.fired) == crashes,
        "memory is flat": all(last - first <= GROWTH_MIB for first, last in flat),
        "survivors end on their own": result["survivors_that_had_to_be_killed"] == 0,
        "no process, file or descriptor is left": result["left"]["processes"] == 0
        and result["left"]["open files"] <= 0
        and result["left"]["files"] == ["clean.pt", "digits.pt", "end.pt"]
        and result["left"]["checkpoints"] <= 2,
    }


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def _bar(steps: int, label: str) -> Iterator[Any]:
    """A progress bar, as a function of the step that is next; what is taken back it goes back."""
    with tqdm(total=steps, desc=label, disable=None) as bar:

        def show(step: int) -> None:
            bar.n = step
            bar.update(0)

        yield show


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description="Trains with TNT in 1, 2 or 4 processes that faults end again and again, and "
        "compares with one process that nothing happens to.",
        epilog=f"Faults: {'; '.join(KINDS)}.",
    )
    parser.add_argument("--steps", type=positive_int, default=10_000, metavar="N")
    parser.add_argument("--faults", type=positive_int, metavar="N", help="(default: steps / 25)")
    parser.add_argument("--seed", type=seed_int, default=0, metavar="N", help="of everything")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the record")
    return parser
