"""`tnt_optim.TNT` follows the dense oracle: 30 steps of small models, every entry, every step."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracle import DenseTNT
from tolerances import FLOAT32_TRAJECTORY, FLOAT64_TRAJECTORY
from torch import Tensor, nn

from tnt_optim import TNT

if TYPE_CHECKING:
    from conftest import DirectGradients

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH, CLASSES, WARM_BATCHES = 30, 16, 5, 3
INTERVALS = [(1, 1), (2, 3), (3, 20)]  # (T1, T2); the second never has both due but at 0, 6, ..
TOLERANCES = {torch.float64: FLOAT64_TRAJECTORY, torch.float32: FLOAT32_TRAJECTORY}


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
    """The same float32 starting point for the oracle and for every library run."""
    torch.manual_seed(11)
    model = ConvNet()
    with torch.no_grad():
        for p in model.parameters():  # norms and biases off their constants
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
    """TNT's arguments under test, plus how the run starts and which Fisher it uses."""

    lr: float = 3e-4
    damping: float = 0.05
    momentum: float = 0.9
    stat_decay: float = 0.9
    weight_decay: float = 0.0
    stat_interval: int = 1
    inverse_interval: int = 1
    max_factor_dim: int = 8192
    relative_damping: bool = False
    graft: str | None = None
    warm: bool = False
    empirical: bool = False

    def arguments(self) -> dict[str, Any]:
        """What the oracle and TNT both take."""
        return {k: v for k, v in vars(self).items() if k not in ("warm", "empirical")}


