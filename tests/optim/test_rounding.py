"""Parameters in half precision: rounded to nearest, at random, or from master copies."""

import copy
from typing import Any

import pytest
import torch
from drawn import raising
from tolerances import SAMPLE_DEVIATIONS
from torch import Tensor, nn

from tnt_optim import TNT, Shampoo
from tnt_optim.directions import stochastically_rounded_

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(6, 4), (5,), (4, 3, 2, 2)]
SETTINGS = {"lr": 0.003, "damping": 0.1, "stat_interval": 2, "inverse_interval": 3}
FORMS: list[dict[str, Any]] = [{}, {"graft": "adam"}, {"block_size": 3}]


def started(dtype: torch.dtype) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=rng).bfloat16().to(dtype)) for s in SHAPES]


def steps(opt: TNT | Shampoo, which: range) -> None:
    for step in which:
        rng = torch.Generator().manual_seed(100 + step)
        for group in opt.param_groups:
            for param in group["params"]:
                gradient = torch.randn(param.shape, generator=rng).bfloat16()
                param.grad = gradient.to(param.dtype)
        opt.step()


def made(params: Any, **settings: Any) -> TNT:
    return TNT(params, fisher="empirical", **{**SETTINGS, **settings})


@pytest.mark.parametrize("form", FORMS)
def test_master_copies_train_in_float32(form: dict[str, Any]) -> None:
    half, full = started(torch.bfloat16), started(torch.float32)
    opt, reference = made(half, rounding="master", **form), made(full, **form)
    steps(opt, range(12))
    steps(reference, range(12))
    for a, b in zip(half, full, strict=True):
        assert torch.equal(opt.state[a]["master"], b)
        assert torch.equal(a, b.bfloat16())


def test_small_steps_are_lost_to_nearest_alone() -> None:
    """Steps of a hundredth of the spacing of bfloat16 at 1, always in one direction."""
    ends = {}
    for rounding in ("nearest", "stochastic", "master"):
        param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        opt = made([param], rounding=rounding, momentum=0.0, max_factor_dim=1, lr=1.0, damping=1.0)
        for _ in range(50):
            param.grad = torch.full_like(param, 1e-4)
            opt.step()
        ends[rounding] = param.detach().float()
    assert torch.equal(ends["nearest"], torch.ones(4096))
    wanted = 1 - 50 * 1e-4
    assert float((ends["master"] - wanted).abs().max()) <= 2.0**-9
    assert abs(float(ends["stochastic"].mean()) - wanted) < 3e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_training_resumed_is_training_not_interrupted(rounding: str, form: dict[str, Any]) -> None:
    params = started(torch.bfloat16)
    opt = made(params, rounding=rounding, **form)
    steps(opt, range(5))
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = made(copies, rounding=rounding, **form)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    steps(opt, range(5, 9))
    steps(resumed, range(5, 9))
    for a, b in zip(params, copies, strict=True):
        assert torch.equal(a, b)
    if rounding == "master":
        for a, b in zip(params, copies, strict=True):
            assert resumed.state[b]["master"].dtype == torch.float32
            assert torch.equal(opt.state[a]["master"], resumed.state[b]["master"])


def test_a_new_start_of_the_statistics_keeps_master_copies() -> None:
    params = started(torch.bfloat16)
    opt = made(params, rounding="master")
    steps(opt, range(5))
    held = opt.state[params[0]]["master"].clone()
    assert not torch.equal(held, params[0].float())
    opt.warm_start([sum((p.float() ** 2).sum() for p in params)])
    assert torch.equal(opt.state[params[0]]["master"], held)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_any_memory_layout(layout: str) -> None:
    plain, other = (nn.Parameter(torch.randn(4, 3, 2, 2).bfloat16()) for _ in range(2))
    with torch.no_grad():
        other.copy_(plain)
    if layout == "channels_last":
        other.data = other.data.to(memory_format=torch.channels_last)
    for param in (plain, other):
        steps(made([param], rounding="master"), range(4))
    torch.testing.assert_close(plain, other, rtol=2.0**-8, atol=0)
    assert (other.is_contiguous(memory_format=torch.channels_last)) == (layout == "channels_last")


