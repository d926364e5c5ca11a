"""Whole optimizer steps: against plain torch and first-order methods, and option by option.

Only the optimizer's work is timed: no forward, no backward. Bare parameters hold given gradients,
which the statistics use too (``likelihood=None``). With sampled labels ``step`` does the same work
on another gradient, and ``observe`` adds a second backward before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tnt_kernels.benchmark.baselines import gram_einsum_, inverse_linalg, step_tensordot_
from tnt_kernels.benchmark.comparison import OURS, Candidate, Comparison
from tnt_kernels.benchmark.inputs import generator, normal
from tnt_kernels.benchmark.work import Work, gram_work, inverse_work, step_work
from tnt_optim import TNT
from tools.measuring.parameter_sets import ParameterSet

LR, T2 = 1e-3, 20
SETTINGS: dict[str, Any] = {"damping": 0.1, "momentum": 0.9, "stat_decay": 0.9}
# Sets whose refresh takes seconds in plain torch run the kinds of single steps only.
CYCLE_SETS = ("mnist_ae", "resnet32")


@dataclass(frozen=True)
class Kind:
    """What is due at the steps of one run."""

    name: str  # as in the tables
    first_step: int  # the first step t, after the warm start and the first T2 steps
    steps: int  # how many steps
    stat_interval: int  # T1

    def due(self, interval: int) -> int:
        """How many of the steps are multiples of an interval."""
        return sum(t % interval == 0 for t in range(self.first_step, self.first_step + self.steps))


PLAIN = Kind("nothing due", 2 * T2 + 1, 1, 10)
STATISTICS = Kind("statistics due", 2 * T2 + 1, 1, 1)
REFRESH = Kind("statistics and inverses due", 2 * T2, 1, 1)
CYCLE = Kind("T1 = 1, T2 = 20", 2 * T2, T2, 1)
KINDS = (PLAIN, STATISTICS, REFRESH, CYCLE)

# The options of a plain step, each on its own; the first one is the base of the ratios.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    'graft="sgd"': {"graft": "sgd"},
    'graft="adam"': {"graft": "adam"},
    "weight_decay": {"weight_decay": 1e-2},
    'bfloat16, rounding="nearest"': {"dtype": torch.bfloat16, "rounding": "nearest"},
    'bfloat16, rounding="stochastic"': {"dtype": torch.bfloat16, "rounding": "stochastic"},
    'bfloat16, rounding="master"': {"dtype": torch.bfloat16, "rounding": "master"},
}
CALLS = ("diagnostics", "failures", "memory_estimate")


class PlainTNT:
    """The whole step of TNT on empirical gradients, made of (i), (iii) and (iv).

    Settings and schedule are those of ``tnt_optim.TNT`` without a likelihood; there is no
    warm start and no check for gradients that are not finite. The parameters are contiguous.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        damping: float,
        momentum: float,
        stat_decay: float,
        stat_interval: int,
        inverse_interval: int,
    ) -> None:
        self.params = list(params)
        self.lr, self.damping, self.momentum = lr, damping, momentum
        self.stat_decay = stat_decay
        self.stat_interval, self.inverse_interval = stat_interval, inverse_interval
        self.steps = 0
        tensors = ParameterSet("", tuple(tuple(p.shape) for p in self.params))
        self.weights = [p.detach().view(v) for p, v in zip(self.params, tensors.views, strict=True)]
        self.momenta = [torch.zeros_like(weight) for weight in self.weights]
        self.stats, self.factors = (
            [[self.weights[0].new_zeros(shape) for shape in row] for row in tensors.matrices]
            for _ in range(2)
        )

    @torch.no_grad()
    def step(self) -> None:
        """Take one step."""
        grads = [
            p.grad.view(w.shape)
            for p, w in zip(self.params, self.weights, strict=True)
            if p.grad is not None
        ]
        if self.steps % self.stat_interval == 0:
            gram_einsum_(self.stats, grads, self.stat_decay if self.steps else 0.0)
        if self.steps % self.inverse_interval == 0:
            inverse_linalg(self.stats, self.damping, self.factors)
        scalars = (self.lr, self.momentum, 0.0)
        step_tensordot_(self.weights, self.momenta, grads, self.factors, *scalars)
        self.steps += 1


