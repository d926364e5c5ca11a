"""The figures for a log, and the memory that is announced."""

import math

import pytest
import torch
from drawn import noise, weight
from torch import Tensor, nn

from tnt_kernels import mode_products
from tnt_optim import TNT, Shampoo, update
from tnt_optim import diagnostics as figures
from tnt_optim.diagnostics import condition

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(method: type[TNT | Shampoo], **settings: object) -> TNT | Shampoo:
    named = [("w", weight(6, 4)), ("b", weight(5)), ("still", weight(2))]
    if method is TNT:
        settings["fisher"] = "empirical"
    opt = method(named, damping=0.1, stat_interval=1, inverse_interval=1, **settings)  # type: ignore[arg-type]
    for _ in range(3):
        for _, param in named[:2]:
            param.grad = noise(*param.shape)
        opt.step()
    return opt


@pytest.mark.parametrize("method", [TNT, Shampoo])
def test_norms_and_counts(method: type[TNT | Shampoo]) -> None:
    opt = trained(method)
    w, b, _ = opt.param_groups[0]["params"]
    found = opt.diagnostics()
    assert {key.split("/")[1] for key in found} == {"w", "b"}
    assert list(found) == sorted(found)
    state = opt.state[w]
    direction = state["factors"][0] @ state["momentum"] @ state["factors"][1]
    for key, value in [
        ("parameter_norm/w", w.norm()),
        ("momentum_norm/w", state["momentum"].norm()),
        ("direction_norm/w", direction.norm()),
        ("direction_norm/b", (opt.state[b]["factors"][0] @ opt.state[b]["momentum"]).norm()),
    ]:
        assert found[key] == pytest.approx(value.item(), rel=1e-12)
    assert found["skipped_statistics/w"] == found["failed_inverses/b"] == 0.0


@pytest.mark.parametrize("method", [TNT, Shampoo])
@pytest.mark.parametrize("settings", [{}, {"block_size": 4}, {"max_factor_dim": 5}])
def test_condition_is_the_largest_of_the_factors(
    method: type[TNT | Shampoo], settings: dict[str, int]
) -> None:
    opt = trained(method, **settings)
    w = opt.param_groups[0]["params"][0]
    exact = []
    for factor in opt.state[w]["factors"]:
        values = factor if factor.dim() == 1 else torch.linalg.eigvalsh(factor)
        exact.append(float(values.max() / values.min()))
    estimate = opt.diagnostics()["condition/w"]
    assert max(exact) > 1.2
    assert 0.7 * max(exact) <= estimate <= 1.0001 * max(exact)


@pytest.mark.parametrize("size", [1, 3, 200])
def test_condition_to_an_order_of_magnitude(size: int) -> None:
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    values = torch.logspace(0, -6, size, dtype=torch.float64)
    stat = (basis * values) @ basis.mT
    factor = (basis / (values + 1e-3)) @ basis.mT
    exact = float((values.max() + 1e-3) / (values.min() + 1e-3))
    assert 0.3 * exact <= float(condition(stat, factor)) <= 1.0001 * exact


def test_statistics_of_zero_have_condition_one() -> None:
    factor = 10.0 * torch.eye(4, dtype=torch.float64)
    assert float(condition(torch.zeros(4, 4, dtype=torch.float64), factor)) == pytest.approx(1.0)


