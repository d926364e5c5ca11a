"""The seconds of a training step, every method in turn in one process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.experiments.problems.problem import Problem, seeded_model
from bench.experiments.runs.methods import METHODS, build_optimizer
from bench.experiments.runs.settings import Settings

# The least number of steps that are timed together.
BLOCK = 20


def seconds_per_step(
    problem: Problem, settings: Sequence[Settings], rounds: int, threads: int
) -> dict[Settings, dict[str, Any]]:
    """Median seconds of a step with each of the settings, on the CPU.

    Each is timed over blocks of whole cycles of its T1 and T2, so that every block has its share of
    refreshes. The methods alternate, block by block, so that what else happens on the machine
    meets all of them. A first block of each is not timed: its refreshes are more frequent.

    Args:
        problem: what to train on.
        settings: of each method; the learning rate is used as it is, without its schedule.
        rounds: timed blocks for each.
        threads: while this measures.

    Returns:
        For each: `seconds_per_step`, the median over its blocks; the `least` and the `most` of
        them; and the `block`'s steps.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        trainings = [_Training(problem, one) for one in settings]
        for training in trainings:
            training.time_block()
        collected: list[list[float]] = [[] for _ in trainings]
        for _ in range(rounds):
            for place, training in enumerate(trainings):
                collected[place].append(training.time_block())
    finally:
        torch.set_num_threads(before)
    return {
        one: {
            "seconds_per_step": statistics.median(own),
            "least": min(own),
            "most": max(own),
            "block": training.block,
        }
        for one, training, own in zip(settings, trainings, collected, strict=True)
    }


class _Training:
    """A run that is timed."""

    def __init__(self, problem: Problem, settings: Settings) -> None:
        self.problem = problem
        self.model = seeded_model(problem, settings.seed)
        self.optimizer = build_optimizer(self.model, settings, problem.likelihood)
        self.observes = METHODS[settings.optimizer].statistics == "sampled"
        self.batch_size = settings.batch_size
        cycle = math.lcm(settings.stat_interval or 1, settings.inverse_interval or 1)
        self.block = cycle * math.ceil(BLOCK / cycle)
        self.shuffle = torch.Generator().manual_seed(settings.seed)

    def time_block(self) -> float:
        """Seconds of a step, over one block."""
        batches: list[Tensor] = []
        while len(batches) < self.block:
            batches += list(self.problem.order(self.batch_size, self.shuffle).unbind())
        began = time.perf_counter()
        for indices in batches[: self.block]:
            inputs, targets = self.problem.batch(indices, self.shuffle)
            self.optimizer.zero_grad()
            outputs = self.model(inputs)
            loss = self.problem.loss(outputs, targets)
            if self.observes:
                self.optimizer.observe(outputs)  # type: ignore[attr-defined]
            loss.backward()
            self.optimizer.step()
        return (time.perf_counter() - began) / self.block
