"""The numbers of every kind of record as a table: a header and rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from experiments.directions.followers import COMPARED
from experiments.figures.document import Table
from experiments.figures.evidence import Record, has_paper_settings, is_tuned, trainings
from experiments.figures.judge_directions import similarities
from experiments.figures.judge_language import best_of_search, floors, language_rows, surfaces
from experiments.figures.judge_training import mean_text
from experiments.language.results import HEADER, cells
from experiments.problems.softmax_regression import Constants
from experiments.runs.methods import LABELS
from experiments.runs.plots import grouped
from experiments.runs.training import Run
from experiments.sensitivities.measures import summary_rows
from tools.measuring.fits import agreement
from tools.measuring.tables import milliseconds, span

TableOf = Callable[[Record], Table]


def training_table(record: Record) -> Table:
    """Every variant's settings, last loss, times and metrics, and whether it is judged."""
    runs, table = trainings(record), 5 if is_tuned(record) else 3
    metrics = list(runs[0].epochs[-1].metrics)
    header = ["", "learning rate", "damping", "μ", "β", "decay"]
    header += ["runs", "epochs", "loss at the end"]
    header += [name.replace("_", " ") for name in metrics]
    header += ["s/epoch", "warm start, s"]
    rows = []
    for label, members in grouped(runs):
        settings = members[0].settings
        warm = [run.warm_start_seconds for run in members if run.warm_start_seconds is not None]
        rows.append(
            [
                label if has_paper_settings(members[0], table) else f"{label}, not judged",
                f"{settings.lr:g}",
                _maybe(settings.damping),
                f"{settings.momentum:g}",
                _maybe(settings.stat_decay),
                f"{settings.weight_decay:g}",
                str(len(members)),
                str(settings.epochs),
                mean_text([run.final_loss for run in members]),
                *(_metric(members, name) for name in metrics),
                mean_text([run.seconds_per_epoch for run in members]),
                mean_text(warm) if warm else "-",
            ]
        )
    return Table(header, rows)


def cosine_table(record: Record) -> Table:
    """Every method's similarity in every layer: mean over iterations and seeds."""
    known = similarities(record)
    count = len(next(iter(known.values()))) if known else 0
    header = ["", *(f"layer {number}" for number in range(2, count + 2)), "mean"]
    rows = []
    for note, found in (
        ("", known),
        (", most similar damping, not judged", similarities(record, at_most_similar=True)),
    ):
        for method, layers in found.items():
            means = [statistics.fmean(layer.values()) for layer in layers if layer]
            row = [mean_text(list(layer.values()), 3) for layer in layers]
            label = f"{COMPARED[method].label}{note}"
            rows.append([label, *row, f"{statistics.fmean(means):.3f}"])
    return Table(header, rows)


def idealized_table(record: Record) -> Table:
    """The averages at the last N, beside the bound."""
    known = Constants(**record.protocol["constants"])
    last = record.protocol["recorded_at"][-1]
    pairs = dict.fromkeys((run["key"]["beta"], run["key"]["multiple"]) for run in record.runs)
    rows = []
    for beta, multiple in pairs:
        own = [
            run["averages"][-1]
            for run in record.runs
            if (run["key"]["beta"], run["key"]["multiple"]) == (beta, multiple)
        ]
        bound = f"{known.bound(last, beta):.3g}" if multiple <= 1 else "outside the theorem"
        cells_ = [f"{beta:g}", f"{multiple:g}", str(last), str(len(own))]
        rows.append([*cells_, f"{statistics.fmean(own):.3g}", bound])
    header = ["β", "steps, times the theorem's", "N", "seeds", "average squared gradient", "bound"]
    return Table(header, rows)


def step_table(record: Record) -> Table:
    """The mean step of every method on every set."""
    rows = []
    for run in record.runs:
        key = run["key"]
        pair = "" if key["stat_interval"] is None else f"{key['stat_interval']}, "
        pair += "" if key["inverse_interval"] is None else str(key["inverse_interval"])
        start = [key["set"], LABELS[key["method"]], pair]
        if "left_out" in run:
            rows.append([*start, "not measured", f"at least {run['ratio_at_least']:.1f}", ""])
            continue
        low, high = (milliseconds(quartile) for quartile in run["quartiles"])
        took = f"{milliseconds(run['seconds'])} ({low} to {high})"
        busy = max(run["busy_before"] or 0.0, run["busy_after"] or 0.0)
        rows.append([*start, took, f"{run['ratio']:.2f}", f"{100 * busy:.0f} %"])
    header = ["set", "method", "T1, T2", "mean step, ms (quartiles)", "over SGD-m"]
    return Table([*header, "of the machine used by others"], rows)


def complexity_table(record: Record) -> Table:
    """Every sweep: the exponent of Table 2 and the one that was fitted."""
    rows = []
    for run in record.runs:
        key, fitted = run["key"], run["fitted"]
        values = run["fitted_values"] if key["of"] == "time" else run["values"]
        rows.append(
            [
                f"{key['method']}, {key['of']}",
                f"{key['over']}; {key['part']}",
                run["term"],
                f"{run['predicted']:g}",
                "-" if fitted is None else f"{fitted:.2f}",
                agreement(run["predicted"], fitted).strip("*"),
                span(values),
            ]
        )
    return Table(["", "over", "term", "predicted", "fitted", "", "range (points)"], rows)


def language_table(record: Record) -> Table:
    """The comparison's own table, with width and length."""
    rows = [
        (str(row.variant.width), str(row.variant.steps), *cells(row))
        for row in language_rows(record)
    ]
    return Table(["width", "steps", *HEADER], rows)


def sensitivity_table(record: Record) -> Table:
    """The rate that was tuned at the base point, at all the other points."""
    header, *rows = summary_rows(surfaces(record), floors(record))
    return Table(header, rows)


def search_table(record: Record) -> Table:
    """The best settings of every method."""
    rows = [
        [
            LABELS[optimizer],
            f"{settings.lr:g}",
            _maybe(settings.damping),
            str(len(scores)),
            mean_text(list(scores.values())),
        ]
        for optimizer, (settings, scores) in best_of_search(record).items()
    ]
    return Table(["", "learning rate", "damping", "seeds", "best of the search"], rows)


def _metric(runs: Sequence[Run], name: str) -> str:
    good = [run for run in runs if run.diverged_at_step is None]
    values = [run.epochs[-1].metrics[name] for run in good]
    # What is not finite comes back from a file as None.
    return mean_text([math.nan if v is None else v for v in values], 4) if values else "-"


def _maybe(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
