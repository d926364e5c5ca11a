"""Half precision: autocast, models, float16's small gradients, scaled losses, rounding.

How each step in bfloat16 follows the oracle is in ``test_trajectories``; compiled models are in
tests/system.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import FixedLabels
from optimizers import (
    METHODS,
    NO_FAILURES,
    SAMPLING,
    Dictated,
    apart,
    equal,
    factored,
    images,
    leaves,
    made,
    statistics,
    values,
)
from tolerances import SAMPLE_DEVIATIONS, half_statistics
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import TNT
from tnt_optim.rounding import stochastically_rounded_

half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
methods = pytest.mark.parametrize("name", METHODS)
tnt_and_kfac = pytest.mark.parametrize("name", SAMPLING)


def made_net() -> nn.Sequential:
    """Logits (N, 4) of images (N, 2, 3, 3)."""
    torch.manual_seed(3)
    body = [nn.Conv2d(2, 4, 2), nn.GELU(), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8)]
    return nn.Sequential(*body, nn.Tanh(), nn.Linear(8, 4))


def autocast(dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


@pytest.fixture
def in_full(fixed_labels: FixedLabels) -> Callable[[Tensor], Tensor]:
    """Cross entropy at labels that do not depend on how logits were rounded, in float32."""
    fixed_labels.current = images(7)[1]
    return lambda output: fixed_labels(output.float())


def first_statistics(name: str, likelihood: Any, dtype: torch.dtype | None, how: str) -> Any:
    """The statistics of a first step, and the model that made it."""
    model = made_net()
    if how == "model":
        model.to(dtype)
    elif how == "rounded":
        model.to(dtype).float()
    opt = made(name, model, likelihood=likelihood)
    x, _ = images(0)
    with autocast(dtype if how in ("inside", "outside") else None):
        output = model(x.to(next(model.parameters()).dtype))
        if how != "outside":
            opt.observe(output)
    if how == "outside":
        opt.observe(output)
    (output.float().square().sum() / (2 * len(x))).backward()  # as of "gaussian"
    opt.step()
    return statistics(opt), model


@pytest.mark.parametrize("how", ["inside", "outside", "model"])
@half
@pytest.mark.parametrize("likelihood", ["gaussian", "labels"])
@tnt_and_kfac
def test_statistics_of_half_precision(
    name: str, likelihood: Any, dtype: torch.dtype, how: str, in_full: Any
) -> None:
    """Close to those of float32; at labels that do not depend on a rounding of the output."""
    likelihood = in_full if likelihood == "labels" else likelihood
    found, model = first_statistics(name, likelihood, dtype, how)
    reference = "rounded" if how == "model" else "full"
    wanted, _ = first_statistics(name, likelihood, dtype, reference)
    assert all(s.dtype == torch.float32 for s in found)
    assert all(p.dtype == (dtype if how == "model" else torch.float32) for p in model.parameters())
    distance = apart(found, wanted)
    assert 0 < distance <= half_statistics(dtype)


class Mixed(nn.Module):
    """A head in float32, whose backward must not run in half precision, even inside autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(18, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        hidden = torch.tanh(self.body(x.flatten(1)))
        with torch.autocast("cpu", enabled=False):
            logits: Tensor = self.head(hidden.float())
        return logits


@half
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("kind", [made_net, Mixed])
@tnt_and_kfac
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
                output = model(images(int(warm))[0])
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


# ------------------------------------------------------------------ small gradients in float16


class Faint(nn.Module):
    """A head with small weights: below it, gradients of a mean over the batch are under 1e-7.

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
@tnt_and_kfac
def test_small_sampled_gradients_do_not_underflow(name: str, first: str, how: str) -> None:
    """The scale of the training's loss does not reach the sampled pass: it has its own.

    Also where the output does not show that its graph has half precision.
    """
    rows = 4096
    x = torch.randn(rows, 8).half()
    found = []
    for half in (True, False):
        model = Faint().to(torch.float16 if half and how == "model" else torch.float32)
        # The gradients at its samples do not depend on a rounding of the output.
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


def test_a_likelihood_function_may_scale_its_loss(in_full: Any, fixed_labels: FixedLabels) -> None:
    """Relative damping and grafting cancel a power of two, which keeps float16 from underflow."""
    x = torch.randn(4096, 8).half()
    fixed_labels.current = torch.randint(10, (4096,))

    def found(half: bool, scale: float) -> list[Tensor]:
        model = Faint()

        def scaled(output: Tensor) -> Tensor:
            return scale * in_full(output)

        opt = TNT.paper(model.parameters(), likelihood=scaled)
        with autocast(torch.float16 if half else None):
            opt.observe(model(x.float()))
        opt.step()
        return [stat / scale**2 for stat in statistics(opt)]

    wanted = found(False, 1.0)
    assert apart(found(True, 2.0**12), wanted) <= half_statistics(torch.float16)
    assert apart(found(True, 1.0), wanted) > 0.1


# ------------------------------------------------------------------ scaled losses


@pytest.mark.parametrize("skipped", [0, 2, 3])
@pytest.mark.parametrize("name", [*METHODS, "fallback"])
def test_a_skipped_step_leaves_its_observation(name: str, skipped: int) -> None:
    """It counts as no step. Where statistics are due, its observation is averaged with that of the
    next attempt, as two micro-batches are. Training gradients are not kept."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    model, twin = made_net(), made_net()
    opt, reference = made(name, model), made(name, twin)
    for step in range(6):
        again = 50 + step
        for net, chosen in ((model, opt), (twin, reference)):
            if step == skipped:
                chosen.zero_grad()
                output = net(images(step)[0])
                chosen.observe(output)
                if net is model:
                    before, kept = values(net), leaves(chosen.state_dict())
                    scaler.scale(output.sum() * math.inf).backward()
                    scaler.step(chosen)
                    scaler.update()
                    assert equal(values(net), before) and leaves(chosen.state_dict()) == kept
                    assert chosen.param_groups[0]["step"] == step
            chosen.zero_grad()
            x, y = images(again if step == skipped else step)
            output = net(x)
            chosen.observe(output)
            if net is model:
                scaler.scale(cross_entropy(output, y)).backward()
                scaler.step(chosen)
                scaler.update()
            else:
                cross_entropy(output, y).backward()
                chosen.step()
        assert equal(values(model), values(twin))
    assert scaler.get_scale() == 2.0**15
    assert equal(statistics(opt), statistics(reference))
    assert opt.failures() == NO_FAILURES


# ------------------------------------------------------------------ steps in hooks


@factored
def test_steps_in_the_backward(name: str) -> None:
    """Each parameter has an optimizer, which steps as soon as the gradient exists and frees it. The
    steps have the bits of one optimizer for all parameters."""
    model, twin = made_net(), made_net()
    whole = made(name, twin)
    single: dict[Tensor, Any] = {}
    for param in model.parameters():
        single[param] = made(name, nn.ParameterList([param]))

        def step_now(param: Tensor) -> None:
            single[param].step()  # noqa: B023 - the same dictionary for all
            single[param].zero_grad()  # noqa: B023

        param.register_post_accumulate_grad_hook(step_now)
    for step in range(9):
        x, y = images(step)
        output = model(x)
        for opt in single.values():
            opt.observe(output)
        cross_entropy(output, y).backward()
        assert all(p.grad is None for p in model.parameters())
        whole.zero_grad()
        output = twin(x)
        whole.observe(output)
        cross_entropy(output, y).backward()
        whole.step()
        assert equal(values(model), values(twin))
    assert whole.param_groups[0]["step"] == 9
    found = [s for opt in single.values() for s in statistics(opt)]
    assert equal(found, statistics(whole))
    assert not any(map(torch.equal, values(model), values(made_net())))


# ------------------------------------------------------------------ rounding

SHAPES = [(6, 4), (5,), (4, 3, 2, 2)]
FORMS: list[dict[str, Any]] = [{}, {"graft": "adam"}, {"block_size": 3}]


def started(name: str, dtype: torch.dtype, **settings: Any) -> Dictated:
    """Parameters whose values are bfloat16's, in this dtype."""
    rng = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(s, generator=rng).bfloat16().to(dtype)) for s in SHAPES]
    schedule: dict[str, int] = {"stat_interval": 2, "inverse_interval": 3}
    return Dictated(name, params, **{"lr": 0.003, "damping": 0.1, **schedule, **settings})


