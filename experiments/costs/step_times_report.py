"""The page and the picture of the step times. Pure functions of the recorded runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from experiments.runs.methods import LABELS, METHODS  # noqa: E402
from tools.measuring.tables import disturbance, megabytes, milliseconds, table  # noqa: E402

# The authors' stored runs of the MNIST autoencoder on their GPU, T1 = 1, T2 = 20: 1.85 s and
# 0.81 s an epoch of 60 steps.
AUTHORS = {("mnist_ae", "tnt", 1, 20): (30.8, 13.5)}

Runs = Sequence[Mapping[str, Any]]


def step_times_page(runs: Runs, protocol: Mapping[str, Any]) -> str:
    """Everything measured, in Markdown."""
    lines = [
        "# Seconds per training step",
        "",
        f"Whole steps (zero_grad, forward, loss, observe, backward, step) on {protocol['device']}, "
        f"{protocol['threads']} threads; data: {protocol['data']}. The methods of a set take turns "
        "in one process, each on a model of its own. Medians; a mean step at (T1, T2) is the sum "
        "of its kinds' medians, each weighted by its share of a period, and its quartiles are the "
        "kinds', weighted alike. The first T2 steps, with inverses at every statistics step, are "
        "no part of it. SGD-m in a ratio is the one of the same turns.",
        "",
    ]
    for name in dict.fromkeys(run["key"]["set"] for run in runs):
        lines += _set([run for run in runs if run["key"]["set"] == name])
    return "\n".join(lines)


def _set(runs: Runs) -> list[str]:
    first = runs[0]
    busy = {
        name: max((run[name] or 0.0 for run in runs), default=0.0)
        for name in ("busy_before", "busy_after")
    }
    note = f"; {first['note']}" if first["note"] else ""
    header = ["", "T1, T2", "mean step, ms", "(quartiles)", "over SGD-m", "authors", "plain step"]
    header += ["+ statistics", "+ inverses", "one refresh", "whole period", "state, MB"]
    header += ["of the parameters"]
    return [
        f"## {first['key']['set']}",
        "",
        f"Batches of {first['batch_size']}, {megabytes(first['parameter_bytes'])} MB of "
        f"parameters{note}.{disturbance(busy)}",
        "",
        *table(header, [_row(run) for run in runs]),
        *_explained(runs),
    ]


def _row(run: Mapping[str, Any]) -> list[str]:
    key = run["key"]
    pair = (
        ""
        if key["stat_interval"] is None
        else f"{key['stat_interval']}, " + str(key["inverse_interval"])
    )
    start = [LABELS[key["method"]], pair]
    if "left_out" in run:
        refresh = f"≈ {milliseconds(run['estimated_refresh_seconds'])}"
        return [*start, "", "", f"≥ {run['ratio_at_least']:.1f} *", *[""] * 4, refresh, *[""] * 3]
    lower, upper = run["quartiles"]
    parts, whole = run["components"], run["whole_period_mean"]
    second_order = key["stat_interval"] is not None
    return [
        *start,
        milliseconds(run["seconds"]),
        f"{milliseconds(lower)} to {milliseconds(upper)}",
        f"{run['ratio']:.2f}",
        _authors(key),
        milliseconds(parts["plain"]),
        milliseconds(parts["statistics"]) if second_order else "",
        milliseconds(parts["inverses"]) if second_order else "",
        milliseconds(refresh_seconds(run["kinds"])) if second_order else "",
        "" if whole is None else f"{whole / run['seconds']:.2f} †",
        megabytes(run["state_bytes"]),
        f"{run['state_bytes'] / run['parameter_bytes']:.2f}",
    ]


def refresh_seconds(kinds: Mapping[str, Mapping[str, Any]]) -> float:
    """What a refresh of the inverses adds to a step with statistics."""
    both, one = kinds["statistics and inverses"], kinds["statistics"]
    return float(both["median"] - one["median"])


def authors_ratio(key: Mapping[str, Any]) -> float | None:
    """The authors' own, where they left one."""
    found = AUTHORS.get((key["set"], key["method"], key["stat_interval"], key["inverse_interval"]))
    return None if found is None else found[0] / found[1]


