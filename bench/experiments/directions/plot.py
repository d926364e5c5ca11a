"""The picture of Figure 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

from bench.experiments.directions.followers import COMPARED  # noqa: E402

# A run's similarity at each iteration (None: a direction was zero), for each of the layers.
Series = Sequence[Sequence[float | None]]


def plot_similarities(series: Mapping[str, Sequence[Series]], path: str | Path) -> None:
    """Draw one panel a layer: the mean over the runs, and a band of one standard deviation.

    Args:
        series: for each method its runs.
        path: the PNG to write.
    """
    layers = len(next(iter(series.values()))[0])
    figure, panels = pyplot.subplots(
        1, layers, figsize=(3.6 * layers, 3.8), sharey=True, layout="constrained", squeeze=False
    )
    for layer, axes in enumerate(panels[0]):
        for name, runs in series.items():
            rows = [[math.nan if v is None else v for v in run[layer]] for run in runs]
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
        axes.set_title(f"layer {layer + 2}", fontsize=10)
        axes.set_xlabel("iteration")
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylim(top=1.0)  # at the end: a limit ends the shared axis' autoscaling
    panels[0][0].set_ylabel("cosine similarity to block Fisher")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False
    )
    runs_shown = len(next(iter(series.values())))
    band = f", mean and standard deviation of {runs_shown} runs" if runs_shown > 1 else ""
    figure.suptitle(f"Directions along block Fisher's run{band}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
