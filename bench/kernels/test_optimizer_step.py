"""The optimizer's whole step against the same in plain torch, and against first-order methods.

Only the optimizer's work is timed: no forward, no backward. Bare parameters hold given gradients,
which also serve for the statistics (``fisher="empirical"``); with sampled labels ``step`` does the
same to another gradient, and ``observe`` adds a second backward before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from bench.kernels.baselines import PlainTNT
from bench.kernels.inputs import generator, normal
from bench.kernels.other_optimizers import distributed_shampoo
from bench.kernels.timing import OURS, Candidate, Comparison
from bench.kernels.work import Work, gram_work, inverse_work, step_work
from tnt_kernels import reference
from tnt_optim import TNT
from tools.measuring.parameter_sets import ParameterSet

SETS = ("mnist_ae", "faces_ae", "resnet32")
LR, DAMPING, MOMENTUM, DECAY = 1e-3, 0.1, 0.9, 0.9
T2 = 20


@dataclass(frozen=True)
class Kind:
    """What is due at the steps that one run takes.

    Attributes:
        name: as in the tables.
        first_step: the number t of the first of them. Beyond T2, where the optimizer's additional
            inverses at the start of training are over.
        steps: how many.
        stat_interval: T1.
    """

    name: str
    first_step: int
    steps: int
    stat_interval: int

    def due(self, interval: int) -> int:
        """At how many of the steps something with this interval is due."""
        return sum(t % interval == 0 for t in range(self.first_step, self.first_step + self.steps))


KINDS = (
    Kind("nothing due", 2 * T2 + 1, 1, 10),
    Kind("statistics due", 2 * T2 + 1, 1, 1),
    Kind("statistics and inverses due", 2 * T2, 1, 1),
    Kind("T1 = 1, T2 = 20", 2 * T2, T2, 1),
)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_optimizer_step(parameter_set: ParameterSet, kind: Kind, compare: Comparison) -> None:
    """One run of ``kind.steps`` steps; times and work are for one step of them."""
    if kind.steps > 1 and parameter_set.name == "faces_ae":
        pytest.skip("minutes; the table adds it up from the other kinds")
    rng = generator()
    start = normal(parameter_set.shapes, rng, LR)
    grads = normal(parameter_set.shapes, rng)

    def parameters() -> list[nn.Parameter]:
        params = [nn.Parameter(weight.clone()) for weight in start]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return params

    def candidate(
        name: str,
        make: Callable[[list[nn.Parameter]], Callable[[], object]],
        compared: bool = False,
    ) -> Candidate:
        params = parameters()

        def movement() -> list[Tensor]:
            return [p.detach() - weight for p, weight in zip(params, start, strict=True)]

        return Candidate(name, make(params), movement, [p.detach() for p in params], compared)

    candidates = [
        candidate(OURS, lambda params: _tnt_run(params, kind), compared=True),
        candidate("plain torch", lambda params: _plain_run(params, kind), compared=True),
        candidate("AdamW", lambda p: _run(torch.optim.AdamW(p, lr=LR, fused=True), kind)),
        candidate("SGD", lambda p: _run(torch.optim.SGD(p, LR, MOMENTUM, fused=True), kind)),
    ]
    shampoo = distributed_shampoo()
    if shampoo is not None:
        make = shampoo
        candidates.append(candidate("distributed_shampoo", lambda p: _run(make(p, LR, T2), kind)))
    compare(
        "TNT.step",
        parameter_set,
        candidates,
        _reference_movement(parameter_set, start, grads, kind),
        _work(parameter_set, kind),
        kind=kind.name,
        steps=kind.steps,
        note="" if shampoo is not None else "distributed_shampoo is not installed",
    )


def _run(optimizer: torch.optim.Optimizer, kind: Kind) -> Callable[[], None]:
    def run() -> None:
        for _ in range(kind.steps):
            optimizer.step()

    return run


def _tnt_run(params: Sequence[nn.Parameter], kind: Kind) -> Callable[[], None]:
    optimizer = TNT(
        params,
        lr=LR,
        damping=DAMPING,
        momentum=MOMENTUM,
        stat_decay=DECAY,
        stat_interval=kind.stat_interval,
        inverse_interval=T2,
        fisher="empirical",
    )
    optimizer.step()  # the first: state, statistics, inverses

    def run() -> None:
        optimizer.param_groups[0]["step"] = kind.first_step
        for _ in range(kind.steps):
            optimizer.step()

    return run


def _plain_run(params: Sequence[nn.Parameter], kind: Kind) -> Callable[[], None]:
    optimizer = PlainTNT(
        params,
        LR,
        damping=DAMPING,
        momentum=MOMENTUM,
        stat_decay=DECAY,
        stat_interval=kind.stat_interval,
        inverse_interval=T2,
    )
    optimizer.step()

    def run() -> None:
        optimizer.steps = kind.first_step
        for _ in range(kind.steps):
            optimizer.step()

    return run


def _reference_movement(
    parameter_set: ParameterSet, start: Sequence[Tensor], grads: Sequence[Tensor], kind: Kind
) -> list[Tensor]:
    """How far the reference moves every parameter in the first step and one run."""
    views = parameter_set.views
    weights = [w.clone().view(view) for w, view in zip(start, views, strict=True)]
    gradients = [g.view(view) for g, view in zip(grads, views, strict=True)]
    momenta = [torch.zeros_like(weight) for weight in weights]
    stats = [[torch.zeros(d, d) for d in view] for view in views]
    factors = [[torch.full((d, d), math.nan) for d in view] for view in views]
    for t in (0, *range(kind.first_step, kind.first_step + kind.steps)):
        if t % kind.stat_interval == 0:
            reference.gram_ema_(stats, gradients, DECAY if t else 0.0)
        if t % T2 == 0:
            reference.damped_inverse(stats, DAMPING, factors)
        reference.preconditioned_step_(weights, momenta, gradients, factors, LR, MOMENTUM, 0.0)
    return [w.view(s.shape) - s for w, s in zip(weights, start, strict=True)]


def _work(parameter_set: ParameterSet, kind: Kind) -> Work:
    views, diagonal = parameter_set.views, parameter_set.diagonal
    total = Work()
    for part, times in (
        (step_work(views, diagonal), kind.steps),
        (gram_work(views, diagonal), kind.due(kind.stat_interval)),
        (inverse_work(views, diagonal), kind.due(T2)),
    ):
        for _ in range(times):
            total += part
    return total
