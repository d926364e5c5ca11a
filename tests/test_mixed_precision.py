"""Half precision: autocast, models in half precision, scaled losses, and gradients changed in time.

Compiled models and checkpointed ones are in ``test_compiled``, how parameters in half precision are
rounded in ``test_rounding``.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import FixedLabels
from drawn import close
from test_optimizer_contract_state import leaves
from tolerances import half_statistics
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from tnt_optim import KFAC, TNT, Shampoo

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS: dict[str, Callable[..., Any]] = {
    "sampled": lambda model, **settings: TNT(model.parameters(), **settings),
    "empirical": lambda model, **settings: TNT(model.parameters(), fisher="empirical", **settings),
    "shampoo": lambda model, **settings: Shampoo(model.parameters(), **settings),
    "kfac": KFAC,
}
SAMPLING = ("sampled", "kfac")
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
    if isinstance(opt, KFAC):
        states = opt._layer_states().values()
    else:
        states = [opt.state[p] for group in opt.param_groups for p in group["params"]]
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
def test_it_is_the_same_inside_and_outside_of_autocast(
    name: str, kind: Callable[[], nn.Module], likelihood: str, dtype: torch.dtype
) -> None:
    found = []
    for inside in (True, False):
        torch.manual_seed(3)
        model = kind()
        opt = made(name, model, likelihood=likelihood)
        with autocast(dtype):
            output = model(batch(0)[0])
            if inside:
                opt.observe(output)
        if not inside:
            opt.observe(output)
        output.float().square().sum().backward()
        opt.step()
        found.append(statistics(opt))
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


class Faint(nn.Sequential):
    """A head of small weights: behind it gradients of the mean over a batch are below 1e-7.

    float16 has no number but 0 below 6e-8.
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 10))
        with torch.no_grad():
            self[2].weight.mul_(1e-3)


@pytest.mark.parametrize("how", ["autocast", "model"])
@pytest.mark.parametrize("first", ["observe", "warm_start"])
@pytest.mark.parametrize("name", SAMPLING)
def test_small_sampled_gradients_do_not_underflow(
    name: str, first: str, how: str, fixed_labels: FixedLabels
) -> None:
    """The loss scale of the training is no help to the sampled pass: it takes one of its own."""
    rows = 4096
    x = torch.randn(rows, 8).half()
    y = fixed_labels.current = torch.randint(10, (rows,))
    found = []
    for dtype in (torch.float64, torch.float16):
        model = Faint().half()
        model.to(torch.float64 if dtype == torch.float64 else torch.float32)
        if dtype == torch.float16 and how == "model":
            model.half()
        opt = made(
            name,
            model,
            likelihood=lambda output: fixed_labels(
                output if output.dtype == torch.float64 else output.float()
            ),
        )
        with autocast(torch.float16 if dtype == torch.float16 and how == "autocast" else None):
            output = model(x.to(next(model.parameters()).dtype))
        if first == "warm_start":
            opt.warm_start([output])
        else:
            opt.observe(output)
            cross_entropy(output.float(), y).backward()
            opt.step()
        found.append(statistics(opt))
    assert apart(found[1], found[0]) <= half_statistics(torch.float16)


# ------------------------------------------------------------------ scaled losses