def steps(run: Dictated, numbers: range) -> list[Tensor]:
    """Steps on bfloat16 gradients that depend on the number; returns the parameters."""
    for number in numbers:
        rng = torch.Generator().manual_seed(100 + number)
        gradients = [torch.randn(p.shape, generator=rng).bfloat16() for p in run.params]
        run.step([g.to(p.dtype) for g, p in zip(gradients, run.params, strict=True)])
    return run.params


@factored
@pytest.mark.parametrize("form", FORMS)
def test_master_copies_train_in_float32(name: str, form: dict[str, Any]) -> None:
    """A new start of the statistics keeps them, and the memory estimate counts them."""
    run = started(name, torch.bfloat16, rounding="master", **form)
    reference = started(name, torch.float32, **form)
    rows = run.opt.memory_estimate()["parameters"]
    assert [row["master"] for row in rows] == [4 * 24, 4 * 5, 4 * 48]
    for first, last in ((0, 8), (8, 12)):
        pairs = zip(
            steps(run, range(first, last)), steps(reference, range(first, last)), strict=True
        )
        for half, full in pairs:
            assert torch.equal(run.opt.state[half]["master"], full)
            assert torch.equal(half, full.bfloat16())
        for each in (run, reference):
            each.warm_start([[torch.ones_like(p) for p in each.params]])


