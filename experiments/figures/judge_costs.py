"""What step times, complexities and the idealized runs say of their claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.confidence import interval
from experiments.costs.step_sets import STEP_SETS
from experiments.costs.step_times_report import AUTHORS
from experiments.figures.evidence import Record
from experiments.figures.verdicts import (
    CANNOT_TELL,
    CONTRADICTS,
    SUPPORTS,
    Verdict,
    all_of,
    unless,
)
from experiments.problems.softmax_regression import Constants
from experiments.runs.methods import LABELS
from tools.measuring.fits import WITHIN
from tools.measuring.tables import BUSY

_AUTHORS_KEY = ("mnist_ae", "tnt", 1, 20)
_LIKE = 1.1  # a ratio is like another within a tenth
_MODERATE = 2.0  # "moderately more computational effort": at most twice
_MUCH = 1.5  # "much slower"
_EXCEEDS = 2 * WITHIN  # an exponent so far above its order is no matter of the sizes
# Over m and the intervals, TNT's terms of the table; "no m" is Shampoo's.
_ORDERS = ("TNT", "Shampoo", "Adam")


def authors_ratio(record: Record) -> Verdict:
    """TNT's step is at most as many times SGD-m's as in the authors' stored run."""
    wanted = AUTHORS[_AUTHORS_KEY][0] / AUTHORS[_AUTHORS_KEY][1]
    found = _step(record, *_AUTHORS_KEY)
    if found is None:
        return Verdict(CANNOT_TELL, "that step was not timed")
    low, high = (quartile / found["sgd_seconds"] for quartile in found["quartiles"])
    why = f"{found['ratio']:.2f} times SGD-m's (quartiles {low:.2f} to {high:.2f})"
    why += f", theirs {wanted:.2f}, on another machine"
    limit = _LIKE * wanted
    outcome = SUPPORTS if high <= limit else CONTRADICTS if low > limit else CANNOT_TELL
    return unless(_disturbed([found]), Verdict(outcome, why))


def moderate_step(record: Record) -> Verdict:
    """At the paper's T1 and T2 for networks, TNT's step takes at most twice SGD-m's."""
    verdicts = []
    for name in ("resnet32", "vgg16"):
        found = _step(record, name, "tnt", 10, 100)
        if found is not None:
            low, high = (quartile / found["sgd_seconds"] for quartile in found["quartiles"])
            text = f"{name}: {found['ratio']:.2f} times SGD-m's ({low:.2f} to {high:.2f})"
            outcome = SUPPORTS if high <= _MODERATE else CANNOT_TELL
            outcome = CONTRADICTS if low > _MODERATE else outcome
            verdicts.append(unless(_disturbed([found]), Verdict(outcome, text)))
    return all_of(verdicts)


def kfac_step(name: str, factor: float) -> Callable[[Record], Verdict]:
    """A judge: KFAC's step on a set takes at least so many times TNT's, at the set's T1 and T2."""
    others = ("tnt", "shampoo") if factor > 1 else ("tnt",)

    def judge(record: Record) -> Verdict:
        own = _own_step(record, name)
        if own is None:
            return Verdict(CANNOT_TELL, f"KFAC's step on {name} was not timed")
        verdicts = []
        for method in others:
            other = _own_step(record, name, method)
            if other is None:
                verdicts.append(Verdict(CANNOT_TELL, f"{LABELS[method]}'s was not timed"))
                continue
            # In multiples of the SGD-m that each took turns with: a command that goes on from its
            # file may have timed the two in different hours.
            base = other["sgd_seconds"] / own["sgd_seconds"]
            low = base * own["quartiles"][0] / other["quartiles"][1]
            high = base * own["quartiles"][1] / other["quartiles"][0]
            outcome = SUPPORTS if low >= factor else CONTRADICTS if high < factor else CANNOT_TELL
            middle = base * own["seconds"] / other["seconds"]
            why = f"{name}: {middle:.2f} times {LABELS[method]}'s ({low:.2f} to {high:.2f}"
            verdict = Verdict(outcome, f"{why}; wanted: at least {factor:g})")
            verdicts.append(unless(_disturbed([own, other]), verdict))
        return all_of(verdicts)

    return judge


def kfac_not_cheaper(record: Record) -> Verdict:
    """KFAC's step takes no less than TNT's, but for a tenth, on every set that has both."""
    sets = dict.fromkeys(run["key"]["set"] for run in record.runs)
    return all_of(
        [
            kfac_step(name, 1 / _LIKE)(record)
            for name in sets
            if _own_step(record, name) and _own_step(record, name, "tnt")
        ]
    )


