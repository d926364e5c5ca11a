"""Pictures of training runs, in the paper's form: mean and spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter  # noqa: E402

from experiments.runs.methods import LABELS, METHODS  # noqa: E402
from experiments.runs.settings import variant, variant_labels  # noqa: E402
from experiments.runs.training import Epoch, Run  # noqa: E402

# Several variants of one method differ by their lines.
_DASHES = ("-", "--", "-.", (0, (1, 1.5)), (0, (5, 1, 1, 1, 1, 1)))


def grouped(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs of the same settings but for the seed, with a label for each group."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault(variant(run.settings), []).append(run)
    members = list(groups.values())
    labels = variant_labels([group[0].settings for group in members], LABELS)
    return list(zip(labels, members, strict=True))


def plot_runs(
    runs: Sequence[Run],
    path: str | Path,
    title: str,
    loss_label: str = "nats per image",
    metric: str | None = None,
) -> None:
    """Draw the smoothed loss against epochs and against seconds, and write it as a PNG.

    Lines are means over the seeds, bands a standard deviation to both sides. The curve against
    seconds starts where the warm start ends. The loss axis is logarithmic; a dotted line is the
    least loss that is possible on this data, where it is known.

    Args:
        runs: runs on one problem; those that differ in nothing but the seed make one curve.
        path: the PNG to write.
        title: what stands above the panels.
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
        style = {
            "color": METHODS[method].colour,
            "linestyle": _DASHES[number % len(_DASHES)],
            "linewidth": 1.8,
            "marker": "o" if members[0].settings.epochs <= 20 and number == 0 else "",
            "markersize": 3.5,
        }
        finished = [run for run in members if run.diverged_at_step is None]
        lost = len(members) - len(finished)
        if lost:
            label += f" ({lost} of {len(members)} diverged)" if len(members) > 1 else " (diverged)"
        _curves(panels[0], finished or members, label, style, lambda e: e.smoothed_loss, start=True)
        if metric is not None:
            _curves(panels[1], finished, label, style, lambda e: e.metrics[metric], start=False)
    panels[0, 0].set_ylabel(f"smoothed minibatch loss [{loss_label}]")
    for axes in panels[0]:
        _loss_axis(axes, runs[0].loss_floor)
    if metric is not None:
        panels[1, 0].set_ylabel(metric.replace("_", " "))
    for by_epoch, by_second in panels:
        by_epoch.set_xlabel("epoch")
        by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        by_second.set_xlabel("training time [s], warm start included (dotted)")
        for axes in (by_epoch, by_second):
            axes.set_xlim(left=0)
            axes.grid(True, color="0.9", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


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
    if not runs:
        return
    by_epoch, by_second = panels
    count = min(len(_finite(run)) for run in runs)
    columns = [[value(run.epochs[i]) for run in runs] for i in range(count)]
    epochs: list[float] = [run_epoch.number for run_epoch in runs[0].epochs[:count]]
    seconds = [statistics.mean(run.epochs[i].elapsed_seconds for run in runs) for i in range(count)]
    warm = [run.warm_start_seconds or 0.0 for run in runs]
    if start:
        columns = [[run.step_losses[0] for run in runs], *columns]
        epochs, seconds = [0, *epochs], [statistics.mean(warm), *seconds]
    means = [statistics.mean(column) for column in columns]
    spreads = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    for axes, x in ((by_epoch, epochs), (by_second, seconds)):
        axes.plot(x, means, label=label, **style)
        if len(runs) > 1:
            axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if start and any(warm):
        dotted = style | {"marker": "", "linestyle": ":"}
        by_second.plot([0, seconds[0]], [means[0]] * 2, **dotted)


def _finite(run: Run) -> list[Epoch]:
    """The epochs before a divergence."""
    return [epoch for epoch in run.epochs if math.isfinite(epoch.smoothed_loss)]


def _loss_axis(axes: Axes, floor: float | None) -> None:
    axes.set_yscale("log")
    # 15, 20, 30 and not powers of 10: these losses span little more than a decade
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    if floor is None:
        return
    axes.axhline(floor, color="0.4", linestyle=":", linewidth=1)
    axes.annotate(
        "entropy of the data",
        (1, floor),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color="0.4",
        fontsize=8,
    )
