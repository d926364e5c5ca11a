"""TNT and Shampoo follow the dense oracles: 30 steps of small models, every entry, every step."""

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import torch
from conftest import FixedLabels
from drawn import noise, weight
from optimizers import FACTORED, Dictated, factored, through_a_file
from oracle import DenseTNT
from oracle_shampoo import DenseShampoo
from tolerances import (
    BFLOAT16_SPACING,
    FLOAT32_FORMULA,
    FLOAT32_TRAJECTORY,
    FLOAT64_TRAJECTORY,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

STEPS, BATCH, CLASSES, WARM_BATCHES = 30, 16, 5, 3
INTERVALS = [(1, 1), (2, 3), (3, 20)]  # (T1, T2); both are due at 0, 6, .. for the second


# How close an optimizer must be to its oracle, by dtype.
TOLERANCES = {torch.float64: FLOAT64_TRAJECTORY, torch.float32: FLOAT32_TRAJECTORY}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def oracle_of(name: str, params: Sequence[Tensor], **settings: Any) -> DenseTNT:
    """The oracle of these parameters."""
    return (DenseShampoo if name == "shampoo" else DenseTNT)(params, **settings)


def assert_near(mine: Tensor, oracle: Tensor, start: Tensor, where: Any) -> None:
    """Relative to how far the oracle has moved, plus the rounding of the parameter itself."""
    travelled = float((oracle - start).norm())
    error = float((mine.detach().double() - oracle).norm())
    rounding = torch.finfo(mine.dtype).eps * float(oracle.norm())
    assert error <= TOLERANCES[mine.dtype] * travelled + rounding, (where, error / travelled)


# ------------------------------------------------------------------ models


class ConvNet(nn.Module):
    """Conv and linear weights, biases, and the weight and bias of a batch and a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Conv2d(4, 6, (3, 2), stride=2),
            nn.GroupNorm(2, 6),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(36, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, 2, 6, 6) to logits (N, CLASSES)."""
        return self.layers(x)


def initial_model() -> ConvNet:
    """The same float32 starting point for the oracle and for every run."""
    torch.manual_seed(11)
    model = ConvNet()
    with torch.no_grad():
        for p in model.parameters():  # moves norms and biases off their constants
            p.add_(0.1 * torch.randn_like(p))
    return model


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    """A warm start's batches, then one a step; labels from a random linear teacher."""
    generator = torch.Generator().manual_seed(12)
    teacher = torch.randn(72, CLASSES, generator=generator)
    inputs = [torch.randn(BATCH, 2, 6, 6, generator=generator) for _ in range(WARM_BATCHES + STEPS)]
    return [(x, (x.flatten(1) @ teacher).argmax(1)) for x in inputs]


@dataclass(frozen=True)
class Settings:
    """Arguments of the optimizer and its oracle, and how the run starts."""

    lr: float
    damping: float
    momentum: float = 0.9
    stat_decay: float = 0.9
    weight_decay: float = 0.0
    stat_interval: int = 2
    inverse_interval: int = 3
    max_factor_dim: int = 8192
    relative_damping: bool = False
    graft: str | None = None
    nesterov: bool = False
    # Shampoo has none of these.
    estimator: str | None = None
    early_roots: bool | None = None
    warm: bool = False

    def arguments(self) -> dict[str, Any]:
        """The arguments that the oracle and the optimizer both take."""
        given = asdict(self)
        del given["warm"]
        for name in ("estimator", "early_roots"):
            if given[name] is None:
                del given[name]
        return given


def settings_of(name: str, **more: Any) -> Settings:
    """Settings with which the optimizer moves every parameter, and stays stable."""
    start = {"lr": 0.01, "damping": 0.01} if name == "shampoo" else {"lr": 3e-4, "damping": 0.05}
    return Settings(**{**start, **more})


@dataclass
class Trajectory:
    """The oracle's run: parameters after every step, and the labels sampled on the way."""

    weights: list[list[Tensor]] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    roots: list[bool] = field(default_factory=list)  # whether factors were roots, step by step
    buffers: dict[str, Tensor] = field(default_factory=dict)


def gradients(output: Tensor, labels: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of the mean cross entropy at these labels."""
    loss = cross_entropy(output, labels)
    return list(torch.autograd.grad(loss, list(params), retain_graph=True))


@functools.cache
def oracle_trajectory(name: str, settings: Settings) -> Trajectory:
    """Trains the float64 model with the oracle; TNT's labels come from its own predictions."""
    record, model = Trajectory(), initial_model().double()
    params = list(model.parameters())
    oracle = oracle_of(name, params, **settings.arguments())
    generator = torch.Generator().manual_seed(13)

    def sampled(output: Tensor, y: Tensor) -> list[Tensor]:
        if name == "sampled":
            y = torch.multinomial(output.detach().softmax(1), 1, generator=generator).squeeze(1)
        record.labels.append(y)
        return gradients(output, y, params)

    if settings.warm:
        before = copy.deepcopy(model.state_dict())
        warm = [(model(x.double()), y) for x, y in batches()[:WARM_BATCHES]]
        oracle.warm_start([sampled(output, y) for output, y in warm])
        model.load_state_dict(before)  # the normalisation buffers are left as they were
    record.weights.append([p.detach().clone() for p in params])
    for x, y in batches()[WARM_BATCHES:]:
        output = model(x.double())
        observed = sampled(output, y)
        oracle.step(gradients(output, y, params), observed)
        record.roots.append(oracle.takes_roots)
        record.weights.append([p.detach().clone() for p in params])
    record.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return record


def library_weights(
    name: str, dtype: torch.dtype, model: nn.Module, settings: Settings, labels: Iterator[Tensor]
) -> Iterator[list[Tensor]]:
    """Trains a model, with the oracle's sampled labels; yields parameters after each step."""
    likelihood = FixedLabels()
    sampled = {"likelihood": likelihood} if name == "sampled" else {}
    opt = FACTORED[name](model.parameters(), **sampled, **settings.arguments())

    def warm_outputs() -> Iterator[Tensor]:
        for x, _ in batches()[:WARM_BATCHES]:
            likelihood.current = next(labels)
            output = model(x.to(dtype))
            yield output if sampled else likelihood(output)

    if settings.warm:
        opt.warm_start(warm_outputs(), model=model)
    for x, y in batches()[WARM_BATCHES:]:
        opt.zero_grad()
        output = model(x.to(dtype))
        likelihood.current = next(labels)
        if sampled:
            opt.observe(output)
        cross_entropy(output, y).backward()
        opt.step()
        yield [p.detach().clone() for p in model.parameters()]


def assert_follows(name: str, dtype: torch.dtype, settings: Settings) -> None:
    """Every parameter, after every step."""
    # Both precisions share one oracle.
    record = oracle_trajectory(name, settings)
    start, end = record.weights[0], record.weights[-1]
    for p, q in zip(start, end, strict=True):
        assert float((q - p).norm()) > 3e-3 * float(p.norm()), "the trajectory hardly moves"
        assert float((q - p).norm()) < 5 * float(p.norm()), "the trajectory is not stable"
    model = initial_model().to(dtype)
    runs = library_weights(name, dtype, model, settings, iter(record.labels))
    steps = 0
    for steps, weights in enumerate(runs, 1):
        for i, (mine, oracle) in enumerate(zip(weights, record.weights[steps], strict=True)):
            assert_near(mine, oracle, start[i], (steps, i))
    assert steps == STEPS
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(
            buffer.double(), record.buffers[name].double(), rtol=10 * TOLERANCES[dtype], atol=1e-6
        )


@pytest.mark.parametrize("name", ["sampled", "shampoo"])
@dtypes
@pytest.mark.parametrize("max_factor_dim", [8192, 5], ids=["full", "mixed"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("intervals", INTERVALS, ids=str)
def test_schedules_follow_the_oracle(
    name: str, dtype: torch.dtype, intervals: tuple[int, int], warm: bool, max_factor_dim: int
) -> None:
    schedule = {"stat_interval": intervals[0], "inverse_interval": intervals[1]}
    settings = settings_of(name, **schedule, warm=warm, max_factor_dim=max_factor_dim)
    assert_follows(name, dtype, settings)


# By option: settings of TNT, and of Shampoo.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weight decay": ({"weight_decay": 10.0}, {"weight_decay": 1.0}),
    "no momentum": ({"momentum": 0.0, "lr": 3e-3}, {"momentum": 0.0, "lr": 0.1}),
    "no memory": ({"stat_decay": 0.0, "damping": 0.1}, {"stat_decay": 0.0}),
    "damping": ({"damping": 0.3, "lr": 1e-3}, {"damping": 3e-4}),
    "relative": (
        {"relative_damping": True, "damping": 1.0, "lr": 2e-5},
        {"relative_damping": True, "damping": 0.1, "lr": 3e-3},
    ),
    "adam": ({"graft": "adam", "lr": 0.01}, {"graft": "adam"}),
    "sgd": ({"graft": "sgd", "lr": 0.03}, {"graft": "sgd", "lr": 0.03}),
    "rms": ({"graft": "rms", "lr": 0.03}, {"graft": "rms", "lr": 0.03}),
    "everything": (
        {
            "graft": "sgd", "lr": 0.03, "relative_damping": True, "damping": 0.2, "momentum": 0.8,
            "weight_decay": 0.1, "stat_decay": 0.7, "max_factor_dim": 5, "inverse_interval": 5,
            "warm": True,
        },
        {
            "graft": "adam", "relative_damping": True, "damping": 0.2, "momentum": 0.8,
            "weight_decay": 0.1, "stat_decay": 0.7, "max_factor_dim": 5, "inverse_interval": 5,
            "warm": True,
        },
    ),
}  # fmt: skip


@factored
@dtypes
@pytest.mark.parametrize("option", OPTIONS)
def test_options_follow_the_oracle(name: str, dtype: torch.dtype, option: str) -> None:
    assert_follows(name, dtype, settings_of(name, **OPTIONS[option][name == "shampoo"]))


@pytest.mark.parametrize("name", ["sampled", "empirical"])
@dtypes
@pytest.mark.parametrize("max_factor_dim", [8192, 5], ids=["full", "mixed"])
@pytest.mark.parametrize(
    "more",
    [{}, {"relative_damping": True, "damping": 0.3, "graft": "adam", "lr": 0.01, "warm": True}],
    ids=["paper", "default"],
)
def test_maximum_likelihood_follows_the_oracle(
    name: str, dtype: torch.dtype, max_factor_dim: int, more: dict[str, Any]
) -> None:
    settings = settings_of(name, estimator="mle", max_factor_dim=max_factor_dim, **more)
    assert_follows(name, dtype, settings)


@factored
@dtypes
@pytest.mark.parametrize("graft", [None, "adam", "sgd", "rms"])
def test_nesterov_follows_the_oracle(name: str, dtype: torch.dtype, graft: str | None) -> None:
    """With weight decay, and cold starts: the first bias corrections count."""
    more = {} if graft is None else {"graft": graft, "lr": 0.01}
    assert_follows(name, dtype, settings_of(name, nesterov=True, weight_decay=0.1, **more))


@dtypes
@pytest.mark.parametrize("max_factor_dim", [8192, 5], ids=["full", "mixed"])
@pytest.mark.parametrize("intervals", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {"graft": "sgd"},
        {"graft": "adam", "nesterov": True},
        {"graft": "adam", "warm": True},
    ],
    ids=["sgd", "default", "warm"],
)
def test_early_roots_follow_the_oracle(
    dtype: torch.dtype, max_factor_dim: int, intervals: tuple[int, int], more: dict[str, Any]
) -> None:
    """From the first step to their end, which comes in the middle of the run."""
    schedule = {"stat_interval": intervals[0], "inverse_interval": intervals[1]}
    form = {"relative_damping": True, "damping": 0.3, "early_roots": True, "estimator": "mle"}
    settings = settings_of("empirical", lr=0.01, **form, **schedule, **more)
    assert_follows("empirical", dtype, replace(settings, max_factor_dim=max_factor_dim))
    roots = oracle_trajectory("empirical", replace(settings, max_factor_dim=max_factor_dim)).roots
    assert roots[0] and not roots[-1], roots


# ------------------------------------------------------------------ dictated gradients

SHAPES: list[tuple[int, ...]] = [
    (), (1,), (7,), (1, 5), (3, 4), (65, 9), (4, 3, 5), (5, 3, 1, 1), (1, 4, 3, 3), (7, 2, 3, 2),
    (3, 2, 2, 3, 2),
]  # fmt: skip


def scattered(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """An anisotropic gradient in a layout that no contiguous tensor has: reversed strides."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=generator)
    for i, d in enumerate(shape):
        g = g * torch.linspace(0.3, 1.5, d).reshape([-1] + [1] * (len(shape) - 1 - i))
    reverse = list(range(len(shape)))[::-1]
    return g.to(dtype).permute(reverse).contiguous().permute(reverse)


@factored
@dtypes
@pytest.mark.parametrize("relative", [False, True], ids=["damping", "relative"])
@pytest.mark.parametrize("max_factor_dim", [8192, 4], ids=["full", "mixed"])
def test_every_shape_and_layout_follows_the_oracle(
    name: str, dtype: torch.dtype, max_factor_dim: int, relative: bool
) -> None:
    """All shapes in one optimizer: Linear to 3-D conv, and scalars; Shampoo's roots 2 to 8."""
    settings = settings_of(
        name, lr=0.05, damping=0.2, max_factor_dim=max_factor_dim, relative_damping=relative
    ).arguments()
    params = [nn.Parameter(scattered(shape, 1000, dtype)) for shape in SHAPES]
    strides = [p.stride() for p in params]
    mirrors = [p.detach().double().clone() for p in params]
    start = [m.clone() for m in mirrors]
    run, oracle = Dictated(name, params, **settings), oracle_of(name, mirrors, **settings)
    for t in range(6):
        grads = [scattered(shape, 2 * t, dtype) for shape in SHAPES]
        sampled = [scattered(shape, 2 * t + 1, dtype) for shape in SHAPES]
        run.step(grads, sampled)
        oracle.step(grads, sampled if name == "sampled" else grads)
        for shape, p, mirror, first in zip(SHAPES, params, mirrors, start, strict=True):
            assert_near(p, mirror, first, (t, shape))
    assert [p.stride() for p in params] == strides


@factored
def test_parameters_without_gradient_follow_the_oracle(name: str) -> None:
    """Such a parameter does not move or decay, and keeps its momentum.

    The second is without gradient at every third step, the third is frozen until step 4 (T1 = 3):
    its statistics and factors are due at once.
    """
    shapes = [(3, 4), (5,), (2, 2)]
    params = [weight(*shape) for shape in shapes]
    mirrors = [p.detach().clone() for p in params]
    start = [p.detach().clone() for p in params]
    settings: dict[str, Any] = {
        "lr": 0.01, "damping": 0.1, "weight_decay": 0.5, "stat_interval": 3, "inverse_interval": 5
    }  # fmt: skip
    run, oracle = Dictated(name, params, **settings), oracle_of(name, mirrors, **settings)
    params[2].requires_grad_(False)
    for t in range(16):
        params[2].requires_grad_(t >= 4)
        grads: list[Tensor | None] = [noise(*shape) for shape in shapes]
        absent = [False, t % 3 == 1, t < 4]
        grads = [None if no else g for no, g in zip(absent, grads, strict=True)]
        moves = run.step(grads)
        oracle.step(grads, grads)
        assert [not bool(move.any()) for move in moves] == absent
        assert t >= 4 or not run.opt.state[params[2]]  # reading it leaves an empty entry
        if t == 2:
            run.opt.load_state_dict(run.opt.state_dict())
        for p, mirror, first in zip(params, mirrors, start, strict=True):
            assert_near(p, mirror, first, t)


@factored
def test_schedulers_and_modes_follow_the_oracle(name: str) -> None:
    """A learning rate that halves every three steps; a group whose matrices have three modes."""
    p = weight(6, 5)
    mirror, start = p.detach().clone(), p.detach().clone()
    group = {"params": [p], "modes": lambda shape: (2, shape[0] // 2, shape[1])}
    settings = {"lr": 0.01, "damping": 0.01, "stat_interval": 2, "inverse_interval": 3}
    run = Dictated(name, [group], **settings)
    oracle = oracle_of(name, [mirror], **settings, mode_shapes=[(2, 3, 5)])
    scheduler = torch.optim.lr_scheduler.StepLR(run.opt, step_size=3, gamma=0.5)
    for t in range(10):
        grads, sampled = [noise(6, 5)], [noise(6, 5)]
        run.step(grads, sampled)
        scheduler.step()
        oracle.lr = 0.01 * 0.5 ** (t // 3)
        oracle.step(grads, sampled if name == "sampled" else grads)
        assert_near(p, mirror, start, t)


@factored
def test_bfloat16_parameters_are_rounded_once(name: str) -> None:
    """Each step is the oracle's, rounded; the state is float32, also after a checkpoint."""
    shapes = [(9, 7), (4, 3, 3, 3), (6,), ()]
    params = [nn.Parameter(torch.randn(s).bfloat16()) for s in shapes]
    mirrors = [p.detach().double() for p in params]
    settings = {"lr": 0.3, "damping": 0.5, "stat_interval": 2, "inverse_interval": 3}
    run, oracle = Dictated(name, params, **settings), oracle_of(name, mirrors, **settings)
    for _ in range(8):
        grads, sampled = ([torch.randn(s).bfloat16() for s in shapes] for _ in range(2))
        for p, mirror in zip(params, mirrors, strict=True):
            mirror.copy_(p.detach())  # the gradients do not depend on it: the rest does not drift
        run.step(grads, sampled)
        oracle.step(grads, sampled if name == "sampled" else grads)
        for p, mirror, block in zip(params, mirrors, oracle.blocks, strict=True):
            assert p.dtype == torch.bfloat16
            error = (p.detach().double() - mirror.bfloat16().double()).abs()
            assert bool((error <= BFLOAT16_SPACING * mirror.abs() + 1e-6).all())
            state = run.opt.state[p]
            held = [state["momentum"], *state["stats"], *state["factors"]]
            assert {x.dtype for x in held} == {torch.float32}
            expected = [block.momentum, *(block.stats or [])]
            found = [state["momentum"].reshape(-1), *state["stats"]]
            for mine, wanted in zip(found, expected, strict=True):
                wanted = torch.diagonal(wanted) if mine.dim() < wanted.dim() else wanted
                error = (mine.double() - wanted).norm()
                assert float(error) <= FLOAT32_FORMULA * float(wanted.norm())
    twin = Dictated(name, [nn.Parameter(p.detach().clone()) for p in params], **settings)
    twin.opt.load_state_dict(through_a_file(run.opt.state_dict()))
    assert all(map(torch.equal, twin.stats() + twin.factors(), run.stats() + run.factors()))
    assert {t.dtype for t in twin.stats()} == {torch.float32}