kfac_much_slower = kfac_step("vgg16", _MUCH)


def memory_orders(record: Record) -> Verdict:
    """The state's size has the table's order, counted to the byte."""
    verdicts = []
    for run in record.runs:
        key = run["key"]
        if key["of"] == "memory":
            agrees = run["fitted"] is not None and abs(run["fitted"] - run["predicted"]) <= WITHIN
            fitted = "no exponent" if run["fitted"] is None else f"{run['fitted']:.2f}"
            text = f"{key['method']}, {key['part']}: {fitted} ({run['predicted']:g})"
            good = agrees and run["equal"]
            verdicts.append(Verdict(SUPPORTS if good else CONTRADICTS, text))
    return all_of(verdicts)


def time_orders(record: Record) -> Verdict:
    """Times beyond SGD-m's have the table's exponents in d, m, T1 and T2.

    A bound is contradicted by an exponent well above its own; one that is below, or could not be
    fitted, leaves it open.
    """
    verdicts = []
    for run in record.runs:
        key = run["key"]
        if key["of"] != "time" or key["method"] not in _ORDERS:
            continue
        text = f"{key['method']} over {key['over']}"
        if run["fitted"] is None:
            verdicts.append(Verdict(CANNOT_TELL, f"{text}: too few points ({run['predicted']:g})"))
            continue
        away = run["fitted"] - run["predicted"]
        outcome = CONTRADICTS if away > _EXCEEDS else CANNOT_TELL
        outcome = SUPPORTS if abs(away) <= WITHIN else outcome
        verdict = Verdict(outcome, f"{text}: {run['fitted']:.2f} ({run['predicted']:g})")
        verdicts.append(unless(_disturbed([run]), verdict))
    verdict = all_of(verdicts)
    if record.protocol.get("quick") and verdict.outcome == CONTRADICTS:
        return unless("the largest sizes were left out", verdict)
    return verdict


def bound_holds(record: Record) -> Verdict:
    """The average squared gradient norm is below the theorem's bound at every N, with 95 %."""
    known = Constants(**record.protocol["constants"])
    counts = record.protocol["recorded_at"]
    verdicts = []
    for beta in dict.fromkeys(run["key"]["beta"] for run in record.runs):
        chosen = [
            run["averages"]
            for run in record.runs
            if run["key"]["beta"] == beta and run["key"]["multiple"] <= 1
        ]
        if not chosen:
            continue
        found = [interval(column) for column in zip(*chosen, strict=True)]
        bounds = [known.bound(count, beta) for count in counts]
        pairs = list(zip(found, bounds, strict=True))
        outcome = SUPPORTS if all(mean.high <= bound for mean, bound in pairs) else CANNOT_TELL
        outcome = CONTRADICTS if any(mean.low > bound for mean, bound in pairs) else outcome
        shares = [(m.mean if m.error is None else m.high) / bound for m, bound in pairs]
        nearest, worst = max(zip(shares, counts, strict=True))
        why = f"beta {beta:g}: at most {nearest:.2g} of the bound (at N = {worst}"
        verdicts.append(Verdict(outcome, f"{why}, {len(chosen)} seeds)"))
    return all_of(verdicts)


def _own_step(record: Record, name: str, method: str | None = None) -> Mapping[str, Any] | None:
    """A method's step at a set's own T1 and T2, the set's form of KFAC where none is named."""
    known = STEP_SETS.get(name)
    if known is None:
        return None  # of a set that there no longer is
    return _step(record, name, method or known.kfac, *known.intervals)


def _step(
    record: Record, name: str, method: str, stat_interval: int, inverse_interval: int
) -> Mapping[str, Any] | None:
    """A timed step; None where it is not in the record, or was left out."""
    wanted = (name, method, stat_interval, inverse_interval)
    for run in record.runs:
        key = run["key"]
        found = (key["set"], key["method"], key["stat_interval"], key["inverse_interval"])
        if found == wanted and "left_out" not in run:
            return run
    return None


def _disturbed(runs: list[Mapping[str, Any]]) -> str | None:
    """Why times are not to be relied on, or None."""
    most = max(run.get(name) or 0.0 for run in runs for name in ("busy_before", "busy_after"))
    return f"something else used {100 * most:.0f} % of the machine" if most > BUSY else None
