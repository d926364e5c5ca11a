"""The steps that are compared: of bare parameters that hold given gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.kernels.checks import check_finite, check_moved
from bench.kernels.inputs import generator, normal
from tnt_optim import TNT
from tools.measuring.parameter_sets import PARAMETER_SETS

# As for the optimizer's step among the kernels' benchmarks.
SETTINGS: dict[str, Any] = {"lr": 1e-3, "damping": 0.1, "momentum": 0.9, "stat_decay": 0.9}
T2 = 20

PLAIN = "plain"
NEAREST = 'bfloat16, rounding="nearest"'
# What comes with a step, beside the settings above.
COMPANIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    'graft="sgd"': {"graft": "sgd"},
    'graft="adam"': {"graft": "adam"},
    "kl_clip": {"kl_clip": 1e-3},
    "weight_decay": {"weight_decay": 1e-2},
    NEAREST: {"dtype": "bfloat16", "rounding": "nearest"},
    'bfloat16, rounding="stochastic"': {"dtype": "bfloat16", "rounding": "stochastic"},
    'bfloat16, rounding="master"': {"dtype": "bfloat16", "rounding": "master"},
}


@dataclass(frozen=True)
class Kind:
    """What is due at a step.

    Attributes:
        name: as in the tables.
        number: of the step. Beyond T2, where the optimizer's additional inverses at the start of
            training are over.
        stat_interval: T1.
    """

    name: str
    number: int
    stat_interval: int


NOTHING = Kind("nothing due", 2 * T2 + 1, 10)
STATISTICS = Kind("statistics due", 2 * T2 + 1, 1)
BOTH = Kind("statistics and inverses due", 2 * T2, 1)
KINDS = (NOTHING, STATISTICS, BOTH)


def steps_of_a_cycle(t1: int, t2: int) -> dict[str, int]:
    """How many steps of each kind T2 steps have, T1 a divisor of T2."""
    return {NOTHING.name: t2 - t2 // t1, STATISTICS.name: t2 // t1 - 1, BOTH.name: 1}


class Bench:
    """Optimizers of the parameters of one set, all on the same gradients."""

    def __init__(self, name: str) -> None:
        rng = generator()
        shapes = PARAMETER_SETS[name].shapes
        self._start = normal(shapes, rng, SETTINGS["lr"])
        self._gradients = {torch.float32: normal(shapes, rng)}
        self._made: list[tuple[str, list[nn.Parameter], list[Tensor]]] = []

    def optimizer(self, settings: dict[str, Any]) -> TNT:
        """An optimizer of parameters of its own that has taken its first step.

        Args:
            settings: beside ``SETTINGS``; "dtype" is the parameters'.
        """
        settings = dict(settings)
        dtype = getattr(torch, settings.pop("dtype", "float32"))
        if dtype not in self._gradients:
            self._gradients[dtype] = [g.to(dtype) for g in self._gradients[torch.float32]]
        params = [nn.Parameter(weight.to(dtype, copy=True)) for weight in self._start]
        for param, gradient in zip(params, self._gradients[dtype], strict=True):
            param.grad = gradient
        opt = TNT(params, **SETTINGS, **settings, inverse_interval=T2, fisher="empirical")
        opt.step()  # the first: state, statistics, inverses
        self._made.append((str(settings), params, [_some_of(p).clone() for p in params]))
        return opt

    def check(self) -> None:
        """Checks that all parameters have moved since, to somewhere finite.

        Raises:
            ValueError: some have not.
        """
        for name, params, first in self._made:
            check_finite(name, params)
            if params[0].dtype == torch.float32:  # in fewer bits a step may well round to none
                check_moved(name, first, [_some_of(p) for p in params])


def _some_of(param: Tensor) -> Tensor:
    """A few numbers of a parameter: copies of all would take a large model's memory once more."""
    return param.detach().flatten()[:1000]


def step_of(opt: TNT, kind: Kind) -> Callable[[], None]:
    """Takes a step of a kind, again and again."""
    group = opt.param_groups[0]

    def run() -> None:
        group["step"], group["stat_interval"] = kind.number, kind.stat_interval
        opt.step()

    return run
