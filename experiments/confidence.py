"""What a mean over few seeds can tell: its 95 % confidence interval by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtrit

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean and its two-sided interval.

    Attributes:
        mean: of the values.
        error: its standard error; None from one value.
        low: the interval's lower end; from one value minus infinity.
        high: its upper end; from one value infinity.
    """

    mean: float
    error: float | None
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """The mean of at least one value, and where the true one lies with 95 % confidence.

    Two standard errors would be too few: from 2, 3 and 5 values of one mean they tell a difference
    in 29 %, 18 % and 12 % of cases. Student's t takes 12.7, 4.3 and 2.8.

    Args:
        values: finite, one for each seed.

    >>> [round(number, 1) for number in interval([1.0, 3.0])]
    [2.0, 1.0, -10.7, 14.7]
    >>> interval([1.0])
    Interval(mean=1.0, error=None, low=-inf, high=inf)
    """
    mean = statistics.mean(values)
    if len(values) == 1:
        return Interval(mean, None, -math.inf, math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error
    return Interval(mean, error, mean - half, mean + half)