@dataclass
class Trajectory:
    """The oracle's run: parameters after every step, and the labels sampled on the way."""

    weights: list[list[Tensor]] = field(default_factory=list)
    warm_labels: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def sampled_gradients(output: Tensor, labels: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of the mean cross entropy at the sampled labels."""
    loss = nn.functional.cross_entropy(output, labels)
    return list(torch.autograd.grad(loss, list(params), retain_graph=True))


@functools.cache
def oracle_trajectory(settings: Settings) -> Trajectory:
    """Train the float64 model with the dense oracle; labels come from its own predictions."""
    record, model = Trajectory(), initial_model().double()
    params = list(model.parameters())
    oracle = DenseTNT(params, **settings.arguments())
    generator = torch.Generator().manual_seed(13)
    warm, steps = batches()[:WARM_BATCHES], batches()[WARM_BATCHES:]

    def draw(output: Tensor) -> Tensor:
        return torch.multinomial(output.detach().softmax(1), 1, generator=generator).squeeze(1)

    if settings.warm:
        before, gradients = copy.deepcopy(model.state_dict()), []
        for x, y in warm:
            output = model(x.double())
            record.warm_labels.append(y if settings.empirical else draw(output))
            gradients.append(sampled_gradients(output, record.warm_labels[-1], params))
        model.load_state_dict(before)  # the normalisation buffers are left as they were
        oracle.warm_start(gradients)
    record.weights.append([p.detach().clone() for p in params])
    for x, y in steps:
        output = model(x.double())
        record.labels.append(y if settings.empirical else draw(output))
        sampled = sampled_gradients(output, record.labels[-1], params)
        oracle.step(sampled_gradients(output, y, params), sampled)
        record.weights.append([p.detach().clone() for p in params])
    record.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return record


class TeacherForcing:
    """A callable likelihood whose sampled labels are the oracle's at this step."""

    def __init__(self) -> None:
        self.labels = torch.empty(0, dtype=torch.int64)

    def __call__(self, output: Tensor) -> Tensor:
        """-log p(labels | output), mean over the batch."""
        return nn.functional.cross_entropy(output, self.labels)


def library_weights(
    model: nn.Module, settings: Settings, record: Trajectory
) -> Iterator[list[Tensor]]:
    """Train `model` with TNT on the oracle's sampled labels; yields parameters after each step."""
    likelihood = TeacherForcing()
    dtype = next(model.parameters()).dtype
    opt = TNT(
        model.parameters(),
        likelihood=likelihood,
        fisher="empirical" if settings.empirical else "sampled",
        **settings.arguments(),
    )

    def warm_outputs() -> Iterator[Tensor]:
        for (x, _), labels in zip(batches()[:WARM_BATCHES], record.warm_labels, strict=True):
            likelihood.labels = labels
            output = model(x.to(dtype))
            yield likelihood(output) if settings.empirical else output

    if settings.warm:
        opt.warm_start(warm_outputs(), model=model)
    for t, (x, y) in enumerate(batches()[WARM_BATCHES:]):
        opt.zero_grad()
        output = model(x.to(dtype))
        loss = nn.functional.cross_entropy(output, y)
        likelihood.labels = record.labels[t]
        opt.observe(output)
        loss.backward()
        opt.step()
        yield [p.detach().double() for p in model.parameters()]


def assert_follows(settings: Settings, dtype: torch.dtype, model: nn.Module | None = None) -> None:
    """Every parameter, after every step, relative to how far the oracle has moved it so far."""
    record = oracle_trajectory(settings)
    start, end = record.weights[0], record.weights[-1]
    for p, q in zip(start, end, strict=True):
        assert float((q - p).norm()) > 3e-3 * float(p.norm()), "the trajectory hardly moves"
        assert float((q - p).norm()) < 3 * float(p.norm()), "the trajectory is not stable"
    model = (model or initial_model()).to(dtype)
    steps = 0
    for weights in library_weights(model, settings, record):
        steps += 1
        for i, (mine, oracle) in enumerate(zip(weights, record.weights[steps], strict=True)):
            moved = float((oracle - start[i]).norm())
            error = float((mine - oracle).norm())
            rounding = torch.finfo(dtype).eps * float(oracle.norm())  # of the parameter itself
            assert error <= TOLERANCES[dtype] * moved + rounding, (steps, i, error / moved)
    assert steps == STEPS
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(
            buffer.double(), record.buffers[name].double(), rtol=TOLERANCES[dtype], atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("max_factor_dim", [8192, 5, 1], ids=["full", "mixed", "diagonal"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("intervals", INTERVALS, ids=str)
def test_follows_the_oracle(
    intervals: tuple[int, int], warm: bool, max_factor_dim: int, dtype: torch.dtype
) -> None:
    settings = Settings(
        stat_interval=intervals[0],
        inverse_interval=intervals[1],
        warm=warm,
        max_factor_dim=max_factor_dim,
    )
    assert_follows(settings, dtype)


OPTIONS = {
    "weight_decay": Settings(weight_decay=10.0, stat_interval=2, inverse_interval=3),
    "no_momentum": Settings(momentum=0.0, lr=3e-3, stat_interval=2, inverse_interval=3),
    "no_memory": Settings(stat_decay=0.0, damping=0.1, stat_interval=2, inverse_interval=3),
    "relative": Settings(
        relative_damping=True, damping=1.0, lr=2e-5, stat_interval=2, inverse_interval=3
    ),
    "relative_diagonal": Settings(relative_damping=True, damping=1.0, lr=2e-5, max_factor_dim=1),
    "graft_adam": Settings(graft="adam", lr=0.01, stat_interval=2, inverse_interval=3),
    "graft_sgd": Settings(graft="sgd", lr=0.03, stat_interval=2, inverse_interval=3),
    "graft_adam_relative_decay": Settings(
        graft="adam", lr=0.01, relative_damping=True, damping=0.1, weight_decay=0.5, warm=True
    ),
    "empirical": Settings(empirical=True, stat_interval=2, inverse_interval=3),
    "empirical_warm": Settings(empirical=True, warm=True, stat_interval=3, inverse_interval=20),
    "everything": Settings(
        empirical=True,
        warm=True,
        graft="sgd",
        relative_damping=True,
        damping=0.2,
        lr=0.03,
        weight_decay=0.1,
        momentum=0.8,
        stat_decay=0.7,
        max_factor_dim=5,
        stat_interval=2,
        inverse_interval=5,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_follow_the_oracle(name: str, dtype: torch.dtype) -> None:
    assert_follows(OPTIONS[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_channels_last_follows_the_oracle(dtype: torch.dtype) -> None:
    """Strides of weights and gradients are the library's business, and survive."""
    model = initial_model().to(memory_format=torch.channels_last)
    strides = [p.stride() for p in model.parameters()]
    assert not all(p.is_contiguous() for p in model.parameters())
    assert_follows(Settings(stat_interval=2, inverse_interval=3), dtype, model)
    assert [p.stride() for p in model.parameters()] == strides


SHAPES: list[tuple[int, ...]] = [
    (), (1,), (7,), (1, 5), (3, 4), (65, 9), (4, 3, 5), (5, 3, 1, 1), (1, 4, 3, 3), (7, 2, 3, 2),
    (3, 2, 2, 3, 2),
]  # fmt: skip


def scattered(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """An anisotropic gradient in a layout no contiguous tensor has: reversed strides."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=generator)
    for i, d in enumerate(shape):
        g = g * torch.linspace(0.3, 1.5, d).reshape([-1] + [1] * (len(shape) - 1 - i))
    reverse = list(range(len(shape)))[::-1]
    return g.to(dtype).permute(reverse).contiguous().permute(reverse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("max_factor_dim", [8192, 4], ids=["full", "mixed"])
def test_every_shape_and_layout_follows_the_oracle(
    max_factor_dim: int,
    dtype: torch.dtype,
    direct: "Callable[[Sequence[Tensor]], DirectGradients]",
) -> None:
    """All the shapes in one optimizer, on dictated gradients: Linear to 3-D conv, and scalars."""
    settings = Settings(
        lr=0.05, damping=0.2, stat_interval=2, inverse_interval=3, max_factor_dim=max_factor_dim
    ).arguments()
    params = [nn.Parameter(scattered(shape, 1000, dtype)) for shape in SHAPES]
    mirrors = [p.detach().double().clone() for p in params]
    start, harness = [m.clone() for m in mirrors], direct(params)
    opt = TNT(params, likelihood=harness.likelihood, **settings)
    oracle = DenseTNT(mirrors, **settings)
    for t in range(8):
        grads = [scattered(shape, 2 * t, dtype) for shape in SHAPES]
        sampled = [scattered(shape, 2 * t + 1, dtype) for shape in SHAPES]
        harness.iterate(opt, grads, sampled)
        oracle.step(grads, sampled)
        for shape, p, mirror, first in zip(SHAPES, params, mirrors, start, strict=True):
            moved = float((mirror - first).norm())
            error = float((p.detach().double() - mirror).norm())
            rounding = torch.finfo(dtype).eps * float(mirror.norm())
            assert error <= TOLERANCES[dtype] * moved + rounding, (t, shape, error / moved)
