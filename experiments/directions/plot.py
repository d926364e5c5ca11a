"""The picture of Figure 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from experiments.directions.followers import COMPARED  # noqa: E402

# A layer's similarity at each iteration; None: a direction was zero.
Layer = Sequence[float | None]
# A run's, for each of the layers.
Series = Sequence[Layer]


def plot_similarities(choices: Mapping[str, Mapping[str, Sequence[Series]]], path: Path) -> None:
    """Draw one panel a layer: the mean over the runs, and a band of one standard deviation.

    Args:
        choices: a row of panels each; for each method its runs.
        path: the PNG to write.
    """
    shown = next(iter(next(iter(choices.values())).values()))
    layers = len(shown[0])
    figure, panels = pyplot.subplots(
        len(choices),
        layers,
        figsize=(3.6 * layers, 3.2 * len(choices) + 0.6),
        sharex=True,
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for row, (choice, series) in zip(panels, choices.items(), strict=True):
        for layer, axes in enumerate(row):
            for name, runs in series.items():
                _draw(axes, name, [run[layer] for run in runs])
            axes.grid(True, color="0.9", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(f"cosine similarity,\n{choice}")
    for layer, (top, bottom) in enumerate(zip(panels[0], panels[-1], strict=True)):
        top.set_title(f"layer {layer + 2}", fontsize=10)
        bottom.set_xlabel("iteration")
    panels[0][0].set_ylim(top=1.0)  # at the end: a limit ends the shared axis' autoscaling
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False
    )
    band = f", mean and standard deviation of {len(shown)} runs" if len(shown) > 1 else ""
    figure.suptitle(f"Directions along block Fisher's run{band}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw(axes: Axes, name: str, runs: Sequence[Layer]) -> None:
    rows = [[math.nan if v is None else v for v in run] for run in runs]
    points = [list(point) for point in zip(*rows, strict=True)]
    mean = [statistics.fmean(point) for point in points]
    spread = [
        statistics.stdev(p) if len(p) > 1 and math.isfinite(m) else 0.0
        for p, m in zip(points, mean, strict=True)
    ]
    steps = range(1, len(mean) + 1)
    colour = COMPARED[name].colour
    axes.plot(steps, mean, color=colour, linewidth=1.6, label=COMPARED[name].label)
    low = [m - s for m, s in zip(mean, spread, strict=True)]
    high = [m + s for m, s in zip(mean, spread, strict=True)]
    axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