@pytest.mark.parametrize("value", [1.0, -1.0, 1.00390625, 3.14159, -2e-20, 1e30, 2.0**-120, 0.0])
def test_stochastic_rounding_keeps_the_mean(value: float) -> None:
    count = 40_000
    values = torch.full((count,), value)
    low, high = neighbours(values[0])
    stochastically_rounded_(values, torch.Generator().manual_seed(0))
    assert set(values.tolist()) <= {float(low), float(high)}
    assert torch.equal(values, values.bfloat16().float())
    exact, spacing = float(torch.tensor(value)), float(high - low)
    share = 0.0 if spacing == 0 else (exact - float(low)) / spacing
    deviation = spacing * (share * (1 - share) / count) ** 0.5
    assert abs(
        float(values.double().mean()) - exact
    ) <= SAMPLE_DEVIATIONS * deviation + 1e-12 * abs(exact)


def neighbours(value: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers below and above a float32 one."""
    down = (value.view(torch.int32) & -(1 << 16)).view(torch.float32)
    if torch.equal(down, value):
        return value, value
    away = ((value.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    return (down, away) if float(value) > 0 else (away, down)


@pytest.mark.parametrize("in_groups", [False, True])
def test_parameters_and_groups_are_rounded_by_draws_of_their_own(in_groups: bool) -> None:
    start = torch.randn(64, 64).bfloat16()
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    groups: Any = [{"params": [p]} for p in params] if in_groups else params
    opt = made(groups, rounding="stochastic")
    gradient = torch.randn(64, 64).bfloat16()
    for param in params:
        param.grad = gradient.clone()
    opt.step()
    assert not torch.equal(params[0], params[1])
    # But for the rounding they are the same.
    torch.testing.assert_close(params[0], params[1], rtol=2.0**-7, atol=0)


def test_draws_are_the_same_wherever_a_training_runs() -> None:
    """As in processes with copies of one model, whose global generators differ."""
    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        params = started(torch.bfloat16)
        steps(made(params, rounding="stochastic"), range(4))
        ends.append(params)
    assert all(map(torch.equal, *ends))


def test_weights_set_from_outside_count() -> None:
    params = started(torch.bfloat16)
    opt = made(params, rounding="master")
    steps(opt, range(3))
    with torch.no_grad():
        params[0].fill_(5.0)
    kept = opt.state[params[1]]["master"].clone()
    opt.param_groups[0]["lr"] = 0.0
    steps(opt, range(3, 4))
    assert torch.equal(params[0], torch.full_like(params[0], 5.0))
    assert torch.equal(opt.state[params[1]]["master"], kept)


def test_what_is_not_finite_stays_so() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf")])
    stochastically_rounded_(values, torch.Generator().manual_seed(0))
    assert bool(values[0].isnan())
    assert values[1:].tolist() == [float("inf"), -float("inf")]


def test_full_precision_is_left_alone() -> None:
    ends = []
    for rounding in ("nearest", "stochastic", "master"):
        params = started(torch.float32)
        opt = made(params, rounding=rounding)
        steps(opt, range(4))
        assert all("master" not in opt.state[p] for p in params)
        ends.append(params)
    for other in ends[1:]:
        assert all(map(torch.equal, ends[0], other))


def test_memory_of_master_copies_is_announced() -> None:
    opt = made(started(torch.bfloat16), rounding="master")
    rows = opt.memory_estimate()["parameters"]
    assert [row["master"] for row in rows] == [4 * 24, 4 * 5, 4 * 48]


def test_switched_on_late_it_is_refused() -> None:
    params = started(torch.bfloat16)
    opt = made(params)
    steps(opt, range(2))
    before = [p.detach().clone() for p in params]
    opt.param_groups[0]["rounding"] = "master"
    with raising(RuntimeError, match="must be set before the first statistics"):
        steps(opt, range(2, 3))
    assert all(map(torch.equal, params, before))


def test_unknown_roundings_and_float16_at_random_are_refused() -> None:
    with pytest.raises(ValueError, match="rounding must be one of 'nearest', 'stochastic', 'mast"):
        made(started(torch.bfloat16), rounding="up")
    with pytest.raises(
        ValueError, match="rounding='stochastic' is for bfloat16, got torch.float16"
    ):
        made([nn.Parameter(torch.zeros(3, dtype=torch.float16))], rounding="stochastic")
