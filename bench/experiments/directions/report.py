"""The tables of Figure 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench.experiments.directions.followers import COMPARED
from bench.experiments.runs.training import smoothed


def report(compared: Sequence[dict[str, Any]], best: dict[str, dict[str, Any]]) -> str:
    """The averages over iterations and seeds: of every layer, and of every damping."""

    def means(method: str, damping: float | None) -> list[float]:
        runs = [run["similarity"][method][damping_name(damping)] for run in compared]
        return [
            statistics.fmean(value for run in runs for value in run[layer] if is_number(value))
            for layer in range(len(runs[0]))
        ]

    table = {name: means(name, found["damping"]) for name, found in best.items()}
    layers = range(len(table["tnt"]))
    lines = [
        "method   damping " + "".join(f"  layer {layer + 2}" for layer in layers) + "     mean"
    ]
    for name, row in table.items():
        cells = "".join(f"{value:9.3f}" for value in [*row, statistics.fmean(row)])
        found, own = best[name], ""
        if found["smoothed_loss"] is not None:
            own = f"   trains itself to {found['smoothed_loss']:.3f} (lr {found['lr']:g})"
        lines.append(f"{COMPARED[name].label:8} {damping_name(found['damping']):>7} {cells}{own}")
    lines += ["", "mean over the four layers with every damping:"]
    for name, method in COMPARED.items():
        each = [
            f"{damping_name(d)}: {statistics.fmean(means(name, d)):.3f}" for d in method.dampings
        ]
        lines.append(f"{method.label:8} " + "   ".join(each))
    refused = [run["refused_steps"] for run in compared if run["refused_steps"]]
    if refused:
        lines += ["", f"steps refused for want of inverses: {refused}"]
    reference = statistics.fmean(smoothed(run["block_fisher_losses"])[-1] for run in compared)
    mean = statistics.fmean(table["tnt"])
    above = sum(t > s for t, s in zip(table["tnt"], table["shampoo"], strict=True))
    inside = "inside" if 0.65 <= mean <= 0.85 else "outside"
    lines += [
        "",
        "block Fisher itself, with damping {damping:g} and lr {lr:g}, trains to ".format(
            **compared[0]["block_fisher"]
        )
        + f"{reference:.3f}",
        f"TNT's mean similarity, {mean:.3f}, is {inside} 0.65 to 0.85 (the paper: 0.7 to 0.8); "
        f"it is above Shampoo's on {above} of {len(layers)} layers.",
    ]
    return "\n".join(lines)


def is_number(value: float | None) -> bool:
    """Whether there is a value: what is not finite comes back from a file as None."""
    return value is not None and math.isfinite(value)


def damping_name(damping: float | None) -> str:
    """A damping as a record's key."""
    return "none" if damping is None else f"{damping:g}"
