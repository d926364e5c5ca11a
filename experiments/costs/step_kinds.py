"""Training steps by what is due at them: which kinds there are, how often, how long each takes.

With T1 = stat_interval and T2 = inverse_interval, a step t has statistics at t % T1 == 0 and
inverses at t % T2 == 0. So a period of lcm(T1, T2) steps holds every kind a known number of times,
and the mean time of a step is that of each kind, weighted by its share. The first T2 steps, which
remake the inverses with every statistic, are no part of that: `set_due` leaves them far behind.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from experiments.clock import now

# A step number far beyond the first T2 steps, and an interval at which nothing is due there, nor
# soon after; the optimizers' additional inverses at the start of training are over.
START = 1 << 20
NEVER = 999_983

Item = TypeVar("Item")


class Kind(NamedTuple):
    """What is due at a step."""

    statistics: bool
    inverses: bool

    @property
    def label(self) -> str:
        """As tables and records call it."""
        parts = [name for name in self._fields if getattr(self, name)]
        return " and ".join(parts) or "plain"


PLAIN = Kind(False, False)


def kind_at(step: int, stat_interval: int, inverse_interval: int) -> Kind:
    """What is due at a step beyond the first ones.

    >>> [kind_at(t, 2, 4).label for t in range(4)]
    ['statistics and inverses', 'plain', 'statistics', 'plain']
    """
    return Kind(step % stat_interval == 0, step % inverse_interval == 0)


def shares(stat_interval: int, inverse_interval: int) -> dict[Kind, Fraction]:
    """The share of each kind among the steps of a period; kinds that do not occur are left out.

    Raises:
        ValueError: an interval is not positive.

    >>> {kind.label: str(share) for kind, share in shares(10, 100).items()}
    {'plain': '9/10', 'statistics': '9/100', 'statistics and inverses': '1/100'}
    """
    if min(stat_interval, inverse_interval) < 1:
        raise ValueError(f"intervals must be positive, got {stat_interval} and {inverse_interval}")
    both = Fraction(1, math.lcm(stat_interval, inverse_interval))
    with_statistics = Fraction(1, stat_interval) - both
    with_inverses = Fraction(1, inverse_interval) - both
    found = {
        PLAIN: 1 - with_statistics - with_inverses - both,
        Kind(True, False): with_statistics,
        Kind(False, True): with_inverses,
        Kind(True, True): both,
    }
    return {kind: share for kind, share in found.items() if share}


def amortised(seconds: Mapping[Kind, float], parts: Mapping[Kind, Fraction]) -> float:
    """The mean time of a step, from that of each kind and its share."""
    return math.fsum(float(share) * seconds[kind] for kind, share in parts.items())


class Components(NamedTuple):
    """What a mean step is the sum of: a plain step, and what is added by what is due."""

    plain: float
    statistics: float
    inverses: float


def components(seconds: Mapping[Kind, float], parts: Mapping[Kind, Fraction]) -> Components:
    """`amortised` in three parts; all kinds of step that occur must be known, and the plain one.

    Where both are due, inverses add what such a step takes beyond one with statistics alone.
    """
    plain = seconds[PLAIN]
    statistic = inverse = 0.0
    for kind, share in parts.items():
        with_statistics = seconds[Kind(True, False)] if kind.statistics else plain
        statistic += float(share) * (with_statistics - plain)
        inverse += float(share) * (seconds[kind] - with_statistics)
    return Components(plain, statistic, inverse)


@dataclass(frozen=True)
class TrainingStep:
    """One method's whole training step, on a model of its own and always the same batch.

    Attributes:
        model: what is trained.
        optimizer: over all its parameters.
        inputs: of the batch.
        targets: of the batch.
        loss: of outputs and targets.
        observes: whether the optimizer has `observe`, to see each output.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    observes: bool

    def __call__(self) -> None:
        """Takes it."""
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

    def set_due(self, kind: Kind) -> None:
        """Make the next step one of this kind; a first-order method has plain ones alone."""
        self.set_intervals(1 if kind.statistics else NEVER, 1 if kind.inverses else NEVER)

    def set_intervals(self, stat_interval: int, inverse_interval: int, step: int = START) -> None:
        """Set T1, T2 and the number of the next step."""
        if not self.second_order:
            return
        for group in self.optimizer.param_groups:
            group.update(stat_interval=stat_interval, inverse_interval=inverse_interval, step=step)

    def seconds(self, steps: int = 1) -> float:
        """Takes some steps and returns how long they took together."""
        device = self.inputs.device
        began = now(device)
        for _ in range(steps):
            self()
        return now(device) - began

    def period_seconds(self, stat_interval: int, inverse_interval: int) -> float:
        """Takes all steps of one period and returns how long they took together."""
        period = math.lcm(stat_interval, inverse_interval)
        self.set_intervals(stat_interval, inverse_interval, period * -(-START // period))
        return self.seconds(period)


@dataclass(frozen=True)
class Plan:
    """How many samples are taken.

    Attributes:
        seconds: for all rounds together, unless the fewest rounds take longer.
        fewest: rounds.
        most: rounds.
        slow: what takes longer than so many seconds is only in the first `slow_rounds` rounds.
        slow_rounds: at least one.
    """

    seconds: float
    fewest: int = 3
    most: int = 20
    slow: float = 10.0
    slow_rounds: int = 2

    def rounds(self, round_seconds: float) -> int:
        """As many as fit into the time, within the bounds."""
        fitting = math.ceil(self.seconds / max(round_seconds, 1e-9))
        return min(self.most, max(self.fewest, fitting))


def time_kinds(
    steps: Mapping[str, TrainingStep], kinds: Sequence[Kind], plan: Plan
) -> dict[str, dict[Kind, list[float]]]:
    """The times of each kind of step of every method.

    The methods take turns, another one first in each round, so that a machine that changes its
    speed changes it for all of them. Everything is warmed up once, untimed.

    Args:
        steps: the methods' training steps, by name. Each has been taken once: it has its state.
        kinds: what to time of second-order methods; of others the plain step.
        plan: how many samples to take.

    Raises:
        ValueError: afterwards a parameter stands where it stood, or is not finite any more.
    """
    own = {name: list(kinds) if step.second_order else [PLAIN] for name, step in steps.items()}
    start = {name: [p.detach().clone() for p in s.model.parameters()] for name, s in steps.items()}
    samples: dict[str, dict[Kind, list[float]]] = {n: {k: [] for k in own[n]} for n in steps}
    warm = {(n, k): _timed(step, k) for n, step in steps.items() for k in own[n]}
    rounds = plan.rounds(sum(warm.values()))
    gc.collect()
    gc.disable()  # a collection in the middle would be one method's alone
    try:
        for turn in range(rounds):
            for name in turned(list(steps), turn):
                for kind in own[name]:
                    if warm[name, kind] <= plan.slow or turn < plan.slow_rounds:
                        samples[name][kind].append(_timed(steps[name], kind))
    finally:
        gc.enable()
    for name, step in steps.items():
        check_moved(name, step.model, start[name])
    return samples


def turned(candidates: Sequence[Item], turn: int) -> list[Item]:
    """The same candidates, another one first at each turn.

    >>> turned("abc", 4)
    ['b', 'c', 'a']
    """
    start = turn % max(len(candidates), 1)
    return [*candidates[start:], *candidates[:start]]


def _timed(step: TrainingStep, kind: Kind) -> float:
    step.set_due(kind)
    return step.seconds()


def check_moved(name: str, model: nn.Module, start: Sequence[Tensor]) -> None:
    """Refuses times of steps that did nothing, or computed with what is not finite.

    Raises:
        ValueError: names the method and the parameters.
    """
    for (parameter_name, parameter), before in zip(model.named_parameters(), start, strict=True):
        if not bool(parameter.isfinite().all()):
            raise ValueError(f"{name}: {parameter_name} is no longer finite")
        if torch.equal(parameter.detach(), before):
            raise ValueError(f"{name}: {parameter_name} was not moved by the steps that were timed")


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of at least one sample, and the samples themselves.

    >>> summary([3.0])["quartiles"]
    [3.0, 3.0]
    """
    known = [*samples] * (2 if len(samples) == 1 else 1)
    lower, median, upper = statistics.quantiles(known, n=4, method="inclusive")
    return {"median": median, "quartiles": [lower, upper], "samples": list(samples)}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state, single numbers (counters) left out."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.dim() > 0:
                found[value.data_ptr()] = value.nbytes
        elif isinstance(value, Mapping):
            for item in value.values():
                visit(item)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    visit(optimizer.state_dict())
    return sum(found.values())
