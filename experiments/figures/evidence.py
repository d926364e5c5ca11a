"""Records of experiments, found and read: which there are, and the runs that they hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.problems import autoencoders, classifiers
from experiments.runs.run_file import load_runs
from experiments.runs.training import Run


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
        origins: Sequence[Mapping[str, Any]] = self.content["provenance"]
        return origins

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
        The records, in the order of their names, and those files that are none, with the reason. Of
        files that were not asked for by name only those whose JSON is broken, and those that name
        an experiment but hold no runs that could be read.
    """
    paths = sorted(folder.rglob("*.json")) if names is None else [folder / n for n in names]
    records, unread = [], {}
    for path in paths:
        if not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        try:
            record = Record(path, load_runs(path))
        except (OSError, ValueError) as error:
            if names is not None or _ought_to_be_one(path):
                unread[name] = str(error).replace(str(path), path.name)
            continue
        if record.runs:
            records.append(record)
        else:
            unread[name] = "it holds no runs"
    return records, unread


def _ought_to_be_one(path: Path) -> bool:
    """Whether a file is broken, or names an experiment: no JSON of another kind."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(content, dict) and "experiment" in content


def trainings(record: Record) -> list[Run]:
    """The training runs of a record."""
    return [Run.from_record(dict(run)) for run in record.runs]


def by_method(record: Record) -> dict[str, dict[int, Run]]:
    """Each method's runs by seed, with the settings of the paper's table; others are not judged.

    Of several that differ in their length alone the longest counts.
    """
    table = 5 if is_tuned(record) else 3
    methods: dict[str, dict[int, Run]] = {}
    for run in trainings(record):
        if not has_paper_settings(run, table):
            continue
        own = methods.setdefault(run.settings.optimizer, {})
        known = own.get(run.settings.seed)
        if known is None or run.settings.epochs > known.settings.epochs:
            own[run.settings.seed] = run
    return methods


def has_paper_settings(run: Run, table: int = 3) -> bool:
    """Whether a run has its method's settings, whatever its seed and its length.

    They are the paper's, MNIST's on CURVES, and those of the recorded search on the digits.

    Args:
        run: of an autoencoder or a convolutional network.
        table: 3 or 5, the paper's table for an autoencoder.
    """
    own = run.settings
    try:
        if run.problem in classifiers.NETWORKS:
            paper = classifiers.default_settings(run.problem, own.optimizer, own.epochs)
        else:
            paper = autoencoders.default_settings(run.problem, own.optimizer, table)
    except (KeyError, ValueError):
        return False  # a method that the table has not
    return own == replace(paper, epochs=own.epochs, seed=own.seed)


def is_tuned(record: Record) -> bool:
    """Whether more of its methods have the settings of Table 5 than those of Table 3."""
    if record.experiment != "autoencoder":
        return False
    runs = trainings(record)
    tuned, usual = (
        {run.settings.optimizer for run in runs if has_paper_settings(run, table)}
        for table in (5, 3)
    )
    return len(tuned) > len(usual)
