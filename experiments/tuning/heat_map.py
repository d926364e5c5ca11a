"""Heat maps: a score over two settings, one panel a method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy  # noqa: E402
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from experiments.runs.methods import LABELS  # noqa: E402
from experiments.tuning.grids import Grid  # noqa: E402
from experiments.tuning.recorded_search import Tried  # noqa: E402


def plot_search(
    entries: Sequence[Tried],
    grids: Mapping[str, Grid],
    criterion: str,
    path: str | Path,
    title: str,
) -> None:
    """Draw each method's mean score over the first two axes of its grid, and write it as a PNG.

    Over further axes the best counts. A crossed cell diverged from some seed, an empty one was not
    tried; the frame is around the best.

    Args:
        entries: what was tried.
        grids: the methods to draw, with the values that they were tried with.
        criterion: what was minimised.
        path: the PNG to write.
        title: what stands above the panels.
    """
    figure, panels = pyplot.subplots(
        1, len(grids), figsize=(3.6 * len(grids) + 0.6, 4.2), squeeze=False, layout="constrained"
    )
    for axes, (optimizer, grid) in zip(panels[0], grids.items(), strict=True):
        own = [entry for entry in entries if entry.settings.optimizer == optimizer]
        names = [name for name, values in grid.items() if len(values) > 1][:2] or ["lr"]
        down = list(grid[names[0]])
        across = list(grid[names[1]]) if len(names) > 1 else [None]
        scores = numpy.full((len(down), len(across)), math.nan)
        for entry in own:
            row = down.index(getattr(entry.settings, names[0]))
            column = across.index(getattr(entry.settings, names[1])) if len(names) > 1 else 0
            score = math.inf if entry.mean is None else entry.mean
            scores[row, column] = numpy.fmin(scores[row, column], score)
        draw(axes, scores, down, across)
        axes.set_title(LABELS[optimizer], fontsize=10)
        axes.set_ylabel(names[0].replace("_", " "))
        axes.set_xlabel(names[1].replace("_", " ") if len(names) > 1 else "")
    figure.suptitle(f"{title}: {criterion.replace('_', ' ')}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw(axes: Axes, scores: Any, down: Sequence[Any], across: Sequence[Any]) -> None:
    """One panel.

    Args:
        axes: where.
        scores: (rows, columns); NaN where there is none, infinite where a run diverged.
        down: the rows' values.
        across: the columns'; [None] where there is one column without a value.
    """
    finite = scores[numpy.isfinite(scores)]
    if finite.size:
        # Bad scores differ by decades and nobody cares by how many.
        low = finite.min()
        high = max(numpy.quantile(finite, 0.75), low + 1e-12)
        shown = numpy.where(numpy.isfinite(scores), scores, math.nan)
        axes.imshow(
            numpy.clip(shown, low, high), cmap="viridis_r", aspect="auto", vmin=low, vmax=high
        )
        best = numpy.unravel_index(numpy.nanargmin(shown), shown.shape)
        axes.add_patch(
            pyplot.Rectangle(  # type: ignore[attr-defined]
                (best[1] - 0.5, best[0] - 0.5), 1, 1, fill=False, edgecolor="#D55E00", linewidth=2
            )
        )
    else:
        axes.imshow(numpy.full(scores.shape, math.nan), aspect="auto")
    for row in range(scores.shape[0]):
        for column in range(scores.shape[1]):
            score = scores[row, column]
            if math.isnan(score):
                continue
            # The worst are drawn darkest; where a run diverged the cell is white.
            dark = math.isfinite(score) and score > (low + high) / 2
            axes.text(
                column,
                row,
                "×" if math.isinf(score) else f"{score:.3g}",
                ha="center",
                va="center",
                fontsize=7 if len(down) < 20 else 4,
                color="white" if dark else "0.1",
            )
    axes.set_yticks(range(len(down)), [f"{value:g}" for value in down], fontsize=7)
    labels = ["" if value is None else f"{value:g}" for value in across]
    axes.set_xticks(range(len(across)), labels, fontsize=7)
