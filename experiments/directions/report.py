"""The tables of Figure 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from experiments.directions.followers import COMPARED
from experiments.runs.training import smoothed


def report(compared: Sequence[dict[str, Any]], best: dict[str, dict[str, Any]]) -> str:
    """The averages over iterations and seeds: of every layer, and of every damping."""
    chosen = {name: found["damping"] for name, found in best.items()}
    own = {
        name: f"   trains itself to {found['smoothed_loss']:.3f} (lr {found['lr']:g})"
        for name, found in best.items()
        if found["smoothed_loss"] is not None
    }
    similar = most_similar(compared)
    lines = [
        "with the damping with which each method trains itself best:",
        *_table(compared, chosen, own),
        "",
        "with the damping with which each method is most similar, chosen by these very runs:",
        *_table(compared, similar),
        "",
        "mean over the four layers with every damping:",
    ]
    for name, method in COMPARED.items():
        each = [
            f"{damping_name(d)}: {statistics.fmean(layer_means(compared, name, d)):.3f}"
            for d in method.dampings
        ]
        lines.append(f"{method.label:8} " + "   ".join(each))
    refused = [run["refused_steps"] for run in compared if run["refused_steps"]]
    if refused:
        lines += ["", f"steps refused for want of inverses: {refused}"]
    reference = statistics.fmean(smoothed(run["block_fisher_losses"])[-1] for run in compared)
    lines += [
        "",
        "block Fisher itself, with damping {damping:g} and lr {lr:g}, trains to ".format(
            **compared[0]["block_fisher"]
        )
        + f"{reference:.3f}",
        _conclusion(compared, chosen),
        f"With the most similar dampings: {_conclusion(compared, similar)}",
    ]
    return "\n".join(lines)


def layer_means(
    compared: Sequence[dict[str, Any]], method: str, damping: float | None
) -> list[float]:
    """For each layer a method's mean similarity, over iterations and runs."""
    runs = [run["similarity"][method][damping_name(damping)] for run in compared]
    return [
        statistics.fmean(value for run in runs for value in run[layer] if is_number(value))
        for layer in range(len(runs[0]))
    ]


def most_similar(compared: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Each method's damping with the largest mean similarity over the layers.

    What a method can come to. It flatters them all, those with more dampings a little more.
    """
    return {
        name: max(
            method.dampings,
            key=lambda damping: statistics.fmean(layer_means(compared, name, damping)),
        )
        for name, method in COMPARED.items()
    }


def _table(
    compared: Sequence[dict[str, Any]],
    dampings: Mapping[str, float | None],
    notes: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    rows = {name: layer_means(compared, name, damping) for name, damping in dampings.items()}
    layers = range(len(rows["tnt"]))
    lines = [
        "method   damping " + "".join(f"  layer {layer + 2}" for layer in layers) + "     mean"
    ]
    for name, row in rows.items():
        cells = "".join(f"{value:9.3f}" for value in [*row, statistics.fmean(row)])
        damping = damping_name(dampings[name])
        lines.append(f"{COMPARED[name].label:8} {damping:>7} {cells}{notes.get(name, '')}")
    return lines


def _conclusion(compared: Sequence[dict[str, Any]], dampings: Mapping[str, float | None]) -> str:
    tnt, shampoo = (layer_means(compared, name, dampings[name]) for name in ("tnt", "shampoo"))
    mean = statistics.fmean(tnt)
    above = sum(t > s for t, s in zip(tnt, shampoo, strict=True))
    inside = "inside" if 0.65 <= mean <= 0.85 else "outside"
    return (
        f"TNT's mean similarity, {mean:.3f}, is {inside} 0.65 to 0.85 (the paper: 0.7 to 0.8); "
        f"it is above Shampoo's on {above} of {len(tnt)} layers."
    )


def is_number(value: float | None) -> bool:
    """Whether there is a value: what is not finite comes back from a file as None."""
    return value is not None and math.isfinite(value)


def damping_name(damping: float | None) -> str:
    """A damping as a record's key."""
    return "none" if damping is None else f"{damping:g}"
