"""Two optimizers as one: the steps of both, and one state. Its contract is in ``test_contract``."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from drawn import raising, weight
from optimizers import (
    NO_FAILURES,
    SETTINGS,
    backward,
    batch,
    equal,
    leaves,
    made,
    net,
    no_memory,
    train,
    values,
)
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from tnt_optim import TNT, Shampoo, with_fallback


def parts(model: nn.Sequential) -> tuple[TNT, torch.optim.AdamW]:
    """Optimizers of the small net's weights and of its biases."""
    main = TNT.paper([model[0].weight, model[2].weight], **SETTINGS)
    return main, torch.optim.AdamW([model[0].bias, model[2].bias], lr=0.01)


def test_it_is_both_optimizers_also_under_a_scheduler() -> None:
    model = net()
    other = copy.deepcopy(model)
    both = parts(model)
    schedulers = [ExponentialLR(o, 0.8) for o in both]
    for step in range(9):
        backward(model, list(both), step)
        for each in (*both, *schedulers):
            each.step()
    opt = with_fallback(*parts(other))
    train(other, opt, range(9), [ExponentialLR(opt, 0.8)])
    assert equal(model.parameters(), other.parameters())
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.02 * 0.8**9, 0.01 * 0.8**9])
    assert [len(group["params"]) for group in opt.param_groups] == [2, 2]
    assert set(opt.state) == set(other.parameters())
    assert opt.failures() == NO_FAILURES and "with the fallback AdamW" in repr(opt)


def test_a_schedule_of_the_momentum_is_for_both() -> None:
    model = net()
    main, _ = parts(model)
    opt = with_fallback(main, torch.optim.SGD([model[0].bias, model[2].bias], 0.1, momentum=0.9))
    schedule = OneCycleLR(opt, max_lr=0.1, total_steps=4)
    train(model, opt, range(2), [schedule])
    momenta = {group["momentum"] for group in opt.param_groups}
    assert len(momenta) == 1 and momenta != {0.9}
    with pytest.raises(ValueError, match="momentum"):
        OneCycleLR(with_fallback(*parts(net())), max_lr=0.1, total_steps=4)


def test_where_main_raises_neither_moves() -> None:
    model = net()
    opt, before = made("fallback", model), values(model)
    model(batch(0)[0].float()).sum().backward()
    with raising(RuntimeError, match="no statistics"):
        opt.step()
    assert equal(model.parameters(), before)


def test_a_step_that_main_repeats_from_a_saved_state() -> None:
    """The statistics of a failed step are main's, and not added again."""
    every_step: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 1, "interval_warmup": 0}

    def both(model: nn.Sequential) -> Any:
        main = TNT([model[0].weight], **every_step)
        return with_fallback(main, Shampoo([model[2].weight], **every_step))

    model = net()
    other = copy.deepcopy(model)
    undisturbed, opt = both(other), both(model)
    train(other, undisturbed, range(4))
    train(model, opt, range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opt.main, "_factors", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            train(model, opt, [3])
    resumed = both(model)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, resumed, [3])
    assert equal(model.parameters(), other.parameters())


def test_groups_are_added_to_one_of_the_two() -> None:
    opt = made("fallback", net())
    opt.main.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    opt.fallback.add_param_group({"params": [weight(2), weight(4), weight(5)]})
    assert [len(group["params"]) for group in opt.param_groups] == [2, 1, 2, 3]
    with pytest.raises(ValueError, match="must be added to .main or to .fallback"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = net()
    opt = made("fallback", model)
    train(model, opt, range(3))
    good = copy.deepcopy(opt.state_dict())
    saves: list[Any] = []
    hook = opt.main.register_state_dict_pre_hook(saves.append)
    opt.load_state_dict(good)
    assert not saves, "loading saves nothing of main, which would warn with shard"
    hook.remove()
    for broken, message in [
        ({"state": {}}, "must have the key 'param_groups'"),
        ({**good, "param_groups": good["param_groups"][:1]}, r"groups of \[2, 2\] parameters"),
        ({**good, "method": "Shampoo"}, "must be of TNT, got that of Shampoo"),
    ]:
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(broken)
    assert leaves(opt.state_dict()) == leaves(good)


def test_where_the_fallback_cannot_load_main_is_unchanged() -> None:
    def started(block_size: int, steps: int) -> Any:
        model = net()
        rest = [model[0].bias, model[2].bias]
        opt = with_fallback(parts(model)[0], Shampoo.paper(rest, block_size=block_size))
        train(model, opt, range(steps))
        return opt

    opt, refusing = started(4, 3), started(5, 1)
    before = leaves(refusing.main.state_dict())
    with pytest.raises(ValueError, match="block_size=5"):
        refusing.load_state_dict(opt.state_dict())
    assert leaves(refusing.main.state_dict()) == before


def test_optimizers_that_cannot_be_combined_are_refused() -> None:
    param = weight(3)
    with pytest.raises(ValueError, match="no parameter in common, got 1, the first of shape"):
        with_fallback(Shampoo.paper([param]), torch.optim.SGD([param], lr=0.1))
    with pytest.raises(TypeError, match="fallback must be an optimizer, got list"):
        with_fallback(Shampoo.paper([param]), [weight(2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must step without a closure, got LBFGS"):
        with_fallback(Shampoo.paper([param]), torch.optim.LBFGS([weight(2)]))
    with pytest.raises(TypeError, match="must not observe outputs"):
        with_fallback(Shampoo.paper([param]), TNT([weight(2)]))
    with_fallback(Shampoo.paper([param]), TNT([weight(2)], fisher="empirical"))


def test_a_main_without_sampled_statistics_observes_nothing() -> None:
    layer = nn.Linear(3, 4)
    opt = with_fallback(Shampoo.paper([layer.weight]), torch.optim.SGD([layer.bias]))
    assert not opt.observing
    with pytest.raises(TypeError, match=r"main must be a TNT for observe\(\), got Shampoo"):
        opt.observe(layer(torch.randn(2, 3)))
    with pytest.raises(TypeError, match=r"main must be a TNT for attach\(\), got Shampoo"):
        opt.attach(layer)


def test_states_to_load_into_lack_statistics_of_what_no_output_reached() -> None:
    layer = nn.Linear(3, 4)
    opt = with_fallback(TNT([layer.weight]), torch.optim.SGD([layer.bias]))
    opt.allocate_state(unreached=[layer.weight])
    assert "momentum" in opt.state[layer.weight] and not opt.state[layer.weight].get("stats")


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_torchs_distributed_checkpoints_load_both_in_place(tmp_path: Path) -> None:
    model, other = net(), net()
    opt, resumed = (made("fallback", m, graft="adam") for m in (model, other))
    train(model, opt, range(5))
    saved = {"net": model.state_dict(), "opt": opt.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    train(model, opt, range(5, 9))
    start = values(other)
    resumed.allocate_state()
    assert all(p.grad is None for p in other.parameters())
    assert equal(other.parameters(), start)
    target = {"net": other.state_dict(), "opt": resumed.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "saved", no_dist=True)
    other.load_state_dict(target["net"])
    resumed.load_state_dict(target["opt"])
    train(other, resumed, range(5, 9))
    assert equal(model.parameters(), other.parameters())
