"""States that are allocated to load into: without a load, training is that of a new optimizer."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Snapshot
from optimizers import (
    EVERY,
    SAMPLING,
    ValueHead,
    batch,
    conv_net,
    equal,
    images,
    made,
    net,
    through_a_file,
    train,
    values,
    warm_start,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tnt_optim import checkpoint

NAMES = (*EVERY, "eigenbasis")


def allocated(model: nn.Module, opt: Any, renewed: Callable[[], Any]) -> Any:
    opt.allocate_state()
    return opt


def asked_by_torch(model: nn.Module, opt: Any, renewed: Callable[[], Any]) -> Any:
    get_optimizer_state_dict(model, opt)
    return opt


def saved_and_loaded(model: nn.Module, opt: Any, renewed: Callable[[], Any]) -> Any:
    opt.allocate_state()
    fresh = renewed()
    fresh.load_state_dict(through_a_file(opt.state_dict()))
    return fresh


WAYS = {"allocated": allocated, "asked by torch": asked_by_torch, "loaded": saved_and_loaded}
FORMS: dict[str, dict[str, Any]] = {
    "paper": {"stat_interval": 10, "inverse_interval": 100},
    "grafted": {"graft": "adam", "relative_damping": True, "interval_warmup": 5},
    "vectors": {"graft": "adam", "precondition_1d": False, "block_size": 3},
}


# In a saved state of torch's own fallback the allocation counts as a step.
CASES = [
    (name, form, way)
    for name in NAMES
    for form in FORMS
    for way in WAYS
    if (name, way) != ("fallback", "loaded")
]


@pytest.mark.parametrize(
    ("name", "form", "way"), [*CASES, ("sampled", "tensor lr", "asked by torch")]
)
def test_without_a_load_training_is_a_new_optimizers(name: str, form: str, way: str) -> None:
    """Bitwise, and rates, step and gradients stay as they were."""
    settings = dict(FORMS.get(form, {"lr": torch.tensor(0.02)}))
    if name in ("kfac", "eigenbasis"):
        settings = {k: v for k, v in settings.items() if k not in ("precondition_1d", "block_size")}
    model = conv_net()
    twin = copy.deepcopy(model)
    wanted = train(model, made(name, model, **settings), range(12), data=images)
    opt = made(name, twin, **settings)
    rates = [float(group["lr"]) for group in opt.param_groups]
    opt = WAYS[way](twin, opt, lambda: made(name, twin, **settings))
    assert [float(group["lr"]) for group in opt.param_groups] == rates
    assert not any(group.get("step", 0) for group in opt.param_groups)
    assert all(p.grad is None for p in twin.parameters())
    states = [opt.state.get(p) for p in twin.parameters()]
    assert all(states) or way == "loaded"
    assert opt.failures()["unreached"] == 0
    assert train(twin, opt, range(12), data=images) == wanted
    assert equal(model.parameters(), twin.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_an_allocated_state_trains_as_a_new_optimizer(name: str) -> None:
    model = net()
    other = copy.deepcopy(model)
    wanted = train(model, made(name, model, graft="adam"), range(5))
    opt = made(name, other, graft="adam")
    get_optimizer_state_dict(other, opt)
    twin, opt = copy.deepcopy((other, opt))
    assert train(twin, opt, range(5)) == wanted


@pytest.mark.filterwarnings("ignore:the (observed output|loss) (does|depends):RuntimeWarning")
@pytest.mark.parametrize("name", SAMPLING)
def test_parameters_that_no_output_reaches(name: str) -> None:
    """They move by their momentum, and are counted, as without the allocation."""
    ends, counts = [], []
    for allocates in (False, True):
        torch.manual_seed(0)
        model = ValueHead()
        opt = made(name, model, graft="adam")
        if allocates:
            opt.allocate_state()
        for step in range(4):
            policy, value = model(batch(step)[0].float())
            opt.zero_grad()
            opt.observe(policy)
            loss = nn.functional.cross_entropy(policy, batch(step)[1])
            (loss + value.square().mean()).backward()
            opt.step()
        ends.append(values(model))
        counts.append(opt.failures()["unreached"])
        assert not opt.state[model.value.weight].get("stats")
    assert equal(*ends) and counts == [1 if name != "sampled" else 2] * 2


@pytest.mark.parametrize("name", ["sampled", "kfac"])
def test_an_allocated_state_does_not_replace_an_observation(name: str) -> None:
    model = net()
    opt = made(name, model)
    opt.allocate_state()
    before = Snapshot(model.parameters(), opt)
    nn.functional.cross_entropy(model(batch(0)[0].float()), batch(0)[1]).backward()
    with pytest.raises(RuntimeError, match="call observe"):
        opt.step()
    opt.zero_grad()
    before.assert_unchanged()


@pytest.mark.parametrize("name", NAMES)
def test_torchs_request_keeps_an_observation(name: str) -> None:
    """It comes between ``observe`` and the backward."""
    model = net()
    other = copy.deepcopy(model)
    wanted = train(model, made(name, model), range(4))
    opt = made(name, other)
    x, y = batch(0)
    output = other(x.float())
    opt.observe(output)
    get_optimizer_state_dict(other, opt)
    nn.functional.cross_entropy(output, y).backward()
    opt.step()
    assert train(other, opt, range(1, 4)) == wanted[1:]
    assert equal(model.parameters(), other.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_first_step_with_a_rate_of_zero_is_a_step(name: str) -> None:
    """As a warm-up has it: the gradients are not zero."""
    model = net()
    opt = made(name, model, lr=0.0)
    train(model, opt, [0])
    main = getattr(opt, "main", opt)
    assert main.param_groups[0]["step"] == 1
    assert any(s.any() for state in main.state.values() for s in state.get("stats", []))


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_distributed_checkpoints_load_into_it(name: str, by_name: bool, tmp_path: Path) -> None:
    """By name without ``allocate_state``: torch asks for the state."""
    model, other = net(), net()
    opt, fresh = (made(name, m, graft="adam") for m in (model, other))
    if name != "fallback":
        warm_start(opt, model)
    train(model, opt, range(5))
    state = get_optimizer_state_dict(model, opt) if by_name else opt.state_dict()
    dcp.save({"net": model.state_dict(), "opt": state}, checkpoint_id=tmp_path, no_dist=True)
    if not by_name:
        fresh.allocate_state()
    state = get_optimizer_state_dict(other, fresh) if by_name else fresh.state_dict()
    target = {"net": other.state_dict(), "opt": state}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(target["net"])
    if by_name:
        set_optimizer_state_dict(other, fresh, target["opt"])
    else:
        fresh.load_state_dict(target["opt"])
    for m, o in ((model, opt), (other, fresh)):
        train(m, o, range(5, 9))
    assert equal(model.parameters(), other.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_full_state_is_set_in_a_new_optimizer(name: str) -> None:
    model, other = net(), net()
    opt, fresh = (made(name, m, graft="adam") for m in (model, other))
    train(model, opt, range(5))
    options = StateDictOptions(full_state_dict=True)
    # AdamW keeps the loaded "step" itself.
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    set_optimizer_state_dict(other, fresh, saved, options=options)
    other.load_state_dict(model.state_dict())
    for m, o in ((model, opt), (other, fresh)):
        train(m, o, range(5, 9))
    assert equal(model.parameters(), other.parameters())


def test_kfac_allocates_layers_that_no_output_had_reached_without_statistics() -> None:
    model = ValueHead()
    opt = made("kfac", model)
    opt.allocate_state(unreached=[model.value.weight])
    assert opt.state[model.policy.weight]["stats"]
    assert not opt.state[model.value.weight]["stats"]
    with pytest.raises(ValueError, match="unreached must be parameters of this optimizer"):
        opt.allocate_state(unreached=[nn.Parameter(torch.ones(2, 3))])


def test_a_sharded_state_is_asked_for_with_an_empty_group() -> None:
    """The processes agree on a device, which the first group may not have."""
    asked = []

    def anywhere(flags: list[bool], device: torch.device) -> list[bool]:
        asked.append(device)
        return flags

    param = torch.nn.Parameter(torch.ones(2, 3))
    param.grad = torch.zeros(2, 3)
    groups = [{"params": [], "lr": 0.0}, {"params": [param], "lr": 0.0}]
    processes = SimpleNamespace(is_sharded=True, anywhere=anywhere)
    assert checkpoint.asks_for_state(groups, lambda: processes)
    assert asked == [param.device]
