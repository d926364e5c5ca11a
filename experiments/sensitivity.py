"""Beyond the paper: how well one learning rate serves, in each form of TNT and Shampoo.

The learning rate is tuned at one point and kept while batch size, T2, damping and width change, on
an autoencoder and on a character transformer. A regret is the loss with a rate minus the loss with
the best rate at the same point: as a fraction of the best one's excess over the loss's lower bound,
or in nats if no bound is known. All regrets are of one form only, so a form that is bad everywhere
can have no regret; the tables have the best losses, too.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import typer
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle
from torch import nn

from experiments import options
from experiments.methods import Settings, method_settings
from experiments.options import Quick, chosen, numbers, user_errors
from experiments.plots import save
from experiments.pool import make_runs
from experiments.problems.autoencoders import Autoencoder, load_autoencoder
from experiments.problems.language import load_language
from experiments.problems.problem import Problem
from experiments.run_files import RunFile
from experiments.search import decades, lowest
from experiments.tasks import FORMS, SCHEDULE
from tools.measuring.tables import table

_QUICK = "--quick --problems digits --seeds 0,1 --optimizer tnt,tnt-grafted --jobs 2"
QUICK = [Quick("sensitivity", 1, _QUICK)]

# A rate serves if its regret is at most 5 % of the excess, or 0.05 nats.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Contender:
    """One optimizer in one form.

    Attributes:
        label: in tables and pictures.
        optimizer: its name in `METHODS`.
        grafted: whether steps have the length of Adam's.
        relative_damping: the optimizer's argument.
        damping: at the base point of the digits and of the text.
        rates: the lowest and the highest learning rate on the digits and on the text.
    """

    label: str
    optimizer: str
    grafted: bool
    relative_damping: bool
    damping: tuple[float | None, float | None]
    rates: tuple[tuple[float, float], tuple[float, float]] = ((1e-5, 1.0), (1e-5, 1.0))


# The paper's forms have each problem's own damping: the best of a search on the digits, the
# transformer's on the text. A relative damping is the text's for both, which is its purpose. Every
# contender has 11 rates on each problem, five decades around the best ones: for TNT in the paper's
# form the digits' are a hundred times the text's.
_DAMPING = {name: form.damping for name, form in FORMS.items()}
_TNT, _SHAMPOO = (_DAMPING["tnt-grafted"],) * 2, (_DAMPING["shampoo-grafted"],) * 2
CONTENDERS: Mapping[str, Contender] = {
    "tnt": Contender(
        *("TNT, paper's form", "tnt", False, False, (0.03, _DAMPING["tnt"])),
        ((3e-7, 3e-2), (3e-9, 3e-4)),
    ),
    "tnt-relative": Contender(
        *("TNT, relative damping", "tnt", False, True, _TNT), ((1e-10, 1e-5), (1e-10, 1e-5))
    ),
    "tnt-grafted": Contender("TNT, grafted, relative", "tnt", True, True, _TNT),
    "shampoo": Contender(
        *("Shampoo, paper's form", "shampoo", False, False, (1e-3, _DAMPING["shampoo"]))
    ),
    "shampoo-grafted": Contender("Shampoo, grafted, relative", "shampoo", True, True, _SHAMPOO),
}


@dataclass(frozen=True)
class Point:
    """A place at which learning rates are tried.

    Attributes:
        problem: "digits" or "language".
        batch_size: examples, or windows of the text.
        inverse_interval: T2 in the paper; T1 is 1.
        damping: factor of the form's own.
        width: factor of the model's.
    """

    problem: str
    batch_size: int
    inverse_interval: int
    damping: float = 1.0
    width: float = 1.0


# The axes with their names in tables and pictures.
AXES = {"batch_size": "batch size", "inverse_interval": "T2", "damping": "damping ×"}
AXES["width"] = "width ×"
PROBLEMS = {"digits": "Autoencoder", "language": "Transformer"}
METRICS = {"digits": "training_loss", "language": "validation_loss"}
# Where the axes cross and the learning rate is tuned.
BASES = {"digits": Point("digits", 128, 2), "language": Point("language", 32, 2)}
# Runs of every batch size see as many examples, so a larger batch takes fewer steps. Every
# statistic of the first T2 steps refreshes the inverses, so a T2 far above the root of the number
# of steps makes more of them, not fewer: the shortest runs have 24 steps.
_VALUES = {"inverse_interval": (1, 2, 6), "damping": (0.1, 1, 10), "width": (0.5, 1, 2)}
VALUES: dict[str, dict[str, tuple[float, ...]]] = {
    "digits": {"batch_size": (32, 128, 512), **_VALUES},
    "language": {"batch_size": (8, 32, 128), **_VALUES},
}


@dataclass(frozen=True)
class Scale:
    """The size of the experiment.

    Attributes:
        epochs: of a run at the base point of the digits and of the text.
        rate_step: 1 tries every half decade of the learning rates, 2 every decade.
        epoch_steps: of the language problem.
    """

    epochs: tuple[int, int] = (15, 4)
    rate_step: int = 1
    epoch_steps: int = 25


FULL, SMALL = Scale(), Scale((2, 4), 2, 6)


class MeasuredAutoencoder(Autoencoder):
    """An autoencoder problem that measures the loss of all its images at the end of each epoch.

    The smoothed minibatch loss lags ten steps behind, a third of the run at a batch size of 512.
    """

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss of all training images."""
        with torch.no_grad():
            return {"training_loss": self.loss(model(self.images), self.images).item()}