class Parameters:
    """Parameters of one set that hold given gradients."""

    def __init__(self, parameter_set: ParameterSet, device: torch.device) -> None:
        rng = generator(device)
        self.set = parameter_set
        self.start = normal(parameter_set.shapes, rng, LR)
        # Small, because a bias has a statistic of condition |gradient|^2 / damping: with variance 1
        # and 4096 entries, its float32 inverse has an error of 5e-2, in plain torch as in ours.
        self.gradients = normal(parameter_set.shapes, rng, 0.1)

    def new(self, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        """New parameters at the starting point."""
        params = [nn.Parameter(weight.to(dtype, copy=True)) for weight in self.start]
        for param, gradient in zip(params, self.gradients, strict=True):
            param.grad = gradient.to(dtype)
        return params

    def candidate(
        self,
        name: str,
        make: Callable[[list[nn.Parameter]], Callable[[], object]],
        *,
        compared: bool = False,
        dtype: torch.dtype = torch.float32,
        updates: bool = True,
    ) -> Candidate:
        """A candidate on parameters of its own; its results are how far they have moved."""
        params = self.new(dtype)

        def movement() -> list[Tensor]:
            return [p.detach() - w for p, w in zip(params, self.start, strict=True)]

        run = make(params)
        # In bfloat16 a step may be too small to change every parameter.
        updated = [p.detach() for p in params] if updates and dtype == torch.float32 else []
        return Candidate(name, run, movement, updated, compared, graph=False)

    def tnt(self, params: Sequence[nn.Parameter], **settings: Any) -> TNT:
        """TNT after its first step: it has state, statistics and inverses."""
        optimizer = TNT.paper(
            params, lr=LR, inverse_interval=T2, likelihood=None, **{**SETTINGS, **settings}
        )
        optimizer.step()
        return optimizer


def steps_of(optimizer: torch.optim.Optimizer, kind: Kind) -> Callable[[], None]:
    """Take the steps of a kind, again and again."""
    group = optimizer.param_groups[0]
    second_order = "stat_interval" in group

    def run() -> None:
        if second_order:
            group["step"], group["stat_interval"] = kind.first_step, kind.stat_interval
        for _ in range(kind.steps):
            optimizer.step()

    return run


@pytest.fixture(autouse=True)
def skip_parts(parameter_set: ParameterSet) -> None:
    """Skips sets that are a part of another set."""
    if parameter_set.name == "vgg16_conv":
        pytest.skip("a part of vgg16, for the roots only")


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_methods(
    parameter_set: ParameterSet, kind: Kind, device: torch.device, compare: Comparison
) -> None:
    """TNT, the same in plain torch, and other optimizers."""
    if kind is CYCLE and parameter_set.name not in CYCLE_SETS:
        pytest.skip("takes minutes; it is 19 steps with statistics and one with both")
    parameters = Parameters(parameter_set, device)

    def plain_torch(params: list[nn.Parameter]) -> Callable[[], None]:
        optimizer = PlainTNT(
            params, LR, stat_interval=kind.stat_interval, inverse_interval=T2, **SETTINGS
        )
        optimizer.step()

        def run() -> None:
            optimizer.steps = kind.first_step
            for _ in range(kind.steps):
                optimizer.step()

        return run

    def ours(params: list[nn.Parameter], **settings: bool) -> Callable[[], None]:
        return steps_of(parameters.tnt(params, stat_interval=kind.stat_interval, **settings), kind)

    def recorded(params: list[nn.Parameter]) -> Callable[[], None]:
        run = ours(params, capturable=True)
        for _ in range(2):  # the second step of each kind records its graph
            run()
        return run

    def other(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Any:
        return lambda params: steps_of(make(params), kind)

    candidates = [
        parameters.candidate(OURS, ours, compared=True),
        parameters.candidate("plain torch", plain_torch, compared=True),
        *([parameters.candidate(f"{OURS}, capturable", recorded)] if device.type == "cuda" else []),
        parameters.candidate("AdamW", other(lambda p: torch.optim.AdamW(p, lr=LR, fused=True))),
        parameters.candidate("SGD", other(lambda p: torch.optim.SGD(p, LR, 0.9, fused=True))),
        parameters.candidate("Muon with AdamW", lambda p: _muon(p, kind)),
    ]
    expected: Sequence[Tensor] = ()
    # In TF32 the statistics differ by 1e-3, which their inverses amplify beyond comparison.
    if compare.precision == "highest":
        exact = parameters.candidate("float64", plain_torch, dtype=torch.float64)
        exact.run()
        expected = exact.results()
    compare(
        "TNT.step",
        parameter_set,
        candidates,
        expected,
        _work(parameter_set, kind),
        kind=kind.name,
        steps=kind.steps,
    )


def test_options(parameter_set: ParameterSet, device: torch.device, compare: Comparison) -> None:
    """A plain step with one option at a time: grafting, weight decay, rounding."""
    parameters = Parameters(parameter_set, device)

    def candidate(name: str, settings: dict[str, Any]) -> Candidate:
        settings = dict(settings)
        dtype = settings.pop("dtype", torch.float32)
        return parameters.candidate(
            name, lambda params: steps_of(parameters.tnt(params, **settings), PLAIN), dtype=dtype
        )

    candidates = [candidate(name, settings) for name, settings in OPTIONS.items()]
    compare("options of a plain step", parameter_set, candidates, kind=PLAIN.name)


def test_calls(parameter_set: ParameterSet, device: torch.device, compare: Comparison) -> None:
    """Calls that a user adds to steps: diagnostics, failure counts, the memory estimate."""
    parameters = Parameters(parameter_set, device)

    def call(name: str) -> Candidate:
        return parameters.candidate(
            f"{name}()", lambda params: getattr(parameters.tnt(params), name), updates=False
        )

    step = parameters.candidate("a plain step", lambda p: steps_of(parameters.tnt(p), PLAIN))
    compare("calls next to steps", parameter_set, [step, *map(call, CALLS)], kind=PLAIN.name)


def _muon(params: list[nn.Parameter], kind: Kind) -> Callable[[], None]:
    """Muon for the matrices, AdamW for all other parameters."""
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=LR),
        torch.optim.AdamW([{"params": rest}], lr=LR, fused=True),  # an empty group is no error
    ]

    def run() -> None:
        for _ in range(kind.steps):
            for optimizer in optimizers:
                optimizer.step()

    return run


def _work(parameter_set: ParameterSet, kind: Kind) -> Work:
    parts = (
        (step_work(parameter_set), kind.steps),
        (gram_work(parameter_set), kind.due(kind.stat_interval)),
        (inverse_work(parameter_set), kind.due(T2)),
    )
    return Work(
        sum(times * part.flops for part, times in parts),
        sum(times * part.bytes for part, times in parts),
    )
