"""How well one learning rate serves: regret of a transferred rate, width and shift of the optimum.

A regret is the loss with some rate less that with the best one at the same point. Where the loss
has a known floor it is a fraction of the best one's excess over it, otherwise it is in nats.
Everything is of one form alone, so a form that is bad everywhere can have no regret: the best
losses stand beside.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.sensitivities.plan import AXES, BASES, CONTENDERS, Point, axis_points, points

# A rate serves where its regret is at most so much: 5 % of the excess, or 0.05 nats.
TOLERANCE = 0.05

# The loss of every learning rate that was tried; infinite where it diverged.
Losses = Mapping[float, float]
# Those of one contender.
Surface = Mapping[Point, Losses]


def surface(runs: Iterable[Mapping[str, Any]], form: str, seeds: Sequence[int]) -> Surface:
    """One contender's mean losses over the seeds; infinite where a run diverged.

    Args:
        runs: a record's.
        form: one of `CONTENDERS`.
        seeds: a rate counts once it has a run of each.
    """
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


def best_rate(losses: Losses) -> float | None:
    """The rate of the lowest loss; None where all diverged."""
    finite = {lr: loss for lr, loss in losses.items() if math.isfinite(loss)}
    return min(finite, key=lambda lr: finite[lr]) if finite else None


def regret(losses: Losses, lr: float, floor: float | None) -> float:
    """What a rate loses against the best; infinite where it diverged, NaN where all did.

    Args:
        losses: at one point.
        lr: the rate.
        floor: the least loss that is possible; None for a regret in nats.

    >>> regret({0.1: 6.0, 1.0: 4.0}, 0.1, 3.0), regret({0.1: 6.0, 1.0: 4.0}, 0.1, None)
    (2.0, 2.0)
    """
    best = best_rate(losses)
    if best is None:
        return math.nan
    scale = 1.0 if floor is None else losses[best] - floor
    return (losses[lr] - losses[best]) / scale


def serving(losses: Losses, floor: float | None, tolerance: float = TOLERANCE) -> set[float]:
    """The rates whose regret is at most `tolerance`; none where all diverged."""
    return {lr for lr in losses if regret(losses, lr, floor) <= tolerance}


def half_decades(lowest: float, highest: float) -> int:
    """How many half-decades lie between two rates.

    >>> half_decades(0.001, 0.03), half_decades(0.01, 0.01)
    (3, 0)
    """
    return round(2 * math.log10(highest / lowest))


def rates_in_common(columns: Sequence[Losses]) -> list[float]:
    """The rates that were tried at every one of some points, in their order.

    >>> rates_in_common([{0.1: 6.0, 1.0: 4.0}, {0.01: 7.0, 0.1: 5.0}])
    [0.1]
    """
    return sorted(set.intersection(*map(set, columns))) if columns else []


def common_rate(
    columns: Sequence[tuple[Losses, float | None]],
) -> tuple[float, list[float]] | None:
    """The rate whose largest regret is least, and its regrets; None where each one diverges.

    Of the rates that were tried at every point, `rates_in_common`; regrets are against all of a
    point's own.

    Args:
        columns: losses and floor of every point that it is to serve; points where all rates
            diverged do not count, and have a regret of NaN.
    """
    tried = rates_in_common([losses for losses, _ in columns])
    found: tuple[float, list[float]] | None = None
    worst = math.inf
    for lr in tried:
        regrets = [regret(losses, lr, floor) for losses, floor in columns]
        largest = max((value for value in regrets if not math.isnan(value)), default=math.inf)
        if largest < worst:
            found, worst = (lr, regrets), largest
    return found


@dataclass(frozen=True)
class Transfer:
    """What becomes of the rate that was tuned at the base point along one axis.

    Attributes:
        values: of the axis.
        regrets: of the tuned rate at each; 0 at the base point. Infinite where it diverged, NaN
            where every rate did.
        best: the best rate at each; None where every rate diverged.
        serving: how many rates serve at each.
        at_all: how many serve at all of them.
        at_an_end: whether a best rate is an end of what was tried: the shift may be larger.
    """

    values: tuple[float, ...]
    regrets: tuple[float, ...]
    best: tuple[float | None, ...]
    serving: tuple[int, ...]
    at_all: int
    at_an_end: bool

    @property
    def worst(self) -> float:
        """The largest regret; infinite where the rate diverged somewhere."""
        return max((value for value in self.regrets if not math.isnan(value)), default=math.nan)

    @property
    def shift(self) -> int | None:
        """How far apart the best rates are, in half-decades; None where there is none."""
        known = [lr for lr in self.best if lr is not None]
        return half_decades(min(known), max(known)) if known else None


def transfer(
    losses: Surface, problem: str, axis: str, floor: float | None
) -> tuple[float | None, Transfer]:
    """The rate that is best at the base point, and what becomes of it along an axis.

    Args:
        losses: one form's.
        problem: one of `BASES`.
        axis: one of `AXES`.
        floor: the problem's least loss, if it is known.
    """
    tuned = best_rate(losses[BASES[problem].point])
    columns = [losses[point] for point in axis_points(problem, axis)]
    sets = [serving(column, floor) for column in columns]
    best = tuple(best_rate(column) for column in columns)
    return tuned, Transfer(
        values=tuple(BASES[problem].values[axis]),
        regrets=tuple(
            math.nan if tuned is None else regret(column, tuned, floor) for column in columns
        ),
        best=best,
        serving=tuple(map(len, sets)),
        at_all=len(set.intersection(*sets)),
        at_an_end=any(
            lr in (min(column), max(column)) for lr, column in zip(best, columns, strict=True)
        ),
    )


def amount(value: float, floor: float | None) -> str:
    """A regret as it stands in tables."""
    if math.isnan(value):
        return "all diverged"
    if math.isinf(value):
        return "diverged"
    return f"{value:.3f} nats" if floor is None else f"{100 * value:.3g} %"


def refreshes_text(refreshes: Sequence[int]) -> str:
    """How often factors are made along the T2 axis, in words.

    >>> refreshes_text([28, 15, 10])
    '28, 15, 10 refreshes'
    """
    return f"{', '.join(map(str, refreshes))} refreshes"


def summary_rows(
    surfaces: Mapping[str, Surface], floors: Mapping[str, float | None]
) -> list[tuple[str, ...]]:
    """For every problem and form: the rate tuned at the base point, at all the other points."""
    rows: list[tuple[str, ...]] = [
        ("", "problem", "tuned lr", "loss there", "median regret", "worst", "diverged",
         "rates within"),
    ]  # fmt: skip
    for problem, floor in floors.items():
        for form, losses in surfaces.items():
            base, *others = points(problem)
            tuned = best_rate(losses[base])
            label = CONTENDERS[form].label
            if tuned is None:
                rows.append((label, BASES[problem].label, "all diverged", *["-"] * 5))
                continue
            regrets = [regret(losses[point], tuned, floor) for point in others]
            known = [value for value in regrets if not math.isnan(value)]
            widths = [len(serving(losses[point], floor)) for point in (base, *others)]
            rows.append(
                (
                    label,
                    BASES[problem].label,
                    f"{tuned:g}",
                    f"{losses[base][tuned]:.3f}",
                    amount(_median(known), floor),
                    amount(max(known, default=math.nan), floor),
                    f"{sum(not math.isfinite(v) for v in regrets)} of {len(regrets)}",
                    f"{statistics.mean(widths):.1f} of {len(losses[base])}",
                )
            )
    return rows


def axis_rows(
    surfaces: Mapping[str, Surface], problem: str, floor: float | None, refreshes: Sequence[int]
) -> list[tuple[str, ...]]:
    """For every axis and form of one problem.

    Args:
        surfaces: losses by form.
        problem: one of `BASES`.
        floor: the problem's least loss, if it is known.
        refreshes: how often factors are made at each T2.
    """
    rows: list[tuple[str, ...]] = [
        ("", "axis", "regret of the base point's rate", "best rate moves", "rates within",
         "at all"),
    ]  # fmt: skip
    t2 = f"{AXES['inverse_interval']} ({refreshes_text(refreshes)})"
    for axis, name in {**AXES, "inverse_interval": t2}.items():
        for form, losses in surfaces.items():
            tuned, found = transfer(losses, problem, axis, floor)
            base = getattr(BASES[problem].point, axis)
            regrets = ", ".join(
                f"{value:g}: {amount(loss, floor)}"
                for value, loss in zip(found.values, found.regrets, strict=True)
                if value != base
            )
            shift = "-" if found.shift is None else f"{found.shift / 2:g} decades"
            rows.append(
                (
                    CONTENDERS[form].label,
                    name,
                    "all diverged" if tuned is None else regrets,
                    ("≥ " if found.at_an_end and found.shift is not None else "") + shift,
                    " ".join(map(str, found.serving)),
                    str(found.at_all),
                )
            )
    return rows


def common_rows(
    surfaces: Mapping[str, Surface], floors: Mapping[str, float | None]
) -> list[tuple[str, ...]]:
    """For every form the one rate for the problems' base points, and the one for all points.

    A form's rates can be other ones on each problem: those on both count.
    """
    labels = [BASES[problem].label for problem in floors]
    rows: list[tuple[str, ...]] = [("", "one rate for", "of the rates", "lr", *labels)]
    for form, losses in surfaces.items():
        for name, chosen in (
            ("the base points", {problem: [BASES[problem].point] for problem in floors}),
            ("all points", {problem: points(problem) for problem in floors}),
        ):
            places = [(problem, point) for problem in chosen for point in chosen[problem]]
            tried = rates_in_common([losses[point] for _, point in places])
            found = common_rate([(losses[point], floors[problem]) for problem, point in places])
            cells = ["each diverges"] + ["-"] * len(floors)
            if found is not None:
                lr, regrets = found
                cells = [f"{lr:g}"]
                for problem, floor in floors.items():
                    own = [r for (p, _), r in zip(places, regrets, strict=True) if p == problem]
                    known = [value for value in own if not math.isnan(value)]
                    cells.append(amount(max(known, default=math.nan), floor))
            span = f"{tried[0]:g} to {tried[-1]:g}" if tried else "none"
            rows.append((CONTENDERS[form].label, name, span, *cells))
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first of them the header, as a table."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _median(values: Sequence[float]) -> float:
    return statistics.median_high(values) if values else math.nan