def make_problem(name: str, width: float, data: Path | None, scale: Scale) -> Problem:
    """A problem with its model's width multiplied; the autoencoder's code keeps its width.

    Args:
        name: "digits" or "language".
        width: factor of the model's.
        data: `--data`, for the language problem.
        scale: has the steps of the language problem's epochs.
    """
    if name == "language":
        sizes = {"width": round(32 * width), "context": 32, "epoch_steps": scale.epoch_steps}
        return load_language(data, **sizes)
    digits = load_autoencoder("digits")
    outer, *hidden, _ = digits.widths
    code = min(hidden)
    hidden = [size if size == code else round(size * width) for size in hidden]
    widths = (outer, *hidden, outer)
    return MeasuredAutoencoder("digits", digits.images, widths, digits.source)


def axis_points(problem: str, axis: str) -> list[Point]:
    """The points of one axis, with the base point."""
    fields: list[dict[str, Any]] = [{axis: value} for value in VALUES[problem][axis]]
    return [replace(BASES[problem], **changed) for changed in fields]


def points(problem: str) -> list[Point]:
    """All points of a problem, the base point first and once."""
    found = [point for axis in AXES for point in axis_points(problem, axis)]
    return list(dict.fromkeys([BASES[problem], *found]))


def _of(problem: str, pair: tuple[Any, Any]) -> Any:
    """The value for one of the two problems."""
    return pair[list(PROBLEMS).index(problem)]


def rates(form: str, problem: str, scale: Scale) -> tuple[float, ...]:
    """The learning rates of a contender at every point of a problem."""
    return decades(*_of(problem, CONTENDERS[form].rates))[:: scale.rate_step]


def run_settings(form: str, point: Point, lr: float, seed: int, scale: Scale) -> Settings:
    """The settings of one run; each sees as many examples as a run at the base point."""
    own, epochs = CONTENDERS[form], _of(point.problem, scale.epochs)
    if point.problem == "language":  # an epoch is a number of steps
        epochs = epochs * BASES[point.problem].batch_size // point.batch_size
    return method_settings(
        *(own.optimizer, lr, _of(point.problem, own.damping) * point.damping),
        intervals=(1, point.inverse_interval),
        warm_start=point.problem == "digits",
        relative_damping=own.relative_damping,
        graft="adam" if own.grafted else None,
        schedule="constant" if point.problem == "digits" else SCHEDULE,
        batch_size=point.batch_size,
        epochs=epochs,
        seed=seed,
    )


