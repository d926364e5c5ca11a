"""Exponents fitted to measured sweeps, and the points that a fit may use. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# A time below this multiple of the smallest size's time is mostly the fixed cost of the call.
LAUNCH_FACTOR = 3.0
# An interval that adds less than this share of the bare step is lost in the noise.
LEAST_EXCESS = 0.1
LEAST_POINTS = 3
WITHIN = 0.15  # largest distance of a fitted exponent from the predicted one


def launch_bound(times: Sequence[float]) -> list[bool]:
    """For each point of a sweep from small to large, whether its time is mostly a fixed cost.

    It is where the time is below three times the smallest size's time.

    >>> launch_bound([10e-6, 12e-6, 40e-6, 300e-6])
    [True, True, False, False]
    """
    return [time < LAUNCH_FACTOR * times[0] for time in times]


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """The slope of log(values) over log(sizes) by least squares; None with fewer than 3 points.

    >>> exponent([1, 2, 4], [5.0, 20.0, 80.0])
    2.0
    """
    if len(sizes) < LEAST_POINTS:
        return None
    xs, ys = [math.log2(x) for x in sizes], [math.log2(y) for y in values]
    return statistics.linear_regression(xs, ys).slope


def agreement(predicted: float, fitted: float | None) -> str:
    """Whether a fitted exponent agrees with the predicted one.

    >>> agreement(3, 2.86), agreement(3, 2.7), agreement(3, None)
    ('agrees', '**off**', 'too few points')
    """
    if fitted is None:
        return "too few points"
    return "agrees" if abs(fitted - predicted) <= WITHIN else "**off**"


def left_out(record: Mapping[str, Any]) -> str:
    """The values that were not fitted, by reason.

    >>> left_out({"values": [1, 2, 4], "status": ["launch-bound", "launch-bound", "fitted"]})
    'launch-bound: 1, 2'
    """
    reasons: dict[str, list[str]] = {}
    for value, status in zip(record["values"], record["status"], strict=True):
        if status != "fitted":
            reasons.setdefault(status, []).append(str(value))
    return "; ".join(f"{reason}: {', '.join(values)}" for reason, values in reasons.items())