def train_scaled(
    name: str, scaler: torch.amp.GradScaler | None, *, explicit: bool, clip: float | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and statistics at the end of some steps."""
    model = made_net()
    opt = made(name, model)
    for step in range(7):
        opt.zero_grad()
        x, y = batch(step)
        output = model(x)
        observe(opt, output)
        loss = cross_entropy(output, y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None and explicit:
            scaler.unscale_(opt)
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()
    return values(model), statistics(opt)


@pytest.mark.parametrize(("explicit", "clip"), [(False, None), (True, 0.05)])
@pytest.mark.parametrize("name", METHODS)
def test_a_scaled_loss_changes_nothing(name: str, explicit: bool, clip: float | None) -> None:
    """To the bit, scales being powers of two: nor what the statistics see, sampled or not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    found = train_scaled(name, scaler, explicit=explicit, clip=clip)
    assert scaler.get_scale() == 2.0**14
    wanted = train_scaled(name, None, explicit=explicit, clip=clip)
    assert equal(found[0], wanted[0]) and equal(found[1], wanted[1])


@pytest.mark.parametrize("skipped", [0, 2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_a_skipped_step_leaves_its_observation(name: str, skipped: int) -> None:
    """It counts as no step; where statistics are due, what was observed is averaged with what the
    next attempt observes, as two micro-batches would be. Training gradients are not kept."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, twin = made_net(), made_net()
    opt, reference = made(name, model), made(name, twin)
    for step in range(6):
        again = 50 + step
        for net, chosen in ((model, opt), (twin, reference)):
            if step == skipped:
                chosen.zero_grad()
                output = net(batch(step)[0])
                observe(chosen, output)
                if net is model:
                    before, kept = values(net), leaves(chosen.state_dict())
                    scaler.scale(output.sum() * math.inf).backward()
                    scaler.step(chosen)
                    scaler.update()
                    assert equal(values(net), before) and leaves(chosen.state_dict()) == kept
                    assert chosen.param_groups[0]["step"] == step
            chosen.zero_grad()
            x, y = batch(again if step == skipped else step)
            output = net(x)
            observe(chosen, output)
            if net is model:
                scaler.scale(cross_entropy(output, y)).backward()
                scaler.step(chosen)
                scaler.update()
            else:
                cross_entropy(output, y).backward()
                chosen.step()
        assert equal(values(model), values(twin))
    assert scaler.get_scale() == 2.0
    assert equal(statistics(opt), statistics(reference))
    assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}
    if name in SAMPLING:  # the observation did count
        plain = made_net()
        without = made(name, plain)
        for step in range(6):
            output = plain(batch(50 + step if step == skipped else step)[0])
            without.observe(output)
            without.zero_grad()
            cross_entropy(output, batch(50 + step if step == skipped else step)[1]).backward()
            without.step()
        assert equal(statistics(without), statistics(opt)) == (skipped == 3)


@pytest.mark.parametrize("name", SAMPLING)
def test_an_overflow_of_the_sampled_pass_skips_no_step(name: str) -> None:
    """The statistics go without it, and the scale of the training's loss stays what it is."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    factor = [1.0]
    model = made_net()
    opt = made(name, model, likelihood=lambda output: output.square().mean() * factor[0])
    for step in range(4):
        factor[0] = math.inf if step == 2 else 1.0
        before, kept = values(model), statistics(opt) if step else []
        opt.zero_grad()
        x, y = batch(step)
        output = model(x)
        opt.observe(output)
        scaler.scale(cross_entropy(output, y)).backward()
        scaler.step(opt)
        with pytest.warns(RuntimeWarning) if step == 2 else contextlib.nullcontext():
            assert opt.failures()["skipped_statistics"] == int(step >= 2)
        scaler.update()
        assert not any(map(torch.equal, values(model), before))
        assert step != 2 or equal(statistics(opt), kept)
    assert scaler.get_scale() == 4.0


# ------------------------------------------------------------------ clipping, steps in hooks


@pytest.mark.parametrize("name", METHODS)
def test_clipping_reaches_what_is_made_of_the_gradient(name: str) -> None:
    """A first step on clipped gradients. Sampled statistics do not know, and the step is shorter by
    the factor of the clipping; those of training gradients are of the clipped ones."""
    ends = []
    start = values(made_net().double())
    for clip in (math.inf, 0.03):
        model = made_net().double()
        opt = made(name, model)
        x, y = batch(0)
        output = model(x.double())
        observe(opt, output)
        cross_entropy(output, y).backward()
        norm = float(clip_grad_norm_(model.parameters(), clip))
        opt.step()
        moves = [a - b for a, b in zip(values(model), start, strict=True)]
        ends.append((moves, statistics(opt)))
    factor = 0.03 / (norm + 1e-6)  # as torch has it
    assert factor < 0.5
    (moves, stats), (clipped_moves, clipped_stats) = ends
    if name in SAMPLING:
        assert equal(stats, clipped_stats)
        for whole, clipped in zip(moves, clipped_moves, strict=True):
            assert float(whole.norm()) > 0
            close(clipped, factor * whole)
    else:
        for whole, clipped in zip(stats, clipped_stats, strict=True):
            close(clipped, factor**2 * whole)


@pytest.mark.parametrize("name", ["sampled", "empirical", "shampoo"])
def test_steps_in_the_backward(name: str) -> None:
    """An optimizer for each parameter, which steps as soon as its gradient is there and lets it go:
    to the bit what one optimizer of all of them does."""
    model, twin = made_net(), made_net()
    whole = made(name, twin)
    single = {}
    for param in model.parameters():
        single[param] = made(name, nn.ParameterList([param]))

        def step_now(param: Tensor) -> None:
            single[param].step()  # noqa: B023 - the same dictionary for all
            single[param].zero_grad()  # noqa: B023

        param.register_post_accumulate_grad_hook(step_now)
    for step in range(9):
        x, y = batch(step)
        output = model(x)
        for opt in single.values():
            observe(opt, output)
        cross_entropy(output, y).backward()
        assert all(p.grad is None for p in model.parameters())
        whole.zero_grad()
        output = twin(x)
        observe(whole, output)
        cross_entropy(output, y).backward()
        whole.step()
        assert equal(values(model), values(twin))
    assert whole.param_groups[0]["step"] == 9
    found = [s for opt in single.values() for s in statistics(opt)]
    assert equal(found, statistics(whole))
    assert not equal(values(model), values(copy.deepcopy(made_net())))
