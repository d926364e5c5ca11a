"""What KFAC refuses, survives, counts and reports, and what stops it."""

import copy
import math
from typing import Any

import pytest
import torch
from drawn import close, noise
from kfac_models import Sides, conv_net, held, step_on_ones, with_ones
from optimizers import NO_FAILURES, equal
from torch import Tensor, nn

from tnt_optim import KFAC, PreconditionerError

NAN = math.nan


BAD = [
    *(("likelihood", "poisson"), ("inverse", "svd"), ("shard", "both")),
    *(("seed", 1.5), ("seed", True)),
]


@pytest.mark.parametrize(("name", "bad"), BAD)
def test_a_bad_argument_is_refused_by_name(name: str, bad: Any) -> None:
    model = conv_net()
    with pytest.raises(ValueError, match=f"{name} must be"):
        KFAC(model, **{"likelihood": "categorical", name: bad})
    assert not any(m._forward_hooks for m in model.modules())


def test_parameters_and_groups_are_refused() -> None:
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got generator"):
        KFAC(conv_net().parameters(), likelihood="categorical")
    opt = KFAC(conv_net(), likelihood="categorical")
    with pytest.raises(ValueError, match="param_group"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(opt.param_groups) == 1


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    with pytest.warns(RuntimeWarning, match="60.0% .* 12 in Embedding"):
        opt = KFAC(model, likelihood="categorical")
    output = model(torch.tensor([0, 2, 2]))
    opt.observe(output)
    output.softmax(1)[:, 0].sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"'0.weight'.* must be dense, got .*sparse"):
        opt.step()
    assert equal(before, model.parameters()) and not opt.state_dict()["state"]


def test_max_factor_dim_stays_as_it_was() -> None:
    """It has chosen the layers. A loaded one that chooses the same ones is taken over."""
    model = nn.Linear(3, 2).double()
    opt = KFAC(model, likelihood="categorical")
    opt.load_state_dict(
        KFAC(nn.Linear(3, 2), max_factor_dim=100, likelihood="categorical").state_dict()
    )
    step_on_ones(model, opt, noise(5, 3))
    for changed in (opt, copy.deepcopy(opt)):
        changed.param_groups[0]["max_factor_dim"] = 1
        before = model.weight.detach().clone()
        with pytest.raises(RuntimeError, match="max_factor_dim must stay 100, .*, got 1: set it"):
            changed.step()
        assert torch.equal(model.weight, before)


# ------------------------------------------------------------------ what is not finite


def test_what_is_not_finite_is_left_out_counted_and_stops_training() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    opt = KFAC(model, stat_interval=1, inverse_interval=1, likelihood="categorical")
    x = noise(5, 3)
    step_on_ones(model, opt, x)
    stats, bad = held(opt), x.clone()
    bad[0, 0] = math.inf
    for _ in range(4):
        before = model[0].weight.detach().clone()
        with pytest.warns(RuntimeWarning, match=r"not finite.*'0.weight'.*1 more"):
            step_on_ones(model, opt, bad)
        assert not torch.equal(before, model[0].weight) and bool(model[0].weight.isfinite().all())
    assert equal(stats, held(opt))
    with torch.no_grad():
        model[2].bias[0] = math.inf
    with pytest.raises(
        PreconditionerError, match="5 in a row.*diverged.* '2.bias' of group 0 with"
    ):
        step_on_ones(model, opt, bad)
    nn.init.zeros_(model[2].bias)
    assert opt.failures() == NO_FAILURES | {"skipped_statistics": 5}
    step_on_ones(model, opt, x)
    assert opt.state[model[0].weight]["skipped_in_a_row"] == 0


def made_sides() -> tuple[Sides, KFAC]:
    """Two layers on inputs of their own, and a loss whose gradient does not depend on them."""
    model = Sides()

    def likelihood(output: Tensor) -> Tensor:
        return (output * torch.randn(output.shape, dtype=output.dtype)).sum() / len(output)

    return model, KFAC(model, likelihood=likelihood, stat_interval=1, inverse_interval=1)


