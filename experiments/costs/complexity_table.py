"""The page and the picture of the methods' complexity. Pure functions of the recorded runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import NullFormatter  # noqa: E402

from bench.kernels.complexity_report import WITHIN, agreement, left_out  # noqa: E402
from tools.measuring.fits import LAUNCH_FACTOR, LEAST_EXCESS, LEAST_POINTS  # noqa: E402
from tools.measuring.tables import disturbance, milliseconds, span, table  # noqa: E402

Runs = Sequence[Mapping[str, Any]]

# As in the paper, d_i written d; KFAC's, which the paper leaves to words, for a linear layer.
TABLE_2 = {
    "TNT": ("sum d²", "(m/T1 + sum d) prod d + sum d³/T2"),
    "Shampoo": ("sum d²", "(sum d) prod d + sum d³/T2 (its Newton roots, some hundred d³)"),
    "Shampoo, eigenvalues": ("sum d²", "(sum d) prod d + sum d³/T2"),
    "Adam": ("prod d", "prod d"),
    "Newton-like": ("prod d²", "prod d² + prod d³/T2 (left open in the paper)"),
    "KFAC": ("sum d²", "m (prod d + sum d²)/T1 + (sum d) prod d + sum d³/T2"),
}
_COLOURS = {
    "TNT": "#0072B2",
    "Shampoo": "#E69F00",
    "Shampoo, eigenvalues": "#D55E00",
    "Adam": "#009E73",
    "Newton-like": "#000000",
    "KFAC": "#CC79A7",
}
_MARKERS = "osD^v"


def complexity_page(runs: Runs) -> str:
    """Table 2 with what was measured, then every sweep."""
    memory = [run for run in runs if run["key"]["of"] == "memory"]
    time = [run for run in runs if run["key"]["of"] == "time"]
    busy = {
        name: max((run[name] or 0.0 for run in time), default=0.0)
        for name in ("busy_before", "busy_after")
    }
    lines = [
        "# Table 2 for whole methods",
        "",
        "Memory and time per iteration beyond SGD with momentum, on one tensor of k modes of size "
        "d and m examples: whole training steps, forward and backward included, less those of "
        "SGD-m. An exponent is the slope of the logarithms, the predicted one in brackets; over T1 "
        "and T2 it is of what is beyond the method's step with nothing due."
        f"{disturbance(busy)}",
        "",
        *table(
            ["", "memory in Table 2", "counted, over d", "time in Table 2", "measured"],
            [_row(method, memory, time) for method in TABLE_2],
        ),
        "## Memory",
        "",
        "Bytes of the state in float32, without the momentum that SGD-m has too, and single "
        "numbers left out.",
        "",
        *table(
            ["", "modes", "term", "predicted", "counted", "", "at d", "bytes", "by the formula"],
            [_memory_row(run) for run in memory],
        ),
        "## Time",
        "",
        f"The least of several. An exponent agrees within {WITHIN}. Not fitted: *launch-bound*, "
        f"over d: below {LAUNCH_FACTOR:g} times the smallest size's; *below the fitted range*: "
        "smaller than the first value set beforehand; *lost in noise*: less than "
        f"{LEAST_EXCESS:g} of what it is beyond. No exponent from fewer than {LEAST_POINTS} "
        "points.",
        "",
        *table(
            ["", "over", "", "term", "predicted", "fitted", "", "range (points)", "not fitted"]
            + ["slowest point, ms", "of it beyond"],
            [_time_row(run) for run in time],
        ),
    ]
    return "\n".join(lines)


def _row(method: str, memory: Runs, time: Runs) -> list[str]:
    counted = [
        f"{run['key']['part']}: {run['fitted']:.2f} ({run['predicted']:g})"
        for run in memory
        if run["key"]["method"] == method
    ]
    measured = [
        f"{run['key']['over']}{_modes(run)}: {_number(run['fitted'])} ({run['predicted']:g})"
        for run in time
        if run["key"]["method"] == method
    ]
    return [method, TABLE_2[method][0], "; ".join(counted), TABLE_2[method][1], "; ".join(measured)]


def _modes(run: Mapping[str, Any]) -> str:
    """Over d the number of modes, and what was due."""
    if run["key"]["over"] != "d":
        return ""
    sizes, _, due = run["key"]["part"].partition("; ")
    return f", {sizes.partition(',')[0]}, {due.removesuffix(' at every step')}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _memory_row(run: Mapping[str, Any]) -> list[str]:
    return [
        run["key"]["method"],
        run["key"]["part"],
        run["term"],
        f"{run['predicted']:g}",
        _number(run["fitted"]),
        agreement(run["predicted"], run["fitted"]),
        str(run["values"][-1]),
        str(run["bytes"][-1]),
        "equal" if run["equal"] else f"**{run['formula_bytes'][-1]}**",
    ]


def _time_row(run: Mapping[str, Any]) -> list[str]:
    slowest = max(range(len(run["seconds"])), key=lambda i: run["seconds"][i])
    return [
        run["key"]["method"],
        run["key"]["over"],
        run["key"]["part"],
        run["term"],
        f"{run['predicted']:g}",
        _number(run["fitted"]),
        agreement(run["predicted"], run["fitted"]),
        span(run["fitted_values"]),
        left_out(dict(run)),
        milliseconds(run["seconds"][slowest]),
        milliseconds(run["excess_seconds"][slowest]),
    ]


def plot_complexity(runs: Runs, path: Path) -> None:
    """Time over every variable, and the state over d at each number of modes."""
    time = [run for run in runs if run["key"]["of"] == "time"]
    memory = [run for run in runs if run["key"]["of"] == "memory"]
    panels: list[tuple[str, list[Mapping[str, Any]]]] = [
        ("time over d", [r for r in time if r["key"]["over"] == "d"]),
        ("time over m", [r for r in time if r["key"]["over"] == "m"]),
        ("time over T1 or T2", [r for r in time if r["key"]["over"][0] == "T"]),
    ]
    panels += [
        (f"state over d, k = {k}", [r for r in memory if r["key"]["part"] == f"k = {k}"])
        for k in (1, 2, 3)
    ]
    figure, grid = pyplot.subplots(2, 3, figsize=(16, 10), layout="constrained")
    for (title, own), axes in zip(panels, grid.flat, strict=True):
        for run in own:
            _sweep(axes, run, own)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(title.partition("over ")[2].partition(",")[0])
        axes.set_ylabel("seconds beyond" if title.startswith("time") else "bytes beyond SGD-m")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** (0.06 * len(own) + 0.1))  # room for the legend
        if own:
            axes.legend(frameon=False, fontsize=7, loc="upper left")
        axes.grid(True, axis="y", color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "Fitted exponents, predicted ones in brackets. Lines have the predicted slope; hollow "
        "points are not fitted.",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _sweep(axes: Axes, run: Mapping[str, Any], panel: Runs) -> None:
    method = run["key"]["method"]
    same = [other for other in panel if other["key"]["method"] == method]
    colour, marker = _COLOURS[method], _MARKERS[same.index(run) % len(_MARKERS)]
    xs = run["values"]
    if run["key"]["of"] == "memory":
        ys, used = run["bytes"], [True] * len(xs)
        label = method
    else:
        ys = run["excess_seconds"]
        used = [status == "fitted" for status in run["status"]]
        label = f"{method}{_modes(run)}" + (
            f", {run['key']['over']}" if run["key"]["over"][0] == "T" else ""
        )
    label += f": {_number(run['fitted'])} ({run['predicted']:g})"
    axes.plot([], [], marker=marker, color=colour, linewidth=1, markersize=4, label=label)
    for keep, face in ((True, colour), (False, "none")):
        points = [(x, y) for x, y, u in zip(xs, ys, used, strict=True) if u is keep and y > 0]
        if points:
            at, heights = zip(*points, strict=True)
            axes.scatter(at, heights, s=20, marker=marker, edgecolors=colour, facecolors=face)
    shown = [(x, y) for x, y, u in zip(xs, ys, used, strict=True) if u and y > 0]
    if shown:
        x0, y0 = shown[-1]
        line = [y0 * (x / x0) ** run["predicted"] for x, _ in shown]
        axes.plot([x for x, _ in shown], line, color=colour, linewidth=1)
