"""`tnt_optim.KFAC` follows the dense oracle, and its factors are those of the exact Fisher."""

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from drawn import close
from oracle import dense_kron
from oracle_kfac import DenseKFAC, Layer, Network, Norm, Tanh
from tolerances import (
    FLOAT32_TRAJECTORY,
    FLOAT64_FORMULA,
    FLOAT64_TRAJECTORY,
    SAMPLE_DEVIATIONS,
    inverse_rounding,
)
from torch import Tensor, nn

from tnt_optim import KFAC
from tnt_optim.kfac.inverses import INVERSES
from tnt_optim.kfac.layers import input_rows, is_supported, output_rows
from tnt_optim.kfac.statistics import layer_sums

pytestmark = pytest.mark.usefixtures("one_thread")

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


class TeacherForcing:
    """A callable likelihood whose sampled labels are the oracle's, in their order."""

    def __init__(self, labels: list[Tensor]) -> None:
        self.labels = list(labels)

    def __call__(self, output: Tensor) -> Tensor:
        """-log p(labels | output), mean over the batch."""
        return nn.functional.cross_entropy(output, self.labels.pop(0))


def library_weights(
    model: nn.Module, settings: Settings, labels: list[Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Train `model` with KFAC on the oracle's sampled labels; yields parameters after each step."""
    dtype = next(model.parameters()).dtype
    likelihood = TeacherForcing(labels)
    opt = KFAC(model, likelihood=likelihood, **settings.arguments())
    if settings.warm:
        before = copy.deepcopy([*model.buffers()])
        opt.warm_start(model(x.to(dtype)) for x, _ in batches()[:WARM_BATCHES])
        assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    for x, y in batches()[WARM_BATCHES:]:
        opt.zero_grad()
        output = model(x.to(dtype))
        loss = nn.functional.cross_entropy(output, y)
        opt.observe(output)
        loss.backward()
        opt.step()
        yield {name: p.detach().double() for name, p in model.named_parameters()}
    assert not likelihood.labels  # sampled exactly as often as the oracle did


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


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32], ids=["float64", "float32"]
)


@DTYPES
@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("intervals", INTERVALS, ids=str)
def test_follows_the_oracle(
    intervals: tuple[int, int], warm: bool, inverse: str, dtype: torch.dtype
) -> None:
    t1, t2 = intervals
    settings = Settings(inverse=inverse, warm=warm, stat_interval=t1, inverse_interval=t2)
    assert_follows(settings, dtype)


