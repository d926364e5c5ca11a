"""Two bar charts from the records: operators over plain PyTorch, and the optimizers' states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib import pyplot

from experiments.plots import save
from tnt_kernels.benchmark.records import read_json

RESULTS = Path(__file__).parents[1] / "bench" / "results"
# What a step of TNT calls, in the picture's order.
OPERATORS = {
    "gram_ema_": "statistics",
    "gram_ema_ whitened": "whitened statistics",
    "damped_inverse": "inverses",
    "grafted_directions_": "directions",
    "scaled_step_": "weights",
}
# By record: the set of matrices, its label, its colour.
MACHINES = {
    "kernels.json": ("gpt2", "EPYC with AVX-512, 2 threads: 2 blocks", "#0072B2"),
    "amx.json": ("gpt2", "Xeon with AMX, 2 threads: 2 blocks", "#56B4E9"),
    "gpu/operators.json": ("gpt2_full", "H200, kernels of commit cb807b7: all blocks", "#999999"),
}
STATES = ("Muon", "AdamW", "SOAP", "TNT")


def speedup(record: Mapping[str, Any], op: str, matrices: str) -> float:
    """The time of the fastest way in plain PyTorch over ours, at full precision."""
    return min(
        float(row["ratio"][0])
        for row in record["rows"]
        if (row["op"], row["set"], row["precision"]) == (op, matrices, "highest")
        if row["candidate"] != "tnt_kernels" and not row["candidate"].endswith(", graph")
    )


def main(path: Annotated[Path, typer.Argument(metavar="FILE.png")]) -> None:
    """Draw README.md's bars: kernels over plain PyTorch, memory. It measures nothing."""
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 3.6), width_ratios=(2, 1), layout="constrained"
    )
    height = 0.8 / len(MACHINES)
    for number, (name, (matrices, label, colour)) in enumerate(MACHINES.items()):
        record = read_json(RESULTS / name)
        values = [speedup(record, op, matrices) for op in OPERATORS]
        places = [i + number * height for i in range(len(OPERATORS))]
        bars = left.barh(places, values, height * 0.9, color=colour, label=label)
        for text in left.bar_label(bars, fmt="%.2f", padding=3, fontsize=8):
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    left.set_yticks([i + height for i in range(len(OPERATORS))], list(OPERATORS.values()))
    left.axvline(1, color="0.2", linewidth=1, zorder=0)
    left.set_title("Plain PyTorch's time over ours, GPT-2 (1: equal)", fontsize=10)
    left.legend(frameon=False, fontsize=8, loc="lower right")
    rows = read_json(RESULTS / "scale.json")["rows"]
    states = {
        row["method"]: row["state"] / 2**30
        for row in rows
        if (row["model"], row["gpus"], row["way"]) == ("GPT-2 small", 1, "every process")
    }
    colours = ["#0072B2" if name == "TNT" else "#999999" for name in STATES]
    bars = right.barh(STATES, [states[name] for name in STATES], 0.6, color=colours)
    right.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    right.set_title("State for GPT-2 small, GiB", fontsize=10)
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, "")
