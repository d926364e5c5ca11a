"""block_size and merge_small_dims: a block is a parameter of its own, merged modes are one mode."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from drawn import close, noise, raising, weight
from torch import Tensor, nn

from tnt_optim import TNT, Shampoo

pytestmark = pytest.mark.usefixtures("one_thread")

Method = Callable[..., TNT | Shampoo]


def empirical(params: Any, **settings: Any) -> TNT:
    return TNT(params, fisher="empirical", **settings)


METHODS: list[Method] = [empirical, Shampoo]
FORMS: list[dict[str, Any]] = [
    {},
    {"relative_damping": True},
    {"graft": "adam", "relative_damping": True},
    {"graft": "sgd"},
    {"max_factor_dim": 2},
]
SETTINGS = {"lr": 0.05, "damping": 0.1, "stat_interval": 2, "inverse_interval": 3}


def tiles(tensor: Tensor, size: int) -> list[Tensor]:
    """Sub-tensors of at most this size in each mode; the last mode's vary fastest."""
    found = [tensor]
    for mode in range(tensor.dim()):
        found = [piece for whole in found for piece in whole.split(size, dim=mode)]
    return found


def take_steps(opt: TNT | Shampoo, gradients: Sequence[Sequence[Tensor]]) -> None:
    params = [p for group in opt.param_groups for p in group["params"]]
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        opt.step()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(7, 5), (7,), (4, 3, 5), (3, 2)])
def test_blocks_are_parameters_of_their_own(
    method: Method, form: dict[str, Any], shape: tuple[int, ...]
) -> None:
    whole = weight(*shape)
    parts = [nn.Parameter(part.clone()) for part in tiles(whole.detach(), 3)]
    assert (len(parts) > 1) == (max(shape) > 3)
    gradients = [noise(*shape) for _ in range(8)]
    warm = [noise(*shape) for _ in range(2)]
    cut = method([whole], **SETTINGS, **form, weight_decay=0.1, block_size=3)
    apart = method(parts, **SETTINGS, **form, weight_decay=0.1)
    cut.warm_start((whole * g).sum() for g in warm)
    apart.warm_start(
        sum((p * t).sum() for p, t in zip(parts, tiles(g, 3), strict=True)) for g in warm
    )
    take_steps(cut, [[g] for g in gradients])
    take_steps(apart, [tiles(g, 3) for g in gradients])
    for got, wanted in zip(tiles(whole.detach(), 3), parts, strict=True):
        close(got, wanted.detach())


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_blocks_of_any_memory_layout(layout: str) -> None:
    """Where no view can have the modes, what is written goes back to the parameter."""
    plain = weight(5, 4, 3, 2)
    other = plain.detach().clone()
    if layout == "channels_last":
        other = other.to(memory_format=torch.channels_last)
    if layout == "transposed":
        other = other.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    param = nn.Parameter(other)
    assert param.is_contiguous() == (layout == "contiguous")
    gradients = [noise(5, 4, 3, 2) for _ in range(4)]
    before = param.detach().clone()
    for candidate in (plain, param):
        take_steps(empirical([candidate], **SETTINGS, block_size=2), [[g] for g in gradients])
    assert not torch.equal(param, before)
    close(param.detach(), plain.detach())


def test_sampled_statistics_are_those_of_the_blocks(direct: Callable[..., Any]) -> None:
    param = weight(4, 6)
    harness = direct([param])
    opt = TNT([param], likelihood=harness.likelihood, block_size=4)
    sampled = noise(4, 6)
    harness.iterate(opt, [noise(4, 6)], [sampled])
    left, right = sampled[:, :4], sampled[:, 4:]
    wanted = [left @ left.mT, left.mT @ left, right @ right.mT, right.mT @ right]
    for stat, gram in zip(opt.state[param]["stats"], wanted, strict=True):
        close(stat, gram)
    assert [tuple(s.shape) for s in opt.state[param]["factors"]] == [(4, 4), (4, 4), (4, 4), (2, 2)]