OPTIONS = {
    "weight_decay": Settings(weight_decay=1.0, stat_interval=2, inverse_interval=3),
    "weight_decay_eigenbasis": Settings(weight_decay=1.0, inverse="eigenbasis"),
    "no_momentum": Settings(momentum=0.0, lr=0.05, stat_interval=2, inverse_interval=3),
    "no_memory": Settings(stat_decay=0.0, damping=0.3, stat_interval=2, inverse_interval=3),
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


@DTYPES
@pytest.mark.parametrize("name", OPTIONS)
def test_options_follow_the_oracle(name: str, dtype: torch.dtype) -> None:
    assert_follows(OPTIONS[name], dtype)


@DTYPES
def test_channels_last_follows_the_oracle(dtype: torch.dtype) -> None:
    model = initial_model().to(memory_format=torch.channels_last)
    assert not all(p.is_contiguous() for p in model.parameters())
    strides = [p.stride() for p in model.parameters()]
    assert_follows(Settings(stat_interval=2, inverse_interval=3), dtype, model)
    assert [p.stride() for p in model.parameters()] == strides


# ------------------------------------------------------------------ rows


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(3, 4, 3, stride=2, padding=1), (5, 3, 8)),
    "1d_same_even": (nn.Conv1d(3, 4, 4, padding="same", dilation=3, bias=False), (5, 3, 13)),
    "1d_circular": (nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (4, 2, 6)),
    "2d": (nn.Conv2d(3, 4, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 3, 7, 6)),
    "2d_valid": (nn.Conv2d(2, 5, 3, padding="valid"), (3, 2, 5, 6)),
    "2d_reflect": (nn.Conv2d(2, 5, 3, padding=(1, 2), padding_mode="reflect"), (3, 2, 5, 6)),
    "2d_same_replicate": (
        nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode="replicate", bias=False),
        (3, 2, 5, 6),
    ),
    "2d_without_batch": (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 4)),
    "2d_pointwise": (nn.Conv2d(4, 3, 1, stride=2), (2, 4, 5, 5)),
    "3d": (nn.Conv3d(2, 3, (1, 2, 3), stride=(2, 1, 2), padding=(0, 1, 1)), (2, 2, 3, 4, 5)),
    "linear_without_batch": (nn.Linear(4, 3), (4,)),
    "linear": (nn.Linear(4, 3, bias=False), (5, 4)),
    "linear_positions": (nn.Linear(4, 3), (2, 5, 4)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_rows_give_the_layers_output_and_gradient(name: str, transposed: bool) -> None:
    """Rows times [W | b] are the output; gradient rows times rows are [W | b]'s gradient."""
    layer, shape = copy.deepcopy(CONVOLUTIONS[name])
    layer = layer.double()
    assert is_supported(layer)
    x = torch.randn(shape, dtype=torch.float64)
    if transposed:
        reverse = list(range(x.dim()))[::-1]
        x = x.permute(reverse).contiguous().permute(reverse)
    parts, a = [layer.weight.flatten(1)], input_rows(layer, x)
    if layer.bias is not None:
        parts.append(layer.bias[:, None])
        a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
    output = layer(x)
    close(a @ torch.cat(parts, 1).detach().T, output_rows(layer, output.detach()))
    gradient = torch.randn_like(output)
    grads = torch.autograd.grad(output, list(layer.parameters()), gradient)
    expected = torch.cat([g.reshape(len(g), -1) for g in grads], dim=1)
    close(output_rows(layer, gradient).T @ a, expected)
    sums = layer_sums(layer, x, gradient, 3)
    close(sums.inputs, a.T @ a)
    close(sums.gradients, output_rows(layer, gradient).T @ output_rows(layer, gradient))
    assert (sums.examples, sums.positions) == (3, len(a))
    assert all(torch.equal(m, m.T) for m in (sums.inputs, sums.gradients))


def test_sums_of_two_batches_are_plain_sums_where_finite() -> None:
    layer = nn.Linear(4, 3)
    parts = [layer_sums(layer, torch.randn(n, 4), torch.randn(n, 3), n) for n in (5, 7)]
    both = parts[0] + parts[1]
    assert torch.equal(both.gradients, parts[0].gradients + parts[1].gradients)
    assert torch.equal(both.inputs, parts[0].inputs + parts[1].inputs)
    means = [both.gradients / 12, both.inputs / 12]
    assert all(map(torch.equal, both.means(), means))


class Rescaled(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        """Twice the product."""
        return 2 * super().forward(input)


class Renamed(nn.Linear):
    """A linear layer by another name."""


def test_which_layers_are_supported() -> None:
    yes = [Renamed(2, 3), nn.Conv3d(1, 2, 2), nn.Conv1d(2, 2, 1)]
    no = [
        Rescaled(2, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.ConvTranspose2d(2, 3, 3),
        nn.Bilinear(2, 2, 3),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
        nn.MultiheadAttention(4, 2).out_proj,
        nn.Embedding(4, 3),
        nn.BatchNorm2d(3),
    ]
    assert [is_supported(m) for m in yes + no] == [True] * len(yes) + [False] * len(no)


def test_small_eigenvalues_of_a_large_matrix_count() -> None:
    """In float32, where a sixth of them lie below n eps of the largest."""
    n, damping = 600, 1e-5
    basis = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    g = (basis * torch.logspace(0, -5, n, dtype=torch.float64)) @ basis.T
    g = ((g + g.T) / 2).float()
    a = torch.tensor([[1.0, 0.2, 0.0], [0.2, 0.5, 0.1], [0.0, 0.1, 0.7]])
    matrix = torch.randn(n, 3)
    eigenbasis = INVERSES["eigenbasis"]
    factors, codes = eigenbasis.make([[g, a]], damping, None)
    (actual,) = eigenbasis.apply([matrix], factors)
    assert codes.tolist() == [0]
    fisher = dense_kron([g.double(), a.double()])
    fisher.diagonal().add_(damping)
    values = torch.linalg.eigvalsh(g.double())
    assert int((values < n * torch.finfo(torch.float32).eps).sum()) > 50
    expected = torch.linalg.solve(fisher, matrix.double().reshape(-1)).reshape(n, 3)
    error = float((actual.double() - expected).norm() / expected.norm())
    # Measured: 0.01; with eigenvalues below n eps taken for zero 1.5.
    condition = float(values[-1]) * float(torch.linalg.eigvalsh(a)[-1]) / damping
    assert error <= inverse_rounding(torch.float32, condition)


# ------------------------------------------------------------------ the exact Fisher


def exact_gram(likelihood: str, logits: Tensor) -> tuple[Tensor, Tensor]:
    """E[g gᵀ] over labels, mean over rows, and the variance of an estimate from one draw a row."""
    n, c = logits.shape
    if likelihood == "categorical":
        p = logits.softmax(1)
        g = p[:, None, :] - torch.eye(c, dtype=p.dtype)  # (n, label, c)
        products = g[:, :, :, None] * g[:, :, None, :]
        first = (p[:, :, None, None] * products).sum(1)
        second = (p[:, :, None, None] * products.square()).sum(1)
    elif likelihood == "bernoulli":
        p = logits.sigmoid()
        # g = p - y: squares have mean p(1-p), fourth powers p(1-p)(1 - 3p(1-p)).
        v = p * (1 - p)
        first = torch.diag_embed(v)
        second = v[:, :, None] * v[:, None, :]
        second = second - torch.diag_embed(v.square()) + torch.diag_embed(v * (1 - 3 * v))
    else:
        first = torch.eye(c, dtype=logits.dtype).expand(n, c, c)
        second = 1 + 2 * first
    return first.mean(0), (second - first.square()).sum(0) / n**2


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_factors_are_those_of_the_exact_fisher(likelihood: str) -> None:
    """One input, many times over: there the Fisher matrix is a Kronecker product exactly."""
    torch.manual_seed(5)
    layer, n = nn.Linear(3, 4).double(), 40_000
    x = torch.randn(1, 3, dtype=torch.float64)
    opt = KFAC(layer, lr=0.0, likelihood=likelihood)
    opt.warm_start([layer(x.expand(n, 3))])
    g, a = opt.state[layer.weight]["stats"]
    row = torch.cat([x, torch.ones(1, 1)], dim=1)
    close(a, row.T @ row)
    exact, variance = exact_gram(likelihood, layer(x).detach().expand(n, 4))
    allowed = SAMPLE_DEVIATIONS * variance.sqrt()
    assert bool(((g - exact).abs() <= allowed + FLOAT64_FORMULA).all())
    assert float(allowed.max()) < 0.05 * float(exact.abs().max())  # so that a factor 1.1 shows
    if likelihood == "categorical":
        p = layer(x).detach().softmax(1)[0]
        gradients = p - torch.eye(4, dtype=p.dtype)  # one row a label
        fisher = sum(
            p[y] * torch.outer(v, v)
            for y in range(4)
            for v in [torch.outer(gradients[y], row[0]).reshape(-1)]
        )
        close(dense_kron([exact, a]), fisher)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_sampled_gradients_have_the_exact_second_moments(likelihood: str) -> None:
    """Different inputs; G does not depend on how many there are."""
    layer, n = nn.Linear(3, 4).double(), 30_000
    x = 2 * torch.randn(n, 3, dtype=torch.float64)
    opt = KFAC(layer, lr=0.0, likelihood=likelihood, seed=3)
    opt.warm_start([layer(x)])
    exact, variance = exact_gram(likelihood, layer(x).detach())
    error = (opt.state[layer.weight]["stats"][0] - exact).abs()
    assert bool((error <= SAMPLE_DEVIATIONS * variance.sqrt() + FLOAT64_FORMULA).all())


# ------------------------------------------------------------------ positions


class Mixed(nn.Module):
    """A layer on (N, positions, features), and logits for each example or each position."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.body, self.head, self.pooled = nn.Linear(4, 6), nn.Linear(6, 5), pooled

    def forward(self, x: Tensor) -> Tensor:
        """(N, positions, 4) to (N, 5) or (N * positions, 5)."""
        hidden = torch.tanh(self.body(x))
        return self.head(hidden.mean(1) if self.pooled else hidden).reshape(-1, 5)


class AsConvolution(nn.Module):
    """`Mixed`, pooled, with its body as a convolution of one position."""

    def __init__(self, like: Mixed) -> None:
        super().__init__()
        self.body, self.head = nn.Conv1d(4, 6, 1).to(like.body.weight.dtype), like.head
        self.body.load_state_dict(
            {"weight": like.body.weight.detach()[:, :, None], "bias": like.body.bias.detach()}
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, positions, 4) to (N, 5)."""
        return self.head(torch.tanh(self.body(x.transpose(1, 2))).mean(2))


def first_statistics(model: nn.Module, layer: nn.Module, x: Tensor) -> list[Tensor]:
    opt = KFAC(model)
    opt.warm_start([model(x)])
    return opt.state[layer.weight]["stats"]


def test_positions_of_a_linear_layer_are_those_of_a_convolution() -> None:
    model = Mixed(pooled=True).double()
    twin = AsConvolution(copy.deepcopy(model))
    x = torch.randn(8, 7, 4, dtype=torch.float64)
    for mine, expected in zip(
        first_statistics(model, model.body, x),
        first_statistics(twin, twin.body, x),
        strict=True,
    ):
        close(mine, expected)


def test_positions_with_labels_of_their_own_are_examples() -> None:
    model = Mixed(pooled=False).double()
    x = torch.randn(8, 7, 4, dtype=torch.float64)
    for layer in (model.body, model.head):
        rows = first_statistics(model, layer, x.reshape(56, 1, 4))
        for mine, expected in zip(first_statistics(model, layer, x), rows, strict=True):
            close(mine, expected)
