"""Half precision: autocast, models in half precision, small gradients in float16.

Scaled losses are in ``test_scaled_gradients``, compiled models and checkpointed ones in
``test_compiled``, how parameters in half precision are rounded in ``test_rounding``.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import FixedLabels
from tolerances import half_statistics
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC, TNT, Shampoo

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS: dict[str, Callable[..., Any]] = {
    "sampled": lambda model, **settings: TNT(model.parameters(), **settings),
    "empirical": lambda model, **settings: TNT(model.parameters(), fisher="empirical", **settings),
    "shampoo": lambda model, **settings: Shampoo(model.parameters(), **settings),
    "kfac": KFAC,
    "kfac in the eigenbasis": lambda model, **settings: KFAC(
        model, inverse="eigenbasis", **settings
    ),
}
SAMPLING = ("sampled", "kfac", "kfac in the eigenbasis")
HALF = (torch.bfloat16, torch.float16)
SETTINGS = {"lr": 0.02, "damping": 0.1, "stat_interval": 2, "inverse_interval": 4}


def made_net() -> nn.Sequential:
    """Logits (N, 4) of images (N, 2, 3, 3)."""
    torch.manual_seed(3)
    body = [nn.Conv2d(2, 4, 2), nn.GELU(), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8)]
    return nn.Sequential(*body, nn.Tanh(), nn.Linear(8, 4))


def made(name: str, model: nn.Module, **settings: Any) -> Any:
    return METHODS[name](model, **{**SETTINGS, **settings})


def batch(step: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Images and labels that depend on the step alone; the labels on the images."""
    x = torch.randn(rows, 2, 3, 3, generator=torch.Generator().manual_seed(100 + step))
    return x, x.flatten(1)[:, :4].argmax(1)


def observe(opt: Any, output: Tensor) -> None:
    if not isinstance(opt, Shampoo):
        opt.observe(output)


def statistics(opt: Any) -> list[Tensor]:
    """All of them, by parameter or layer."""
    states = [opt.state[p] for group in opt.param_groups for p in group["params"]]
    if isinstance(opt, KFAC):
        states = list(opt._layer_states().values())
    return [s.clone() for state in states for s in state["stats"]]


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest distance of two statistics, relative to the wanted one's norm."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def autocast(dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


# ------------------------------------------------------------------ autocast and models in half


@pytest.fixture
def in_full(fixed_labels: FixedLabels) -> Callable[[Tensor], Tensor]:
    """Cross entropy at labels that do not depend on how logits were rounded, in float32."""
    fixed_labels.current = batch(7)[1]
    return lambda output: fixed_labels(output.float())


def first_statistics(name: str, likelihood: Any, dtype: torch.dtype | None, how: str) -> Any:
    """Those of a first step, and the model that made it."""
    model = made_net()
    if how == "model":
        model.to(dtype)
    elif how == "rounded":
        model.to(dtype).float()
    opt = made(name, model, likelihood=likelihood)
    x, y = batch(0)
    with autocast(dtype if how in ("inside", "outside") else None):
        output = model(x.to(next(model.parameters()).dtype))
        if how != "outside":
            opt.observe(output)
    if how == "outside":
        opt.observe(output)
    cross_entropy(output.float(), y).backward()
    opt.step()
    return statistics(opt), model


