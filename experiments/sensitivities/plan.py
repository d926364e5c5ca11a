"""What the sensitivity experiment runs: contenders, problems, the points of every axis, rates."""

from __future__ import annotations

import hashlib
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from experiments.language.forms import FORMS, SCHEDULE
from experiments.problems import Autoencoder, Problem, load_autoencoder
from experiments.problems.language import load_language
from experiments.runs.settings import Settings
from experiments.tuning.grids import decades

# The language problem's text where none is given. It is everywhere where Python is, and another
# one for every version of it: the version is part of its name, which the record has.
_LIBRARY = "the standard library's sources, Python "
_LIBRARY_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Contender:
    """One optimizer in one form.

    Attributes:
        label: its name in tables and pictures.
        optimizer: its name in `METHODS`.
        graft: as the optimizer's argument.
        relative_damping: as the optimizer's argument.
        damping: at the base point of each problem.
        rates: of each problem, the lowest and the highest learning rate that are tried, the same
            ones at all of its points.
    """

    label: str
    optimizer: str
    graft: str | None
    relative_damping: bool
    damping: Mapping[str, float]
    rates: Mapping[str, tuple[float, float]]


def _dampings(form: str, digits: float | None = None) -> dict[str, float]:
    """On the text what the language comparison's form has; on the digits that too, where None."""
    text = FORMS[form].damping
    assert text is not None  # only Muon has none
    return {"digits": text if digits is None else digits, "language": text}


def _both(lowest: float, highest: float) -> dict[str, tuple[float, float]]:
    return {"digits": (lowest, highest), "language": (lowest, highest)}


# The paper's forms have each problem's own damping: on the digits the recorded search's best, on
# the text the language comparison's. A relative one is the text's for both, which is what it is
# for. Every contender has 11 rates on each problem, over five decades about what is best there: for
# TNT in the paper's form, on the digits, a thousand times what is on the text. It has 3e-7 to 3e-4
# on both: at the base points a lower rate leaves the digits' loss at its start, a higher one
# diverges on the text.
CONTENDERS: Mapping[str, Contender] = {
    "tnt": Contender(
        "TNT, paper's form",
        "tnt",
        None,
        False,
        _dampings("tnt", digits=0.03),
        {"digits": (3e-7, 3e-2), "language": (3e-9, 3e-4)},
    ),
    "tnt-relative": Contender(
        "TNT, relative damping", "tnt", None, True, _dampings("tnt-grafted"), _both(1e-10, 1e-5)
    ),
    "tnt-grafted": Contender(
        "TNT, grafted, relative", "tnt", "adam", True, _dampings("tnt-grafted"), _both(1e-5, 1.0)
    ),
    "shampoo": Contender(
        "Shampoo, paper's form",
        "shampoo",
        None,
        False,
        _dampings("shampoo", digits=1e-3),
        _both(1e-5, 1.0),
    ),
    "shampoo-grafted": Contender(
        "Shampoo, grafted, relative",
        "shampoo",
        "adam",
        True,
        _dampings("shampoo-grafted"),
        _both(1e-5, 1.0),
    ),
}


@dataclass(frozen=True)
class Point:
    """Where learning rates are tried.

    Attributes:
        problem: one of `BASES`.
        batch_size: examples, or windows of the text, in a batch.
        inverse_interval: T2 in the paper.
        damping: times the form's own.
        width: times the model's.
    """

    problem: str
    batch_size: int
    inverse_interval: int
    damping: float = 1.0
    width: float = 1.0


# The fields of a point that are axes, and their names in tables and pictures.
AXES: Mapping[str, str] = {
    "batch_size": "batch size",
    "inverse_interval": "T2",
    "damping": "damping ×",
    "width": "width ×",
}


@dataclass(frozen=True)
class Base:
    """A problem and the point that its axes cross in.

    Attributes:
        label: its name in tables and pictures.
        metric: the loss that counts, as `Problem.evaluate` names it.
        point: where the learning rate is tuned.
        values: of every axis.
        stat_interval: T1 in the paper.
        warm_start: whether statistics begin with the data's.
        schedule: of the learning rate.
        fixed: what a run of another batch size has as many of: epochs of the data, or, where an
            epoch is a number of steps, examples.
    """

    label: str
    metric: str
    point: Point
    values: Mapping[str, tuple[float, ...]]
    stat_interval: int
    warm_start: bool
    schedule: str
    fixed: Literal["epochs", "examples"]


