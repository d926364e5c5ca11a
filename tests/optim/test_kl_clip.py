"""kl_clip: one factor for a group's directions, that bounds their divergence."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drawn import close, noise, weight
from torch import Tensor, nn

from tnt_kernels import mode_products
from tnt_optim import TNT, Shampoo
from tnt_optim.directions import clipped

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(4, 3), (5,), (2, 3, 2, 2)]
SETTINGS: dict[str, Any] = {"lr": 0.1, "damping": 0.1, "stat_interval": 1, "inverse_interval": 2}
FORMS: list[dict[str, Any]] = [{}, {"graft": "sgd"}, {"graft": "adam"}, {"max_factor_dim": 3}]


def made(params: Any, **settings: Any) -> TNT:
    return TNT(params, fisher="empirical", **{**SETTINGS, **settings})


def step(opt: TNT | Shampoo, gradients: Sequence[Tensor]) -> list[Tensor]:
    """One step; returns how the parameters moved."""
    params = [p for group in opt.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    opt.step()
    return [p.detach() - b for p, b in zip(params, before, strict=True)]


def divergence(opt: TNT | Shampoo, moves: Sequence[Tensor]) -> float:
    """The sum of (lr s P)^T F (lr s P), from how far parameters moved: by lr s P, P = F^-1 m."""
    total = 0.0
    for group in opt.param_groups:
        for param, move in zip(group["params"], moves, strict=True):
            state = opt.state[param]
            (direction,) = mode_products([state["momentum"]], [state["factors"]])
            factor = float(move.norm() / direction.norm())  # lr s
            total += factor**2 * float((direction * state["momentum"]).sum())
    return total


@pytest.mark.parametrize("form", FORMS)
def test_all_directions_are_shortened_alike(form: dict[str, Any]) -> None:
    gradients = [noise(*shape) for shape in SHAPES]
    start = [weight(*shape) for shape in SHAPES]
    free, clipped = (
        made([nn.Parameter(p.detach().clone()) for p in start], **form, **more)
        for more in ({}, {"kl_clip": 1e-4})
    )
    whole, short = step(free, gradients), step(clipped, gradients)
    measured = divergence(free, whole)
    assert measured > 1e-4
    assert divergence(clipped, short) == pytest.approx(1e-4)
    factor = math.sqrt(1e-4 / measured)
    for a, b in zip(short, whole, strict=True):
        close(a, factor * b)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_within_the_bound_is_the_step(form: dict[str, Any]) -> None:
    gradients = [noise(*shape) for shape in SHAPES]
    start = [weight(*shape) for shape in SHAPES]
    moves = []
    for more in ({}, {"kl_clip": 1e6}):
        opt = made([nn.Parameter(p.detach().clone()) for p in start], **form, **more)
        moves.append(step(opt, gradients))
    for a, b in zip(*moves, strict=True):
        close(b, a)


def test_groups_are_bounded_apart_and_decay_stands_outside() -> None:
    params = [weight(4, 3), weight(5)]
    start = [p.detach().clone() for p in params]
    opt = made([{"params": params[:1], "kl_clip": 1e-6}, {"params": params[1:]}], weight_decay=0.3)
    free = made([nn.Parameter(start[0].clone()), nn.Parameter(start[1].clone())])
    gradients = [noise(4, 3), noise(5)]
    moves, whole = step(opt, gradients), step(free, gradients)
    state = opt.state[params[0]]
    measured = -0.1 * float((whole[0] * state["momentum"]).sum())
    close(moves[0] + 0.1 * 0.3 * start[0], math.sqrt(1e-6 / measured) * whole[0])
    close(moves[1] + 0.1 * 0.3 * start[1], whole[1])


def test_zero_gradients_and_zero_rates_do_not_divide() -> None:
    param = weight(4, 3)
    opt = made([param], kl_clip=1e-3)
    assert all(not move.any() for move in step(opt, [torch.zeros(4, 3, dtype=torch.float64)]))
    opt.param_groups[0]["lr"] = 0.0
    assert all(not move.any() for move in step(opt, [noise(4, 3)]))


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "small", True])
def test_wrong_bounds_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="kl_clip must be None or a finite number > 0, got"):
        made([weight(3)], kl_clip=value)


def test_directions_on_another_device_than_the_groups_first_parameter() -> None:
    """What comes of them is where they are."""
    group = {"params": [torch.empty(3, device="meta")], "kl_clip": 0.5, "lr": 1.0}
    direction, scale = noise(4), torch.full((1,), 2.0, dtype=torch.float64)
    for scales in (None, scale):
        (found,) = clipped([direction], [direction], scales, group)
        own = 1.0 if scales is None else 2.0
        wanted = own * min(1.0, math.sqrt(0.5 / float((own * direction).square().sum())))
        assert found.device.type == "cpu" and float(found) == pytest.approx(wanted)
