"""`tnt_optim.KFAC` follows the dense oracle: every parameter, after every step."""

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from drawn import close
from kfac_models import conv_net, held, step_on_ones, train
from oracle_kfac import DenseKFAC, Layer, Network, Norm, Tanh
from tolerances import BFLOAT16_SPACING, FLOAT32_TRAJECTORY, FLOAT64_TRAJECTORY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC

STEPS, BATCH, CLASSES, WARM_BATCHES = 22, 6, 5, 3
INTERVALS = [(1, 1), (2, 3), (3, 20)]
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


ARCHITECTURE: list[Layer | Norm | Tanh] = [
    Layer("0.weight", None, kernel=(3, 3), padding=(1, 1)),
    Norm("1.weight", "1.bias"),
    Tanh(),
    Layer("3.weight", "3.bias", (3, 2), stride=(2, 1), dilation=(1, 2), padding=(0, 1)),
    Tanh(),
    Layer("6.weight", "6.bias"),
    Tanh(),
    Layer("8.weight", None),
]


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    """A warm start's batches, then one a step; labels from a random linear teacher."""
    generator = torch.Generator().manual_seed(22)
    teacher = torch.randn(50, CLASSES, generator=generator)
    count = WARM_BATCHES + STEPS
    inputs = [torch.randn(BATCH, 2, 5, 5, generator=generator) for _ in range(count)]
    return [(x, (x.flatten(1) @ teacher).argmax(1)) for x in inputs]


@dataclass(frozen=True)
class Settings:
    """KFAC's arguments under test, and how the run starts."""

    lr: float = 0.005
    damping: float = 0.1
    inverse: str = "damped"
    momentum: float = 0.9
    stat_decay: float = 0.9
    weight_decay: float = 0.0
    stat_interval: int = 1
    inverse_interval: int = 1
    warm: bool = False

    def arguments(self) -> dict[str, Any]:
        """What the oracle and KFAC both take."""
        return {k: v for k, v in vars(self).items() if k != "warm"}


@dataclass
class Trajectory:
    """The oracle's run: parameters after every step, and the labels sampled on the way."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)


@functools.cache
def oracle_trajectory(settings: Settings) -> Trajectory:
    """Train the oracle's own network; labels come from its own predictions."""
    named = initial_model().double().named_parameters()
    params = {name: p.detach().clone().requires_grad_() for name, p in named}
    network, record = Network(ARCHITECTURE, params), Trajectory()
    oracle = DenseKFAC(network, **settings.arguments())
    generator = torch.Generator().manual_seed(23)

    def draw(x: Tensor) -> Tensor:
        logits = network.forward(x)[0].detach()
        record.labels.append(torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0])
        return record.labels[-1]

    def copies() -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in params.items()}

    if settings.warm:
        warm = [x.double() for x, _ in batches()[:WARM_BATCHES]]
        oracle.warm_start([network.statistics(x, draw(x)) for x in warm])
    record.weights.append(copies())
    for x, y in batches()[WARM_BATCHES:]:
        x = x.double()
        observed = network.statistics(x, draw(x)) if oracle.due() else None
        oracle.step(network.gradients(x, y), observed)
        record.weights.append(copies())
    return record


def library_weights(
    model: nn.Module, settings: Settings, labels: list[Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Train `model` with KFAC on the oracle's sampled labels; yields parameters after each step."""
    dtype, sampled = next(model.parameters()).dtype, iter(labels)
    likelihood = lambda output: cross_entropy(output, next(sampled))  # noqa: E731
    opt = KFAC(model, likelihood=likelihood, **settings.arguments())
    if settings.warm:
        before = copy.deepcopy([*model.buffers()])
        opt.warm_start(model(x.to(dtype)) for x, _ in batches()[:WARM_BATCHES])
        assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    for x, y in batches()[WARM_BATCHES:]:
        opt.zero_grad()
        output = model(x.to(dtype))
        loss = cross_entropy(output, y)
        opt.observe(output)
        loss.backward()
        opt.step()
        yield {name: p.detach().double() for name, p in model.named_parameters()}
    assert next(sampled, None) is None  # sampled exactly as often as the oracle did


def assert_follows(settings: Settings, dtype: torch.dtype, model: nn.Module | None = None) -> None:
    """Every parameter, after every step, relative to how far the oracle has moved it so far."""
    record = oracle_trajectory(settings)
    start, end = record.weights[0], record.weights[-1]
    for name in start:
        moved = float((end[name] - start[name]).norm())
        assert 3e-3 * float(start[name].norm()) < moved < 3 * float(start[name].norm()), name
    model, steps = (model or initial_model()).to(dtype), 0
    for weights in library_weights(model, settings, record.labels):
        steps += 1
        for name, expected in record.weights[steps].items():
            moved = float((expected - start[name]).norm())
            error = float((weights[name] - expected).norm())
            rounding = torch.finfo(dtype).eps * float(expected.norm())
            assert error <= TOLERANCES[dtype] * moved + rounding, (steps, name, error / moved)
    assert steps == STEPS


inverses = pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32], ids=["float64", "float32"]
)

