"""Beyond the paper: how well one learning rate serves, in each form of TNT and Shampoo.

The learning rate is tuned at one point and kept while batch size, T2, damping and width change, on
an autoencoder and on a character transformer. A regret is the loss with a rate minus the loss with
the best rate at the same point: as a fraction of the best one's excess over the loss's lower bound,
or in nats if no bound is known. All regrets are of one form only, so a form that is bad everywhere
can have no regret; the table has the best losses, too.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from experiments import options
from experiments.methods import Settings, method_settings
from experiments.options import Quick, chosen, numbers, user_errors
from experiments.pool import make_runs
from experiments.problems.autoencoders import Autoencoder, load_autoencoder
from experiments.problems.language import load_language
from experiments.problems.problem import Problem
from experiments.run_files import RunFile
from experiments.search import decades, lowest
from experiments.tasks import SCHEDULE
from tools.measuring.tables import table

QUICK = [Quick("sensitivity", "--quick --problems digits --optimizer tnt,tnt-grafted")]

# A rate serves if its regret is at most 5 % of the excess, or 0.05 nats.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Contender:
    """One optimizer in one form. Pairs are for the digits and the text."""

    label: str
    optimizer: str
    grafted: bool  # steps have the length of Adam's
    relative_damping: bool
    damping: tuple[float, float]  # at the base point
    # The lowest and the highest learning rate.
    rates: tuple[tuple[float, float], tuple[float, float]] = ((1e-5, 1.0), (1e-5, 1.0))


# The paper's forms have each problem's own damping: the best of a search on the digits, the best of
# a few tried by hand on the text. A relative damping is the text's for both, which is its purpose.
# Every contender has 11 rates on each problem, five decades around the best ones: for TNT in the
# paper's form the digits' are a hundred times the text's.
CONTENDERS: Mapping[str, Contender] = {
    "tnt": Contender(
        *("TNT, paper's form", "tnt", False, False, (0.03, 1e-4)), ((3e-7, 0.03), (3e-9, 3e-4))
    ),
    "tnt-relative": Contender(
        *("TNT, relative damping", "tnt", False, True, (0.1, 0.1)), ((1e-10, 1e-5), (1e-10, 1e-5))
    ),
    "tnt-grafted": Contender("TNT, grafted, relative", "tnt", True, True, (0.1, 0.1)),
    "shampoo": Contender("Shampoo, paper's form", "shampoo", False, False, (1e-3, 1e-4)),
    "shampoo-grafted": Contender("Shampoo, grafted, relative", "shampoo", True, True, (1e-3, 1e-3)),
}


@dataclass(frozen=True)
class Point:
    """A place at which learning rates are tried."""

    problem: str
    batch_size: int
    inverse_interval: int  # T2 in the paper; T1 is 1
    damping: float = 1.0  # factor of the form's own
    width: float = 1.0  # factor of the model's


# The problems and the axes with their names in tables.
PROBLEMS = {"digits": "Autoencoder", "language": "Transformer"}
AXES = {
    "batch_size": "batch size",
    "inverse_interval": "T2",
    "damping": "damping ×",
    "width": "width ×",
}
# Where the axes cross and the learning rate is tuned.
BASES = {"digits": Point("digits", 128, 2), "language": Point("language", 32, 2)}


@dataclass(frozen=True)
class Scale:
    """The size of the experiment."""

    epochs: tuple[int, int] = (15, 4)  # at the base point of the digits and of the text
    rate_step: int = 1  # 1 tries every half decade of the learning rates, 2 every decade
    epoch_steps: int = 25  # of the language problem


FULL, SMALL = Scale(), Scale((2, 4), 2, 6)


class MeasuredAutoencoder(Autoencoder):
    """An autoencoder problem that measures the loss of all its images at the end of each epoch.

    The smoothed minibatch loss lags ten steps behind, a third of the run at a batch size of 512.
    """

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """The loss of all training images."""
        return {"training_loss": self.loss(model(self.images), self.images).item()}


def make_problem(name: str, width: float, data: Path | None, scale: Scale) -> Problem:
    """A problem with its model's width multiplied; the autoencoder's code keeps its width."""
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
    base = BASES[problem]
    values: dict[str, tuple[Any, ...]] = {
        "batch_size": (base.batch_size // 4, base.batch_size, 4 * base.batch_size),
        # Every statistic of the first T2 steps refreshes the inverses, so a T2 far above the root
        # of the number of steps makes more of them, not fewer: the shortest runs have 24 steps.
        "inverse_interval": (1, 2, 6),
        "damping": (0.1, 1, 10),
        "width": (0.5, 1, 2),
    }
    return [replace(base, **{axis: value}) for value in values[axis]]


def points(problem: str) -> list[Point]:
    """All points of a problem, the base point first and once."""
    found = [point for axis in AXES for point in axis_points(problem, axis)]
    return list(dict.fromkeys([BASES[problem], *found]))


def run_settings(form: str, point: Point, lr: float, seed: int, scale: Scale) -> Settings:
    """The settings of one run; each sees as many examples as a run at the base point."""
    own, place = CONTENDERS[form], list(PROBLEMS).index(point.problem)
    epochs = scale.epochs[place]
    if point.problem == "language":  # an epoch is a number of steps
        epochs = epochs * BASES[point.problem].batch_size // point.batch_size
    return method_settings(
        *(own.optimizer, lr, own.damping[place] * point.damping),
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
    place = list(PROBLEMS).index(problem)
    for point, form in product(points(problem), forms):
        rates = decades(*CONTENDERS[form].rates[place])[:: scale.rate_step]
        for lr, seed in product(rates, seeds):
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
            make_runs(file, maker, keys, _kept, jobs)
    surfaces = {form: surface(file.runs, form, starts) for form in forms}
    floors = {name: shared["problems"][name]["loss_floor"] for name in names}
    text = page(surfaces, floors)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {out} and {out.with_suffix('.md')}")


def _kept(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's record that the file keeps: the problem's only metric, at the end."""
    (last,), lost = record["epochs"][-1]["metrics"].values(), record["diverged_at_step"]
    # A run that is finite at its last step but not after it has diverged, too.
    loss = round(last, 5) if lost is None and math.isfinite(last) else None
    return {"loss": loss, "diverged_at_step": lost}


