"""`tnt_optim.Shampoo` follows the dense oracle: 30 steps of small models, every entry, every step.

The oracle's roots are by eigenvalues, and in float64 also by the coupled Newton iteration, whose
tolerance would otherwise hide what is smaller.
"""

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from drawn import close, noise, weight
from oracle import contraction
from oracle_shampoo import DenseShampoo, Root, damped_stats, eigen_root, newton_root
from test_tnt import (
    INTERVALS,
    SHAPES,
    STEPS,
    WARM_BATCHES,
    ConvNet,
    batches,
    initial_model,
    sampled_gradients,
    scattered,
)
from tolerances import (
    FLOAT32_ROOT,
    FLOAT32_TRAJECTORY,
    FLOAT64_TRAJECTORY,
    NEWTON_OPERATOR,
    NEWTON_TRAJECTORY,
    root_rounding,
)
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from tnt_optim import Shampoo

pytestmark = pytest.mark.usefixtures("one_thread")

# How the library runs, which roots the oracle takes, and how close they are.
COMPARISONS = [
    pytest.param(torch.float64, newton_root, FLOAT64_TRAJECTORY, id="float64-newton"),
    pytest.param(torch.float64, eigen_root, NEWTON_TRAJECTORY, id="float64"),
    pytest.param(torch.float32, eigen_root, FLOAT32_TRAJECTORY, id="float32"),
]
comparisons = pytest.mark.parametrize(("dtype", "root", "tolerance"), COMPARISONS)


@dataclass(frozen=True)
class Settings:
    """Shampoo's arguments under test, and how the run starts."""

    lr: float = 0.01
    damping: float = 0.01
    momentum: float = 0.9
    stat_decay: float = 0.9
    weight_decay: float = 0.0
    stat_interval: int = 1
    inverse_interval: int = 1
    max_factor_dim: int = 8192
    relative_damping: bool = False
    graft: str | None = None
    warm: bool = False

    def arguments(self) -> dict[str, Any]:
        """What the oracle and Shampoo both take."""
        return {name: value for name, value in vars(self).items() if name != "warm"}


