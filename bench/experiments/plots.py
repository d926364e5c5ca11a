"""The picture of one or several training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter  # noqa: E402

from bench.experiments.training import Run  # noqa: E402

# Okabe and Ito's palette: told apart in grey and by colour-blind readers too.
_COLOURS = {"tnt": "#0072B2", "tnt-ef": "#56B4E9", "sgd": "#D55E00", "adam": "#009E73"}


def plot_runs(runs: Sequence[Run], path: str | Path, title: str) -> None:
    """Draw the smoothed loss against epochs and against seconds, and write it as a PNG.

    The curve against seconds starts where the warm start ends. The loss axis is logarithmic; the
    dotted line is the least loss that any reconstruction of this data has.

    Args:
        runs: runs on one problem.
        path: the PNG to write.
        title: what stands above both panels.
    """
    figure, (by_epoch, by_second) = pyplot.subplots(
        1, 2, figsize=(11, 4.4), sharey=True, layout="constrained"
    )
    for run in runs:
        finite = [e for e in run.epochs if run.diverged_at_step is None or e is not run.epochs[-1]]
        losses = [run.step_losses[0], *(epoch.smoothed_loss for epoch in finite)]
        warm = run.warm_start_seconds or 0.0
        label = run.label + (" (diverged)" if run.diverged_at_step is not None else "")
        style = {
            "color": _COLOURS[run.settings.optimizer],
            "linewidth": 1.8,
            "marker": "o" if run.settings.epochs <= 20 else "",
            "markersize": 3.5,
        }
        by_epoch.plot([0, *(epoch.number for epoch in finite)], losses, label=label, **style)
        seconds = [warm, *(epoch.elapsed_seconds for epoch in finite)]
        by_second.plot(seconds, losses, label=label, **style)
        if run.warm_start_seconds is not None:
            by_second.plot([0, warm], losses[:1] * 2, linestyle=":", **style | {"marker": ""})
    by_epoch.set_xlabel("epoch")
    by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    by_second.set_xlabel("training time [s], warm start included (dotted)")
    by_epoch.set_ylabel("smoothed minibatch loss [nats per image]")
    for axes in (by_epoch, by_second):
        _finish(axes, runs[0].loss_floor)
    by_epoch.legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _finish(axes: Axes, floor: float) -> None:
    axes.set_yscale("log")
    # 15, 20, 30 and not powers of 10: these losses span little more than a decade
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
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
    axes.set_xlim(left=0)
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
