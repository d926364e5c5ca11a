"""The pictures of the kernel benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import NullFormatter, ScalarFormatter  # noqa: E402

from bench.kernels.targets import ratio, target  # noqa: E402
from bench.kernels.timing import OURS  # noqa: E402

# Okabe and Ito's palette: told apart in grey and by colour-blind readers too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def plot_ratios(benchmarks: Sequence[dict[str, Any]], path: Path) -> None:
    """Every operator's ratios over its baselines, one panel an operator.

    A black bar marks the ratio to reach, the dotted line a ratio of 1.
    """
    ops = [op for op in dict.fromkeys(b["op"] for b in benchmarks) if op != "TNT.step"]
    figure, panels = pyplot.subplots(
        1, len(ops), figsize=(4 * len(ops), 4), layout="constrained", squeeze=False
    )
    for op, axes in zip(ops, panels[0], strict=True):
        own = [b for b in benchmarks if b["op"] == op]
        baselines = [name for name in own[0]["candidates"] if name != OURS]
        width = 0.8 / len(baselines)
        for j, baseline in enumerate(baselines):
            at = [i + (j - (len(baselines) - 1) / 2) * width for i in range(len(own))]
            heights = [ratio(b, baseline) for b in own]
            axes.bar(at, heights, width * 0.95, color=_COLOURS[j], label=baseline)
            for x, b in zip(at, own, strict=True):
                wanted = target(op, b["kind"], baseline, b["set"])
                if wanted is not None:
                    axes.hlines(wanted, x - width / 2, x + width / 2, color="black", linewidth=2)
        axes.axhline(1, color="0.4", linestyle=":", linewidth=1)
        axes.set_xticks(range(len(own)), [b["set"] for b in own], rotation=30, ha="right")
        axes.set_title(op, fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        _plain(axes)
    panels[0][0].set_ylabel("baseline's median time / ours")
    _save(figure, path)


def plot_steps(benchmarks: Sequence[dict[str, Any]], path: Path) -> None:
    """The time of an optimizer's step, one panel a parameter set."""
    steps = [b for b in benchmarks if b["op"] == "TNT.step"]
    sets = list(dict.fromkeys(b["set"] for b in steps))
    if not sets:
        return
    figure, panels = pyplot.subplots(
        1, len(sets), figsize=(5 * len(sets), 4.4), layout="constrained", squeeze=False
    )
    for name, axes in zip(sets, panels[0], strict=True):
        own = [b for b in steps if b["set"] == name]
        candidates = list(own[0]["candidates"])
        width = 0.8 / len(candidates)
        for j, candidate in enumerate(candidates):
            at = [i + (j - (len(candidates) - 1) / 2) * width for i in range(len(own))]
            heights = [b["candidates"][candidate]["median"] * 1e3 for b in own]
            label = "TNT" if candidate == OURS else candidate
            axes.bar(at, heights, width * 0.95, color=_COLOURS[j], label=label)
        labels = [b["kind"].replace(" and ", " and\n") for b in own]
        axes.set_xticks(range(len(own)), labels, fontsize=8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.set_title(name, fontsize=10)
        _plain(axes)
    panels[0][0].set_ylabel("one step [ms]")
    panels[0][0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def plot_complexity(record: dict[str, Any], path: Path) -> None:
    """Time and memory over every variable."""
    time, memory = record["time"], record["memory"]
    over_d = [r for r in time if r["variable"] == "d"]
    square = [r for r in over_d if "k = 2" in r["part"]]
    panels = [
        ("operators, k = 2", [r for r in square if "step" not in r["part"]], "d"),
        ("whole steps, k = 2", [r for r in square if "step" in r["part"]], "d"),
        ("operators, k = 3", [r for r in over_d if "k = 3" in r["part"]], "d"),
        ("d = 32, k = 1 to 5", [r for r in time if r["variable"] == "k"], "k d^(k+1)"),
        ("the second backward", [r for r in time if r["variable"] == "m"], "m"),
        ("beyond a bare step", [r for r in time if r["variable"][0] == "T"], "T1 or T2"),
        ("state, k = 2", [r for r in memory if r["variable"] == "d"], "d"),
        ("state, k = 1 to 5", [r for r in memory if r["abscissa"] == "k"], "k"),
    ]
    figure, grid = pyplot.subplots(2, 4, figsize=(19, 9), layout="constrained")
    for (title, records, label), axes in zip(panels, grid.flat, strict=True):
        for j, entry in enumerate(records):
            _sweep(axes, entry, j)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(label)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("bytes" if title.startswith("state") else "seconds")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend
        axes.legend(frameon=False, fontsize=7, loc="upper left")
        _plain(axes)
    figure.suptitle(
        "Fitted exponents, predicted ones in brackets. Lines have the predicted slope; hollow "
        "points are not fitted (launch-bound, below the range, lost in noise).",
        fontsize=10,
    )
    _save(figure, path)


def _sweep(axes: Axes, entry: dict[str, Any], number: int) -> None:
    colour, marker, xs = _COLOURS[number], "osD^vP*"[number], entry["xs"]
    if "counted_bytes" in entry:
        ys, used = entry["counted_bytes"], [True] * len(xs)
    else:
        floor = entry["bare_step_seconds"] or 0.0
        ys = [t - floor for t in entry["seconds"]]
        used = [status == "fitted" for status in entry["status"]]
    name = f"{entry['method']} {entry['part']}" if "status" in entry else entry["method"]
    fitted = "" if entry["fitted"] is None else f": {entry['fitted']:.2f}"
    label = f"{name}{fitted} ({entry['predicted']:g})"
    for keep, face in ((True, colour), (False, "none")):
        points = [(x, y) for x, y, u in zip(xs, ys, used, strict=True) if u is keep and y > 0]
        if points:
            at, heights = zip(*points, strict=True)
            axes.scatter(at, heights, s=20, marker=marker, edgecolors=colour, facecolors=face)
    anchor = max((i for i, u in enumerate(used) if u and ys[i] > 0), default=None)
    if anchor is None:
        axes.plot([], [], color=colour, label=label)
        return
    shown = [x for x, u in zip(xs, used, strict=True) if u]
    predicted = [ys[anchor] * (x / xs[anchor]) ** entry["predicted"] for x in shown]
    axes.plot(shown, predicted, color=colour, linewidth=1, label=label)


def _plain(axes: Axes) -> None:
    axes.grid(True, axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
