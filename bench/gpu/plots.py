"""The pictures of a GPU's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import ScalarFormatter  # noqa: E402

from bench.gpu.record import Line, ratio  # noqa: E402
from bench.gpu.targets import TARGETS  # noqa: E402
from bench.kernels.timing import OURS  # noqa: E402

# Okabe and Ito's palette: told apart in grey and by colour-blind readers too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def plot_ratios(lines: Sequence[Line], path: Path) -> None:
    """Eager ratios over every baseline, one panel an operator; nothing where there are no lines.

    A black bar marks the ratio to reach, the dotted line a ratio of 1; TF32 is hatched.
    """
    ops = list(dict.fromkeys(line["op"] for line in lines))
    if not ops:
        return
    figure, panels = pyplot.subplots(
        1, len(ops), figsize=(4.5 * len(ops), 4), layout="constrained", squeeze=False
    )
    for op, axes in zip(ops, panels[0], strict=True):
        own = [line for line in lines if line["op"] == op]
        sets = list(dict.fromkeys(line["set"] for line in own))
        baselines = [name for name in own[0]["eager"] if name != OURS]
        settings = list(dict.fromkeys(line["precision"] for line in own))
        bars = [(name, setting) for name in baselines for setting in settings]
        width = 0.8 / len(bars)
        for line in own:
            for j, baseline in enumerate(baselines):
                bar = bars.index((baseline, line["precision"]))
                x = sets.index(line["set"]) + (bar - (len(bars) - 1) / 2) * width
                axes.bar(
                    x,
                    ratio(line, baseline, OURS) or 0.0,
                    width * 0.95,
                    color=_COLOURS[j],
                    hatch="//" if line["precision"] == "high" else None,
                    edgecolor="white",
                )
                wanted = TARGETS.get((op, "", baseline), {}).get(line["set"])
                if wanted is not None:
                    axes.hlines(wanted, x - width / 2, x + width / 2, color="black", linewidth=2)
        for j, baseline in enumerate(baselines):
            axes.bar(0, 0, color=_COLOURS[j], label=baseline)
        axes.axhline(1, color="0.4", linestyle=":", linewidth=1)
        axes.set_xticks(range(len(sets)), sets, rotation=30, ha="right")
        axes.set_title(op, fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        _logarithmic(axes)
    panels[0][0].set_ylabel("baseline's median time / ours, eager")
    _save(figure, path)


def plot_steps(lines: Sequence[Line], path: Path) -> None:
    """The time of an optimizer's step, one panel a set; nothing where there are no lines."""
    plain = [line for line in lines if line["precision"] == "highest"]
    sets = list(dict.fromkeys(line["set"] for line in plain))
    if not sets:
        return
    figure, panels = pyplot.subplots(
        1, len(sets), figsize=(4.5 * len(sets), 4.4), layout="constrained", squeeze=False
    )
    for name, axes in zip(sets, panels[0], strict=True):
        own = [line for line in plain if line["set"] == name]
        candidates = list(own[0]["eager"])
        width = 0.8 / len(candidates)
        for j, candidate in enumerate(candidates):
            at = [i + (j - (len(candidates) - 1) / 2) * width for i in range(len(own))]
            heights = [line["eager"][candidate]["median"] * 1e3 for line in own]
            label = "TNT" if candidate == OURS else candidate
            axes.bar(at, heights, width * 0.95, color=_COLOURS[j], label=label)
        labels = [line["kind_of_step"].replace(" and ", " and\n") for line in own]
        axes.set_xticks(range(len(own)), labels, fontsize=7)
        axes.set_title(name, fontsize=10)
        _logarithmic(axes)
    panels[0][0].set_ylabel("one step [ms], float32")
    panels[0][0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.grid(True, axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