def neighbours(value: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers below and above a float32 one."""
    bits = value.view(torch.int32) & -(1 << 16)
    inner, outer = bits.view(torch.float32), (bits + (1 << 16)).view(torch.float32)
    if torch.equal(inner, value):
        return value, value
    return (inner, outer) if float(value) > 0 else (outer, inner)


@pytest.mark.parametrize("value", [1.0, -1.0, 1.00390625, 3.14159, -2e-20, 1e30, 2.0**-120, 0.0])
def test_stochastic_rounding_keeps_the_mean(value: float) -> None:
    count = 40_000
    values = torch.full((count,), value)
    low, high = neighbours(values[0])
    stochastically_rounded_(values, torch.Generator().manual_seed(0))
    assert set(values.tolist()) <= {float(low), float(high)}
    assert torch.equal(values, values.bfloat16().float())
    exact, spacing = float(torch.tensor(value)), float(high - low)
    upwards = 0.0 if spacing == 0 else (exact - float(low)) / spacing
    deviation = spacing * (upwards * (1 - upwards) / count) ** 0.5
    error = abs(float(values.double().mean()) - exact)
    assert error <= SAMPLE_DEVIATIONS * deviation + 1e-12 * abs(exact)


def test_stochastic_rounding_keeps_numbers_that_are_not_finite() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf])
    stochastically_rounded_(values, torch.Generator().manual_seed(0))
    assert bool(values[0].isnan())
    assert values[1:].tolist() == [math.inf, -math.inf]


@factored
@pytest.mark.parametrize("in_groups", [False, True])
def test_parameters_and_groups_are_rounded_by_draws_of_their_own(
    name: str, in_groups: bool
) -> None:
    start, gradient = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    groups: Any = [{"params": [p]} for p in params] if in_groups else params
    Dictated(name, groups, rounding="stochastic", lr=0.003).step([gradient, gradient])
    assert not torch.equal(params[0], params[1])
    torch.testing.assert_close(params[0], params[1], rtol=2.0**-7, atol=0)  # but for the rounding


@factored
def test_draws_do_not_depend_on_the_global_generator(name: str) -> None:
    """Processes with copies of one model have different ones."""
    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ends.append(steps(started(name, torch.bfloat16, rounding="stochastic"), range(4)))
    assert all(map(torch.equal, *ends))


@factored
def test_weights_that_were_set_by_hand_count(name: str) -> None:
    """A master copy follows its parameter where the parameter was changed."""
    run = started(name, torch.bfloat16, rounding="master")
    first, second, _ = steps(run, range(3))
    with torch.no_grad():
        first.fill_(5.0)
    kept = run.opt.state[second]["master"].clone()
    run.opt.param_groups[0]["lr"] = 0.0
    steps(run, range(3, 4))
    assert torch.equal(first, torch.full_like(first, 5.0))
    assert torch.equal(run.opt.state[second]["master"], kept)


@factored
@pytest.mark.parametrize("change", ["dtype", "rounding", "loaded"])
def test_master_copies_begin_when_they_are_needed(name: str, change: str) -> None:
    """Where training goes on in half precision, or rounds otherwise than before."""
    start = torch.bfloat16 if change == "rounding" else torch.float32
    rounding = "nearest" if change == "rounding" else "master"
    run = started(name, start, rounding=rounding)
    steps(run, range(3))
    if change == "loaded":
        later = started(name, torch.bfloat16)
        for old, new in zip(run.params, later.params, strict=True):
            new.data.copy_(old)
        later.opt.load_state_dict(run.opt.state_dict())
        run = later
    for param in run.params:
        param.data = param.data.bfloat16()
    run.opt.param_groups[0]["rounding"] = "master"
    reference = started(name, torch.float32)
    for given, param in zip(run.params, reference.params, strict=True):
        param.data.copy_(given)
    reference.opt.load_state_dict(run.opt.state_dict())
    reference.opt.param_groups[0]["rounding"] = "nearest"
    for half, full in zip(*(steps(each, range(3, 9)) for each in (run, reference)), strict=True):
        assert torch.equal(run.opt.state[half]["master"], full)
        assert torch.equal(half, full.bfloat16())


def test_rounding_is_checked_again_when_the_dtype_changes() -> None:
    param = nn.Parameter(torch.randn(4, 3))
    opt = TNT([param], rounding="stochastic")
    param.data = param.data.half()
    param.grad, before = torch.randn_like(param), param.detach().clone()
    with pytest.raises(ValueError, match="rounding='stochastic' is for bfloat16, got torch.float1"):
        opt.step()
    assert torch.equal(param, before) and not opt.state


@factored
def test_full_precision_is_not_rounded(name: str) -> None:
    ends = []
    for rounding in ("nearest", "stochastic", "master"):
        run = started(name, torch.float32, rounding=rounding)
        ends.append(steps(run, range(4)))
        assert all("master" not in run.opt.state[p] for p in run.params)
    for other in ends[1:]:
        assert all(map(torch.equal, ends[0], other))
