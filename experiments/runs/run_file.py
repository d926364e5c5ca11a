"""The record of an experiment's runs: one JSON file that grows run by run, never half written.

An experiment that was interrupted is started again with the same command and makes only the runs
that its file lacks.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tools.measuring.provenance import provenance
from tools.measuring.records import check_writable, write_json

Key = Mapping[str, Any]


class RunFileError(ValueError):
    """A file is no record, or one of other runs; it is left as it was."""


class RunFile:
    """Finished runs by their settings. Several processes may add to one file at a time.

    The file holds ``experiment``, ``protocol`` (what all its runs share), ``runs`` (each with its
    ``key``, and in ``provenance`` the index of where it comes from) and ``provenance`` (one entry
    for each process that added to the file).

    Args:
        path: the file; it need not exist. Its name must end in ``.json``.
        experiment: the experiment's name.
        protocol: JSON-ready settings that all runs of the file share.
        device: where the runs compute; it is recorded.

    Raises:
        RunFileError: the file is not this experiment's, or its protocol is another one: the message
            names the settings that differ.
        ValueError: the name does not end in ``.json``.
        OSError: the file cannot be read, or nothing can be written there.
    """

    def __init__(
        self,
        path: str | Path,
        experiment: str,
        protocol: Mapping[str, Any],
        device: torch.device | str = "cpu",
    ) -> None:
        self.path = check_writable(path)
        self._origin = provenance(device)
        self._origin_index: int | None = None
        self._record: dict[str, Any] = {
            "experiment": experiment,
            "protocol": _plain(protocol),
            "runs": [],
            "provenance": [],
        }
        if self.path.exists():
            self._record = _read(self.path, experiment, self._record["protocol"])

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The finished runs, in the order in which they ended."""
        runs: list[dict[str, Any]] = self._record["runs"]
        return runs

    def check_same_machine(self) -> None:
        """Checks that the file's runs come from a machine like this process's, run like it.

        For runs whose seconds are to be compared.

        Raises:
            RunFileError: another processor, GPU, device or number of threads was recorded.
        """
        for earlier in self._record["provenance"]:
            for name, was, now in (
                ("processor", earlier["machine"]["cpu"], self._origin["machine"]["cpu"]),
                ("GPU", earlier["machine"]["gpu"], self._origin["machine"]["gpu"]),
                ("device", earlier["device"], self._origin["device"]),
                ("threads", earlier["threads"]["torch"], self._origin["threads"]["torch"]),
                (
                    "flush_subnormals",
                    earlier.get("flush_subnormals", False),  # older files: never
                    self._origin["flush_subnormals"],
                ),
            ):
                if was != now:
                    raise RunFileError(
                        f"{self.path} holds runs with other seconds ({name} was {was!r} and is "
                        f"{now!r}): give another file"
                    )

    def find(self, key: Key) -> dict[str, Any] | None:
        """The finished run with these settings, or None."""
        wanted = _plain(key)
        return next((run for run in self.runs if run["key"] == wanted), None)

    def add(self, key: Key, result: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a finished run and writes the file; returns the run as it stands there.

        What other processes have added since counts: of two runs with one key the first one stays.

        Raises:
            RunFileError: the file has become another one.
            OSError: it cannot be written.
        """
        with _locked(self.path.parent):
            if self.path.exists():
                experiment, protocol = self._record["experiment"], self._record["protocol"]
                self._record = _read(self.path, experiment, protocol)
            known = self.find(key)
            if known is not None:
                return known
            run = {"key": _plain(key), **result}
            if self._origin_index is None:  # nobody takes entries away: it stays where it is
                self._record["provenance"].append(self._origin)
                self._origin_index = len(self._record["provenance"]) - 1
            run["provenance"] = self._origin_index
            self.runs.append(run)
            write_json(self.path, self._record)
            return run


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes that do the same out of a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which unlocks it


def load_runs(path: str | Path) -> dict[str, Any]:
    """The record in ``path``.

    Raises:
        RunFileError: it is not the record of an experiment's runs.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record["runs"], list):
            raise TypeError("'runs' must be a list")
        for name in ("experiment", "protocol", "provenance"):
            record[name]
        for run in record["runs"]:
            run["key"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunFileError(
            f"{path} is not the record of an experiment's runs: {error!r}"
        ) from error
    return dict(record)


def _read(path: Path, experiment: str, protocol: dict[str, Any]) -> dict[str, Any]:
    record = load_runs(path)
    if record["experiment"] != experiment:
        raise RunFileError(
            f"{path} holds runs of {record['experiment']!r}, not of {experiment!r}: "
            "give another file"
        )
    known = record["protocol"]
    differing = [
        f"{name} was {known.get(name)!r} and is {protocol.get(name)!r}"
        for name in sorted({*known, *protocol})
        if known.get(name) != protocol.get(name)
    ]
    if differing:
        raise RunFileError(
            f"{path} holds runs with other settings ({'; '.join(differing)}): "
            "give another file, or the same settings"
        )
    return record


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read back: tuples are lists in JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    return plain
