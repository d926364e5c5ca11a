"""What a run says of a claim, and the rules for it: differences paired by seed, Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.confidence import CONFIDENCE, interval

SUPPORTS, CONTRADICTS, CANNOT_TELL = "supports", "contradicts", "cannot tell"
NOT_RUN = "not run"

# "At least as good": no worse by more than this share of the other's loss.
MARGIN = 0.02


@dataclass(frozen=True)
class Verdict:
    """What a run says of a claim.

    Attributes:
        outcome: SUPPORTS, CONTRADICTS or CANNOT_TELL.
        why: the numbers that decided.
    """

    outcome: str
    why: str


def below(
    name: str, own: Mapping[int, float], other_name: str, other: Mapping[int, float]
) -> Verdict:
    """Whether one is below the other: the mean difference's 95 % interval leaves out 0.

    Args:
        name: whose figures the first are.
        own: by seed; infinite for a run that diverged.
        other_name: whose the others are.
        other: likewise, from the same starts and batches.
    """
    return _judged(name, own, other_name, other, margin=None)


def not_above(
    name: str,
    own: Mapping[int, float],
    other_name: str,
    other: Mapping[int, float],
    margin: float | None = None,
) -> Verdict:
    """Whether one is at most the other, but for a margin, with its 95 % interval.

    Args:
        name: whose figures the first are.
        own: by seed; infinite for a run that diverged.
        other_name: whose the others are.
        other: likewise, from the same starts and batches.
        margin: None for `MARGIN` of the other's mean.
    """
    finite = [value for value in other.values() if math.isfinite(value)]
    if margin is None:
        margin = MARGIN * abs(statistics.mean(finite)) if finite else 0.0
    return _judged(name, own, other_name, other, margin)


def not_comparable(
    name: str, own: Mapping[int, float], other_name: str, other: Mapping[int, float]
) -> Verdict | None:
    """The verdict where one was not run beside the other, or diverged; None where both have ended.

    Args:
        name: whose figures the first are, which the claim is about.
        own: by seed; infinite for a run that diverged.
        other_name: whose the others are.
        other: likewise, from the same starts and batches.
    """
    seeds = sorted(own.keys() & other.keys())
    if not seeds:
        missing = name if not own else other_name
        return Verdict(CANNOT_TELL, f"{missing} was not run beside it")
    # With the claim's own settings: a method that diverges is not better.
    for label, values, outcome in ((name, own, CONTRADICTS), (other_name, other, CANNOT_TELL)):
        lost = sum(not math.isfinite(values[seed]) for seed in seeds)
        if lost:
            return Verdict(outcome, f"{label} diverged in {lost} of {len(seeds)} runs")
    return None


def _judged(
    name: str,
    own: Mapping[int, float],
    other_name: str,
    other: Mapping[int, float],
    margin: float | None,
) -> Verdict:
    verdict = not_comparable(name, own, other_name, other)
    if verdict is not None:
        return verdict
    seeds = sorted(own.keys() & other.keys())
    difference = interval([own[seed] - other[seed] for seed in seeds])
    means = [statistics.mean(values[seed] for seed in seeds) for values in (own, other)]
    numbers = f"{name} {means[0]:.4g}, {other_name} {means[1]:.4g}"
    if difference.error is None:
        return Verdict(CANNOT_TELL, f"{numbers}; one seed, so no error is known")
    numbers += f", difference {difference.mean:+.3g} ± {difference.error:.2g}"
    numbers += f" ({len(seeds)} seeds)"
    if margin is None:
        outcome = SUPPORTS if difference.high < 0 else CANNOT_TELL
        outcome = CONTRADICTS if difference.low > 0 else outcome
        return Verdict(outcome, numbers)
    numbers += f", margin {margin:.2g}"
    outcome = SUPPORTS if difference.high <= margin else CANNOT_TELL
    outcome = CONTRADICTS if difference.low > margin else outcome
    return Verdict(outcome, numbers)


def inside(name: str, values: Sequence[float], low: float, high: float, text: str = "") -> Verdict:
    """Whether the mean of values, one for each seed, lies in a range, with its 95 % interval.

    Args:
        name: whose values.
        values: infinite for a run that diverged, which lies nowhere; NaN for none.
        low: the range's lower end.
        high: its upper end.
        text: the range in words; its ends where there are none.
    """
    where = text or f"{low:g} to {high:g}"
    lost = sum(math.isinf(value) for value in values)
    if lost:
        return Verdict(CONTRADICTS, f"{name}: diverged in {lost} of {len(values)} runs")
    good = [value for value in values if math.isfinite(value)]
    if not good:
        return Verdict(CANNOT_TELL, f"{name} was not measured")
    found = interval(good)
    if found.error is None:
        return Verdict(CANNOT_TELL, f"{name} {found.mean:.4g} (wanted: {where}); one seed")
    why = f"{name} {found.mean:.4g} ± {found.error:.2g} ({len(good)} seeds; wanted: {where})"
    if low <= found.low and found.high <= high:
        return Verdict(SUPPORTS, why)
    if found.high < low or found.low > high:
        return Verdict(CONTRADICTS, why)
    return Verdict(CANNOT_TELL, why)


def by_chance(verdicts: Sequence[Verdict]) -> str:
    """How many of these, in a sentence, are what chance alone would make of equals."""
    judged = sum(verdict.outcome in (SUPPORTS, CONTRADICTS) for verdict in verdicts)
    share = 1 - CONFIDENCE
    return (
        f"Of comparisons of equals chance alone turns {100 * share:.0f} % into a verdict: here "
        f"{share * judged:.1f} of the {judged} claims that got one, more where a claim has several "
        "parts."
    )


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a claim in several parts: each must be supported, and one contradiction is enough."""
    if not verdicts:
        return Verdict(CANNOT_TELL, "nothing that it is about was run")
    outcomes = {verdict.outcome for verdict in verdicts}
    why = "; ".join(verdict.why for verdict in verdicts)
    if CONTRADICTS in outcomes:
        return Verdict(CONTRADICTS, why)
    return Verdict(SUPPORTS if outcomes == {SUPPORTS} else CANNOT_TELL, why)


def unless(reason: str | None, verdict: Verdict) -> Verdict:
    """The verdict, but where there is a reason not to judge: then only its numbers."""
    if reason is None:
        return verdict
    return replace(verdict, outcome=CANNOT_TELL, why=f"{reason} ({verdict.why})")