@dataclass
class Trajectory:
    """The oracle's run: parameters at first and after every step."""

    weights: list[list[Tensor]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@functools.cache
def oracle_trajectory(settings: Settings, root: Root) -> Trajectory:
    record, model = Trajectory(), initial_model().double()
    params = list(model.parameters())
    oracle = DenseShampoo(params, root=root, **settings.arguments())
    if settings.warm:
        before = copy.deepcopy(model.state_dict())
        oracle.warm_start(
            [sampled_gradients(model(x.double()), y, params) for x, y in batches()[:WARM_BATCHES]]
        )
        model.load_state_dict(before)  # the normalisation buffers are left as they were
    record.weights.append([p.detach().clone() for p in params])
    for x, y in batches()[WARM_BATCHES:]:
        gradients = sampled_gradients(model(x.double()), y, params)
        oracle.step(gradients, gradients)
        record.weights.append([p.detach().clone() for p in params])
    record.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return record


def library_weights(model: ConvNet, settings: Settings) -> Iterator[list[Tensor]]:
    """Train `model` with Shampoo; yields parameters after each step."""
    dtype = next(model.parameters()).dtype
    opt = Shampoo(model.parameters(), **settings.arguments())
    if settings.warm:
        warm = batches()[:WARM_BATCHES]
        opt.warm_start((cross_entropy(model(x.to(dtype)), y) for x, y in warm), model=model)
    for x, y in batches()[WARM_BATCHES:]:
        opt.zero_grad()
        cross_entropy(model(x.to(dtype)), y).backward()
        opt.step()
        yield [p.detach().double() for p in model.parameters()]


def assert_follows(settings: Settings, dtype: torch.dtype, root: Root, tolerance: float) -> None:
    """Every parameter, after every step, relative to how far the oracle has moved it so far."""
    record = oracle_trajectory(settings, root)
    start, end = record.weights[0], record.weights[-1]
    for p, q in zip(start, end, strict=True):
        assert float((q - p).norm()) > 0.03 * float(p.norm()), "the trajectory hardly moves"
        assert float((q - p).norm()) < 5 * float(p.norm()), "the trajectory is not stable"
    model = initial_model().to(dtype)
    steps = 0
    for weights in library_weights(model, settings):
        steps += 1
        for i, (mine, oracle) in enumerate(zip(weights, record.weights[steps], strict=True)):
            moved = float((oracle - start[i]).norm())
            error = float((mine - oracle).norm())
            rounding = torch.finfo(dtype).eps * float(oracle.norm())  # of the parameter itself
            assert error <= tolerance * moved + rounding, (steps, i, error / moved)
    assert steps == STEPS
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(
            buffer.double(), record.buffers[name].double(), rtol=10 * tolerance, atol=1e-6
        )


@comparisons
@pytest.mark.parametrize("max_factor_dim", [8192, 5], ids=["full", "mixed"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("intervals", INTERVALS, ids=str)
def test_follows_the_oracle(
    intervals: tuple[int, int],
    warm: bool,
    max_factor_dim: int,
    dtype: torch.dtype,
    root: Root,
    tolerance: float,
) -> None:
    settings = Settings(
        stat_interval=intervals[0],
        inverse_interval=intervals[1],
        warm=warm,
        max_factor_dim=max_factor_dim,
    )
    assert_follows(settings, dtype, root, tolerance)


OPTIONS = {
    "small_damping": Settings(damping=3e-4, stat_interval=2, inverse_interval=3),
    "weight_decay": Settings(weight_decay=1.0, stat_interval=2, inverse_interval=3),
    "no_momentum": Settings(momentum=0.0, lr=0.1, stat_interval=2, inverse_interval=3),
    "no_memory": Settings(stat_decay=0.0, stat_interval=2, inverse_interval=3),
    "relative": Settings(
        relative_damping=True, damping=0.1, lr=3e-3, stat_interval=2, inverse_interval=3
    ),
    "graft_adam": Settings(graft="adam", stat_interval=2, inverse_interval=3),
    "graft_sgd": Settings(graft="sgd", lr=0.03, stat_interval=2, inverse_interval=3),
    "everything": Settings(
        warm=True,
        graft="adam",
        relative_damping=True,
        damping=0.2,
        weight_decay=0.1,
        momentum=0.8,
        stat_decay=0.7,
        max_factor_dim=5,
        stat_interval=2,
        inverse_interval=5,
    ),
}


@comparisons
@pytest.mark.parametrize("name", OPTIONS)
def test_options_follow_the_oracle(
    name: str, dtype: torch.dtype, root: Root, tolerance: float
) -> None:
    assert_follows(OPTIONS[name], dtype, root, tolerance)


@pytest.mark.parametrize("relative", [False, True], ids=["damping", "relative"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_diagonal_modes_are_exact(warm: bool, relative: bool) -> None:
    """No iteration makes them: eigenvalues and the library agree to float64's rounding."""
    settings = Settings(
        max_factor_dim=1, warm=warm, relative_damping=relative, stat_interval=2, inverse_interval=3
    )
    assert_follows(settings, torch.float64, eigen_root, FLOAT64_TRAJECTORY)


@comparisons
@pytest.mark.parametrize("relative", [False, True], ids=["damping", "relative"])
@pytest.mark.parametrize("max_factor_dim", [8192, 4], ids=["full", "mixed"])
def test_every_shape_and_layout_follows_the_oracle(
    max_factor_dim: int, relative: bool, dtype: torch.dtype, root: Root, tolerance: float
) -> None:
    """All shapes, and so roots 2 to 8, in one optimizer: Linear to 3-D conv, and scalars."""
    settings = Settings(
        lr=0.05,
        damping=0.2,
        stat_interval=2,
        inverse_interval=3,
        max_factor_dim=max_factor_dim,
        relative_damping=relative,
    ).arguments()
    params = [nn.Parameter(scattered(shape, 1000, dtype)) for shape in SHAPES]
    mirrors = [p.detach().double().clone() for p in params]
    start = [m.clone() for m in mirrors]
    opt, oracle = Shampoo(params, **settings), DenseShampoo(mirrors, root=root, **settings)
    for t in range(6):
        gradients = [scattered(shape, t, dtype) for shape in SHAPES]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        opt.step()
        oracle.step(gradients, gradients)
        for shape, p, mirror, first in zip(SHAPES, params, mirrors, start, strict=True):
            moved = float((mirror - first).norm())
            error = float((p.detach().double() - mirror).norm())
            rounding = torch.finfo(dtype).eps * float(mirror.norm())
            assert error <= tolerance * moved + rounding, (t, shape, error / moved)


# ------------------------------------------------------------------ without an oracle


@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
def test_first_step_of_a_matrix_acts_on_its_singular_values(damping: float) -> None:
    """S_1 = G G^T and S_2 = G^T G: U diag(s) V^T becomes U diag(s / sqrt(s^2 + eps)) V^T."""
    p, g = weight(5, 8), noise(5, 8)
    start, p.grad = p.detach().clone(), g
    Shampoo([p], lr=0.5, damping=damping).step()
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    expected = 0.5 * u @ torch.diag(s / (s.square() + damping).sqrt()) @ vt
    torch.testing.assert_close(start - p.detach(), expected, rtol=0, atol=NEWTON_TRAJECTORY)


def test_first_step_of_a_vector_acts_on_its_norm() -> None:
    p, g = weight(7), noise(7)
    start, p.grad = p.detach().clone(), g
    Shampoo([p], lr=1.0, damping=0.1).step()
    expected = g / (g.square().sum() + 0.1).sqrt()
    torch.testing.assert_close(start - p.detach(), expected, rtol=0, atol=NEWTON_TRAJECTORY)


@pytest.mark.parametrize("scale", [1e-6, 1e5])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (3, 2, 3, 3)], ids=str)
def test_relative_damping_knows_no_scale(shape: tuple[int, ...], scale: float) -> None:
    p, g = weight(*shape), [noise(*shape) for _ in range(4)]
    q = nn.Parameter(p.detach().clone())
    settings: dict[str, Any] = {"relative_damping": True, "stat_interval": 1, "lr": 0.1}
    opt, scaled = Shampoo([p], **settings), Shampoo([q], **settings)
    for gradient in g:
        p.grad, q.grad = gradient, scale * gradient
        opt.step()
        scaled.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-9)


def test_warm_start_is_the_plain_average() -> None:
    p = weight(3, 4)
    opt = Shampoo([p], damping=0.1, stat_decay=0.5)
    gradients = [noise(3, 4) for _ in range(4)]
    opt.warm_start((p * g).sum() for g in gradients)
    assert p.grad is None
    average = [torch.stack([contraction(g, i) for g in gradients]).mean(0) for i in range(2)]
    for i, s in enumerate(damped_stats(average, 0.1, relative=False)):
        close(opt.state[p]["stats"][i], average[i])
        wanted = eigen_root(s, 4)
        error = (opt.state[p]["factors"][i] - wanted).abs().max()
        assert float(error) <= NEWTON_OPERATOR * float(wanted.abs().max())
    p.grad = noise(3, 4)
    opt.step()
    for i in range(2):
        close(opt.state[p]["stats"][i], 0.5 * average[i] + 0.5 * contraction(p.grad, i))


# ------------------------------------------------------------------ float32 roots


def low_rank_images(count: int) -> Tensor:
    """64 pixels that a few numbers decide, as in images: the statistics' spectra fall steeply."""
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randn(6, 64, generator=generator)
    return torch.sigmoid(-3 + 2 * torch.randn(count, 6, generator=generator) @ patterns)


def autoencoder_optimizer(damping: float) -> tuple[nn.Module, Shampoo]:
    """A trained autoencoder, in float32, whose roots were made from the present statistics."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 6), nn.Linear(6, 100), nn.ReLU(),
        nn.Linear(100, 64),
    )  # fmt: skip
    opt = Shampoo(
        model.parameters(), lr=3e-4, damping=damping, stat_interval=1, inverse_interval=20
    )

    def loss(x: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)

    images = low_rank_images(21 * 50)
    opt.warm_start(loss(x) for x in images.split(50))
    for x in images.split(50):
        opt.zero_grad()
        loss(x).backward()
        opt.step()
    return model, opt


@pytest.mark.parametrize("damping", [0.1, 0.01, 3e-4])
def test_float32_roots_of_training_statistics(damping: float) -> None:
    """The paper's dampings: 0.01 for its CNNs; 3e-4 for its autoencoders, at conditions of 3e4."""
    model, opt = autoencoder_optimizer(damping)
    conditions = []
    for p in model.parameters():
        state = opt.state[p]
        root = 2 * p.dim()
        for stat, factor in zip(state["stats"], state["factors"], strict=True):
            (damped,) = damped_stats([stat.double()], damping, relative=False)
            conditions.append(float(torch.linalg.cond(damped)))
            wanted = eigen_root(damped, root)
            error = float((factor.double() - wanted).abs().max() / wanted.abs().max())
            assert torch.equal(factor, factor.T)
            assert error <= root_rounding(torch.float32, conditions[-1], root)
            if damping >= 0.01:
                assert error <= FLOAT32_ROOT
    assert max(conditions) > 5 / damping, "hardly the statistics of training"
