"""The figures of ``diagnostics`` for a log, and the memory that ``memory_estimate`` announces."""

import math
from typing import Any

import pytest
import torch
from cases import flat
from drawn import noise, weight
from optimizers import Dictated, equal, factored
from torch import Tensor, nn

from tnt_kernels import mode_products
from tnt_optim.diagnostics import conditions


def trained(name: str, **settings: Any) -> Dictated:
    """Named parameters after three steps; the last one never has a gradient."""
    named = [("w", weight(6, 4)), ("b", weight(5)), ("still", weight(2))]
    every_step: dict[str, int] = {"stat_interval": 1, "inverse_interval": 1}
    run = Dictated(name, named, damping=0.1, **every_step, **settings)
    for _ in range(3):
        run.step([noise(6, 4), noise(5), None])
    return run


@factored
@pytest.mark.parametrize("settings", [{}, {"block_size": 4}, {"max_factor_dim": 3}])
def test_condition_is_the_largest_of_the_factors(name: str, settings: dict[str, int]) -> None:
    run = trained(name, **settings)
    exact = []
    for factor in run.factors(run.params[0]):
        values = factor if factor.dim() == 1 else torch.linalg.eigvalsh(factor)
        exact.append(float(values.max() / values.min()))
    found = run.opt.diagnostics()
    assert max(exact) > 1.2
    assert 0.7 * max(exact) <= found["condition/w"] <= 1.0001 * max(exact)
    assert found["skipped_statistics/w"] == found["failed_inverses/b"] == 0.0
    assert {key.split("/")[1] for key in found} == {"w", "b"} and list(found) == sorted(found)


def condition(stat: Tensor, factor: Tensor) -> Tensor:
    return conditions(stat[None], factor[None])[0]


@pytest.mark.parametrize("size", [1, 3, 200])
def test_condition_to_an_order_of_magnitude(size: int) -> None:
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    values = torch.logspace(0, -6, size, dtype=torch.float64)
    stat = (basis * values) @ basis.mT
    factor = (basis / (values + 1e-3)) @ basis.mT
    exact = float((values.max() + 1e-3) / (values.min() + 1e-3))
    assert 0.3 * exact <= float(condition(stat, factor)) <= 1.0001 * exact
    zero = torch.zeros(size, size, dtype=torch.float64)
    identity = torch.eye(size, dtype=torch.float64)
    assert float(condition(zero, 10.0 * identity)) == pytest.approx(1.0)


def test_many_parameters_have_the_figures_of_each_alone(small_buckets: None) -> None:
    """Of several dtypes and sizes, in stacks and buckets that do not come out even."""
    shapes = [(4, 4), (3, 4), (4,), (2, 4, 2, 2), (0, 4), (4, 3), (9, 9), (1,)]
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    params = [nn.Parameter(torch.randn(s).to(d)) for s in shapes for d in dtypes]
    every_step: dict[str, int] = {"stat_interval": 1, "inverse_interval": 1}
    run = Dictated("empirical", params, damping=0.1, **every_step)
    for _ in range(2):
        run.step([torch.randn(p.shape).to(p.dtype) for p in params])
    found = run.opt.diagnostics()
    for index, param in enumerate(params):
        if param.numel() == 0:
            assert f"condition/0.{index}" not in found
            continue
        state = run.opt.state[param]
        direction = mode_products([state["momentum"]], [state["factors"]])[0]
        conditions = map(condition, state["stats"], state["factors"])
        for figure, value, tolerance in [
            ("parameter_norm", param.detach().double().norm(), 1e-6),
            ("momentum_norm", state["momentum"].norm(), 1e-6),
            ("direction_norm", direction.norm(), 1e-6),
            ("condition", max(map(float, conditions)), 1e-4),  # the iteration ends at rounding
        ]:
            assert found[f"{figure}/0.{index}"] == pytest.approx(float(value), rel=tolerance)


