"""What the language comparison and recorded searches say of their claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

from experiments.figures.evidence import Record
from experiments.figures.judge_training import FIRST_ORDER
from experiments.figures.verdicts import (
    CANNOT_TELL,
    CONTRADICTS,
    SUPPORTS,
    Verdict,
    all_of,
    below,
    inside,
    unless,
)
from experiments.language.forms import FORMS, INTERVALS
from experiments.language.results import Row, rows
from experiments.runs.methods import LABELS
from experiments.runs.settings import Settings, variant
from experiments.sensitivities.measures import TOLERANCE, Surface, best_rate, regret, surface
from experiments.sensitivities.plan import BASES, CONTENDERS, points
from experiments.tuning.recorded_search import LOSS

# The probe's runs had 400 steps and more: half of that is judged, less is mostly warm-up.
_LEAST_STEPS = 200
_GRAFTED = "tnt-grafted"


def language_rows(record: Record) -> list[Row]:
    """The record's table."""
    return rows(record.runs)


def lower_at_equal_tokens(baseline: str) -> Callable[[Record], Verdict]:
    """A judge: after as many steps, grafted TNT's validation loss is below a baseline's.

    Not where a better learning rate, beyond the end of its search, could overturn it.
    """

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
            reason = "scaled down too far" if short else row.doubt(baseline, difference)
            verdicts.append(unless(reason, verdict))
        return all_of(verdicts)

    return judge


def best_of_search(
    record: Record, choosing: Collection[int] | None = None
) -> dict[str, tuple[Settings, dict[int, float]]]:
    """Each method's best settings in a search, and their scores by seed, infinite if diverged.

    Args:
        record: of the search.
        choosing: the seeds whose mean score is to be the lowest; None for all.
    """
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
        counted = [s for seed, s in scores.items() if choosing is None or seed in choosing]
        mean = statistics.fmean(counted) if counted else math.inf
        if settings.optimizer not in best or mean < best[settings.optimizer][0]:
            best[settings.optimizer] = (mean, (settings, scores))
    return {optimizer: found for optimizer, (_, found) in best.items()}


def lower_when_tuned(record: Record) -> Verdict:
    """With the best settings of every method's own grid, TNT's loss is below SGD-m's and Adam's.

    Each seed is judged with the settings that the other seeds choose: the winner of a search owes
    part of its loss to the seeds that it won on. Not by half of the seeds: by two of the recorded
    search's five a setting of TNT wins that diverges on others. Not against a rival whose best
    learning rate or damping is an end of its grid, beyond which it may do better; and nothing is
    held against TNT if its own is one.
    """
    seeds = _seeds(record)
    if len(seeds) < 2:
        return Verdict(CANNOT_TELL, "one seed, which cannot both choose settings and judge them")
    found = {seed: best_of_search(record, set(seeds) - {seed}) for seed in seeds}
    losses = {
        name: {
            seed: best[name][1][seed]
            for seed, best in found.items()
            if name in best and seed in best[name][1]
        }
        for name in ("tnt", *FIRST_ORDER)
    }
    verdicts = []
    for name in FIRST_ORDER:
        verdict = below("TNT", losses["tnt"], LABELS[name], losses[name])
        suspects = [name, "tnt"] if verdict.outcome == CONTRADICTS else [name]
        at_end = [
            f"{LABELS[one]}'s best {axis} is an end of its grid"
            for one in suspects
            for axis, field in (("learning rate", "lr"), ("damping", "damping"))
            if any(_at_end(record, best[one][0], field) for best in found.values() if one in best)
        ]
        verdicts.append(unless(" and ".join(at_end) or None, verdict))
    return all_of(verdicts)


def _at_end(record: Record, settings: Settings, field: str) -> bool:
    """Whether a search's best for a method is the lowest or highest that it tried, of several."""
    own = settings.optimizer
    tried = {run["key"][field] for run in record.runs if run["key"]["optimizer"] == own}
    return len(tried) > 1 and getattr(settings, field) in (min(tried), max(tried))


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
            -math.inf,
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
        labels = [CONTENDERS[form].label for form in (_GRAFTED, "tnt")]
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
