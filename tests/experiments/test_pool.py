"""Runs side by side give what runs in this process give, and leave no process behind."""

import functools
import multiprocessing
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.problems.problem import Problem
from experiments.runs.pool import TrainingFailed, run_all
from experiments.runs.settings import Settings

pytestmark = pytest.mark.usefixtures("one_thread")


class Line(Problem):
    """Points on a line; `trouble` is what happens at the first batch."""

    name, label, likelihood, loss_label = "line", "A line", "gaussian", "squared error"
    examples = 12

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def to(self, device: torch.device) -> "Line":
        return self

    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.trouble == "raises":
            raise ValueError("no such batch")
        if self.trouble == "dies":
            os._exit(7)
        x = indices[:, None] / 12
        return x, 3 * x + torch.get_num_threads()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    def description(self) -> dict[str, Any]:
        return {"problem": self.name}


def settings(seed: int) -> Settings:
    """Plain momentum for three epochs."""
    return Settings(
        "sgd", 0.1, None, 0.9, None, 0.0, None, None, None, None, None, "constant", 4, 3, seed
    )


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {"losses": record["step_losses"], "settings": record["settings"]}


def made(jobs: int, seeds: range) -> dict[int, dict[str, Any]]:
    records: dict[int, dict[str, Any]] = {}

    def keep(one: Settings, record: dict[str, Any]) -> None:
        assert one.seed not in records
        records[one.seed] = without_times(record)

    run_all(Line, [settings(seed) for seed in seeds], jobs, keep)
    return records


def test_processes_give_the_same_records_as_this_one() -> None:
    alone = made(1, range(5))
    # The targets hold the number of threads: the same losses are from one thread.
    assert made(2, range(5)) == alone
    assert sorted(alone) == [0, 1, 2, 3, 4]
    assert len({tuple(record["losses"]) for record in alone.values()}) == 5
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("jobs", [1, 3])
def test_no_runs_are_no_work(jobs: int) -> None:
    run_all(Line, [], jobs, lambda *_: pytest.fail("nothing was asked for"))


def test_a_workers_error_comes_with_its_traceback() -> None:
    maker = functools.partial(Line, "raises")
    with pytest.raises(TrainingFailed, match=r"(?s)'sgd'.*in batch\n.*ValueError: no such batch"):
        run_all(maker, [settings(0)], 2, lambda *_: None)
    assert multiprocessing.active_children() == []
    with pytest.raises(ValueError, match="no such batch"):
        run_all(maker, [settings(0)], 1, lambda *_: None)


def test_a_worker_that_dies_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(TrainingFailed, match="died with exit code 7"):
        run_all(functools.partial(Line, "dies"), [settings(0)], 2, lambda *_: None)
    assert multiprocessing.active_children() == []


def test_an_interruption_ends_the_workers() -> None:
    def stop(_: Settings, __: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(Line, [settings(seed) for seed in range(4)], 2, stop)
    assert multiprocessing.active_children() == []


def test_jobs_must_be_positive() -> None:
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        run_all(Line, [settings(0)], 0, lambda *_: None)
