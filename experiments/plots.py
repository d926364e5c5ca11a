"""The pictures' common parts, and two pictures of training runs: plain, and the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator  # noqa: E402
from PIL import Image  # noqa: E402

from experiments.methods import METHODS, variant, variant_labels  # noqa: E402
from experiments.training import Epoch, Run  # noqa: E402

# The lines of several variants of one method.
DASHES = ("-", "--", "-.", (0, (1, 1.5)), (0, (5, 1, 1, 1, 1, 1)))


ENTROPY = "entropy of the data"  # the lower bound of an autoencoder's loss


def save(figure: Any, path: Path, title: str) -> None:
    """Write a figure as a PNG and close it."""
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=220)
    pyplot.close(figure)
    with Image.open(path) as picture:  # 256 colours are a third of the bytes
        picture.convert("RGB").quantize(256).save(path, optimize=True)


def plain_axes(axes: Axes) -> None:
    """A light grid, no frame at the top and on the right."""
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def band(
    axes: Axes, x: Sequence[float], columns: Sequence[Sequence[float]], **style: Any
) -> list[float]:
    """Draw the mean of each column at its x, and a band of one standard deviation; return means."""
    values = numpy.asarray(columns, dtype=float)
    means = values.mean(1)
    spreads = values.std(1, ddof=1) if values.shape[1] > 1 else 0.0
    axes.plot(x, means, **style)
    low, high = means - spreads, means + spreads
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    return list(means)


@dataclass(frozen=True)
class Curve:
    """One method's losses.

    Attributes:
        label: the method and its settings.
        colour: of the curve.
        steps: at each point.
        seconds: at each point.
        columns: at each point the losses of all seeds.
    """

    label: str
    colour: str
    steps: Sequence[float]
    seconds: Sequence[float]
    columns: Sequence[Sequence[float]]

    @property
    def last(self) -> float:
        """The mean of the last losses."""
        return statistics.fmean(self.columns[-1])


def plot_curves(
    curves: Sequence[Curve],
    path: Path,
    title: str,
    loss_label: str,
    goals: Sequence[Curve] = (),
    floor: float | None = None,
    *,
    tall: bool = False,
) -> None:
    """Draw losses against steps and seconds: means over the seeds and standard deviations.

    Args:
        curves: the last one is drawn on top.
        path: the PNG to write.
        title: above the panels.
        loss_label: the unit of the loss.
        goals: curves whose last losses are dotted lines; dots mark where others reach them.
        floor: the loss's lower bound, if known; the axis of the losses is then logarithmic.
        tall: one panel above the other, for phones.
    """
    shape, size = ((2, 1), (5.5, 8)) if tall else ((1, 2), (11, 4.4))
    figure, panels = pyplot.subplots(*shape, figsize=size, sharey=True, layout="constrained")
    for axes, name in zip(panels, ("steps", "seconds"), strict=True):
        for curve in curves:
            x: Sequence[float] = getattr(curve, name)
            means = band(axes, x, curve.columns, color=curve.colour, linewidth=2.0)
            for goal in goals:
                reached = next((i for i, mean in enumerate(means) if mean <= goal.last), None)
                if curve not in goals and reached:  # not None, nor the first point
                    share = (means[reached - 1] - goal.last) / (means[reached - 1] - means[reached])
                    place = x[reached - 1] + share * (x[reached] - x[reached - 1])
                    axes.plot(place, goal.last, "o", color=curve.colour)
        for goal in goals:
            axes.axhline(goal.last, color=goal.colour, linestyle=":", linewidth=1)
        if floor is not None:
            loss_axis(axes, floor)
        axes.set_xlim(left=0)
        plain_axes(axes)
    panels[0].set_ylabel(loss_label)
    panels[0].set_xlabel("steps")
    panels[1].set_xlabel("training time [s]")
    marks = [(curve.last, curve.label, curve.colour) for curve in curves]
    _label_ends(panels[0], marks if floor is None else [*marks, (floor, ENTROPY, "0.4")])
    save(figure, path, title)


LINE = 0.055  # of an axis' height, for a line of text


def _label_ends(axes: Axes, marks: Sequence[tuple[float, str, str]]) -> None:
    """Write labels right of an axis, each near its value, in its colour."""
    to_axes = axes.transData + axes.transAxes.inverted()
    left = axes.get_xlim()[0]
    places = [float(to_axes.transform((left, value))[1]) for value, _, _ in marks]
    for (_, label, colour), place in zip(marks, spread(places, LINE), strict=True):
        axes.text(
            1.01, place, label, color=colour, fontsize=9, va="center", transform=axes.transAxes
        )


def spread(places: Sequence[float], distance: float) -> list[float]:
    """The places, moved apart so that neighbours have at least this distance.

    Places that are too close form a row around their mean.

    >>> spread([0.5, 0.0, 0.5], 0.2)
    [0.4, 0.0, 0.6]
    """
    rows: list[list[int]] = []
    middles: list[float] = []
    for index in sorted(range(len(places)), key=places.__getitem__):
        row, middle = [index], places[index]
        while rows and middle - middles[-1] < (len(rows[-1]) + len(row)) / 2 * distance - 1e-9:
            row, _ = rows.pop() + row, middles.pop()
            middle = statistics.fmean(places[i] for i in row)
        rows.append(row)
        middles.append(middle)
    moved = list(places)
    for row, middle in zip(rows, middles, strict=True):
        for number, index in enumerate(row):
            moved[index] = middle + (number - (len(row) - 1) / 2) * distance
    return moved


def grouped(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs that differ only in the seed, with a label for each group."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault(variant(run.settings), []).append(run)
    members = list(groups.values())
    return list(zip(variant_labels([group[0].settings for group in members]), members, strict=True))


def plot_runs(
    runs: Sequence[Run],
    path: Path,
    title: str,
    loss_label: str = "nats per image",
    metric: str | None = None,
) -> None:
    """Draw the smoothed loss against epochs and against seconds.

    Lines are means over the seeds, bands a standard deviation to both sides. The curve against
    seconds starts at the end of the warm start. A dotted line is the loss's lower bound, if known.

    Args:
        runs: on one problem.
        path: the PNG to write.
        title: above the panels.
        loss_label: the unit of the loss.
        metric: a metric of the epochs for a second row of panels.
    """
    rows = 1 if metric is None else 2
    figure, panels = pyplot.subplots(
        rows, 2, figsize=(11, 4.4 * rows), sharey="row", squeeze=False, layout="constrained"
    )
    drawn: dict[str, int] = {}
    for label, members in grouped(runs):
        method = members[0].settings.optimizer
        number = drawn.setdefault(method, 0)
        drawn[method] += 1
        dashes = DASHES[number % len(DASHES)]
        style = {"color": METHODS[method].colour, "linestyle": dashes, "linewidth": 1.8}
        finished = [run for run in members if run.diverged_at_step is None]
        lost = len(members) - len(finished)
        if lost:
            label += f" ({lost} of {len(members)} diverged)"
        _curves(panels[0], finished or members, label, style, lambda e: e.smoothed_loss, start=True)
        if metric is not None and finished:
            _curves(panels[1], finished, label, style, lambda e: e.metrics[metric], start=False)
    panels[0, 0].set_ylabel(f"smoothed minibatch loss\n[{loss_label}]")
    for axes in panels[0]:
        loss_axis(axes, runs[0].loss_floor)
    if metric is not None:
        panels[1, 0].set_ylabel(metric.replace("_", " "))
    for by_epoch, by_second in panels:
        by_epoch.set_xlabel("epoch")
        by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        by_second.set_xlabel("training time [s], warm start included")
        for axes in (by_epoch, by_second):
            axes.set_xlim(left=0)
            plain_axes(axes)
    lines, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    save(figure, path, title)


def _curves(
    panels: Sequence[Axes],
    runs: Sequence[Run],
    label: str,
    style: dict[str, Any],
    value: Callable[[Epoch], float],
    *,
    start: bool,
) -> None:
    """One method's mean and spread, against epochs and against seconds."""
    finite = [[e for e in run.epochs if math.isfinite(e.smoothed_loss)] for run in runs]
    count = min(map(len, finite))
    columns = [[value(run.epochs[i]) for run in runs] for i in range(count)]
    epochs: list[float] = [epoch.number for epoch in runs[0].epochs[:count]]
    seconds = [statistics.mean(run.epochs[i].elapsed_seconds for run in runs) for i in range(count)]
    if start:
        columns = [[run.step_losses[0] for run in runs], *columns]
        warm = statistics.mean(run.warm_start_seconds or 0.0 for run in runs)
        epochs, seconds = [0, *epochs], [warm, *seconds]
    for axes, x in zip(panels, (epochs, seconds), strict=True):
        band(axes, x, columns, label=label, **style)


def loss_axis(axes: Axes, floor: float | None = None) -> None:
    """A logarithmic axis of losses, with a line at their lower bound, if known."""
    axes.set_yscale("log")
    # 15, 20, 30, not powers of 10: these losses span little more than a decade.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    if floor is not None:
        axes.axhline(floor, color="0.4", linestyle=":", linewidth=1, label=ENTROPY)