# Every statistic of the first T2 steps makes factors, so a T2 far above the root of the steps makes
# more of them, not fewer: of 210 steps 46 at T2 = 5, but 82 at 80. The shortest runs have 24.
_VALUES = {"inverse_interval": (1, 2, 6), "damping": (0.1, 1, 10), "width": (0.5, 1, 2)}
# Runs of every batch size see as many examples: a larger batch takes fewer steps.
BASES: Mapping[str, Base] = {
    "digits": Base(
        label="Autoencoder",
        metric="training_loss",
        point=Point("digits", 128, 2),
        values={"batch_size": (32, 128, 512), **_VALUES},
        stat_interval=1,
        warm_start=True,
        schedule="constant",
        fixed="epochs",
    ),
    "language": Base(
        label="Transformer",
        metric="validation_loss",
        point=Point("language", 32, 2),
        values={"batch_size": (8, 32, 128), **_VALUES},
        stat_interval=1,
        warm_start=False,
        schedule=SCHEDULE,
        fixed="examples",
    ),
}


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        epochs: of a run at each problem's base point; the language problem's must be divisible as
            its batch sizes are.
        rate_step: 1 tries every half-decade of a form's learning rates, 2 every decade.
        seeds: of the runs, where the command does not say.
        width, context, epoch_steps: of the language problem.
    """

    epochs: Mapping[str, int]
    rate_step: int
    seeds: tuple[int, ...]
    width: int = 32
    context: int = 32
    epoch_steps: int = 25


FULL = Scale(epochs={"digits": 15, "language": 4}, rate_step=1, seeds=(0, 1))
QUICK = Scale(epochs={"digits": 2, "language": 4}, rate_step=2, seeds=(0,), epoch_steps=6)


class MeasuredAutoencoder(Autoencoder):
    """An autoencoder problem that measures the loss of all its images at every epoch's end.

    The smoothed minibatch loss lags ten steps behind: nothing at a batch size of 32, a third of
    the run at 512.
    """

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss of all training images."""
        with torch.no_grad():
            return {"training_loss": self.loss(model(self.images), self.images).item()}


