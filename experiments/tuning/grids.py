"""The grids of the searches: the paper's (its appendix on experiments), and this project's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.runs.settings import Settings
from experiments.tuning.recorded_search import Tried

# The values of each setting that is searched.
Grid = Mapping[str, Sequence[float]]


def log_grid(lowest: float, highest: float, points: int) -> tuple[float, ...]:
    """`points` values in equal ratios from `lowest` to `highest`, to two significant digits."""
    ratio = math.log(highest / lowest) / (points - 1)
    return tuple(float(f"{lowest * math.exp(ratio * i):.1e}") for i in range(points))


def decades(lowest: float, highest: float) -> tuple[float, ...]:
    """The values 1, 3, 10, 30, ... between two of them, as the paper steps.

    >>> decades(1e-3, 0.03)
    (0.001, 0.003, 0.01, 0.03)
    """
    first, last = round(2 * math.log10(lowest)), round(2 * math.log10(highest))
    return tuple(
        float(f"{'3' if number % 2 else '1'}e{number // 2}") for number in range(first, last + 1)
    )


_PAPER_AUTOENCODER: dict[str, Grid] = {
    "tnt": {"lr": decades(1e-7, 1e-3), "damping": decades(1e-3, 0.3)},
    "tnt-ef": {"lr": decades(1e-7, 1e-3), "damping": decades(1e-3, 0.3)},
    "kfac": {"lr": decades(1e-4, 0.3), "damping": decades(0.01, 10)},
    "shampoo": {"lr": decades(1e-5, 3e-3), "damping": decades(1e-4, 0.01)},
    "adam": {"lr": decades(1e-5, 0.01), "damping": (1e-8, 1e-4, 1e-2)},
    "sgd": {"lr": decades(1e-4, 0.03)},
}
_PAPER_CNN: dict[str, Grid] = {
    "tnt": {"lr": decades(1e-6, 1e-3), "weight_decay": (1.0, 10.0, 100.0)},
    "tnt-ef": {"lr": decades(1e-6, 1e-3), "weight_decay": (1.0, 10.0, 100.0)},
    "kfac-eigen": {"lr": decades(3e-6, 0.03), "weight_decay": (0.01, 0.1, 1.0)},
    "shampoo": {"lr": decades(3e-5, 0.1), "weight_decay": (0.01, 0.1, 1.0, 10.0)},
    "adam": {
        "lr": decades(1e-6, 0.03),
        "weight_decay": (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0),
    },
    "sgd": {"lr": decades(3e-5, 1.0), "weight_decay": (1e-3, 0.01, 0.1, 1.0)},
}
# 35 settings for every method: SGD-m, which has no damping, spends as many runs on a finer grid of
# rates. In the paper's steps, and placed so that the best is in the interior.
_DIGITS: dict[str, Grid] = {
    "tnt": {"lr": decades(1e-5, 1e-2), "damping": decades(3e-3, 0.3)},
    "tnt-ef": {"lr": decades(1e-7, 1e-4), "damping": decades(1e-3, 0.1)},
    "kfac": {"lr": decades(1e-3, 1.0), "damping": decades(0.01, 1.0)},
    "shampoo": {"lr": decades(1e-3, 1.0), "damping": decades(1e-4, 0.01)},
    "adam": {"lr": decades(3e-4, 0.3), "damping": (1e-8, 1e-4, 1e-3, 0.01, 0.1)},
    "sgd": {"lr": log_grid(1e-3, 1, 35)},
}
# Grafted steps have Adam's length, whatever the method: one grid serves all.
_LANGUAGE: dict[str, Grid] = {
    method: {"lr": decades(1e-3, 0.1)} for method in ("tnt", "tnt-ef", "shampoo", "adam", "muon")
}
GRIDS: dict[str, dict[str, Grid]] = {
    "mnist": _PAPER_AUTOENCODER,
    "faces": _PAPER_AUTOENCODER,
    "curves": _PAPER_AUTOENCODER,
    "digits": _DIGITS,
    "resnet32": _PAPER_CNN,
    "vgg16": _PAPER_CNN,
    "language": _LANGUAGE,
}


def grid_settings(base: Settings, grid: Grid) -> list[Settings]:
    """One method's settings at every point of its grid, the last axis running fastest."""
    settings = []
    for point in itertools.product(*grid.values()):
        chosen: dict[str, Any] = dict(zip(grid, point, strict=True))
        settings.append(replace(base, **chosen))
    return settings


def grid_of(entries: Sequence[Tried], optimizer: str, names: Sequence[str]) -> Grid:
    """The values that one method was tried with, in order; they need not be a whole grid.

    Args:
        entries: what was tried.
        optimizer: the method.
        names: the settings that were searched.
    """
    own = [entry.settings for entry in entries if entry.settings.optimizer == optimizer]
    return {name: sorted({getattr(settings, name) for settings in own}) for name in names}


def interior(settings: Settings, grid: Grid) -> bool:
    """Whether no setting is at an end of its axis; an axis of one value has no ends."""
    return not any(
        len(values) > 1 and getattr(settings, name) in (min(values), max(values))
        for name, values in grid.items()
    )
