"""Grafting that is switched on and off, kl_clip, and directions computed in small buckets."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drawn import close, noise, weight
from optimizers import Dictated, factored
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn

from tnt_kernels import mode_products
from tnt_optim import TNT

LR, MU = 0.01, 0.9


# ------------------------------------------------------------------ grafting


def plain(name: str, graft: str | None, **settings: Any) -> Dictated:
    return Dictated(name, [weight(4, 6)], lr=LR, momentum=MU, graft=graft, **settings)


@factored
def test_grafting_switched_off_and_on_again_has_adams_length(name: str) -> None:
    gradients = [noise(4, 6) for _ in range(52)]
    run = plain(name, "adam")
    for number, gradient in enumerate(gradients):
        run.opt.param_groups[0]["graft"] = "adam" if number in (0, 51) else None
        (move,) = run.step([gradient])
    first = list(itertools.accumulate(gradients, lambda m, g: MU * m + g))[-1]
    second = 0.99 * 0.01 * gradients[0] ** 2 + 0.01 * gradients[51] ** 2
    mean = (1 - MU) * first / (1 - MU**52)
    wanted = LR * (mean / ((second / (1 - 0.99**2)).sqrt() + 1e-8)).norm()
    assert float(move.norm()) == pytest.approx(float(wanted), rel=FLOAT64_TRAJECTORY)


def test_steps_of_an_idle_parameter_keep_their_length() -> None:
    """Its momentum fades until squares of it underflow in float32."""
    p = nn.Parameter(torch.zeros(4, 3))
    opt = TNT([p], lr=LR, graft="rms")
    for step in range(700):
        p.grad = torch.randn(4, 3) if step < 5 else torch.zeros(4, 3)
        before = p.detach().clone()
        opt.step()
        length = (p.detach() - before).square().mean().sqrt()
        assert float(length) < 1.01 * 0.2 * LR
        if step == 600:
            (norm,) = (v for k, v in opt.diagnostics().items() if k.startswith("momentum_norm"))
            assert 1e-28 < norm < 1e-24 and float(length) > 0.9 * 0.2 * LR


@factored
def test_a_new_start_in_other_modes_keeps_the_moments(name: str) -> None:
    """The next step is that of an optimizer with those modes from the start."""
    gradients = [noise(4, 6) for _ in range(5)]
    run = plain(name, "adam")
    for gradient in gradients[:3]:
        run.step([gradient])
    (param,) = run.params
    before = {key: run.opt.state[param][key].clone() for key in ("momentum", "second_moment")}
    run.opt.param_groups[0]["modes"] = lambda shape: (2, 2, 6)
    run.warm_start([[gradients[3]]])
    assert [stat.shape for stat in run.stats()] == [(2, 2), (2, 2), (6, 6)]
    for key, value in before.items():
        assert torch.equal(run.opt.state[param][key], value.reshape(2, 2, 6))
    other = nn.Parameter(param.detach().clone())
    group = {"params": [other], "modes": lambda shape: (2, 2, 6)}
    fresh = Dictated(name, [group], lr=LR, momentum=MU, graft="adam")
    fresh.warm_start([[gradients[3]]])
    state = fresh.opt.state[other]
    for key, value in before.items():
        state[key].copy_(value.reshape(2, 2, 6))
    state.update(updates=3, second_moment_updates=3)
    fresh.opt.param_groups[0]["step"] = 3
    run.step([gradients[4]])
    fresh.step([gradients[4]])
    close(param.detach(), other.detach())


@factored
@pytest.mark.parametrize("graft", [None, "adam", "sgd", "rms"])
def test_small_buckets_of_directions_change_nothing(
    name: str, graft: str | None, request: pytest.FixtureRequest
) -> None:
    """To the bit: a few parameters at a time, as where a model is larger than a bucket."""
    ends = []
    shapes = [(4, 3), (5,), (2, 6), (7, 2)]
    start = [weight(*shape).detach() for shape in shapes]
    gradients = [[noise(*shape) for shape in shapes] for _ in range(4)]
    for small in (False, True):
        if small:
            request.getfixturevalue("small_buckets")
        run = Dictated(name, [nn.Parameter(p.clone()) for p in start], damping=0.1, graft=graft)
        for grads in gradients:
            run.step(grads)
        ends.append(run.params)
    assert all(map(torch.equal, *ends))


# ------------------------------------------------------------------ kl_clip

SHAPES = [(4, 3), (5,), (2, 3, 2, 2)]
FORMS: list[dict[str, Any]] = [{}, {"graft": "sgd"}, {"graft": "adam"}, {"max_factor_dim": 3}]
CLIPPED: dict[str, Any] = {"lr": 0.1, "damping": 0.1, "stat_interval": 1, "inverse_interval": 2}


def divergence(run: Dictated, moves: Sequence[Tensor]) -> float:
    """The sum of (lr s P)^T F (lr s P), where lr s P is the move of a parameter, P = F^-1 m."""
    total = 0.0
    for param, move in zip(run.params, moves, strict=True):
        state = run.opt.state[param]
        (direction,) = mode_products([state["momentum"]], [state["factors"]])
        factor = float(move.norm() / direction.norm())  # lr s
        total += factor**2 * float((direction * state["momentum"]).sum())
    return total


@factored
@pytest.mark.parametrize("form", FORMS)
def test_all_directions_are_shortened_alike(name: str, form: dict[str, Any]) -> None:
    gradients = [noise(*shape) for shape in SHAPES]
    start = [weight(*shape).detach() for shape in SHAPES]
    free, clipped, loose = (
        Dictated(name, [nn.Parameter(p.clone()) for p in start], **CLIPPED, **form, kl_clip=bound)
        for bound in (None, 1e-4, 1e6)
    )
    whole, short, same = (run.step(gradients) for run in (free, clipped, loose))
    measured = divergence(free, whole)
    assert measured > 1e-4
    assert divergence(clipped, short) == pytest.approx(1e-4)
    for a, b, c in zip(short, whole, same, strict=True):
        close(a, math.sqrt(1e-4 / measured) * b)
        close(c, b)  # within the bound


@factored
def test_groups_have_bounds_of_their_own_and_decay_is_not_bounded(name: str) -> None:
    params = [weight(4, 3), weight(5)]
    start = [p.detach().clone() for p in params]
    groups = [{"params": params[:1], "kl_clip": 1e-6}, {"params": params[1:]}]
    run = Dictated(name, groups, **CLIPPED, weight_decay=0.3)
    free = Dictated(name, [nn.Parameter(p.clone()) for p in start], **CLIPPED)
    gradients = [noise(4, 3), noise(5)]
    moves, whole = run.step(gradients), free.step(gradients)
    measured = -0.1 * float((whole[0] * run.opt.state[params[0]]["momentum"]).sum())
    close(moves[0] + 0.1 * 0.3 * start[0], math.sqrt(1e-6 / measured) * whole[0])
    close(moves[1] + 0.1 * 0.3 * start[1], whole[1])


@factored
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_bound_of_the_others(
    name: str, bad: float
) -> None:
    start, first, later = weight(4, 3).detach(), [noise(4, 3), noise(5)], noise(4, 3)
    moves = []
    for bound, last in ((None, 0.0), (1e-6, bad)):
        run = Dictated(name, [nn.Parameter(start.clone()), weight(5)], **CLIPPED, kl_clip=bound)
        run.step(first)
        run.opt.param_groups[0]["stat_interval"] = 9
        moves.append(run.step([later, torch.full((5,), last, dtype=torch.float64)])[0])
    measured = -0.1 * float((moves[0] * run.opt.state[run.params[0]]["momentum"]).sum())
    close(moves[1], math.sqrt(1e-6 / measured) * moves[0])


@pytest.mark.filterwarnings("ignore:the gradients for the first statistics are all zero")
@factored
def test_zero_gradients_and_zero_rates_do_not_divide(name: str) -> None:
    run = Dictated(name, [weight(4, 3)], **CLIPPED, kl_clip=1e-3)
    assert not run.step([torch.zeros(4, 3, dtype=torch.float64)])[0].any()
    run.opt.param_groups[0]["lr"] = 0.0
    assert not run.step([noise(4, 3)])[0].any()
