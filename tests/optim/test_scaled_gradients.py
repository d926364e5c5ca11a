"""Gradients that are changed between backward and step, as for torch's optimizers.

GradScaler's scaled ones and skipped steps, clipped ones, and steps taken in the backward.
"""

import contextlib
import math
from typing import Any

import pytest
import torch
from drawn import close
from test_mixed_precision import (
    METHODS,
    SAMPLING,
    batch,
    equal,
    made,
    made_net,
    observe,
    statistics,
    values,
)
from test_optimizer_contract_state import leaves
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

pytestmark = pytest.mark.usefixtures("one_thread")

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
        x, y = batch(step)
        opt.zero_grad()
        output = model(x)
        opt.observe(output)
        scaler.scale(cross_entropy(output, y)).backward()
        warned = pytest.warns(RuntimeWarning, match="gradient for the statistics is not finite")
        with warned if step == 2 else contextlib.nullcontext():
            scaler.step(opt)
        scaler.update()
        assert not any(map(torch.equal, values(model), before))
        assert step != 2 or equal(statistics(opt), kept)
    assert opt.failures() == {"skipped_statistics": 1, "failed_inverses": 0}
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
    single: dict[Tensor, Any] = {}
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
    assert not any(map(torch.equal, values(model), values(made_net())))
