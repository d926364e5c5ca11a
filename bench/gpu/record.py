"""What the stages have written, gathered into one record. Imports no PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.gpu.driver import OUTCOMES
from bench.gpu.json_lines import read

Record = dict[str, Any]
Line = dict[str, Any]

MEASURING = ("kernels", "step", "training")
STAGES = ("build", "tests", "sanitizer", *MEASURING)

PROTOCOL = {
    "clock": "CUDA events around one call, from an idle device to an idle device",
    "eager": "the host launches while the clock runs: the caller's wall time",
    "graph": "the same call replayed as a CUDA graph, where it can be captured",
    "cache": "second-level cache flushed before every run",
    "order": "candidates alternate in one process, another one first in every round",
    "precision": "PyTorch's float32 matmul precision, the same for all candidates: highest is "
    "float32 (ours 3xTF32), high is TF32",
    "check": "every candidate against the reference in float64 before it is timed",
    "spread": "medians, with quartiles, of 3 to 50 rounds",
}


def gather(folder: Path) -> Record:
    """All lines of all stages, by stage, and how the stages of the last run ended."""
    outcomes = folder / OUTCOMES
    ended = json.loads(outcomes.read_text(encoding="utf-8")) if outcomes.is_file() else {}
    return {
        "protocol": PROTOCOL,
        "outcomes": ended.get("stages", []),
        **{stage: read(folder / f"{stage}.jsonl") for stage in STAGES},
    }


def lines_of(record: Record, stage: str, kind: str) -> list[Line]:
    """The lines of one kind that a stage has written."""
    return [line for line in record[stage] if line["kind"] == kind]


def something_measured(record: Record) -> bool:
    """Whether any stage has timed anything."""
    return any(lines_of(record, stage, stage) for stage in MEASURING)


def origins(record: Record) -> dict[str, Line]:
    """Where each measuring stage's numbers come from."""
    found = {stage: lines_of(record, stage, "origin") for stage in MEASURING}
    return {stage: lines[0] for stage, lines in found.items() if lines}


def rates(record: Record) -> dict[str, float]:
    """The ceilings, of each the higher of two measurements; empty where there are none."""
    best: dict[str, float] = {}
    for line in lines_of(record, "kernels", "ceilings"):
        for name, rate in line["rates"].items():
            best[name] = max(rate, best.get(name, 0.0))
    return best


def ratio(line: Line, baseline: str, ours: str, how: str = "eager") -> float | None:
    """The baseline's median over ours; None where one of them was not timed so."""
    timed = line.get(how, {})
    if baseline not in timed or ours not in timed:
        return None
    return float(timed[baseline]["median"] / timed[ours]["median"])
