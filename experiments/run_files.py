"""The record of an experiment's runs: one JSON file that grows run by run, never half written.

The same command, started again, makes only the runs that its file lacks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from tnt_kernels.benchmark.provenance import provenance
from tnt_kernels.benchmark.records import check_writable, read_json, write_json

Key = Mapping[str, Any]


# Settings that older records lack: their optimizers were without.
_LATER = {"nesterov": False, "early_roots": False}


class RunFileError(ValueError):
    """A file is no record, or a record of other runs; it is not changed."""


class RunFile:
    """Finished runs by their settings. Several processes may add to one file at a time.

    The file holds ``experiment``, ``protocol`` (the settings that all its runs share), ``runs``
    (each with its ``key``, and in ``provenance`` an index) and ``provenance`` (one entry for each
    process that added to the file).

    Args:
        path: the file; it need not exist. Its name must end in ``.json``.
        experiment: the experiment's name.
        protocol: JSON-ready settings that all runs of the file share.
        device: where the runs compute; it is recorded.

    Raises:
        RunFileError: the file is of another experiment, or has another protocol.
        ValueError: the name does not end in ``.json``.
        OSError: the file cannot be read or written.
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
            if self.runs:
                kept = f"{self.path} has {len(self.runs)} finished runs: they are not made again"
                print(kept, file=sys.stderr)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The finished runs, in the order in which they ended."""
        return cast(list[dict[str, Any]], self._record["runs"])

    def check_same_machine(self) -> None:
        """Check that the file's runs come from a machine and a setup like this process's.

        For runs whose seconds are compared.

        Raises:
            RunFileError: the file has another processor, GPU, device or number of threads.
        """
        for earlier in self._record["provenance"]:
            was, now = _speed(earlier), _speed(self._origin)
            if was != now:
                raise RunFileError(
                    f"{self.path} holds runs with other seconds ({_differing(was, now)}): "
                    "give another file"
                )

    def find(self, key: Key) -> dict[str, Any] | None:
        """The finished run with this key, or None."""
        wanted = _plain(key)
        return next((run for run in self.runs if run["key"] == wanted), None)

    def checkpoint(self, key: Key) -> Path:
        """The file in which the run of a key is saved until it ends: no other run has it."""
        digest = hashlib.sha256(json.dumps(_plain(key), sort_keys=True).encode()).hexdigest()
        return self.path.with_name(f"{self.path.stem}-{digest[:12]}.partial.pt")

    def add(self, key: Key, result: Mapping[str, Any]) -> dict[str, Any]:
        """Append a finished run and write the file; return the run in the file.

        Runs that other processes have added since stay. Of two runs with one key the first stays.

        Raises:
            RunFileError: the file is now of another experiment.
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
            if self._origin_index is None:  # no process removes entries: the index stays valid
                self._record["provenance"].append(self._origin)
                self._origin_index = len(self._record["provenance"]) - 1
            run["provenance"] = self._origin_index
            self.runs.append(run)
            write_json(self.path, self._record)
            return run


def load_runs(path: str | Path) -> dict[str, Any]:
    """The record in ``path``.

    Raises:
        RunFileError: it is not the record of an experiment's runs.
        OSError: it cannot be read.
    """
    try:
        record = read_json(path)
        for name in ("experiment", "protocol", "provenance"):
            record[name]
        for run in record["runs"]:
            settings = run["key"].get("settings")
            if settings is not None and "interval_warmup" in settings:  # of a training
                run["key"]["settings"] = {**_LATER, **settings}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFileError(
            f"{path} is not the record of an experiment's runs: {error!r}"
        ) from error
    return record


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other processes that lock the same folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # this unlocks it


def _read(path: Path, experiment: str, protocol: dict[str, Any]) -> dict[str, Any]:
    record = load_runs(path)
    if record["experiment"] != experiment:
        raise RunFileError(
            f"{path} holds runs of {record['experiment']!r}, not of {experiment!r}: "
            "give another file"
        )
    differing = _differing(record["protocol"], protocol)
    if differing:
        raise RunFileError(
            f"{path} holds runs with other settings ({differing}): "
            "give another file, or the same settings"
        )
    return record


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name} was {was.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    )


def _speed(origin: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a provenance that change the seconds."""
    return {
        "processor": origin["machine"]["cpu"],
        "GPU": origin["machine"]["gpu"],
        "device": origin["device"],
        "threads": origin["threads"]["torch"],
        "flush_subnormals": origin.get("flush_subnormals", False),
    }


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON reads it back: tuples become lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    return plain
