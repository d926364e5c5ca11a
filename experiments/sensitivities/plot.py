"""Heat maps of regrets: learning rates against every axis, one row of panels a form."""

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
from matplotlib.cm import ScalarMappable  # noqa: E402
from matplotlib.colors import PowerNorm  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402

from experiments.sensitivities.measures import (  # noqa: E402
    Surface,
    best_rate,
    refreshes_text,
    regret,
)
from experiments.sensitivities.plan import AXES, BASES, CONTENDERS, axis_points  # noqa: E402

# Regrets above it look alike: nobody cares by how much. The root spreads the small ones.
_NORM = PowerNorm(0.5, vmin=0.0, vmax=1.0, clip=True)
_COLOURS = "viridis_r"


def plot_sensitivity(
    surfaces: Mapping[str, Surface],
    floors: Mapping[str, float | None],
    refreshes: Mapping[str, Sequence[int]],
    path: Path,
    title: str,
) -> None:
    """Draw every form's regrets on every axis of every problem, and write them as a PNG.

    A cell is the loss less the best of its column, as a fraction of the best's excess over the
    floor, or in nats where there is no floor. A grey, crossed one diverged from some seed. The
    frame is around the rate that was best at the base point.

    Args:
        surfaces: losses by form.
        floors: of every problem; None where none is known.
        refreshes: of every problem, how often factors are made at each T2.
        path: the PNG to write.
        title: what stands above the panels.
    """
    columns = [(problem, axis) for problem in floors for axis in AXES]
    figure, panels = pyplot.subplots(
        len(surfaces),
        len(columns),
        figsize=(1.75 * len(columns) + 1.2, 2.6 * len(surfaces) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for row, (form, losses) in zip(panels, surfaces.items(), strict=True):
        for axes, (problem, axis) in zip(row, columns, strict=True):
            _panel(axes, losses, problem, axis, floors[problem])
            if axis == "inverse_interval":
                axes.set_xlabel(refreshes_text(refreshes[problem]), fontsize=6)
        row[0].set_ylabel(f"{CONTENDERS[form].label}\nlearning rate", fontsize=8)
    for axes, (problem, axis) in zip(panels[0], columns, strict=True):
        axes.set_title(f"{BASES[problem].label}\n{AXES[axis]}", fontsize=8)
    units = [
        f"{BASES[problem].label}: {'nats' if floor is None else 'of the best excess loss'}"
        for problem, floor in floors.items()
    ]
    bar = figure.colorbar(
        ScalarMappable(_NORM, _COLOURS), ax=panels, fraction=0.015, pad=0.01, extend="max"
    )
    bar.set_label(f"regret ({'; '.join(units)})", fontsize=8)
    bar.set_ticks([0, 0.05, 0.2, 0.5, 1], labels=["0", "0.05", "0.2", "0.5", "1"], fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axes: Axes, losses: Surface, problem: str, axis: str, floor: float | None) -> None:
    columns = [losses[point] for point in axis_points(problem, axis)]
    rates = sorted(columns[0], reverse=True)
    regrets: Any = numpy.array([[regret(column, lr, floor) for column in columns] for lr in rates])
    axes.set_facecolor("0.85")
    shown = numpy.where(numpy.isfinite(regrets), regrets, math.nan)
    axes.imshow(shown, cmap=_COLOURS, norm=_NORM, aspect="auto")
    for (row, column), value in numpy.ndenumerate(regrets):
        text = f"{value:.2f}" if value < 10 else f"{value:.0f}" if value < 100 else "> 99"
        axes.text(
            column,
            row,
            text if math.isfinite(value) else "×",
            ha="center",
            va="center",
            fontsize=6,
            color="white" if value > 0.4 and math.isfinite(value) else "0.1",
        )
    tuned = best_rate(losses[BASES[problem].point])
    if tuned is not None:
        axes.add_patch(
            Rectangle(
                (-0.5, rates.index(tuned) - 0.5),
                len(columns),
                1,
                fill=False,
                edgecolor="#D55E00",
                linewidth=2,
                clip_on=False,
            )
        )
    values = BASES[problem].values[axis]
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values], fontsize=7)
    axes.set_yticks(range(len(rates)), [f"{lr:g}" for lr in rates], fontsize=6)
