"""`tnt_optim.KFAC` follows the dense oracle: every parameter, after every step."""

import copy
import functools
from typing import Any

import pytest
import torch
from kfac_models import held, step_on_ones
from optimizers import equal
from oracle_kfac import DenseKFAC, Network
from tolerances import BFLOAT16_SPACING, FLOAT32_TRAJECTORY, FLOAT64_TRAJECTORY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC

STEPS, BATCH, CLASSES, WARM_BATCHES = 22, 6, 5, 3
TOLERANCES = {torch.float64: FLOAT64_TRAJECTORY, torch.float32: FLOAT32_TRAJECTORY}


def initial_model() -> nn.Sequential:
    """Convolutions and linear layers, with and without bias, and a batch norm."""
    torch.manual_seed(21)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 3, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(0, 1)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(30, 6),
        nn.Tanh(),
        nn.Linear(6, CLASSES, bias=False),
    )
    with torch.no_grad():
        for p in model.parameters():  # norms and biases off their constants
            p.add_(0.2 * torch.randn_like(p))
    return model


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    """A warm start's batches, then one a step; labels from a random linear teacher."""
    generator = torch.Generator().manual_seed(22)
    teacher = torch.randn(50, CLASSES, generator=generator)
    count = WARM_BATCHES + STEPS
    inputs = [torch.randn(BATCH, 2, 5, 5, generator=generator) for _ in range(count)]
    return [(x, (x.flatten(1) @ teacher).argmax(1)) for x in inputs]


DEFAULTS: dict[str, Any] = {"lr": 0.005, "damping": 0.1, "stat_interval": 1, "inverse_interval": 1}
MIDDLE = {"stat_interval": 2, "inverse_interval": 3}
WARM = "warm start, "  # how the names of runs that begin with one begin
RUNS: dict[str, dict[str, Any]] = {
    f"{start}{inverse}, T1 = {t1}, T2 = {t2}": dict(
        inverse=inverse, stat_interval=t1, inverse_interval=t2
    )
    for start, inverse, intervals in [
        ("", "damped", [(1, 1), (2, 3), (3, 20)]),
        ("", "eigenbasis", [(2, 3)]),
        (WARM, "damped", [(2, 3)]),
        (WARM, "eigenbasis", [(1, 1), (2, 3), (3, 20)]),
    ]
    for t1, t2 in intervals
} | {
    "weight decay": {"weight_decay": 1.0, **MIDDLE},
    "weight decay, eigenbasis": {"weight_decay": 1.0, "inverse": "eigenbasis"},
    "no momentum": {"momentum": 0.0, "lr": 0.05, **MIDDLE},
    "no memory": {"stat_decay": 0.0, "damping": 0.3, **MIDDLE},
    f"{WARM}everything": {
        **{"lr": 0.02, "damping": 0.5, "inverse": "eigenbasis", "weight_decay": 0.1},
        **{"momentum": 0.8, "stat_decay": 0.7, "stat_interval": 2, "inverse_interval": 5},
    },
}


@functools.cache
def oracle_run(name: str) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """The oracle's parameters after every step, and the labels drawn from its own predictions."""
    network, labels = Network(initial_model().double()), []
    oracle = DenseKFAC(network, **{**DEFAULTS, **RUNS[name]})
    generator = torch.Generator().manual_seed(23)

    def statistics(x: Tensor) -> Any:
        predicted = network.model(x).detach().softmax(1)
        labels.append(torch.multinomial(predicted, 1, generator=generator)[:, 0])
        return network.statistics(x, labels[-1])

    def copies() -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in network.params.items()}

    if name.startswith(WARM):
        oracle.warm_start([statistics(x.double()) for x, _ in batches()[:WARM_BATCHES]])
    weights = [copies()]
    for x, y in batches()[WARM_BATCHES:]:
        observed = statistics(x.double()) if oracle.due() else None
        oracle.step(network.gradients(x.double(), y), observed)
        weights.append(copies())
    return weights, labels


def assert_follows(name: str, dtype: torch.dtype, model: nn.Module | None = None) -> None:
    """Every parameter, after every step, relative to how far the oracle has moved it so far.

    KFAC's samples are the oracle's labels.
    """
    weights, labels = oracle_run(name)
    start, end = weights[0], weights[-1]
    for key in start:
        moved = float((end[key] - start[key]).norm())
        assert 3e-3 * float(start[key].norm()) < moved < 3 * float(start[key].norm()), key
    model, sampled = (model or initial_model()).to(dtype), iter(labels)
    likelihood = lambda output: cross_entropy(output, next(sampled))  # noqa: E731
    opt = KFAC.paper(model, likelihood=likelihood, **{**DEFAULTS, **RUNS[name]})
    if name.startswith(WARM):
        before = copy.deepcopy([*model.buffers()])
        opt.warm_start(model(x.to(dtype)) for x, _ in batches()[:WARM_BATCHES])
        assert equal(before, model.buffers())
    for step, (x, y) in enumerate(batches()[WARM_BATCHES:], start=1):
        opt.zero_grad()
        output = model(x.to(dtype))
        loss = cross_entropy(output, y)
        opt.observe(output)
        loss.backward()
        opt.step()
        for key, p in model.named_parameters():
            expected = weights[step][key]
            moved = float((expected - start[key]).norm())
            error = float((p.detach().double() - expected).norm())
            rounding = torch.finfo(dtype).eps * float(expected.norm())
            assert error <= TOLERANCES[dtype] * moved + rounding, (step, key, error / moved)
    assert step == STEPS and next(sampled, None) is None  # sampled as often as the oracle did


inverses = pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=["float64", "float32"])


@dtypes
@pytest.mark.parametrize("name", RUNS)
def test_follows_the_oracle(name: str, dtype: torch.dtype) -> None:
    assert_follows(name, dtype)


@dtypes
def test_channels_last_follows_the_oracle(dtype: torch.dtype) -> None:
    model = initial_model().to(memory_format=torch.channels_last)
    assert not all(p.is_contiguous() for p in model.parameters())
    strides = [p.stride() for p in model.parameters()]
    assert_follows("damped, T1 = 2, T2 = 3", dtype, model)
    assert [p.stride() for p in model.parameters()] == strides


@inverses
def test_half_precision_parameters_are_rounded_once(inverse: str) -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 3)).bfloat16()
    wide = copy.deepcopy(model).float()
    opt, opt32 = (
        KFAC(m, lr=0.05, inverse=inverse, interval_warmup=0, likelihood="categorical")
        for m in (model, wide)
    )
    step_on_ones(model, opt, torch.randn(8, 16).bfloat16())
    momenta = [state["momentum"] for state in opt.state.values() if "momentum" in state]
    assert {t.dtype for t in (*momenta, *held(opt), *held(opt, "factors"))} == {torch.float32}
    opt32.load_state_dict(opt.state_dict())
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        q.data.copy_(p.data)
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    opt.step()
    opt32.step()
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        error = (p.detach().float() - q.detach()).abs()
        assert bool((error <= BFLOAT16_SPACING * q.detach().abs()).all())
