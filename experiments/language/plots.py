"""Pictures of the language comparison: validation loss against tokens and against seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

from experiments.language.forms import FORMS, INTERVALS  # noqa: E402
from experiments.language.results import Row, Variant, curve_of, rows, variant_of  # noqa: E402
from experiments.runs.methods import METHODS  # noqa: E402

# Of the forms at other T1 and T2 than the usual ones.
_OTHER_DASHES = ((0, (1, 1.5)), (0, (5, 1, 1, 1)), (0, (5, 1, 1, 1, 1, 1)))
# No curve is worth showing above: characters drawn at their own frequencies cost 3.3 nats.
_TOP = 3.0


def plot_table(
    runs: Iterable[Mapping[str, Any]], path: Path, tokens_per_step: int, threads: int
) -> list[Path]:
    """One picture for every width and length of a record, beside it; returns their paths.

    Lines are means over the seeds, bands a standard deviation to both sides. Seconds are those of
    each kind of step, measured apart, by the run's schedule. Methods of which a run diverged are
    left out.

    Args:
        runs: the record's.
        path: the record's.
        tokens_per_step: characters that a step trains on.
        threads: with which the seconds were measured.
    """
    runs = list(runs)
    table = rows(runs, threads)
    curves: dict[Variant, list[Mapping[str, Any]]] = {}
    for run in runs:
        if run["key"]["stage"] == "final":
            curves.setdefault(variant_of(run["key"]), []).append(run)
    pictures = []
    for width, steps in dict.fromkeys((r.variant.width, r.variant.steps) for r in table):
        own = [r for r in table if (r.variant.width, r.variant.steps) == (width, steps)]
        picture = path.with_name(f"{path.stem}-width{width}-steps{steps}.png")
        title = f"Character transformer, width {width}, {steps} steps"
        _plot(own, curves, picture, title, tokens_per_step)
        pictures.append(picture)
    return pictures


def _plot(
    table: Sequence[Row],
    curves: Mapping[Variant, Sequence[Mapping[str, Any]]],
    picture: Path,
    title: str,
    tokens_per_step: int,
) -> None:
    figure, (by_token, by_second) = pyplot.subplots(
        1, 2, figsize=(11, 4.8), sharey=True, layout="constrained"
    )
    others = 0
    for row in table:
        if not all(math.isfinite(loss) for loss in row.final.values()):
            continue
        form = FORMS[row.variant.form]
        dashes: Any = form.dashes
        if row.variant.intervals != INTERVALS:
            dashes = _OTHER_DASHES[others % len(_OTHER_DASHES)]
            others += 1
        members = curves[row.variant]
        each = members[0]["steps_per_epoch"]
        columns = list(zip(*(curve_of(run) for run in members), strict=True))
        means = [statistics.mean(column) for column in columns]
        spreads = [statistics.stdev(c) if len(c) > 1 else 0.0 for c in columns]
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        steps = [each * number for number in range(1, len(means) + 1)]
        colour = METHODS[form.optimizer].colour
        places = [(by_token, [step * tokens_per_step / 1e6 for step in steps])]
        if row.clock is not None:
            places.append((by_second, [row.clock[step] for step in steps]))
        for axes, x in places:
            axes.plot(
                x, means, color=colour, linestyle=dashes, linewidth=1.6, label=row.variant.label
            )
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    by_token.set_ylabel("validation loss [nats per character]")
    by_token.set_xlabel("characters trained on [million]")
    by_second.set_xlabel("training time [s], from kinds of steps measured alone")
    for axes in (by_token, by_second):
        axes.set_xlim(left=0)
        if axes.get_ylim()[1] > _TOP:
            axes.set_ylim(top=_TOP)
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    by_token.legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=11)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