@pytest.mark.filterwarnings("ignore:mode 1 could not be inverted:RuntimeWarning")
def test_a_block_that_fails_keeps_its_own_factors_alone() -> None:
    param, other = weight(2, 6), weight(3)
    opt = empirical([param, other], damping=0.1, stat_interval=1, inverse_interval=1, block_size=3)
    take_steps(opt, [[noise(2, 6), noise(3)]])
    held = [f.clone() for f in opt.state[param]["factors"]]
    opt.state[param]["stats"][3].fill_(math.nan)  # mode 1 of the second block
    take_steps(opt, [[noise(2, 6), noise(3)]])
    kept = [torch.equal(a, b) for a, b in zip(held, opt.state[param]["factors"], strict=True)]
    assert kept == [False, False, True, True]
    assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 1}
    assert opt.state[other]["failed_inverses"] == 0


def test_a_first_factor_that_fails_names_parameter_and_mode() -> None:
    param = weight(2, 6)
    opt = empirical([param], damping=0.0, block_size=3)
    gradient = noise(2, 6)
    gradient[:, 3:] = 0.0
    gradient[0, 3] = 1.0  # of rank one, undamped
    param.grad = gradient
    with raising(RuntimeError, match=r"mode \d of parameter 0 of group 0"):
        opt.step()
    assert not opt.state.get(param)


@pytest.mark.parametrize("method", METHODS)
def test_merged_modes_are_one_mode(method: Method) -> None:
    gradients = [noise(6, 2, 3, 3) for _ in range(5)]
    start = weight(6, 2, 3, 3)
    ends = []
    for settings in ({"merge_small_dims": 20}, {"modes": lambda shape: (6, 18)}):
        param = nn.Parameter(start.detach().clone())
        opt = method([{"params": [param], **settings}], **SETTINGS)
        take_steps(opt, [[g] for g in gradients])
        assert [tuple(s.shape) for s in opt.state[param]["stats"]] == [(6, 6), (18, 18)]
        ends.append(param.detach())
    assert torch.equal(*ends)


def test_merged_then_cut() -> None:
    param = weight(2, 3, 2, 2)
    opt = empirical([param], merge_small_dims=24, block_size=20)
    take_steps(opt, [[noise(2, 3, 2, 2)]])
    assert [tuple(s.shape) for s in opt.state[param]["stats"]] == [(20, 20), (4, 4)]


@pytest.mark.parametrize("form", FORMS)
def test_training_resumed_is_training_not_interrupted(form: dict[str, Any]) -> None:
    gradients = [[noise(7, 5), noise(4)] for _ in range(9)]
    params = [weight(7, 5), weight(4)]
    opt = empirical(params, **SETTINGS, **form, block_size=3)
    take_steps(opt, gradients[:5])
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = empirical(copies, **SETTINGS, **form, block_size=3)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    take_steps(opt, gradients[5:])
    take_steps(resumed, gradients[5:])
    for got, wanted in zip(copies, params, strict=True):
        assert torch.equal(got, wanted)


def test_a_state_in_other_blocks_is_refused() -> None:
    param = weight(6, 6)
    opt = empirical([param], block_size=3)
    take_steps(opt, [[noise(6, 6)]])
    saved = opt.state_dict()
    other = empirical([weight(6, 6)], block_size=4)
    with pytest.raises(ValueError, match="block_size=4.*block_size=3"):
        other.load_state_dict(saved)
    assert not other.state


def test_half_precision_parameters_are_rounded_once() -> None:
    start = torch.randn(6, 4).bfloat16()
    gradients = [torch.randn(6, 4).bfloat16() for _ in range(3)]
    cut = nn.Parameter(start.clone())
    parts = [nn.Parameter(part.clone()) for part in tiles(start, 3)]
    take_steps(empirical([cut], **SETTINGS, block_size=3), [[g] for g in gradients])
    take_steps(empirical(parts, **SETTINGS), [tiles(g, 3) for g in gradients])
    for got, wanted in zip(tiles(cut.detach(), 3), parts, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["block_size", "merge_small_dims"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_wrong_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be None or an integer >= 1, got"):
        TNT([weight(3)], **{name: value})  # type: ignore[arg-type]


def test_the_summary_counts_the_blocks_modes() -> None:
    text = repr(TNT([weight(7, 5)], block_size=3, max_factor_dim=2))
    assert "5 full and 7 diagonal modes" in text