def wanted(
    forms: Sequence[str], problem: str, seeds: Sequence[int], scale: Scale
) -> Iterator[tuple[Point, Settings, dict[str, Any]]]:
    """Every run on one problem: its point, its settings and its key."""
    for point in points(problem):
        for form in forms:
            for lr in rates(form, problem, scale):
                for seed in seeds:
                    settings = run_settings(form, point, lr, seed, scale)
                    yield point, settings, {"form": form, **asdict(point), "lr": lr, "seed": seed}


def protocol(problems: Sequence[str], data: Path | None, scale: Scale) -> dict[str, Any]:
    """What all runs of one file share; seeds and forms can be added."""
    described = {}
    for name in problems:
        problem = make_problem(name, 1.0, data, scale)
        described[name] = {**problem.description(), "loss_floor": problem.loss_floor}
    return {
        "problems": described,
        "bases": {name: asdict(BASES[name]) for name in problems},
        "forms": {name: asdict(contender) for name, contender in CONTENDERS.items()},
        "scale": asdict(scale),
        "loss": "at the end: of all training images for the autoencoder, of the validation windows "
        "for the transformer; a run of another batch size sees as many examples",
    }


def main(
    data: options.Data = None,
    problems: Annotated[str, typer.Option("--problems", metavar="NAME,…")] = "all",
    optimizer: options.Optimizers = "all",
    seeds: options.Seeds = "0,1",
    quick: options.QuickRun = False,
    jobs: options.Jobs = 2,
    out: options.Out = None,
) -> None:
    """Beyond the paper: how well one learning rate serves TNT and Shampoo in each form."""
    # As in the processes of the pool: a run's numbers must not depend on the number of jobs.
    options.set_machine(1)
    scale, names = SMALL if quick else FULL, chosen(problems, list(PROBLEMS))
    forms, starts = chosen(optimizer, list(CONTENDERS)), numbers(seeds)
    out = out or Path("results/sensitivity.json")
    with user_errors():
        shared = protocol(names, data, scale)
        file = RunFile(out, "sensitivity", shared)
    for name in names:
        groups: dict[float, dict[Settings, dict[str, Any]]] = {}
        for point, settings, key in wanted(forms, name, starts, scale):
            groups.setdefault(point.width, {})[settings] = key
        for width, keys in groups.items():
            maker = functools.partial(make_problem, name, width, data, scale)
            make_runs(file, maker, keys, functools.partial(_kept, name), jobs)
    surfaces = {form: surface(file.runs, form, starts) for form in forms}
    floors = {name: shared["problems"][name]["loss_floor"] for name in names}
    lines = ["# Regrets of one learning rate", "", "## Tuned at the base point, used elsewhere", ""]
    lines += table(*summary_rows(surfaces, floors))
    lines += ["## One rate for several points: the largest regret", ""]
    lines += table(*common_rows(surfaces, floors))
    out.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    plot(surfaces, floors, out.with_suffix(".png"))
    print("\n".join(lines), f"\nwrote {out}, {out.with_suffix('.md')} and .png")