def make_problem(name: str, width: float, text: Path | None, scale: Scale) -> Problem:
    """A problem with its model's width multiplied; any process can call it.

    The autoencoder's code stays as wide as it is, or the loss that it can reach would change.

    Args:
        name: one of `BASES`.
        width: times the model's usual one.
        text: for the language problem; None for the standard library's sources.
        scale: the language problem's sizes.

    Raises:
        ValueError, OSError: the text cannot be read, or is too short.
    """
    if name == "digits":
        digits = load_autoencoder("digits")
        outer, *hidden, _ = digits.widths
        code = min(hidden)
        hidden = [size if size == code else round(size * width) for size in hidden]
        widths = (outer, *hidden, outer)
        return MeasuredAutoencoder("digits", digits.images, widths, digits.source)
    sizes = {
        "width": round(scale.width * width),
        "context": scale.context,
        "epoch_steps": scale.epoch_steps,
    }
    if text is not None:
        return load_language(text, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.txt"
        path.write_bytes(library_text())
        language = load_language(path, **sizes)
    language.source = _LIBRARY + sysconfig.get_python_version()
    return language


def library_text() -> bytes:
    """The first two million ASCII characters of the standard library's modules, by their names.

    Raises:
        ValueError: this Python came without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(
        path.read_bytes().decode("utf-8", "ignore").encode("ascii", "ignore")
        for path in sorted(folder.glob("*.py"))
    )
    if len(text) < _LIBRARY_CHARACTERS:
        raise ValueError(
            f"the standard library's sources have {len(text)} characters here, which must be at "
            f"least {_LIBRARY_CHARACTERS}: give a text"
        )
    return text[:_LIBRARY_CHARACTERS]


def rates(form: str, problem: str, scale: Scale) -> tuple[float, ...]:
    """The learning rates that are tried of a contender at every point of a problem."""
    return decades(*CONTENDERS[form].rates[problem])[:: scale.rate_step]


def axis_points(problem: str, axis: str) -> list[Point]:
    """The points of one axis, the base point among them."""
    base = BASES[problem]
    fields: list[dict[str, Any]] = [{axis: value} for value in base.values[axis]]
    return [replace(base.point, **changed) for changed in fields]


def points(problem: str) -> list[Point]:
    """All points of a problem, the base point first and once."""
    found = [point for axis in AXES for point in axis_points(problem, axis)]
    return list(dict.fromkeys([BASES[problem].point, *found]))


def refreshes(steps: int, stat_interval: int, inverse_interval: int) -> int:
    """How often a run makes factors by the optimizers' rule, not counting a warm start's own.

    At every T2-th step, and at every statistic of the first T2 steps.

    Args:
        steps: of the run.
        stat_interval: T1 in the paper.
        inverse_interval: T2 in the paper.

    >>> [refreshes(28, 1, interval) for interval in (1, 2, 6, 20)]
    [28, 15, 10, 21]
    """
    return sum(
        step % inverse_interval == 0 or (step % stat_interval == 0 and step < inverse_interval)
        for step in range(steps)
    )


def axis_refreshes(problem: str, steps: int) -> list[int]:
    """How often a run of so many steps makes factors at each point of the T2 axis."""
    return [
        refreshes(steps, BASES[problem].stat_interval, point.inverse_interval)
        for point in axis_points(problem, "inverse_interval")
    ]


def run_settings(form: str, point: Point, lr: float, seed: int, scale: Scale) -> Settings:
    """The settings of one run.

    Raises:
        ValueError: no whole number of epochs has as many examples as the base point's.
    """
    own, base = CONTENDERS[form], BASES[point.problem]
    epochs = scale.epochs[point.problem]
    if base.fixed == "examples":
        epochs, rest = divmod(epochs * base.point.batch_size, point.batch_size)
        if rest or not epochs:
            raise ValueError(
                f"epochs of {point.problem!r} times {base.point.batch_size} must be divisible by "
                f"{point.batch_size}, got {scale.epochs[point.problem]}"
            )
    return Settings(
        optimizer=own.optimizer,
        lr=lr,
        damping=own.damping[point.problem] * point.damping,
        momentum=0.9,
        stat_decay=0.9,
        weight_decay=0.0,
        stat_interval=base.stat_interval,
        inverse_interval=point.inverse_interval,
        warm_start=base.warm_start,
        relative_damping=own.relative_damping,
        graft=own.graft,
        schedule=base.schedule,
        batch_size=point.batch_size,
        epochs=epochs,
        seed=seed,
    )


def run_key(form: str, point: Point, lr: float, seed: int) -> dict[str, Any]:
    """What tells a run from the others of its file; all else is in the file's protocol."""
    return {"form": form, **asdict(point), "lr": lr, "seed": seed}


def wanted(
    forms: Sequence[str], problem: str, seeds: Sequence[int], scale: Scale
) -> Iterator[tuple[Point, Settings, dict[str, Any]]]:
    """Every run on one problem: its point, its settings and its key."""
    for point in points(problem):
        for form in forms:
            for lr in rates(form, problem, scale):
                for seed in seeds:
                    settings = run_settings(form, point, lr, seed, scale)
                    yield point, settings, run_key(form, point, lr, seed)


def protocol(problems: Sequence[str], text: Path | None, scale: Scale) -> dict[str, Any]:
    """What all runs of one file share; seeds and forms can be added to a file.

    Raises:
        ValueError, OSError: the text cannot be read, or is too short.
    """
    described, counts = {}, {}
    for name in problems:
        problem = make_problem(name, 1.0, text, scale)
        described[name] = {**problem.description(), "loss_floor": problem.loss_floor}
        steps = scale.epochs[name] * problem.steps_per_epoch(BASES[name].point.batch_size)
        counts[name] = axis_refreshes(name, steps)
    if "language" in problems:
        content = library_text() if text is None else text.read_bytes()
        described["language"]["sha256"] = hashlib.sha256(content).hexdigest()
    return {
        "problems": described,
        "bases": {name: asdict(BASES[name]) for name in problems},
        "forms": {name: asdict(contender) for name, contender in CONTENDERS.items()},
        "rates": {
            form: {name: rates(form, name, scale) for name in problems} for form in CONTENDERS
        },
        # of a run at the base point, at each T2 of its axis
        "refreshes": counts,
        "epochs": {name: scale.epochs[name] for name in problems},
        "loss": "at the end: of all training images for the autoencoder, of the validation windows "
        "for the transformer; a run of another batch size sees as many examples",
    }
