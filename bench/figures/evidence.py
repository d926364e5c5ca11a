"""Records of experiments, found and read: which there are, and the runs that they hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.experiments.runs.run_file import load_runs
from bench.experiments.runs.settings import Settings, variant
from bench.experiments.runs.training import Run


@dataclass(frozen=True)
class Record:
    """The record of one experiment.

    Attributes:
        path: its file.
        content: what stands there.
    """

    path: Path
    content: Mapping[str, Any]

    @property
    def experiment(self) -> str:
        """Which one."""
        return str(self.content["experiment"])

    @property
    def protocol(self) -> Mapping[str, Any]:
        """What its runs share."""
        protocol: Mapping[str, Any] = self.content["protocol"]
        return protocol

    @property
    def runs(self) -> Sequence[Mapping[str, Any]]:
        """Its runs."""
        runs: Sequence[Mapping[str, Any]] = self.content["runs"]
        return runs

    @property
    def origins(self) -> Sequence[Mapping[str, Any]]:
        """Where they come from: one entry for each process that made some."""
        origins = self.content["provenance"]
        return [origins] if isinstance(origins, Mapping) else origins

    def pictures(self) -> list[Path]:
        """The pictures that its command left beside it: one, or one for each width and length."""
        own = self.path.with_suffix(".png")
        if own.is_file():
            return [own]
        return sorted(self.path.parent.glob(f"{self.path.stem}-width*-steps*.png"))


def load_folder(
    folder: Path, names: Sequence[str] | None = None
) -> tuple[list[Record], dict[str, str]]:
    """The records of a folder.

    Args:
        folder: where.
        names: of the files to look for; None for all JSON files, also in folders below.

    Returns:
        The records, in the order of their names, and those files that are none, with the reason: of
        files that were not asked for by name only what claims to be runs and cannot be read.
    """
    paths = sorted(folder.rglob("*.json")) if names is None else [folder / n for n in names]
    records, unread = [], {}
    for path in paths:
        if not path.is_file():
            continue
        try:
            records.append(Record(path, load_runs(path)))
        except (OSError, ValueError) as error:
            if names is not None:
                unread[path.name] = str(error).replace(str(path), path.name)
    return [record for record in records if record.runs], unread


def trainings(record: Record) -> list[Run]:
    """The training runs of a record."""
    return [Run.from_record(dict(run)) for run in record.runs]


def by_method(
    record: Record, metric: Callable[[Run], float] | None = None
) -> dict[str, dict[int, Run]]:
    """Each method's runs by seed, as in the paper: neither grafted nor with relative damping.

    Of several settings of one method those count that are best on the average, the lowest final
    loss or metric first; settings with which a run diverged come last.
    """
    score = metric or (lambda run: run.final_loss)
    groups: dict[tuple[str, object], dict[int, Run]] = {}
    for run in trainings(record):
        settings = run.settings
        if settings.graft is None and not settings.relative_damping:
            key = (settings.optimizer, variant(settings))
            groups.setdefault(key, {})[settings.seed] = run
    best: dict[str, tuple[float, dict[int, Run]]] = {}
    for (optimizer, _), members in groups.items():
        mean = statistics.mean(score(run) for run in members.values())
        mean = mean if math.isfinite(mean) else math.inf
        if optimizer not in best or mean < best[optimizer][0]:
            best[optimizer] = (mean, members)
    return {optimizer: members for optimizer, (_, members) in best.items()}


def is_tuned(record: Record) -> bool:
    """Whether momenta and decays are not all those that the paper has elsewhere."""
    for run in record.runs:
        settings = Settings(**run["key"])
        usual = 0.999 if settings.optimizer == "adam" else 0.9
        if settings.momentum != 0.9 or settings.stat_decay not in (None, usual):
            return True
    return False