@pytest.mark.parametrize("how", ["inside", "outside", "model"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("likelihood", ["gaussian", "labels"])
@pytest.mark.parametrize("name", SAMPLING)
def test_statistics_of_half_precision(
    name: str, likelihood: Any, dtype: torch.dtype, how: str, in_full: Any
) -> None:
    """Near those of float32; of labels that do not hang on a rounding of the output."""
    likelihood = in_full if likelihood == "labels" else likelihood
    found, model = first_statistics(name, likelihood, dtype, how)
    reference = "rounded" if how == "model" else "full"
    wanted, _ = first_statistics(name, likelihood, dtype, reference)
    assert all(s.dtype == torch.float32 for s in found)
    assert all(p.dtype == (dtype if how == "model" else torch.float32) for p in model.parameters())
    distance = apart(found, wanted)
    assert 0 < distance <= half_statistics(dtype)


class Mixed(nn.Module):
    """A head in float32: autocast around a backward would run the backward of that in half."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(18, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        hidden = torch.tanh(self.body(x.flatten(1)))
        with torch.autocast("cpu", enabled=False):
            logits: Tensor = self.head(hidden.float())
        return logits


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("kind", [made_net, Mixed])
@pytest.mark.parametrize("name", SAMPLING)
def test_inside_of_autocast_is_outside(
    name: str, kind: Callable[[], nn.Module], likelihood: str, dtype: torch.dtype
) -> None:
    """Warm start, observation and step, to the bit."""
    found = []
    for inside in (True, False):
        torch.manual_seed(3)
        model = kind()
        opt = made(name, model, likelihood=likelihood)
        for warm in (True, False):
            with autocast(dtype):
                output = model(batch(int(warm))[0])
                loss = output.float().square().sum()
            loss.backward(retain_graph=True)
            with autocast(dtype if inside else None):
                if warm:
                    opt.warm_start([output])
                else:
                    opt.observe(output)
                    opt.step()
        found.append([*statistics(opt), *values(model)])
    assert equal(*found)


def trained_loss(name: str, dtype: torch.dtype | None, **settings: Any) -> tuple[list[float], Any]:
    """The losses of a training, under autocast with ``dtype``, and its optimizer."""
    model = made_net()
    if "rounding" in settings:
        model.to(dtype)
    opt = made(name, model, **settings)
    losses = []
    for step in range(30):
        opt.zero_grad()
        x, y = batch(step)
        with autocast(None if "rounding" in settings else dtype):
            output = model(x.to(next(model.parameters()).dtype))
            loss = cross_entropy(output.float(), y)
            observe(opt, output)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses, opt


@functools.cache
def full_losses(name: str) -> list[float]:
    return trained_loss(name, None)[0]


def assert_trained_as_in_full(name: str, losses: list[float]) -> None:
    """By the last steps' mean, to a tenth of what training has won."""
    full = full_losses(name)
    won = full[0] - sum(full[-5:]) / 5
    assert won > 0.2
    assert abs(sum(losses[-5:]) - sum(full[-5:])) / 5 < 0.1 * won


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", METHODS)
def test_training_under_autocast(name: str, dtype: torch.dtype) -> None:
    """Parameters and all that the optimizer keeps stay in float32."""
    losses, opt = trained_loss(name, dtype)
    assert_trained_as_in_full(name, losses)
    assert all(p.dtype == torch.float32 for group in opt.param_groups for p in group["params"])
    kept = [t for state in opt.state_dict()["state"].values() for t in tensors(state)]
    assert len(kept) > 10
    assert all(t.dtype == torch.float32 and bool(t.isfinite().all()) for t in kept)


@pytest.mark.parametrize("rounding", ["stochastic", "master"])
@pytest.mark.parametrize("name", ["sampled", "empirical", "shampoo"])
def test_training_of_a_bfloat16_model(name: str, rounding: str) -> None:
    losses, opt = trained_loss(name, torch.bfloat16, rounding=rounding)
    assert_trained_as_in_full(name, losses)
    assert all(p.dtype == torch.bfloat16 for group in opt.param_groups for p in group["params"])
    kept = [t for state in opt.state_dict()["state"].values() for t in tensors(state)]
    assert len(kept) > 10 and all(t.dtype == torch.float32 for t in kept)


def tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of a state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from tensors(value)


# ------------------------------------------------------------------ small gradients in float16


class Faint(nn.Module):
    """A head of small weights: behind it gradients of the mean over a batch are below 1e-7.

    float16 has no number but 0 below 6e-8.
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        with torch.no_grad():
            self.head.weight.mul_(1e-3)
        self.half().float()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(torch.tanh(self.body(x)))
        return logits


@pytest.mark.parametrize("how", ["autocast", "autocast inside", "model"])
@pytest.mark.parametrize("first", ["observe", "warm_start"])
@pytest.mark.parametrize("name", SAMPLING)
def test_small_sampled_gradients_do_not_underflow(name: str, first: str, how: str) -> None:
    """The scale of the training's loss is no help to the sampled pass: it needs one of its own.

    Also where the output does not show that half precision was behind it.
    """
    rows = 4096
    x = torch.randn(rows, 8).half()
    found = []
    for half in (True, False):
        model = Faint().to(torch.float16 if half and how == "model" else torch.float32)
        # Whose gradients at samples do not hang on a rounding of the output.
        opt = made(name, model, likelihood="gaussian")
        with autocast(torch.float16 if half and how != "model" else None):
            output = model(x.to(model.head.weight.dtype))
        if how == "autocast inside":
            output = output.float()
        if first == "warm_start":
            opt.warm_start([output])
        else:
            opt.observe(output)
            output.float().square().mean().backward()
            opt.step()
        found.append(statistics(opt))
    assert apart(*found) <= half_statistics(torch.float16)


def test_a_likelihood_of_ones_own_is_given_a_scale(in_full: Any, fixed_labels: FixedLabels) -> None:
    """What its loss is divided by its author knows; in float32 a power of two changes no bit."""
    x = torch.randn(4096, 8).half()
    fixed_labels.current = torch.randint(10, (4096,))

    def found(half: bool, scale: float | None) -> list[Tensor]:
        model = Faint()
        opt = TNT(model.parameters(), likelihood=in_full, sample_scale=scale)
        with autocast(torch.float16 if half else None):
            opt.observe(model(x.float()))
        opt.step()
        return statistics(opt)

    wanted = found(False, None)
    assert equal(found(False, 2.0**12), wanted)
    assert apart(found(True, 2.0**12), wanted) <= half_statistics(torch.float16)
    assert apart(found(True, None), wanted) > 0.1


@pytest.mark.parametrize("scale", [0.0, -2.0, 3.0, math.inf, math.nan])
def test_scales_that_would_round_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="sample_scale must be a power of two or None, got"):
        TNT(Faint().parameters(), sample_scale=scale)
    with pytest.raises(ValueError, match="sample_scale cannot be set for a parameter group"):
        TNT([{"params": Faint().parameters(), "sample_scale": 2.0}])