def test_many_parameters_are_looked_at_together_as_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several dtypes and sizes, in stacks and lots that do not come out even."""
    monkeypatch.setattr(update, "_BUCKET", 40)
    monkeypatch.setattr(figures, "_STACK", 50)
    shapes = [(4, 4), (3, 4), (4,), (2, 4, 2, 2), (0, 4), (4, 3), (9, 9), (1,)]
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    params = [nn.Parameter(torch.randn(s).to(d)) for s in shapes for d in dtypes]
    opt = TNT(params, damping=0.1, stat_interval=1, inverse_interval=1, fisher="empirical")
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape).to(param.dtype)
        opt.step()
    found = opt.diagnostics()
    for index, param in enumerate(params):
        if param.numel() == 0:
            assert f"condition/0.{index}" not in found
            continue
        state = opt.state[param]
        direction = mode_products([state["momentum"]], [state["factors"]])[0]
        conditions = map(condition, state["stats"], state["factors"])
        for figure, value, tolerance in [
            ("parameter_norm", param.detach().double().norm(), 1e-6),
            ("momentum_norm", state["momentum"].norm(), 1e-6),
            ("direction_norm", direction.norm(), 1e-6),
            ("condition", max(map(float, conditions)), 1e-4),  # it ends where rounding lets it
        ]:
            assert found[f"{figure}/0.{index}"] == pytest.approx(float(value), rel=tolerance)


def test_what_is_not_a_number_is_told() -> None:
    opt = trained(TNT)
    w = opt.param_groups[0]["params"][0]
    for spoilt in opt.state[w]["factors"]:
        kept = spoilt.clone()
        spoilt.fill_(torch.nan)
        assert math.isnan(opt.diagnostics()["condition/w"])
        spoilt.copy_(kept)


def test_norms_of_parameters_in_half_precision() -> None:
    """One whose norm float16 does not hold."""
    param = nn.Parameter(torch.full((300, 300), 300.0, dtype=torch.float16))
    opt = TNT([param], lr=0.0, damping=0.1, fisher="empirical")
    param.grad = torch.ones_like(param)
    opt.step()
    assert opt.diagnostics()["parameter_norm/0.0"] == pytest.approx(90000.0)


def test_autocast_does_not_round_the_figures() -> None:
    params = [nn.Parameter(weight(6, 4).detach().float()) for _ in range(2)]
    opt = TNT(params, damping=0.1, fisher="empirical")
    for param in params:
        param.grad = noise(6, 4).float()
    opt.step()
    outside = opt.diagnostics()
    with torch.autocast("cpu", torch.bfloat16):
        assert opt.diagnostics() == outside


def test_parameters_without_names_are_called_by_their_place() -> None:
    params = [weight(2), weight(3)]
    opt = Shampoo([{"params": [params[0]]}, {"params": [params[1]]}])
    params[1].grad = noise(3)
    opt.step()
    assert {key.split("/")[1] for key in opt.diagnostics()} == {"1.0"}


def everything(opt: TNT | Shampoo) -> list[Tensor]:
    values = [v for state in opt.state.values() for v in state.values()]
    return [t for v in values for t in (v if isinstance(v, list) else [v]) if isinstance(t, Tensor)]


@pytest.mark.parametrize("settings", [
    {}, {"graft": "adam"}, {"graft": "sgd"}, {"max_factor_dim": 5}, {"block_size": 3},
    {"merge_small_dims": 30},
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_memory_is_what_was_estimated(settings: dict[str, object], dtype: torch.dtype) -> None:
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(6, 4), (5,), (4, 3, 2, 2)]]
    opt = TNT(params, fisher="empirical", **settings)  # type: ignore[arg-type]
    estimate = opt.memory_estimate()
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    opt.step()
    there = everything(opt)
    assert estimate["total"] == sum(t.nbytes for t in there)
    rows = estimate["parameters"]
    assert [row["shape"] for row in rows] == [(6, 4), (5,), (4, 3, 2, 2)]
    assert sum(row["stats"] + row["factors"] + row["moments"] for row in rows) == estimate["total"]
    for row, param in zip(rows, params, strict=True):
        assert row["statistics"] == [tuple(s.shape) for s in opt.state[param]["stats"]]


def test_allocated_states_are_zeros_and_move_nothing() -> None:
    param, frozen = weight(3, 4), weight(2)
    frozen.requires_grad_(False)
    opt = TNT([param, frozen], fisher="empirical", graft="adam", stat_interval=10)
    opt.allocate_state()
    assert opt.memory_estimate()["parameters"][0]["name"].endswith("shape (3, 4)")
    assert set(opt.state) == {param}
    assert all(not t.any() for t in everything(opt))
    before = param.detach().clone()
    opt.param_groups[0]["step"] = 1  # no statistics, no factors
    param.grad = noise(3, 4)
    opt.step()
    assert torch.equal(param, before)
