"""A training run that was interrupted goes on from its last epoch, bit for bit."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tools.measuring.provenance import flushes_subnormals

if TYPE_CHECKING:
    from experiments.runs.training import Run

# Between two writes: a write takes about as long as a step, and must not be felt.
SECONDS_BETWEEN = 60.0


class CheckpointError(ValueError):
    """A file that an unfinished run left behind does not fit; it is left alone."""


class Checkpoint:
    """The file that an unfinished run leaves behind.

    Args:
        path: the file, or None for none.
        description: the problem's.
        run: the run so far; filled in by `load`.
        model: likewise.
        optimizer: likewise.
        generators: all random state that the run goes on with; likewise.
        device: where the run computes: it does not go on elsewhere, nor with other threads.
    """

    def __init__(
        self,
        path: Path | None,
        description: Mapping[str, Any],
        run: Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generators: Sequence[torch.Generator],
        device: torch.device,
    ) -> None:
        self._path, self._run = path, run
        self._own = {
            **description,
            **asdict(run.settings),
            "device": str(device),
            "threads": torch.get_num_threads(),
            "flush_subnormals": flushes_subnormals(),
        }
        self._model, self._optimizer, self._generators = model, optimizer, generators
        self._written = time.monotonic()

    def load(self) -> bool:
        """Puts everything where the file left it; False where there is no file.

        Raises:
            CheckpointError: the file is no checkpoint, or one of other settings.
        """
        if self._path is None or not self._path.exists():
            return False
        try:
            saved: dict[str, Any] = torch.load(self._path, weights_only=True, map_location="cpu")
            settings, record = dict(saved["settings"]), saved["run"]
        except Exception as error:
            raise CheckpointError(
                f"{self._path} is not a checkpoint of this experiment ({error}): delete it to "
                "start anew"
            ) from error
        names = {*settings, *self._own}
        differing = sorted(name for name in names if settings.get(name) != self._own.get(name))
        if differing:
            raise CheckpointError(
                f"{self._path} was left by a run with other settings ({', '.join(differing)}): "
                "delete it to start anew, or give another file"
            )
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        for generator, state in zip(self._generators, saved["generators"], strict=True):
            generator.set_state(state)
        done = type(self._run).from_record(record)
        self._run.step_losses, self._run.epochs = done.step_losses, done.epochs
        self._run.warm_start_seconds = done.warm_start_seconds
        self._run.resumed_after = [*done.resumed_after, len(done.epochs)]
        return True

    def save(self) -> None:
        """Writes the file, unless it was written a moment ago."""
        if self._path is None or time.monotonic() - self._written < SECONDS_BETWEEN:
            return
        record = self._run.record()
        record["step_losses"] = self._run.step_losses  # with all their digits
        partial = self._path.with_name(self._path.name + ".part")
        torch.save(
            {
                "settings": self._own,
                "run": record,
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "generators": [generator.get_state() for generator in self._generators],
            },
            partial,
        )
        os.replace(partial, self._path)
        self._written = time.monotonic()

    def remove(self) -> None:
        """Deletes the file: the run is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