def test_first_statistics_that_are_not_finite_raise() -> None:
    model, opt = made_sides()
    before = [p.detach().clone() for p in model.parameters()]
    good, bad = (noise(5, 3), noise(5, 2)), (noise(5, 3), math.inf * noise(5, 2))
    with pytest.raises(
        PreconditionerError, match="first gradient for the statistics.* 'right.weight'"
    ):
        step_on_ones(model, opt, *bad)
    with pytest.raises(PreconditionerError, match="none of 2 batches"):
        opt.warm_start(model(*bad) for _ in range(2))
    assert equal(before, model.parameters()) and not opt.state_dict()["state"]
    opt.warm_start(model(*inputs) for inputs in (good, bad))
    assert opt.failures()["skipped_statistics"] == 1
    step_on_ones(model, opt, *good)


def test_a_new_layer_joins_while_another_is_not_finite() -> None:
    x, y = NAN * noise(5, 3), noise(5, 2)
    model, opt = made_sides()
    model.right.requires_grad_(False)
    step_on_ones(model, opt, noise(5, 3), y)
    stats = held(opt)
    model.right.requires_grad_(True)
    with pytest.warns(
        RuntimeWarning, match="not finite: they are not refreshed, for .*'left.weight'"
    ):
        step_on_ones(model, opt, x, y)
    assert equal(stats, opt.state[model.left.weight]["stats"])
    close(opt.state[model.right.weight]["stats"][1], with_ones(y).T @ with_ones(y) / 5)
    assert opt.failures() == NO_FAILURES | {"skipped_statistics": 1}


@pytest.mark.parametrize("bad", [NAN, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_skipped_steps_observation_that_is_not_finite_is_left_out(place: int, bad: float) -> None:
    """As GradScaler skips a step on an overflow: nothing but observations has happened."""
    outputs = [noise(n, 3) for n in (4, 5, 6)]
    model = nn.Linear(3, 2).double()
    likelihood = nn.Linear(2, 1).double().requires_grad_(False)  # the same for every example

    def statistics(inputs: list[Tensor]) -> list[Tensor]:
        opt = KFAC(model, lr=0.0, likelihood=lambda z: likelihood(z).mean())
        opt.observe(model(inputs[0]))
        opt.step()  # without gradients: makes the first statistics
        opt.param_groups[0]["step"] = 0
        for x in inputs[1:]:
            opt.observe(model(x))
        opt.step()
        assert opt.failures() == NO_FAILURES
        return held(opt)

    expected, later = statistics(outputs), outputs[1:]
    later.insert(place, torch.full((3, 3), bad).double())
    assert equal(statistics([outputs[0], *later]), expected)
    rows = [with_ones(x) for x in outputs]
    mean = (rows[1].T @ rows[1] + rows[2].T @ rows[2]) / 11
    close(expected[1], 0.9 * rows[0].T @ rows[0] / 4 + 0.1 * mean)


def test_observations_of_which_none_is_finite_are_counted_once() -> None:
    model, opt = made_sides()
    x, y = noise(5, 3), noise(5, 2)
    step_on_ones(model, opt, x, y)
    opt.observe(model(x * NAN, y))
    with pytest.warns(RuntimeWarning, match="'left.weight'.* more"):
        step_on_ones(model, opt, x * math.inf, y)
    assert opt.failures() == NO_FAILURES | {"skipped_statistics": 1}


@pytest.mark.filterwarnings("ignore:KFAC updates:RuntimeWarning")
def test_an_idle_layer_of_fixed_length_stays_finite() -> None:
    """Its momentum fades to the smallest float32, for which no scale is large enough."""
    model = nn.ModuleList([nn.Linear(4, 3), nn.LayerNorm(4)])
    opt = KFAC(model, lr=1e-3, graft="rms", interval_warmup=0, likelihood="categorical")
    for t in range(1000):
        opt.zero_grad(set_to_none=False)
        x = torch.randn(8, 4)
        output = model[0](model[1](x) if t < 5 else x)
        opt.observe(output)
        nn.functional.cross_entropy(output, torch.zeros(8, dtype=torch.int64)).backward()
        opt.step()
    assert all(p.isfinite().all() for p in model.parameters())
