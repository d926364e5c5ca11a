"""Statistics and factors where formulas exist: float16's range, Shampoo's relative damping."""

from typing import Any

import pytest
import torch
from drawn import noise, weight
from optimizers import FACTORED, NO_FAILURES, Dictated, factored
from torch import nn


@factored
@pytest.mark.parametrize("relative", [False, True])
def test_parameters_without_elements(name: str, relative: bool) -> None:
    params = [weight(0, 3), weight(0), weight(2, 3)]
    run = Dictated(name, params, relative_damping=relative, damping=0.1)
    moves = run.step([torch.zeros_like(params[0]), torch.zeros_like(params[1]), noise(2, 3)])
    assert bool(moves[2].any()) and bool(params[2].isfinite().all())


def test_gradients_in_float16_have_statistics_beyond_float16() -> None:
    """Of norm 80000, where float16 ends at 65504."""
    gradient = torch.full((200, 200), 400.0, dtype=torch.float16)
    for name in FACTORED:
        param = nn.Parameter(torch.zeros(200, 200, dtype=torch.float16))
        run = Dictated(name, [param], damping=1e6)
        run.step([gradient])
        expected = torch.full((200, 200), 400.0**2 * 200)
        torch.testing.assert_close(run.stats()[0], expected, rtol=1e-6, atol=0)


# ------------------------------------------------------------------ Shampoo


@pytest.mark.parametrize("scale", [1e-6, 1e5])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (3, 2, 3, 3)], ids=str)
def test_shampoos_relative_damping_has_no_scale(shape: tuple[int, ...], scale: float) -> None:
    p = weight(*shape)
    settings: dict[str, Any] = {"relative_damping": True, "stat_interval": 1, "lr": 0.1}
    run, scaled = (
        Dictated("shampoo", [nn.Parameter(p.detach().clone())], **settings) for _ in range(2)
    )
    for gradient in [noise(*shape) for _ in range(4)]:
        run.step([gradient])
        scaled.step([scale * gradient])
    torch.testing.assert_close(run.params, scaled.params, rtol=0, atol=1e-9)


@pytest.mark.parametrize("damping", [0.0, 1e-6, 0.1, 1e6])
@pytest.mark.parametrize("size", [0.0, 1e-21, 1e-18, 1e-17])
def test_shampoos_relative_damping_takes_rounding_for_zero(size: float, damping: float) -> None:
    """S is singular, and damping times its average would be 0 in float32."""
    p = nn.Parameter(torch.randn(3, 40))
    settings: dict[str, Any] = {"relative_damping": True, "stat_interval": 1, "graft": "adam"}
    run = Dictated("shampoo", [p], damping=damping, **settings)
    for _ in range(3):
        run.step([size * torch.randn(3, 40)])
    assert run.opt.failures() == NO_FAILURES
    assert bool(p.isfinite().all())
    for factor in run.factors():
        rounding = 16 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(factor, torch.eye(len(factor)), rtol=0, atol=rounding)
