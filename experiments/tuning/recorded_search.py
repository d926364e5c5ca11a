"""What a recorded search found: the best settings of every method.

The paper's criteria: the lowest training loss for autoencoders, the highest validation accuracy for
classifiers (section 6), over the seeds that were searched with.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs.run_file import load_runs
from experiments.runs.settings import Settings, variant

# What is minimised, by its name in a record: the smoothed loss at the end, or a metric's best.
LOSS = "final_smoothed_loss"


@dataclass(frozen=True)
class Tried:
    """One setting of a search.

    Attributes:
        settings: with the first of its seeds.
        scores: what is minimised, a number for each seed; None for a run that diverged.
    """

    settings: Settings
    scores: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """The mean score; None where a seed diverged: a good setting does not."""
        good = [score for score in self.scores if score is not None]
        return statistics.mean(good) if len(good) == len(self.scores) else None


def tried(runs: Iterable[Mapping[str, Any]], criterion: str = LOSS) -> list[Tried]:
    """The settings of a record's runs, seeds gathered, in the order of their first runs."""
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(variant(Settings(**run["key"])), []).append(run)
    return [
        Tried(
            Settings(**members[0]["key"]),
            tuple(None if run["diverged_at_step"] else run[criterion] for run in members),
        )
        for members in groups.values()
    ]


def best_of(entries: Sequence[Tried], optimizer: str) -> Tried:
    """The setting of the lowest mean score among one optimizer's.

    Raises:
        ValueError: there is none that did not diverge.
    """
    own = [entry for entry in entries if entry.settings.optimizer == optimizer]
    finished = [(entry.mean, entry) for entry in own if entry.mean is not None]
    if not finished:
        raise ValueError(
            f"no setting of {optimizer!r} finished, of {len(own)} that the search tried"
        )
    return min(finished, key=lambda pair: pair[0])[1]


@functools.cache
def best_settings(path: Path, optimizer: str) -> Settings:
    """The best settings of one optimizer in the search that `path` records.

    Raises:
        ValueError: it is no such record, or holds no finished run of this optimizer.
        OSError: it cannot be read.
    """
    record = load_runs(path)
    criterion = record["protocol"].get("criterion", LOSS)
    return best_of(tried(record["runs"], criterion), optimizer).settings