@factored
def test_a_factor_that_is_not_a_number_shows(name: str) -> None:
    run = trained(name)
    for spoilt in run.opt.state[run.params[0]]["factors"]:
        kept = spoilt.clone()
        spoilt.fill_(torch.nan)
        assert math.isnan(run.opt.diagnostics()["condition/w"])
        spoilt.copy_(kept)


def test_norms_beyond_float16_of_parameters_in_float16() -> None:
    param = nn.Parameter(torch.full((300, 300), 300.0, dtype=torch.float16))
    run = Dictated("empirical", [param], lr=0.0, damping=0.1)
    run.step([torch.ones_like(param)])
    assert run.opt.diagnostics()["parameter_norm/0.0"] == pytest.approx(90000.0)


def test_autocast_does_not_round_the_figures() -> None:
    params = [nn.Parameter(weight(6, 4).detach().float()) for _ in range(2)]
    run = Dictated("empirical", params, damping=0.1)
    run.step([noise(6, 4).float() for _ in params])
    outside = run.opt.diagnostics()
    with torch.autocast("cpu", torch.bfloat16):
        assert run.opt.diagnostics() == outside


@factored
def test_parameters_without_names_are_called_by_group_and_index(name: str) -> None:
    run = Dictated(name, [{"params": [weight(2)]}, {"params": [weight(3)]}])
    run.step([None, noise(3)])
    assert {key.split("/")[1] for key in run.opt.diagnostics()} == {"1.0"}


def test_parameters_of_one_name_are_told_apart_by_group() -> None:
    groups = [{"params": [("w", weight(2)), ("b", weight(3))]}, {"params": [("w", weight(3))]}]
    run = Dictated("empirical", groups)
    run.step([noise(2), noise(3), noise(3)])
    assert {key.split("/")[1] for key in run.opt.diagnostics()} == {"0.w", "b", "1.w"}


def test_several_parameters_of_one_name_in_a_group_are_told_apart_by_index() -> None:
    run = Dictated("empirical", [("w", weight(2)), ("b", weight(3)), ("w", weight(3))])
    run.step([noise(2), noise(3), noise(3)])
    assert {key.split("/")[1] for key in run.opt.diagnostics()} == {"0.0", "b", "0.2"}


@factored
@pytest.mark.parametrize("settings", [
    {}, {"graft": "adam"}, {"graft": "sgd"}, {"max_factor_dim": 5}, {"block_size": 3},
    {"merge_small_dims": "kernel"}, {"rounding": "master"}, {"precondition_1d": False},
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_takes_the_memory_that_was_estimated(
    name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(6, 4), (5,), (4, 3, 2, 2)]]
    run = Dictated(name, params, **settings)
    estimate = run.opt.memory_estimate()
    run.step([torch.randn(p.shape).to(dtype) for p in params])
    assert estimate["total"] == sum(t.nbytes for t in flat(dict(run.opt.state)))
    rows = estimate["parameters"]
    assert [row["shape"] for row in rows] == [(6, 4), (5,), (4, 3, 2, 2)]
    parts = ("stats", "factors", "moments", "master")
    assert sum(row[part] for row in rows for part in parts) == estimate["total"]
    for row, param in zip(rows, params, strict=True):
        assert row["statistics"] == [tuple(s.shape) for s in run.stats(param)]


@factored
def test_allocated_states_are_zeros_and_identities(name: str) -> None:
    param, frozen = weight(3, 4), weight(2)
    frozen.requires_grad_(False)
    run = Dictated(name, [param, frozen], graft="adam", stat_interval=10)
    run.opt.allocate_state()
    assert run.opt.memory_estimate()["parameters"][0]["name"].endswith("shape (3, 4)")
    assert set(run.opt.state) == {param}
    state = dict(run.opt.state[param])
    assert equal(state.pop("factors"), [torch.eye(d).double() for d in (3, 4)])
    assert not any(t.any() for t in flat(state))