def _authors(key: Mapping[str, Any]) -> str:
    ratio = authors_ratio(key)
    return "" if ratio is None else f"{ratio:.2f}"


def _explained(runs: Runs) -> list[str]:
    lines = []
    if any(authors_ratio(run["key"]) for run in runs):
        lines.append("Authors: 30.8 ms against 13.5 on their GPU, from their stored epochs.")
    if any(run.get("whole_period_mean") for run in runs):
        lines.append("† The measured mean step of a whole period, over the one put together.")
    reasons = dict.fromkeys(
        f"{LABELS[run['key']['method']]}: {run['left_out']}" for run in runs if "left_out" in run
    )
    if reasons:
        lines.append(
            f"\\* Not measured. {'; '.join(reasons)}. The ratio is what that alone would make of a "
            "step of SGD-m."
        )
    return [" ".join(lines), ""] if lines else []


def plot_step_times(runs: Runs, path: Path) -> None:
    """The mean step over SGD-m's: a panel for each pair of intervals, a group for each set.

    Full colour is the plain step, lighter on top what the statistics add, lightest the inverses. A
    black bar is the authors' own ratio, an arrow a lower bound.
    """
    pairs = sorted(
        {
            (run["key"]["stat_interval"], run["key"]["inverse_interval"])
            for run in runs
            if run["key"]["stat_interval"] is not None
        }
    ) or [(None, None)]
    sets = list(dict.fromkeys(run["key"]["set"] for run in runs))
    figure, panels = pyplot.subplots(
        len(pairs),
        1,
        figsize=(3 + 2 * len(sets), 3.6 * len(pairs)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for (first, second), axes in zip(pairs, panels[:, 0], strict=True):
        for place, name in enumerate(sets):
            own = [
                run
                for run in runs
                if run["key"]["set"] == name
                and (run["key"]["stat_interval"], run["key"]["inverse_interval"])
                in ((first, second), (None, None))
                and run["key"]["method"] != "sgd"
            ]
            own.sort(key=lambda run: list(METHODS).index(run["key"]["method"]))
            _group(axes, own, place)
        axes.axhline(1, color="0.4", linestyle=":", linewidth=1)
        axes.set_ylabel("mean step / SGD-m's")
        title = "first-order methods" if first is None else f"T1 = {first}, T2 = {second}"
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(sets)), sets)
        axes.grid(True, axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    shown = [m for m in METHODS if any(run["key"]["method"] == m != "sgd" for run in runs)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=METHODS[m].colour) for m in shown]  # type: ignore[attr-defined]
    panels[0, 0].legend(handles, [LABELS[m] for m in shown], frameon=False, fontsize=8)
    figure.suptitle(
        "Whole training steps; lighter: statistics, lightest: inverses; black: the authors",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _group(axes: Axes, runs: Runs, place: int) -> None:
    width = 0.84 / max(len(runs), 1)
    for number, run in enumerate(runs):
        at = place + (number - (len(runs) - 1) / 2) * width
        colour = METHODS[run["key"]["method"]].colour
        if "left_out" in run:
            axes.plot([at], [run["ratio_at_least"]], marker="^", color=colour, markersize=5)
            continue
        bottom = 0.0
        for part, alpha in (("plain", 1.0), ("statistics", 0.6), ("inverses", 0.3)):
            height = run["components"][part] / run["sgd_seconds"]
            axes.bar(at, height, width * 0.92, bottom=bottom, color=colour, alpha=alpha)
            bottom += height
        ratio = authors_ratio(run["key"])
        if ratio is not None:
            axes.hlines(ratio, at - width / 2, at + width / 2, color="black", linewidth=2)
