"""The seconds of a training run: those of each kind of step, by the optimizer's schedule."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from experiments.costs.step_kinds import (
    PLAIN,
    Kind,
    Plan,
    TrainingStep,
    summary,
    time_kinds,
)
from experiments.problems.problem import Problem, seeded_model
from experiments.runs.methods import METHODS, build_optimizer
from experiments.runs.settings import Settings

# The kinds of step by their names in records.
KINDS = {kind.label: kind for kind in (Kind(s, i) for s in (False, True) for i in (False, True))}


def run_kinds(steps: int, intervals: tuple[int, int] | None) -> list[Kind]:
    """What is due at each step of a run, by the optimizers' rule.

    Statistics at t % T1 == 0; inverses at t % T2 == 0, and with every statistic while t < T2: a run
    remakes them more often in its first T2 steps than later.

    Args:
        steps: of the run.
        intervals: T1 and T2; None for a first-order method, whose steps are plain ones.

    >>> [kind.label for kind in run_kinds(7, (2, 3))][:4]
    ['statistics and inverses', 'plain', 'statistics and inverses', 'inverses']
    >>> sum(kind.inverses for kind in run_kinds(100, (5, 20)))
    8
    """
    if intervals is None:
        return [PLAIN] * steps
    kinds = []
    for step in range(steps):
        statistics = step % intervals[0] == 0
        young = statistics and step < intervals[1]
        kinds.append(Kind(statistics, step % intervals[1] == 0 or young))
    return kinds


def elapsed(seconds: Mapping[Kind, float], kinds: Iterable[Kind]) -> list[float]:
    """The seconds that a run has taken after 0, 1, 2, ... steps.

    Args:
        seconds: of each kind of step.
        kinds: of the run's steps.
    """
    return [0.0, *itertools.accumulate(seconds[kind] for kind in kinds)]


def steps_within(clock: Sequence[float], seconds: float) -> float:
    """How many steps a run has done after some seconds, the one under way as a fraction.

    Args:
        clock: of the run, from `elapsed`.
        seconds: since its start; at its end and later, all steps are done.

    >>> steps_within([0.0, 2.0, 3.0], 1.0), steps_within([0.0, 2.0, 3.0], 9.0)
    (0.5, 2.0)
    """
    if seconds >= clock[-1]:
        return float(len(clock) - 1)
    done = bisect.bisect_right(clock, seconds) - 1
    return done + (seconds - clock[done]) / (clock[done + 1] - clock[done])


def seconds_at(clock: Sequence[float], step: float) -> float:
    """The seconds after a number of steps, linear within a step; infinite where that is.

    >>> seconds_at([0.0, 2.0, 3.0], 1.5), seconds_at([0.0, 2.0, 3.0], 2.0)
    (2.5, 3.0)
    """
    if not math.isfinite(step):
        return math.inf
    done = min(int(step), len(clock) - 2)
    return clock[done] + (step - done) * (clock[done + 1] - clock[done])


def kind_seconds(
    problem: Problem,
    settings: Mapping[str, Settings],
    kinds: Sequence[Kind],
    rounds: int,
    threads: int,
) -> dict[str, dict[str, dict[str, Any]]]:
    """The seconds of each kind of step with each of the settings, on the CPU.

    Forward, backward and the optimizer's step, on one batch, which is the same for all. The methods
    alternate, so that what else happens on the machine meets all of them.

    Args:
        problem: what to train on.
        settings: of each method, by name; the learning rate is used without its schedule.
        kinds: what to time of a second-order method; of others it is the plain step.
        rounds: how often each is timed.
        threads: while this measures.

    Returns:
        For each name and each kind's label: median and quartiles, and the samples.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        steps = {name: _training_step(problem, one) for name, one in settings.items()}
        for step in steps.values():
            step()  # the first: state, first statistics, first inverses
        samples = time_kinds(steps, kinds, Plan(0.0, fewest=rounds, most=rounds))
    finally:
        torch.set_num_threads(before)
    return {
        name: {kind.label: summary(taken) for kind, taken in own.items()}
        for name, own in samples.items()
    }


def _training_step(problem: Problem, settings: Settings) -> TrainingStep:
    shuffle = torch.Generator().manual_seed(settings.seed)
    indices = problem.order(settings.batch_size, shuffle)[0]
    inputs, targets = problem.batch(indices, shuffle)
    model = seeded_model(problem, settings.seed)
    return TrainingStep(
        model=model,
        optimizer=build_optimizer(model, settings, problem.likelihood),
        inputs=inputs,
        targets=targets,
        loss=problem.loss,
        observes=METHODS[settings.optimizer].statistics == "sampled",
    )
