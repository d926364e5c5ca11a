"""What the language comparison and recorded searches say of their claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.experiments.language.forms import FORMS, INTERVALS
from bench.experiments.language.results import Row, rows
from bench.experiments.runs.methods import LABELS
from bench.experiments.runs.settings import Settings, variant
from bench.experiments.sensitivities.measures import TOLERANCE, Surface, best_rate, regret, surface
from bench.experiments.sensitivities.plan import BASES, points
from bench.experiments.sensitivities.plan import FORMS as SENSITIVITY_FORMS
from bench.experiments.tuning.recorded_search import LOSS
from bench.figures.evidence import Record
from bench.figures.verdicts import (
    CANNOT_TELL,
    CONTRADICTS,
    SUPPORTS,
    Verdict,
    all_of,
    below,
    inside,
    unless,
)

# The probe's runs had 400 steps and more: half of that is judged, less is mostly warm-up.
_LEAST_STEPS = 200
_GRAFTED = "tnt-grafted"


def language_rows(record: Record) -> list[Row]:
    """The record's table."""
    return rows(record.runs)


def lower_at_equal_tokens(baseline: str) -> Callable[[Record], Verdict]:
    """A judge: after as many steps, grafted TNT's validation loss is below a baseline's."""

    def judge(record: Record) -> Verdict:
        verdicts = []
        for row in language_rows(record):
            if row.variant.form != _GRAFTED or row.variant.intervals != INTERVALS:
                continue
            difference = row.tokens[baseline]
            where = f"width {row.variant.width}, {row.variant.steps} steps"
            outcome = {"below": SUPPORTS, "above": CONTRADICTS}.get(difference.verdict, CANNOT_TELL)
            text = f"{where}, against {FORMS[baseline].label}: {difference.text()}"
            verdict = Verdict(outcome, text)
            short = row.variant.steps < _LEAST_STEPS
            verdicts.append(unless("scaled down too far" if short else None, verdict))
        return all_of(verdicts)

    return judge


def best_of_search(record: Record) -> dict[str, tuple[Settings, dict[int, float]]]:
    """Each method's best settings in a search, and their scores by seed."""
    criterion = record.protocol.get("criterion", LOSS)
    groups: dict[object, tuple[Settings, dict[int, float]]] = {}
    for run in record.runs:
        settings = Settings(**run["key"])
        score = run.get(criterion)
        good = run["diverged_at_step"] is None and score is not None
        own = groups.setdefault(variant(settings), (settings, {}))[1]
        own[settings.seed] = float(score or 0.0) if good else math.inf
    best: dict[str, tuple[float, tuple[Settings, dict[int, float]]]] = {}
    for settings, scores in groups.values():
        mean = sum(scores.values()) / len(scores)
        if settings.optimizer not in best or mean < best[settings.optimizer][0]:
            best[settings.optimizer] = (mean, (settings, scores))
    return {optimizer: found for optimizer, (_, found) in best.items()}


def lower_when_tuned(record: Record) -> Verdict:
    """With the best settings of every method's own grid, TNT's loss is below SGD-m's and Adam's.

    Not against a rival whose best learning rate is an end of its grid, beyond which it may do
    better.
    """
    found = best_of_search(record)
    own = found["tnt"][1] if "tnt" in found else {}
    verdicts = []
    for name in ("sgd", "adam"):
        if name not in found:
            verdicts.append(below("TNT", own, LABELS[name], {}))
            continue
        settings, scores = found[name]
        rates = {run["key"]["lr"] for run in record.runs if run["key"]["optimizer"] == name}
        at_end = settings.lr in (min(rates), max(rates))
        reason = f"{LABELS[name]}'s best learning rate is an end of its grid" if at_end else None
        verdicts.append(unless(reason, below("TNT", own, LABELS[name], scores)))
    return all_of(verdicts)


def surfaces(record: Record, seeds: Sequence[int] | None = None) -> dict[str, Surface]:
    """Of a sensitivity record, every form's losses at every point and rate."""
    forms = dict.fromkeys(run["key"]["form"] for run in record.runs)
    return {form: surface(record.runs, form, seeds or _seeds(record)) for form in forms}


def floors(record: Record) -> dict[str, float | None]:
    """Of a sensitivity record, every problem's least loss."""
    return {name: known["loss_floor"] for name, known in record.protocol["problems"].items()}


def one_rate_serves(record: Record) -> Verdict:
    """Grafted TNT's rate, tuned at the base point, is near the best one at every other point.

    Near: a regret of at most 5 % of what is above the floor, or 0.05 nats.
    """
    verdicts = [
        inside(
            f"{BASES[problem].label}: the largest regret",
            list(_worst(record, _GRAFTED, problem, floor).values()),
            0.0,
            TOLERANCE,
            f"at most {TOLERANCE:g}",
        )
        for problem, floor in floors(record).items()
    ]
    return all_of(verdicts)


def serves_better(record: Record) -> Verdict:
    """Grafted TNT's tuned rate loses less at the other points than that of the paper's form."""
    verdicts = []
    for problem, floor in floors(record).items():
        own, other = (_worst(record, form, problem, floor) for form in (_GRAFTED, "tnt"))
        labels = [SENSITIVITY_FORMS[form].label for form in (_GRAFTED, "tnt")]
        finite = all(math.isfinite(value) for value in own.values())
        lost = [seed for seed, value in other.items() if math.isinf(value)]
        if own and finite and len(lost) == len(other) > 1:
            why = f"{BASES[problem].label}: {labels[1]} diverges with its rate in all seeds, "
            why += f"{labels[0]} {statistics.mean(own.values()):.3g}"
            verdicts.append(Verdict(SUPPORTS, why))
            continue
        names = [f"{BASES[problem].label}: largest regret of {labels[0]}", labels[1]]
        verdicts.append(below(names[0], own, names[1], other))
    return all_of(verdicts)


def _worst(record: Record, form: str, problem: str, floor: float | None) -> Mapping[int, float]:
    """By seed, the largest regret at the other points of the rate that is best at the base one."""
    worst = {}
    for seed in _seeds(record):
        losses = surfaces(record, [seed]).get(form, {})
        base, *others = points(problem)
        rate = best_rate(losses.get(base, {}))
        if rate is None or not all(rate in losses.get(point, {}) for point in others):
            continue
        regrets = [regret(losses[point], rate, floor) for point in others]
        # NaN where every rate diverged, of which none is to blame
        worst[seed] = max((value for value in regrets if not math.isnan(value)), default=math.nan)
    return worst


def _seeds(record: Record) -> list[int]:
    return sorted({run["key"]["seed"] for run in record.runs})
