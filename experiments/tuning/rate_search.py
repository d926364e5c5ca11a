"""A search of the best learning rate with a fixed number of trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

# Rates are 10^(k/4): 1, 1.8, 3.2, 5.6, 10. The search starts with every second one.
COARSE = 2


def rate(place: int) -> float:
    """The learning rate at a place of the grid, to two significant digits.

    >>> [rate(place) for place in range(-8, -3)]
    [0.01, 0.018, 0.032, 0.056, 0.1]
    """
    return float(f"{10 ** (place / 4):.1e}")


def place_of(lr: float) -> int:
    """The place of the grid that is nearest to a learning rate."""
    return round(4 * math.log10(lr))


def next_places(tried: Mapping[int, float], centre: int, trials: int) -> list[int]:
    """The places to try next; empty once the trials are spent.

    First the centre and its coarse neighbours. Then, while the best is at an end of what was
    tried, the coarse neighbour beyond it; and with the best in the interior, the nearest place to
    it that was not tried, on the side of its better neighbour first. So every method gets the same
    number of trials, and a bad guess of the centre costs it precision before it costs it the
    optimum.

    Args:
        tried: loss by place; infinite for a run that diverged.
        centre: the guess.
        trials: how many there are in all.
    """
    left = trials - len(tried)
    if left <= 0:
        return []
    start = [p for p in (centre, centre - COARSE, centre + COARSE) if p not in tried]
    if start:
        return start[:left]
    best = best_place(tried)
    if best is None:  # all diverged: lower
        return [min(tried) - COARSE]
    if best == max(tried):
        return [best + COARSE]
    if best == min(tried):
        return [best - COARSE]
    below = max(p for p in tried if p < best)
    above = min(p for p in tried if p > best)
    sides = [-1, 1] if tried[below] < tried[above] else [1, -1]
    nearest = (best + side * distance for distance in itertools.count(1) for side in sides)
    return [next(place for place in nearest if place not in tried)]


def best_place(tried: Mapping[int, float]) -> int | None:
    """The place of the lowest loss; None where all diverged."""
    finite = {place: loss for place, loss in tried.items() if math.isfinite(loss)}
    return min(finite, key=lambda place: finite[place]) if finite else None


def interior(tried: Mapping[int, float]) -> bool:
    """Whether the best is neither the lowest nor the highest rate that was tried."""
    best = best_place(tried)
    return best is not None and min(tried) < best < max(tried)