# The loss of every learning rate; infinite if it diverged. A surface has them at every point.
Losses = Mapping[float, float]
Surface = Mapping[Point, Losses]
# The loss's lower bound for every problem, or None.
Floors = Mapping[str, float | None]


def surface(runs: Iterable[Mapping[str, Any]], form: str, seeds: Sequence[int]) -> Surface:
    """One contender's mean losses over the seeds."""
    found: dict[Point, dict[float, list[float]]] = {}
    for run in runs:
        key = dict(run["key"])
        if key.pop("form") == form and key.pop("seed") in seeds:
            loss = math.inf if run["loss"] is None else run["loss"]
            lr = key.pop("lr")
            found.setdefault(Point(**key), {}).setdefault(lr, []).append(loss)
    return {
        point: {lr: statistics.mean(losses) for lr, losses in sorted(by_rate.items())}
        for point, by_rate in found.items()
    }


def regrets(losses: Losses, floor: float | None) -> Losses:
    """The regret of every rate at one point; none if all rates diverged.

    >>> regrets({0.1: 6.0, 1.0: 4.0}, 2.0), regrets({0.1: 6.0, 1.0: 4.0}, None)
    ({0.1: 1.0, 1.0: 0.0}, {0.1: 2.0, 1.0: 0.0})
    """
    best = lowest(losses)
    if best is None:
        return {}
    unit = 1.0 if floor is None else losses[best] - floor
    return {lr: (loss - losses[best]) / unit for lr, loss in losses.items()}


def amount(value: float, floor: float | None) -> str:
    """A regret in a table.

    >>> amount(0.361, 13.7), amount(0.0551, None), amount(math.inf, None)
    ('36.1 %', '0.055 nats', 'diverged')
    """
    if math.isinf(value):
        return "diverged"
    return f"{value:.3f} nats" if floor is None else f"{100 * value:.3g} %"


def page(surfaces: Mapping[str, Surface], floors: Floors) -> str:
    """The tables, in Markdown."""
    header = ["", "problem", "tuned lr", "loss there", *AXES.values()]
    header += ["diverged", "best rates, decades apart", f"rates within {TOLERANCE:g}"]
    lines = ["# Regrets of one learning rate", ""]
    lines += ["## Tuned at the base point: the largest regret along each axis", ""]
    lines += table(header, summary_rows(surfaces, floors))
    lines += ["## One rate for all points: the largest regret", ""]
    header = ["", "lr", *(PROBLEMS[name] for name in floors)]
    return "\n".join(lines + table(header, common_rows(surfaces, floors)))


def summary_rows(surfaces: Mapping[str, Surface], floors: Floors) -> list[list[str]]:
    """For every problem and form the rate tuned at the base point, along every axis."""
    rows = []
    for (problem, floor), (form, losses) in product(floors.items(), surfaces.items()):
        base, *others = points(problem)
        found = {point: regrets(losses[point], floor) for point in (base, *others)}
        start = [CONTENDERS[form].label, PROBLEMS[problem]]
        tuned = lowest(found[base])
        if tuned is None:
            rows.append([*start, "all diverged", *["-"] * (len(AXES) + 4)])
            continue
        # A point at which all rates diverged has no regrets.
        along = [
            max(found[p][tuned] for p in axis_points(problem, axis) if found[p]) for axis in AXES
        ]
        best = [lr for own in found.values() if (lr := lowest(own)) is not None]
        within = [sum(value <= TOLERANCE for value in own.values()) for own in found.values()]
        rows.append(
            [
                *(*start, f"{tuned:g}", f"{losses[base][tuned]:.3f}"),
                *(amount(value, floor) for value in along),
                f"{sum(math.isinf(losses[p][tuned]) for p in others)} of {len(others)}",
                f"{round(2 * math.log10(max(best) / min(best))) / 2:g}",
                f"{statistics.mean(within):.1f} of {len(losses[base])}",
            ]
        )
    return rows


def common_rows(surfaces: Mapping[str, Surface], floors: Floors) -> list[list[str]]:
    """For every form the rate whose largest regret, over all points of all problems, is least.

    Points at which all rates diverged do not count.
    """
    rows = []
    for form, losses in surfaces.items():
        found = {
            problem: [own for p in points(problem) if (own := regrets(losses[p], floor))]
            for problem, floor in floors.items()
        }
        tried = set.intersection(*(set(losses[p]) for name in floors for p in points(name)))
        worst = {
            lr: [max((at[lr] for at in own), default=math.inf) for own in found.values()]
            for lr in sorted(tried)
        }
        best = lowest({lr: max(largest) for lr, largest in worst.items()})
        cells = ["each diverges", *["-"] * len(floors)]
        if best is not None:
            cells = [f"{best:g}", *map(amount, worst[best], floors.values())]
        rows.append([CONTENDERS[form].label, *cells])
    return rows
