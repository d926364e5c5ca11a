"""Training steps by what is due at them: the kinds of step, their shares, and their times.

With T1 = stat_interval and T2 = inverse_interval, a step t has statistics at t % T1 == 0 and
inverses at t % T2 == 0. A period of lcm(T1, T2) steps has a known number of each kind, so the mean
time of a step is the sum of the kinds' times, weighted by their shares. The first T2 steps refresh
the inverses with every statistic; they do not count, so `set_due` uses late steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.methods import Settings, build_optimizer, observes
from experiments.models import seeded
from experiments.problems.problem import Problem
from tnt_kernels.benchmark.clock import alternate

# A step number far beyond the first T2 steps, and an interval with nothing due there or soon after.
START = 1 << 20
NEVER = 999_983


class Kind(NamedTuple):
    """What is due at a step; with `roots`, inverse square roots in place of the inverses."""

    statistics: bool
    inverses: bool
    roots: bool = False

    @property
    def label(self) -> str:
        """Its name in tables and records."""
        parts = [name for name in self._fields if getattr(self, name)]
        return " and ".join(parts) or "plain"


PLAIN, STATISTICS = Kind(False, False), Kind(True, False)
INVERSES, BOTH = Kind(False, True), Kind(True, True)


def shares(stat_interval: int, inverse_interval: int) -> dict[Kind, Fraction]:
    """The share of each kind among the steps of a period, without kinds that do not occur.

    >>> {kind.label: str(share) for kind, share in shares(10, 100).items()}
    {'statistics and inverses': '1/100', 'plain': '9/10', 'statistics': '9/100'}
    """
    period = math.lcm(stat_interval, inverse_interval)
    steps = Counter(Kind(t % stat_interval == 0, t % inverse_interval == 0) for t in range(period))
    return {kind: Fraction(count, period) for kind, count in steps.items()}


def amortised(seconds: Mapping[Kind, float], parts: Mapping[Kind, Fraction]) -> float:
    """The mean time of a step, from the time of each kind and its share."""
    return math.fsum(float(share) * seconds[kind] for kind, share in parts.items())


def components(seconds: Mapping[Kind, float], parts: Mapping[Kind, Fraction]) -> dict[str, float]:
    """`amortised` in three parts: a plain step, and what statistics and inverses add.

    If both are due, inverses add what such a step takes beyond one with statistics only.
    """
    plain = seconds[PLAIN]
    found = {"plain": plain, "statistics": 0.0, "inverses": 0.0}
    for kind, share in parts.items():
        with_statistics = seconds[STATISTICS] if kind.statistics else plain
        found["statistics"] += float(share) * (with_statistics - plain)
        found["inverses"] += float(share) * (seconds[kind] - with_statistics)
    return found


@dataclass(frozen=True)
class TrainingStep:
    """One method's whole training step, on its own model and always the same batch.

    `observes` says whether the optimizer has `observe`, which gets the outputs.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    observes: bool

    def __call__(self) -> None:
        """Take the step."""
        self.optimizer.zero_grad()
        outputs = self.model(self.inputs)
        loss = self.loss(outputs, self.targets)
        if self.observes:
            self.optimizer.observe(outputs)  # type: ignore[attr-defined]
        loss.backward()
        self.optimizer.step()

    @property
    def second_order(self) -> bool:
        """Whether anything can be due."""
        return "stat_interval" in self.optimizer.param_groups[0]

    def takes(self, kind: Kind) -> bool:
        """Whether a step can be of this kind."""
        group = self.optimizer.param_groups[0]
        if kind.roots:
            return bool(group.get("early_roots"))
        return kind == PLAIN or self.second_order

    def set_due(self, kind: Kind) -> None:
        """Make the next step one of this kind; a first-order method has only plain ones."""
        if self.second_order:
            for group in self.optimizer.param_groups:
                group["stat_interval"] = 1 if kind.statistics else NEVER
                group["inverse_interval"] = 1 if kind.inverses else NEVER
                if group.get("early_roots"):
                    group["takes_roots"] = kind.roots
                group["step"] = START


def problem_step(problem: Problem, settings: Settings) -> TrainingStep:
    """A method's training step on the first batch of a problem, on the CPU."""
    shuffle = torch.Generator().manual_seed(settings.seed)
    indices = problem.order(settings.batch_size, shuffle)[0]
    inputs, targets = problem.batch(indices, shuffle)
    model = seeded(problem.build, settings.seed)
    optimizer = build_optimizer(model, settings, problem.likelihood)
    return TrainingStep(model, optimizer, inputs, targets, problem.loss, observes(settings))


def time_kinds(
    steps: Mapping[str, TrainingStep],
    kinds: Sequence[Kind],
    seconds: float,
    min_rounds: int,
    max_rounds: int,
) -> dict[str, dict[Kind, list[float]]]:
    """The times of each kind of step of every method; methods and kinds alternate.

    Args:
        steps: the methods' training steps, by name. Each must have run once, so it has its state.
        kinds: the kinds of steps; each method is timed at the kinds that it has.
        seconds: for all rounds together, between `min_rounds` and `max_rounds` of them.
        min_rounds: of timing.
        max_rounds: of timing.

    Raises:
        ValueError: a parameter did not change, or is no longer finite.
    """
    pairs = {
        f"{name}: {kind.label}": (name, kind)
        for name, step in steps.items()
        for kind in kinds
        if step.takes(kind)
    }
    start = {name: [p.detach().clone() for p in s.model.parameters()] for name, s in steps.items()}
    device = next(iter(steps.values())).inputs.device
    samples = alternate(
        {label: steps[name] for label, (name, _) in pairs.items()},
        seconds=seconds,
        min_rounds=min_rounds,
        max_rounds=max_rounds,
        setup=lambda label: steps[pairs[label][0]].set_due(pairs[label][1]),
        device=device,
    )
    for name, step in steps.items():
        check_moved(name, step.model, start[name])
    found: dict[str, dict[Kind, list[float]]] = {name: {} for name in steps}
    for label, (name, kind) in pairs.items():
        found[name][kind] = samples[label]
    return found


def check_moved(name: str, model: nn.Module, start: Sequence[Tensor]) -> None:
    """Refuse the times of steps that changed nothing or computed with non-finite numbers."""
    for (parameter_name, parameter), before in zip(model.named_parameters(), start, strict=True):
        if not parameter.requires_grad:
            continue
        if not bool(parameter.isfinite().all()):
            raise ValueError(f"{name}: {parameter_name} is no longer finite")
        if torch.equal(parameter.detach(), before):
            raise ValueError(f"{name}: the timed steps did not change {parameter_name}")
