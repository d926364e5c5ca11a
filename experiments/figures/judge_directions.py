"""What the cosine similarities say of the claims on Figure 1."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from experiments.cosine import best_settings
from experiments.directions.followers import COMPARED
from experiments.directions.report import damping_name, most_similar
from experiments.figures.evidence import Record
from experiments.figures.verdicts import (
    CANNOT_TELL,
    CONTRADICTS,
    SUPPORTS,
    Verdict,
    all_of,
    below,
    inside,
    not_above,
    unless,
)

RANGE = (0.65, 0.85)  # "around 0.7 to 0.8"
_SIMILAR = 0.05
_LEAST_ITERATIONS = 30  # three times the memory of a moving average with decay 0.9
_SECOND_ORDER, _FIRST_ORDER = ("tnt", "kfac", "shampoo"), ("adam", "sgd")

# For a method and each of the layers, the mean over the iterations, by seed.
Layers = list[dict[int, float]]


def similarities(record: Record, at_most_similar: bool = False) -> dict[str, Layers]:
    """Every method's, with the damping that trained best, or the one that is most similar."""
    runs = [dict(run) for run in record.runs]
    compared = [run for run in runs if run["key"]["part"] == "similarity"]
    if not compared:
        return {}
    found: dict[str, Layers] = {}
    chosen = {name: best["damping"] for name, best in best_settings(runs).items()}
    for method, value in (most_similar(compared) if at_most_similar else chosen).items():
        damping = damping_name(value)
        count = len(compared[0]["similarity"][method][damping])
        layers: Layers = [{} for _ in range(count)]
        for run in compared:
            for layer, values in zip(layers, run["similarity"][method][damping], strict=True):
                good = [value for value in values if value is not None]
                if good:
                    layer[run["key"]["seed"]] = statistics.fmean(good)
        found[method] = layers
    return found


def in_range(record: Record) -> Verdict:
    """TNT's similarity lies around 0.7 to 0.8 in every layer."""
    layers = similarities(record).get("tnt", [])
    verdicts = [
        inside(f"layer {number}", list(layer.values()), *RANGE)
        for number, layer in enumerate(layers, 2)
    ]
    return unless(_too_short(record), all_of(verdicts))


def above_shampoo(record: Record) -> Verdict:
    """TNT's similarity is above Shampoo's in every layer."""
    known = similarities(record)
    verdicts = [
        below(f"layer {number}: Shampoo", shampoo, "TNT", tnt)
        for number, (tnt, shampoo) in enumerate(
            zip(known.get("tnt", []), known.get("shampoo", []), strict=True), 2
        )
    ]
    return unless(_too_short(record), all_of(verdicts))


def like_kfac(record: Record) -> Verdict:
    """TNT's similarity is at least KFAC's, within 0.05, in every layer."""
    known = similarities(record)
    verdicts = [
        not_above(f"layer {number}: KFAC", kfac, "TNT", tnt, _SIMILAR)
        for number, (tnt, kfac) in enumerate(
            zip(known.get("tnt", []), known.get("kfac", []), strict=True), 2
        )
    ]
    return unless(_too_short(record), all_of(verdicts))


def first_order_lower(record: Record) -> Verdict:
    """First-order methods' similarity is usually below the second-order ones'.

    Of their means over the layers, every pair is judged; "usually" is more than half of the pairs.
    """
    known = {method: _mean_layer(layers) for method, layers in similarities(record).items()}
    verdicts = [
        below(COMPARED[first].label, known[first], COMPARED[second].label, known[second])
        for first in _FIRST_ORDER
        for second in _SECOND_ORDER
        if first in known and second in known
    ]
    yes = sum(verdict.outcome == SUPPORTS for verdict in verdicts)
    no = sum(verdict.outcome == CONTRADICTS for verdict in verdicts)
    half = len(verdicts) / 2
    outcome = SUPPORTS if yes > half else CONTRADICTS if no > half else CANNOT_TELL
    why = f"{yes} of {len(verdicts)} pairs below, {no} above: "
    why += "; ".join(verdict.why for verdict in verdicts)
    return unless(_too_short(record), Verdict(outcome, why))


def _mean_layer(layers: Layers) -> Mapping[int, float]:
    seeds = set.intersection(*(set(layer) for layer in layers)) if layers else set()
    return {seed: statistics.fmean(layer[seed] for layer in layers) for seed in sorted(seeds)}


def _too_short(record: Record) -> str | None:
    iterations = record.protocol["iterations"]
    if iterations < _LEAST_ITERATIONS:
        return f"scaled down too far: {iterations} iterations, of moving averages with decay 0.9"
    return None
