"""The 95 % confidence interval of a mean over few seeds, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean, its standard error (None from one value), and its two-sided interval."""

    mean: float
    error: float | None
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """The mean of at least one finite value, and its 95 % confidence interval.

    >>> [round(number, 1) for number in interval([1.0, 3.0])]
    [2.0, 1.0, -10.7, 14.7]
    >>> interval([1.0])
    Interval(mean=1.0, error=None, low=-inf, high=inf)
    """
    mean = statistics.mean(values)
    if len(values) == 1:
        return Interval(mean, None, -math.inf, math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return Interval(mean, error, mean - half, mean + half)
