"""What the complexity table sweeps over: one tensor of k modes of size d, part by part.

Table 2 of Ren & Goldfarb 2021 gives, beyond SGD, for TNT (m / T1 + sum d) prod d + sum d^3 / T2,
for Shampoo the same without m, for Adam prod d. Each sweep here varies one of d, k, m, T1 and T2
where one term rules, or times that term's operator alone. The first value that a fit may use
(``fit_from``) is set here beforehand: below it, products have not reached the flat part of the
BLAS's rate, or the tensors still fit into a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from bench.kernels.inputs import empty_like, generator, gram_statistics, normal, symmetric_modes
from tnt_kernels import damped_inverse, gram_ema_, inverse_root, preconditioned_step_
from tnt_optim import TNT
from tools.measuring.parameter_sets import ParameterSet

DAMPING = 0.1
# A step number that is a multiple of every interval swept, and one that nothing is due at or soon
# after; beyond it the optimizer's additional inverses at the start of training are over.
START = 1 << 20
NEVER = 999_983


@dataclass(frozen=True)
class Run:
    """Something to time: ``run()`` takes ``steps`` steps."""

    run: Callable[[], object]
    steps: int = 1


@dataclass(frozen=True)
class Sweep:
    """One variable varied.

    Attributes:
        method: whose cost.
        part: which part of it.
        variable: what varies: d, k, m, T1 or T2.
        term: the predicted cost, as in the paper.
        predicted: the exponent of the abscissa.
        values: the variable's values, from cheap to dear for sizes.
        fit_from: the least value that a fit may use.
        prepare: makes what is timed.
        abscissa: what the exponent belongs to where it is not the variable itself, and its name.
        floor: for intervals: a step with nothing due, subtracted from the times.
    """

    method: str
    part: str
    variable: str
    term: str
    predicted: float
    values: Sequence[int]
    fit_from: int
    prepare: Callable[[int], Run]
    abscissa: tuple[str, Callable[[int], float]] | None = None
    floor: Callable[[], Run] | None = None


def _cube(d: int, k: int) -> ParameterSet:
    return ParameterSet(f"{d}^{k}", ((d,) * k,), each_dimension_a_mode=True)


def _statistics(shape: ParameterSet) -> Run:
    rng = generator()
    tensors, stats = normal(shape.views, rng), symmetric_modes(shape, rng)
    return Run(lambda: gram_ema_(stats, tensors, 0.9))


def _inverses(shape: ParameterSet) -> Run:
    stats = gram_statistics(shape, generator())
    out = empty_like(stats)
    return Run(lambda: damped_inverse(stats, DAMPING, out))


def _roots(shape: ParameterSet) -> Run:
    stats = gram_statistics(shape, generator())
    out = empty_like(stats)
    roots = [2 * len(view) for view in shape.views]
    return Run(lambda: inverse_root(stats, DAMPING, roots, out))


def _update(shape: ParameterSet) -> Run:
    rng = generator()
    weights, momenta, grads = (normal(shape.views, rng) for _ in range(3))
    factors = symmetric_modes(shape, rng)
    return Run(lambda: preconditioned_step_(weights, momenta, grads, factors, 1e-3, 0.9, 0.0))


def _parameter(shape: Sequence[int]) -> nn.Parameter:
    rng = generator()
    weight, grad = normal([shape, shape], rng)
    parameter = nn.Parameter(weight)
    parameter.grad = grad
    return parameter


def _tnt_step(shape: Sequence[int], stat_interval: int, inverse_interval: int, steps: int) -> Run:
    """``steps`` steps of TNT on its own gradients, from one at which all that can be due is."""
    optimizer = TNT([_parameter(shape)], lr=1e-3, damping=DAMPING, fisher="empirical")
    optimizer.step()  # the first: state, statistics, inverses
    group = optimizer.param_groups[0]
    group.update(stat_interval=stat_interval, inverse_interval=inverse_interval)

    def run() -> None:
        group["step"] = START
        for _ in range(steps):
            optimizer.step()

    return Run(run, steps)


def _observed_step(d: int, m: int, stat_interval: int, steps: int, *, stepping: bool = True) -> Run:
    """``observe`` and ``step`` of one linear layer d x d on a batch of m, the forward left out."""
    rng = generator()
    layer = nn.Linear(d, d, bias=False)
    layer.weight.grad = normal([(d, d)], rng)[0]
    output = layer(normal([(m, d)], rng)[0])
    optimizer = TNT(layer.parameters(), lr=1e-6, damping=DAMPING, likelihood="gaussian")
    optimizer.observe(output)
    optimizer.step()
    group = optimizer.param_groups[0]
    group.update(stat_interval=stat_interval, inverse_interval=NEVER)

    def run() -> None:
        group["step"] = START
        for _ in range(steps):
            optimizer.observe(output)
            if stepping:
                optimizer.step()

    return Run(run, steps)


def _shampoo_step(shape: ParameterSet, inverse_interval: int, steps: int) -> Run:
    """Shampoo's kernel work: statistics and update at every step, roots at every T2-th."""
    parts = [_statistics(shape).run, _update(shape).run]
    roots = _roots(shape).run

    def run() -> None:
        for t in range(steps):
            for part in parts:
                part()
            if inverse_interval and t % inverse_interval == 0:
                roots()

    return Run(run, steps)


