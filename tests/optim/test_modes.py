"""How a parameter is seen: cut into blocks, with merged modes, in any memory layout."""

import math
from typing import Any

import pytest
import torch
from drawn import close, noise, weight
from optimizers import NO_FAILURES, Dictated, factored
from torch import Tensor, nn

from tnt_optim.modes import layout_for

SETTINGS: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "stat_interval": 2, "inverse_interval": 3}
FORMS: list[dict[str, Any]] = [
    {},
    {"relative_damping": True},
    {"graft": "adam", "relative_damping": True},
    {"graft": "sgd"},
    {"max_factor_dim": 2},
]


def tiles(tensor: Tensor, size: int) -> list[Tensor]:
    """Sub-tensors of at most this size in each mode; those of the last mode vary fastest."""
    found = [tensor]
    for mode in range(tensor.dim()):
        found = [piece for whole in found for piece in whole.split(size, dim=mode)]
    return found


@factored
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(7, 5), (7,), (4, 3, 5), (3, 2)])
def test_blocks_are_parameters_of_their_own(
    name: str, form: dict[str, Any], shape: tuple[int, ...]
) -> None:
    whole = weight(*shape)
    parts = [nn.Parameter(part.clone()) for part in tiles(whole.detach(), 3)]
    assert (len(parts) > 1) == (max(shape) > 3)
    cut = Dictated(name, [whole], **SETTINGS, **form, weight_decay=0.1, block_size=3)
    separate = Dictated(name, parts, **SETTINGS, **form, weight_decay=0.1)
    warm = [noise(*shape) for _ in range(2)]
    cut.warm_start([[g] for g in warm])
    separate.warm_start([tiles(g, 3) for g in warm])
    for _ in range(8):
        gradient, sampled = noise(*shape), noise(*shape)
        cut.step([gradient], [sampled])
        separate.step(tiles(gradient, 3), tiles(sampled, 3))
    for found, wanted in (
        (cut.stats(), separate.stats()),
        (cut.factors(), separate.factors()),
        (tiles(whole.detach(), 3), [p.detach() for p in parts]),
    ):
        close(found, wanted)


@factored
@pytest.mark.parametrize("rounding", ["nearest", "master"])
@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_any_memory_layout(name: str, layout: str, rounding: str) -> None:
    """Where no view has the shape of the modes, results are copied back; strides are kept."""
    for dtype in (torch.float64, torch.bfloat16):
        start = torch.randn(5, 4, 3, 2, dtype=torch.float64).to(dtype)
        other = start.clone(memory_format=torch.channels_last)
        if layout == "transposed":
            other = start.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        params = [nn.Parameter(start.clone()), nn.Parameter(other)]
        assert [p.is_contiguous() for p in params] == [True, False]
        strides = params[1].stride()
        gradients = [torch.randn(start.shape, dtype=torch.float64).to(dtype) for _ in range(4)]
        for param in params:
            run = Dictated(name, [param], **SETTINGS, block_size=2, rounding=rounding)
            for gradient in gradients:
                run.step([gradient])
        assert not torch.equal(params[1], start) and params[1].stride() == strides
        if dtype is torch.float64:
            close(params[1].detach(), params[0].detach())
        else:
            torch.testing.assert_close(*params, rtol=2.0**-8, atol=0)


@factored
@pytest.mark.filterwarnings("ignore:mode 1 could not be inverted:RuntimeWarning")
def test_a_failed_block_keeps_its_own_factors_alone(name: str) -> None:
    param, other = weight(2, 6), weight(3)
    every_step = {"stat_interval": 1, "inverse_interval": 1}
    run = Dictated(name, [param, other], damping=0.1, **every_step, block_size=3)
    run.step([noise(2, 6), noise(3)])
    held = run.factors(param)
    run.opt.state[param]["stats"][3].fill_(math.nan)  # mode 1 of the second block
    run.step([noise(2, 6), noise(3)])
    kept = list(map(torch.equal, held, run.factors(param)))
    assert kept == [False, False, True, True]
    assert run.opt.failures() == {**NO_FAILURES, "failed_inverses": 1}
    assert run.opt.state[other]["failed_inverses"] == 0


@factored
def test_merged_modes_are_one_mode(name: str) -> None:
    gradients = [noise(6, 2, 3, 3) for _ in range(5)]
    start = weight(6, 2, 3, 3)
    ends = []
    forms: list[dict[str, Any]] = [{"modes": lambda shape: (6, 18)}, {"merge_small_dims": "kernel"}]
    for settings in forms:
        param = nn.Parameter(start.detach().clone())
        run = Dictated(name, [{"params": [param], **settings}], **SETTINGS)
        for gradient in gradients:
            run.step([gradient])
        assert [tuple(s.shape) for s in run.stats()] == [(6, 6), (18, 18)]
        ends.append(param.detach())
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_a_kernel_that_is_too_large_stays_a_mode_of_its_own() -> None:
    group = {"modes": None, "merge_small_dims": "kernel", "max_factor_dim": 17, "block_size": None}
    assert layout_for(weight(6, 2, 3, 3), group).sizes == (6, 2, 9)
    assert layout_for(weight(6, 2, 3, 3), {**group, "max_factor_dim": 18}).sizes == (6, 18)
    assert layout_for(weight(6, 2), group).sizes == (6, 2)


@factored
def test_modes_are_merged_before_they_are_cut(name: str) -> None:
    run = Dictated(name, [weight(2, 6, 2, 2)], merge_small_dims="kernel", block_size=20)
    run.step([noise(2, 6, 2, 2)])
    assert [tuple(s.shape) for s in run.stats()] == [(2, 2), (20, 20), (2, 2), (4, 4)]
