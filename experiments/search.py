"""Grid searches over the settings of an experiment: the paper's grids, and this project's own.

The paper's criterion chooses: the lowest training loss for autoencoders, the lowest validation
error for classifiers, here as means over the seeds; a setting that diverges from one seed is out.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy
import typer
from sklearn.model_selection import ParameterGrid

from experiments import options
from experiments.methods import METHODS, Settings, variant
from experiments.options import Quick, chosen, has_setting, numbers, setting_value, user_errors
from experiments.pool import make_runs
from experiments.run_files import RunFile
from experiments.tasks import TABLE_4, TASKS
from tnt_kernels.benchmark.tables import table

QUICK = [
    Quick(
        "search",
        "digits --optimizer tnt,adam,sgd --grid lr=0.0001,0.001,0.01,0.03,0.1 "
        "--grid damping=1e-08,0.0001,0.03,0.1 --seeds 1,2,3,4,5,6 --epochs 20 --jobs 2",
    )
]

# The minimised figure: the smoothed loss at the end, or the least value of a metric.
LOSS = "final_smoothed_loss"
# The settings of each method that `--then` trains for longer.
FINALISTS = 8
# The values of each searched setting.
Grid = Mapping[str, Sequence[Any]]
Point = Mapping[str, Any]
Candidate = TypeVar("Candidate")


def log_grid(lowest: float, highest: float, count: int) -> tuple[float, ...]:
    """`count` values in equal ratios from `lowest` to `highest`, to two significant digits."""
    return tuple(float(f"{value:.1e}") for value in numpy.geomspace(lowest, highest, count))


def decades(lowest: float, highest: float) -> tuple[float, ...]:
    """The values 1, 3, 10, 30, ... between two of them, as in the paper.

    >>> decades(1e-3, 0.03)
    (0.001, 0.003, 0.01, 0.03)
    """
    first, last = round(2 * math.log10(lowest)), round(2 * math.log10(highest))
    return tuple(
        float(f"{'3' if number % 2 else '1'}e{number // 2}") for number in range(first, last + 1)
    )


# The paper's, from its appendix on the experiments.
_ADAM: Grid = {"lr": decades(1e-5, 0.01), "damping": (1e-8, 1e-4, 1e-2)}
_AUTOENCODER: dict[str, Grid] = {
    "tnt": {"lr": decades(1e-7, 1e-3), "damping": decades(1e-3, 0.3)},
    "tnt-ef": {"lr": decades(1e-7, 1e-3), "damping": decades(1e-3, 0.3)},
    "kfac": {"lr": decades(1e-4, 0.3), "damping": decades(0.01, 10)},
    "shampoo": {"lr": decades(1e-5, 3e-3), "damping": decades(1e-4, 0.01)},
    "adam": _ADAM,
    "adam-authors": _ADAM,
    "sgd": {"lr": decades(1e-4, 0.03)},
}
_CONVNET: dict[str, Grid] = {
    "tnt": {"lr": decades(1e-6, 1e-3), "weight_decay": (1.0, 10.0, 100.0)},
    "tnt-ef": {"lr": decades(1e-6, 1e-3), "weight_decay": (1.0, 10.0, 100.0)},
    "kfac-eigen": {"lr": decades(3e-6, 0.03), "weight_decay": (0.01, 0.1, 1.0)},
    "shampoo": {"lr": decades(3e-5, 0.1), "weight_decay": (0.01, 0.1, 1.0, 10.0)},
    "adam": {"lr": decades(1e-6, 0.03), "weight_decay": log_grid(1e-4, 100.0, 7)},
    "sgd": {"lr": decades(3e-5, 1.0), "weight_decay": (1e-3, 0.01, 0.1, 1.0)},
}
# 35 settings for every method: SGD-m, without a damping, has a finer grid of rates. In the paper's
# steps, placed so that the best is in the interior.
_DIGITS: dict[str, Grid] = {
    "tnt": {"lr": decades(1e-5, 1e-2), "damping": decades(3e-3, 0.3)},
    "tnt-ef": {"lr": decades(1e-7, 1e-4), "damping": decades(1e-3, 0.1)},
    "kfac": {"lr": decades(1e-3, 1.0), "damping": decades(0.01, 1.0)},
    "shampoo": {"lr": decades(1e-3, 1.0), "damping": decades(1e-4, 0.01)},
    "adam": {"lr": decades(3e-4, 0.3), "damping": (1e-8, 1e-4, 1e-3, 0.01, 0.1)},
    "sgd": {"lr": log_grid(1e-3, 1, 35)},
}


GRIDS: Mapping[str, Mapping[str, Grid]] = {
    **dict.fromkeys(("mnist", "faces"), _AUTOENCODER),
    "digits": _DIGITS,
    **dict.fromkeys(TABLE_4, _CONVNET),
}


def main(
    problem: Annotated[str, options.problem_argument(GRIDS)],
    optimizer: options.Optimizers = "all",
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="NAME=V,V,…", help="Values of a setting; repeat."),
    ] = None,
    data: options.Data = None,
    examples: options.Examples = None,
    seeds: options.Seeds = "1,2,3",
    epochs: options.Epochs = None,
    then: Annotated[
        int | None,
        typer.Option(
            "--then",
            metavar="EPOCHS",
            min=1,
            help=f"Choose among the {FINALISTS} best of each method, trained again for as long.",
        ),
    ] = None,
    points: Annotated[
        int | None,
        typer.Option("--points", metavar="N", min=1, help="A random N of each method's grid."),
    ] = None,
    jobs: options.Jobs = 1,
    out: options.Out = None,
) -> None:
    """Search over a grid of settings; by default the paper's grid on the paper's problems.

    The seeds must not be those of later runs: a setting must not win by the luck of its starts. If
    the grid is too large for full runs, take two rounds: `--epochs 1 --then 10`. If it is still too
    large, `--points N` takes N random points of each method. A larger N contains the points of a
    smaller one, so the same file continues.
    """
    # As in the processes of the pool: a run's numbers must not depend on the number of jobs.
    options.set_machine(1)
    task, starts = TASKS[problem], numbers(seeds)
    criterion = task.metric or LOSS
    given = dict(_grid_values(text) for text in grid or ())
    if len(given) < len(grid or ()):
        raise typer.BadParameter("--grid must name a setting once, with all its values")
    grids = {
        name: {**GRIDS[problem][name], **_own(name, given)}
        for name in chosen(optimizer, list(GRIDS[problem]))
    }
    out = out or Path(f"results/search/{problem}.json")
    maker = functools.partial(task.load, data, examples)
    with user_errors():
        shared = {"criterion": criterion, "seeds": starts, "problem": maker().description()}
        file = RunFile(out, "search", shared)

    def train(trials: Mapping[str, Iterable[Point]], length: int | None) -> dict[Settings, str]:
        wanted = {
            replace(task.settings(name, length), **point, seed=seed): name
            for name, own in trials.items()
            for point in own
            for seed in starts
        }
        keys = {settings: asdict(settings) for settings in wanted}
        make_runs(file, maker, keys, lambda record: kept(record, criterion), jobs)
        return wanted

    wanted = train({name: drawn(own, points) for name, own in grids.items()}, epochs)
    if then is not None:
        best = {name: ranked(own_scores(file.runs, wanted, name, criterion)) for name in grids}
        finalists = {
            name: [{axis: getattr(one, axis) for axis in own} for one in best[name][:FINALISTS]]
            for name, own in grids.items()
        }
        wanted = train(finalists, then)
    print("\n".join(report(file.runs, grids, wanted, criterion)))
    print(f"wrote {out}")


def drawn(grid: Grid, count: int | None) -> list[dict[str, Any]]:
    """The first points of a grid in a fixed random order; None for all.

    >>> few, more = (drawn({"lr": range(9)}, count) for count in (3, 5))
    >>> few == more[:3], len(drawn({"lr": range(9)}, None))
    (True, 9)
    """
    points = list(ParameterGrid(grid))
    random.Random(0).shuffle(points)
    return points[:count]


def _grid_values(text: str) -> tuple[str, tuple[Any, ...]]:
    name, _, values = text.partition("=")
    return name, tuple(setting_value(name, value) for value in values.split(","))


def _own(optimizer: str, given: Grid) -> Grid:
    return {name: values for name, values in given.items() if has_setting(optimizer, name)}


def kept(record: Mapping[str, Any], criterion: str) -> dict[str, Any]:
    """The part of a run's record that a search keeps: its score, divergence and seconds.

    The best epoch of a metric counts, as the paper chooses by the best validation accuracy.
    """
    score = record[LOSS]
    if criterion != LOSS:
        score = min(epoch["metrics"][criterion] for epoch in record["epochs"])
    names = ("diverged_at_step", "seconds_per_epoch", "warm_start_seconds")
    return {criterion: score, **{name: record[name] for name in names}}


def mean_scores(runs: Iterable[Mapping[str, Any]], criterion: str = LOSS) -> dict[Settings, float]:
    """The mean score over the seeds of each setting; infinite if a seed diverged.

    A setting is named by its first run's settings, so the seed of a name means nothing.
    """
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(variant(Settings(**run["key"])), []).append(run)
    return {
        Settings(**members[0]["key"]): statistics.mean(
            math.inf if run["diverged_at_step"] else run[criterion] for run in members
        )
        for members in groups.values()
    }


def ranked(losses: Mapping[Candidate, float]) -> list[Candidate]:
    """The candidates of finite losses, the lowest loss first."""
    finite = [candidate for candidate, loss in losses.items() if math.isfinite(loss)]
    return sorted(finite, key=losses.__getitem__)


def own_scores(
    runs: Sequence[Mapping[str, Any]], wanted: Mapping[Settings, str], name: str, criterion: str
) -> dict[Settings, float]:
    """The mean scores of a method's wanted settings."""
    own = [run for run in runs if wanted.get(Settings(**run["key"])) == name]
    return mean_scores(own, criterion)


def interior(settings: Settings, grid: Grid) -> bool:
    """Whether no setting is an end of its axis; an axis of one value has no ends."""
    return not any(
        len(values) > 1 and getattr(settings, name) in (min(values), max(values))
        for name, values in grid.items()
    )


def report(
    runs: Sequence[Mapping[str, Any]],
    grids: Mapping[str, Grid],
    wanted: Mapping[Settings, str],
    criterion: str,
) -> list[str]:
    """A table of the best setting of every method, among the wanted ones."""
    rows = []
    for name, grid in grids.items():
        scores = own_scores(runs, wanted, name, criterion)
        if not ranked(scores):
            rows.append([name, "each setting diverged", "", ""])
            continue
        best = ranked(scores)[0]
        at = ", ".join(f"{axis} {getattr(best, axis):g}" for axis in grid)
        where = "" if interior(best, grid) else "an end of the grid"
        rows.append([METHODS[best.optimizer].label, at, f"{scores[best]:.4g}", where])
    return table(["", "best setting", criterion.replace("_", " "), ""], rows)
