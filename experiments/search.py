"""Grid searches over the settings of an experiment: the paper's grids, and this project's own.

The paper's criterion chooses: the lowest training loss for autoencoders, the lowest validation
error for classifiers, here as means over the seeds; a setting that diverges from one seed is out.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from sklearn.model_selection import ParameterGrid
from tqdm import tqdm

from experiments import options
from experiments.autoencoders import OPTIMIZERS, autoencoder_settings
from experiments.comparison import run_all
from experiments.convnets import OPTIMIZERS as CONVNET_OPTIMIZERS
from experiments.convnets import convnet_settings
from experiments.methods import METHODS, Settings, variant
from experiments.options import Quick, chosen, has_setting, numbers, setting_value, user_errors
from experiments.problems.autoencoders import load_autoencoder
from experiments.problems.classifiers import load_classifier
from experiments.problems.language import load_language
from experiments.problems.problem import Problem
from experiments.run_files import RunFile, RunFileError
from experiments.transformer import form_settings
from tools.measuring.tables import table

QUICK = [
    Quick(
        "search",
        2.5,
        "digits --optimizer tnt,adam,sgd --grid lr=0.0001,0.001,0.01,0.03,0.1 "
        "--grid damping=1e-08,0.0001,0.03,0.1 --seeds 1,2,3,4,5,6 --epochs 20 --jobs 2",
    )
]

# The minimised figure: the smoothed loss at the end, or the least value of a metric.
LOSS = "final_smoothed_loss"
# The values of each searched setting.
Grid = Mapping[str, Sequence[Any]]


def log_grid(lowest: float, highest: float, count: int) -> tuple[float, ...]:
    """`count` values in equal ratios from `lowest` to `highest`, to two significant digits."""
    ratio = math.log(highest / lowest) / (count - 1)
    return tuple(float(f"{lowest * math.exp(ratio * i):.1e}") for i in range(count))


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
_AUTOENCODER: dict[str, Grid] = {
    "tnt": {"lr": decades(1e-7, 1e-3), "damping": decades(1e-3, 0.3)},
    "tnt-ef": {"lr": decades(1e-7, 1e-3), "damping": decades(1e-3, 0.3)},
    "kfac": {"lr": decades(1e-4, 0.3), "damping": decades(0.01, 10)},
    "shampoo": {"lr": decades(1e-5, 3e-3), "damping": decades(1e-4, 0.01)},
    "adam": {"lr": decades(1e-5, 0.01), "damping": (1e-8, 1e-4, 1e-2)},
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
# Grafted steps have Adam's length for every method, so one grid serves all.
_LANGUAGE: dict[str, Grid] = {
    form: {"lr": decades(1e-3, 0.1)}
    for form in ("tnt-grafted", "tnt-ef-grafted", "shampoo-grafted", "adam", "muon")
}


@dataclass(frozen=True)
class Searched:
    """A problem that can be searched.

    Attributes:
        criterion: the minimised figure.
        grids: by optimizer.
        load: loads the problem; another process may call it.
        settings: an optimizer's settings for a number of epochs, or for the usual one.
    """

    criterion: str
    grids: Mapping[str, Grid]
    load: Callable[[Path | None, int | None], Problem]
    settings: Callable[[str, int | None], Settings]


def _autoencoder(name: str, grids: Mapping[str, Grid]) -> Searched:
    def settings(optimizer: str, epochs: int | None) -> Settings:
        usual = autoencoder_settings(name, optimizer)
        return replace(usual, epochs=epochs or usual.epochs)

    load = functools.partial(load_autoencoder, name)
    return Searched(LOSS, {name: grids[name] for name in OPTIMIZERS}, load, settings)


def _convnet(name: str) -> Searched:
    load = functools.partial(load_classifier, name)
    grids = {name: _CONVNET[name] for name in CONVNET_OPTIMIZERS}
    return Searched("validation_error", grids, load, functools.partial(convnet_settings, name))


def _load_language(data: Path | None, examples: int | None) -> Problem:
    return load_language(data)


SEARCHED = {
    "mnist": _autoencoder("mnist", _AUTOENCODER),
    "faces": _autoencoder("faces", _AUTOENCODER),
    "curves": _autoencoder("curves", _AUTOENCODER),
    "digits": _autoencoder("digits", _DIGITS),
    "resnet32": _convnet("resnet32"),
    "vgg16": _convnet("vgg16"),
    "language": Searched(
        *("validation_loss", _LANGUAGE, _load_language),
        lambda form, epochs: form_settings(form, epochs or 8),
    ),
}


def main(
    problem: Annotated[str, typer.Argument(help=f"One of {', '.join(SEARCHED)}.")],
    optimizer: options.Optimizers = "all",
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="NAME=V,V,…", help="Values of a setting; repeat."),
    ] = None,
    data: options.Data = None,
    examples: options.Examples = None,
    seeds: options.Seeds = "1,2,3",
    epochs: options.Epochs = None,
    jobs: options.Jobs = 1,
    out: options.Out = None,
) -> None:
    """Search over a grid of settings; by default the paper's grid on the paper's problems.

    The seeds must not be those of later runs: a setting must not win by the luck of its starts.
    """
    if problem not in SEARCHED:
        raise typer.BadParameter(f"problem must be one of {', '.join(SEARCHED)}, got {problem!r}")
    # As in the processes of the pool: a run's numbers must not depend on the number of jobs.
    options.set_machine(1)
    searched, starts = SEARCHED[problem], numbers(seeds)
    given = dict(_grid_values(text) for text in grid or ())
    grids = {
        name: {**searched.grids[name], **_own(searched.settings(name, epochs).optimizer, given)}
        for name in chosen(optimizer, list(searched.grids))
    }
    todo = [
        (name, replace(searched.settings(name, epochs), **point, seed=seed))
        for name, own in grids.items()
        for point in ParameterGrid(own)
        for seed in starts
    ]
    out = out or Path(f"results/search/{problem}.json")
    maker = functools.partial(searched.load, data, examples)
    with user_errors():
        described = maker().description()
        shared = {"criterion": searched.criterion, "seeds": starts, "problem": described}
        file = RunFile(out, "search", shared)
        check_epochs(file, [settings for _, settings in todo])
    missing = [one for _, one in todo if file.find(asdict(one)) is None]
    with tqdm(total=len(missing), desc="search", unit="run", disable=None) as bar:

        def done(settings: Settings, record: dict[str, Any]) -> None:
            file.add(asdict(settings), kept(record, searched.criterion))
            bar.update()

        run_all(maker, missing, jobs, done)
    wanted = {settings: name for name, settings in todo}
    print("\n".join(report(file.runs, grids, wanted, searched.criterion)))
    print(f"wrote {out}")


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


def check_epochs(file: RunFile, todo: Iterable[Settings]) -> None:
    """Check that a method's runs in the file are as long as the wanted ones: longer ones would win.

    Raises:
        RunFileError: they are not.
    """
    wanted = {settings.optimizer: settings.epochs for settings in todo}
    for run in file.runs:
        optimizer, epochs = run["key"]["optimizer"], run["key"]["epochs"]
        if wanted.get(optimizer, epochs) != epochs:
            raise RunFileError(
                f"{file.path} holds runs of {optimizer} over {epochs} epochs, not "
                f"{wanted[optimizer]}: give another file"
            )


@dataclass(frozen=True)
class Tried:
    """One setting of a search: with its first seed, and a score for each; None if it diverged."""

    settings: Settings
    scores: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """The mean score; None if a seed diverged."""
        good = [score for score in self.scores if score is not None]
        return statistics.mean(good) if len(good) == len(self.scores) else None


def tried(runs: Iterable[Mapping[str, Any]], criterion: str = LOSS) -> list[Tried]:
    """The settings of a record's runs, with their seeds gathered, in the order of their first."""
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(variant(Settings(**run["key"])), []).append(run)
    return [
        Tried(
            Settings(**members[0]["key"]),
            tuple(None if run["diverged_at_step"] else run[criterion] for run in members),
        )
        for members in groups.values()
    ]


def best_of(entries: Iterable[Tried]) -> Tried | None:
    """The setting of the lowest mean score; None if all diverged."""
    finished = [(entry.mean, entry) for entry in entries if entry.mean is not None]
    return min(finished, key=lambda pair: pair[0])[1] if finished else None


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
        own = [run for run in runs if wanted.get(Settings(**run["key"])) == name]
        best = best_of(tried(own, criterion))
        if best is None:
            rows.append([name, "each setting diverged", "", ""])
            continue
        at = ", ".join(f"{axis} {getattr(best.settings, axis):g}" for axis in grid)
        where = "" if interior(best.settings, grid) else "an end of the grid"
        label = METHODS[best.settings.optimizer].label
        rows.append([label, at, f"{best.mean:.4g}", where])
    return table(["", "best setting", criterion.replace("_", " "), ""], rows)