def _kept(problem: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's record that the file keeps."""
    last, lost = record["epochs"][-1]["metrics"][METRICS[problem]], record["diverged_at_step"]
    # A run that is finite at its last step but not after it has diverged, too.
    loss = round(last, 5) if lost is None and math.isfinite(last) else None
    return {"loss": loss, "diverged_at_step": lost}


# The loss of every learning rate; infinite if it diverged. A surface has them at every point.
Losses = Mapping[float, float]
Surface = Mapping[Point, Losses]


def surface(runs: Iterable[Mapping[str, Any]], form: str, seeds: Sequence[int]) -> Surface:
    """One contender's mean losses over the seeds; rates without a run of each seed are left out."""
    found: dict[Point, dict[float, dict[int, float]]] = {}
    for run in runs:
        key = dict(run["key"])
        if key.pop("form") != form or key["seed"] not in seeds:
            continue
        lr, seed = key.pop("lr"), key.pop("seed")
        loss = math.inf if run["loss"] is None else run["loss"]
        found.setdefault(Point(**key), {}).setdefault(lr, {})[seed] = loss
    return {
        point: {
            lr: statistics.mean(by_seed.values())
            for lr, by_seed in sorted(losses.items())
            if len(by_seed) == len(set(seeds))
        }
        for point, losses in found.items()
    }


def regret(losses: Losses, lr: float, floor: float | None) -> float:
    """The regret of a rate; infinite if it diverged, NaN if all rates did.

    >>> regret({0.1: 6.0, 1.0: 4.0}, 0.1, 3.0), regret({0.1: 6.0, 1.0: 4.0}, 0.1, None)
    (2.0, 2.0)
    """
    best = lowest(losses)
    if best is None:
        return math.nan
    scale = 1.0 if floor is None else losses[best] - floor
    return (losses[lr] - losses[best]) / scale


def serving(losses: Losses, floor: float | None) -> set[float]:
    """The rates whose regret is at most `TOLERANCE`."""
    return {lr for lr in losses if regret(losses, lr, floor) <= TOLERANCE}


def rates_in_common(columns: Sequence[Losses]) -> list[float]:
    """The rates that were tried at every one of some points."""
    return sorted(set.intersection(*map(set, columns))) if columns else []


def common_rate(
    columns: Sequence[tuple[Losses, float | None]],
) -> tuple[float, list[float]] | None:
    """The rate whose largest regret is least, and its regrets; None if each rate diverges.

    Args:
        columns: losses and floor of every point. Points at which all rates diverged do not count,
            and have a regret of NaN.
    """
    found: tuple[float, list[float]] | None = None
    worst = math.inf
    for lr in rates_in_common([losses for losses, _ in columns]):
        regrets = [regret(losses, lr, floor) for losses, floor in columns]
        largest = _largest(regrets, math.inf)
        if largest < worst:
            found, worst = (lr, regrets), largest
    return found


def _largest(regrets: Iterable[float], default: float = math.nan) -> float:
    return max((value for value in regrets if not math.isnan(value)), default=default)


def amount(value: float, floor: float | None) -> str:
    """A regret in a table.

    >>> amount(0.361, 13.7), amount(0.0551, None), amount(math.inf, None)
    ('36.1 %', '0.055 nats', 'diverged')
    """
    if math.isnan(value):
        return "all diverged"
    if math.isinf(value):
        return "diverged"
    return f"{value:.3f} nats" if floor is None else f"{100 * value:.3g} %"


Table = tuple[Sequence[str], list[list[str]]]


def summary_rows(surfaces: Mapping[str, Surface], floors: Mapping[str, float | None]) -> Table:
    """For every problem and form the rate tuned at the base point, along every axis."""
    header = ["", "problem", "tuned lr", "loss there", *AXES.values(), "median", "worst"]
    header += ["diverged", "best rates, decades apart", "rates within"]
    rows = []
    for problem, floor in floors.items():
        for form, losses in surfaces.items():
            base, *others = points(problem)
            tuned = lowest(losses[base])
            start = [CONTENDERS[form].label, PROBLEMS[problem]]
            if tuned is None:
                rows.append([*start, "all diverged", *["-"] * (len(header) - 3)])
                continue
            worst = [
                amount(
                    _largest(regret(losses[p], tuned, floor) for p in axis_points(problem, axis)),
                    floor,
                )
                for axis in AXES
            ]
            regrets = [regret(losses[point], tuned, floor) for point in others]
            known = [value for value in regrets if not math.isnan(value)]
            best = [lr for p in points(problem) if (lr := lowest(losses[p])) is not None]
            within = [len(serving(losses[point], floor)) for point in points(problem)]
            rows.append(
                [
                    *(*start, f"{tuned:g}", f"{losses[base][tuned]:.3f}", *worst),
                    amount(statistics.median_high(known) if known else math.nan, floor),
                    amount(_largest(regrets), floor),
                    f"{sum(not math.isfinite(v) for v in regrets)} of {len(regrets)}",
                    f"{round(2 * math.log10(max(best) / min(best))) / 2:g}",
                    f"{statistics.mean(within):.1f} of {len(losses[base])}",
                ]
            )
    return header, rows


def common_rows(surfaces: Mapping[str, Surface], floors: Mapping[str, float | None]) -> Table:
    """For every form the one rate for the problems' base points, and the one for all points."""
    header = ["", "one rate for", "of the rates", "lr", *(PROBLEMS[name] for name in floors)]
    rows = []
    for form, losses in surfaces.items():
        for name, places in (
            ("the base points", [(problem, BASES[problem]) for problem in floors]),
            ("all points", [(problem, point) for problem in floors for point in points(problem)]),
        ):
            tried = rates_in_common([losses[point] for _, point in places])
            found = common_rate([(losses[point], floors[problem]) for problem, point in places])
            cells = ["each diverges", *["-"] * len(floors)]
            if found is not None:
                cells = [f"{found[0]:g}"]
                pairs = list(zip(places, found[1], strict=True))
                for problem, floor in floors.items():
                    own = _largest(r for (p, _), r in pairs if p == problem)
                    cells.append(amount(own, floor))
            span = f"{tried[0]:g} to {tried[-1]:g}" if tried else "none"
            rows.append([CONTENDERS[form].label, name, span, *cells])
    return header, rows


def plot(surfaces: Mapping[str, Surface], floors: Mapping[str, float | None], path: Path) -> None:
    """Draw heat maps of the regrets: learning rates against every axis, a row of panels a form.

    A grey, crossed cell diverged from some seed. The frame is around the rate tuned at the base.
    """
    columns = [(problem, axis) for problem in floors for axis in AXES]
    figure, panels = pyplot.subplots(
        *(len(surfaces), len(columns)),
        figsize=(1.75 * len(columns) + 1.2, 2.6 * len(surfaces) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    # Regrets above 1 look alike; the root spreads the small ones.
    norm = PowerNorm(0.5, vmin=0.0, vmax=1.0, clip=True)
    for row, (form, losses) in zip(panels, surfaces.items(), strict=True):
        for axes, (problem, axis) in zip(row, columns, strict=True):
            _panel(axes, losses, problem, axis, floors[problem], norm)
        row[0].set_ylabel(f"{CONTENDERS[form].label}\nlearning rate", fontsize=8)
    for axes, (problem, axis) in zip(panels[0], columns, strict=True):
        axes.set_title(f"{PROBLEMS[problem]}\n{AXES[axis]}", fontsize=8)
    bar = figure.colorbar(
        ScalarMappable(norm, "viridis_r"), ax=panels, fraction=0.015, pad=0.01, extend="max"
    )
    bar.set_label("regret (autoencoder: of the best excess loss; transformer: nats)", fontsize=8)
    save(figure, path, "Regret of every learning rate at every point; framed: tuned at the base")


def _panel(
    axes: Axes, losses: Surface, problem: str, axis: str, floor: float | None, norm: Any
) -> None:
    columns = [losses[point] for point in axis_points(problem, axis)]
    tried = sorted(columns[0], reverse=True)
    regrets: Any = numpy.array([[regret(column, lr, floor) for column in columns] for lr in tried])
    axes.set_facecolor("0.85")
    shown = numpy.where(numpy.isfinite(regrets), regrets, math.nan)
    axes.imshow(shown, cmap="viridis_r", norm=norm, aspect="auto")
    for (row, column), value in numpy.ndenumerate(regrets):
        text = f"{value:.2f}" if value < 10 else f"{value:.0f}" if value < 100 else "> 99"
        text, colour = (
            (text, "white" if value > 0.4 else "0.1") if math.isfinite(value) else ("×", "0.1")
        )
        axes.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)
    tuned = lowest(losses[BASES[problem]])
    if tuned is not None:
        corner = (-0.5, tried.index(tuned) - 0.5)
        style: dict[str, Any] = {"fill": False, "edgecolor": "#D55E00", "linewidth": 2}
        axes.add_patch(Rectangle(corner, len(columns), 1, clip_on=False, **style))
    values = VALUES[problem][axis]
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values], fontsize=7)
    axes.set_yticks(range(len(tried)), [f"{lr:g}" for lr in tried], fontsize=6)