SETTINGS = {
    f"{inverse}, {'warm' if warm else 'cold'}, T1 = {t1}, T2 = {t2}": Settings(
        inverse=inverse, warm=warm, stat_interval=t1, inverse_interval=t2
    )
    for inverse in ("damped", "eigenbasis")
    for warm in (False, True)
    for t1, t2 in INTERVALS
} | {
    "weight decay": Settings(weight_decay=1.0, stat_interval=2, inverse_interval=3),
    "weight decay, eigenbasis": Settings(weight_decay=1.0, inverse="eigenbasis"),
    "no momentum": Settings(momentum=0.0, lr=0.05, stat_interval=2, inverse_interval=3),
    "no memory": Settings(stat_decay=0.0, damping=0.3, stat_interval=2, inverse_interval=3),
    "everything": Settings(
        lr=0.02,
        damping=0.5,
        inverse="eigenbasis",
        warm=True,
        weight_decay=0.1,
        momentum=0.8,
        stat_decay=0.7,
        stat_interval=2,
        inverse_interval=5,
    ),
}


@dtypes
@pytest.mark.parametrize("name", SETTINGS)
def test_follows_the_oracle(name: str, dtype: torch.dtype) -> None:
    assert_follows(SETTINGS[name], dtype)


@dtypes
def test_channels_last_follows_the_oracle(dtype: torch.dtype) -> None:
    model = initial_model().to(memory_format=torch.channels_last)
    assert not all(p.is_contiguous() for p in model.parameters())
    strides = [p.stride() for p in model.parameters()]
    assert_follows(Settings(stat_interval=2, inverse_interval=3), dtype, model)
    assert [p.stride() for p in model.parameters()] == strides


def test_parameters_outside_of_layers_take_the_momentum() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    opt = KFAC(model, lr=0.1, momentum=0.5, weight_decay=0.2)
    norm, momentum = model[1].weight, torch.zeros(4).double()
    for _ in range(3):
        opt.zero_grad()
        output = model(torch.randn(5, 3).double())
        opt.observe(output)
        output.square().sum().backward()
        momentum = 0.5 * momentum + norm.grad
        expected = norm.detach() - 0.1 * (momentum + 0.2 * norm.detach())
        opt.step()
        close(norm.detach(), expected)


@inverses
def test_half_precision_parameters_are_rounded_once(inverse: str) -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).bfloat16()
    wide = copy.deepcopy(model).float()
    opt, opt32 = (KFAC(m, lr=0.05, inverse=inverse) for m in (model, wide))
    step_on_ones(model, opt, torch.randn(8, 6).bfloat16())
    momenta = [state["momentum"] for state in opt.state.values()]
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


@inverses
def test_settings_may_be_tensors_and_have_a_schedule(inverse: str) -> None:
    numbers = {"lr": 0.1, "damping": 0.25, "momentum": 0.75, "stat_decay": 0.5}
    numbers["weight_decay"] = 0.125
    ends = []
    for wrap in (float, lambda v: torch.tensor(v, dtype=torch.float64)):
        model = conv_net()
        settings = {name: wrap(value) for name, value in numbers.items()}
        opt = KFAC(model, inverse=inverse, stat_interval=2, inverse_interval=3, **settings)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
        torch.manual_seed(3)
        for _ in range(5):
            train(model, opt)
            scheduler.step()
        assert float(opt.param_groups[0]["lr"]) == 0.025
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    close(*ends)
