"""Grafting that is switched on and off, and directions computed in small buckets."""

import itertools
from typing import Any

import pytest
import torch
from drawn import close, noise, weight
from optimizers import Dictated, factored
from tolerances import FLOAT64_TRAJECTORY
from torch import nn

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
