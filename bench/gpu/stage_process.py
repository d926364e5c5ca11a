"""What every stage's process begins and ends with."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.gpu.driver import NO_DEVICE
from bench.gpu.look import OPTIONAL_MODULES
from bench.stage_runs import CHECKOUT, LACKS_SOMETHING

# Of its time a stage leaves so much unused, to end by itself before it is ended.
MARGIN_SHARE, LEAST_MARGIN = 0.05, 3.0


class SomethingIsMissing(Exception):
    """A stage cannot run here, and says why: no failure."""


@dataclass
class Job:
    """What a stage is given.

    Attributes:
        folder: where it writes.
        seconds: how long it has.
        results: where the report goes.
        data: MNIST's folder.
        commit: what is recorded where git does not say.
    """

    folder: Path
    seconds: float
    results: Path = CHECKOUT / "bench" / "results" / "gpu"
    data: Path = CHECKOUT / "data" / "mnist"
    commit: str | None = None
    _start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until it should end by itself."""
        margin = max(LEAST_MARGIN, MARGIN_SHARE * self.seconds)
        return self._start + self.seconds - margin - time.monotonic()


def present_gpu() -> torch.device:
    """The GPU that a stage measures on.

    Raises:
        SomethingIsMissing: there is none.
    """
    if not torch.cuda.is_available():
        raise SomethingIsMissing(NO_DEVICE)
    return torch.device("cuda", torch.cuda.current_device())


def run(stage: Callable[[Job], bool]) -> int:
    """Runs a stage with the arguments on the command line.

    Args:
        stage: does it, and returns whether all went well.

    Returns:
        The exit status that the driver reads.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--results", type=Path, default=Job.results)
    parser.add_argument("--data", type=Path, default=Job.data)
    parser.add_argument("--commit")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        return 0 if stage(Job(**vars(options))) else 1
    except SomethingIsMissing as reason:
        print(reason)
        return LACKS_SOMETHING
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_MODULES:
            raise
        traceback.print_exc(file=sys.stdout)
        print(f"{error.name} is not installed")
        return LACKS_SOMETHING