def _adam_step(d: int) -> Run:
    return Run(torch.optim.AdamW([_parameter((d, d))], fused=True).step)


def _cycle(interval: int) -> int:
    """Whole cycles, and enough steps to time."""
    return max(8, interval)


_SMALL = (16, 32, 64, 128, 256)
_D2 = (*_SMALL, 512, 768, 1024, 1536, 2048)
_STATISTICS = (*_SMALL, 512, 1024, 1536, 2048, 3072, 4096)
_INVERSES = (*_SMALL, 512, 1024, 2048, 4096, 5120, 6144, 8192)
_ROOTS = (*_SMALL, 384, 512, 768, 1024)
_D3 = (8, 16, 32, 64, 128, 256, 384, 512, 576, 640)
_ADAM = (16, 64, 256, 1024, 2048, 3072, 5120, 6144, 7168)
_K_SIZE = 32
_INTERVALS = (1, 2, 4, 8, 16, 32)
_M = (16, 64, 256, 512, 1024, 2048, 4096)
_TALL = (64, 1024)  # one mode large enough for its inverse to outweigh the update
_SHAMPOO_TALL = ParameterSet("tall", ((32, 256),))
_WORK = ("k d^(k+1)", lambda k: float(k * _K_SIZE ** (k + 1)))

SWEEPS = (
    Sweep(
        *("TNT, Shampoo", "statistics, k = 2", "d", "sum d prod d", 3, _STATISTICS, 1536),
        prepare=lambda d: _statistics(_cube(d, 2)),
    ),
    Sweep(
        *("TNT, Shampoo", "statistics, k = 3", "d", "sum d prod d", 4, _D3, 512),
        prepare=lambda d: _statistics(_cube(d, 3)),
    ),
    Sweep(
        *("TNT, Shampoo", "update, k = 2", "d", "sum d prod d", 3, _D2, 512),
        prepare=lambda d: _update(_cube(d, 2)),
    ),
    Sweep(
        *("TNT, Shampoo", "update, k = 3", "d", "sum d prod d", 4, _D3, 384),
        prepare=lambda d: _update(_cube(d, 3)),
    ),
    Sweep(
        *("TNT", "inverses, k = 2", "d", "sum d^3", 3, _INVERSES, 5120),
        prepare=lambda d: _inverses(_cube(d, 2)),
    ),
    Sweep(
        *("Shampoo", "roots, k = 2", "d", "sum d^3", 3, _ROOTS, 256),
        prepare=lambda d: _roots(_cube(d, 2)),
    ),
    Sweep(
        *("TNT", "step, k = 2, T1 = T2 = 1", "d", "sum d prod d + sum d^3", 3, (*_D2, 3072), 1536),
        prepare=lambda d: _tnt_step((d, d), 1, 1, 1),
    ),
    Sweep(
        *("Shampoo", "step, k = 2, T2 = 1", "d", "sum d prod d + sum d^3", 3, _ROOTS, 256),
        prepare=lambda d: _shampoo_step(_cube(d, 2), 1, 1),
    ),
    Sweep(
        *("Adam", "step, k = 2", "d", "prod d", 2, _ADAM, 3072),
        prepare=_adam_step,
    ),
    Sweep(
        *("TNT, Shampoo", f"statistics, d = {_K_SIZE}", "k", "sum d prod d", 1, (1, 2, 3, 4, 5), 3),
        prepare=lambda k: _statistics(_cube(_K_SIZE, k)),
        abscissa=_WORK,
    ),
    Sweep(
        *("TNT, Shampoo", f"update, d = {_K_SIZE}", "k", "sum d prod d", 1, (1, 2, 3, 4, 5), 3),
        prepare=lambda k: _update(_cube(_K_SIZE, k)),
        abscissa=_WORK,
    ),
    Sweep(
        *("TNT", "observe, 1024 x 1024", "m", "m prod d", 1, _M, 256),
        prepare=lambda m: _observed_step(1024, m, 1, 1, stepping=False),
    ),
    Sweep(
        *("TNT", "observe + step, 512 x 512, m = 2048", "T1", "m prod d / T1", -1, _INTERVALS, 1),
        prepare=lambda interval: _observed_step(512, 2048, interval, _cycle(interval)),
        floor=partial(_observed_step, 512, 2048, NEVER, 8),
    ),
    Sweep(
        *("TNT", "step, 64 x 1024, T1 > T2", "T2", "sum d^3 / T2", -1, _INTERVALS, 1),
        prepare=lambda interval: _tnt_step(_TALL, NEVER, interval, _cycle(interval)),
        floor=partial(_tnt_step, _TALL, NEVER, NEVER, 8),
    ),
    Sweep(
        *("Shampoo", "step, 32 x 256", "T2", "sum d^3 / T2", -1, _INTERVALS, 1),
        prepare=lambda interval: _shampoo_step(_SHAMPOO_TALL, interval, _cycle(interval)),
        floor=partial(_shampoo_step, _SHAMPOO_TALL, 0, 8),
    ),
)
