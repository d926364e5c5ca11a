"""KFAC's state: training that is resumed or copied, and states that are refused or adapted."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Snapshot
from kfac_models import batch, conv_net, images
from optimizers import leaves, net, no_memory, train, warm_start
from torch import Tensor, nn

from tnt_optim import KFAC
from tnt_optim.autograd import graph_nodes


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_the_hooks_of_a_copied_model_do_nothing(clone: Callable[[Any], Any]) -> None:
    model = conv_net()
    opt = KFAC(model, likelihood="categorical")
    train(model, opt, [0], data=batch)
    assert not any(node.metadata for node in graph_nodes(clone(model)(images())))


def test_adams_graft_that_is_switched_on_is_refused() -> None:
    """Its second moment would be younger than the momentum."""
    model = conv_net()
    opt = KFAC.paper(model, likelihood="categorical")
    train(model, opt, range(2), data=batch)
    opt.zero_grad()
    before = Snapshot(model.parameters(), opt)
    opt.param_groups[0]["graft"] = "adam"
    with pytest.raises(RuntimeError, match="graft='adam' must be set before .*'0.weight'"):
        train(model, opt, [2], data=batch)
    opt.zero_grad()
    opt.param_groups[0]["graft"] = None
    before.assert_unchanged()


def test_options_that_a_group_of_kfac_lacks_are_refused() -> None:
    model = net()
    opt = KFAC(model, likelihood="categorical")
    train(model, opt, [0])
    opt.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="^maximize cannot be set for a parameter group of KFAC"):
        train(model, opt, [1])
    opt.param_groups[0]["maximize"] = False
    opt.param_groups[0]["seed"] = 0  # its own
    train(model, opt, [1])
    opt.param_groups[0]["seed"] = 1
    with pytest.raises(ValueError, match="^seed cannot be .* KFAC, whose own is 0, got 1: remove"):
        train(model, opt, [2])


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_torchs_distributed_checkpoints_load_in_place(tmp_path: Path) -> None:
    """After a step, which makes the state."""
    model, other = net(), net()
    opt, resumed = KFAC(model, likelihood="categorical"), KFAC(other, likelihood="categorical")
    train(model, opt, range(5))
    dcp.save({"opt": opt.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    train(other, resumed, [0])
    target = {"opt": resumed.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "saved", no_dist=True)
    resumed.load_state_dict(target["opt"])
    assert leaves(resumed.state_dict()) == leaves(opt.state_dict())


@pytest.mark.parametrize("clone", [None, copy.deepcopy, "state"])
def test_a_step_that_ran_out_of_memory_can_be_repeated(clone: Any) -> None:
    """In place, in a copy, or from its saved state."""
    settings: dict[str, Any] = {"interval_warmup": 0, "stat_interval": 1, "inverse_interval": 1}
    model = net()
    undisturbed = copy.deepcopy(model)
    opt, other = (
        KFAC(model, likelihood="categorical", **settings),
        KFAC(undisturbed, likelihood="categorical", **settings),
    )
    train(undisturbed, other, range(4))
    train(model, opt, range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opt, "_factors", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            train(model, opt, [3])
    if clone == "state":
        saved = copy.deepcopy(opt.state_dict())
        opt = KFAC(model, likelihood="categorical", **settings)
        opt.load_state_dict(saved)
    elif clone is not None:
        model, opt = clone((model, opt))
    train(model, opt, [3])
    Snapshot(model.parameters(), opt).assert_equals(Snapshot(undisturbed.parameters(), other))


def test_a_state_of_another_dtype_is_refused_after_a_warm_start() -> None:
    model = net()
    opt = KFAC(model, likelihood="categorical")
    warm_start(opt, model)
    model.double()
    with pytest.raises(RuntimeError, match=r"must be torch.float64 for torch.float64, got torch.f"):
        train(model, opt, [0])


# ------------------------------------------------------------------ states that are refused


def two_layers(hidden: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden, bias=False), nn.Linear(hidden, 3, bias=False))


def started(make: type[Any], model: nn.Module, **settings: Any) -> Any:
    """The optimizer of a model after a warm start."""
    opt = make(model, likelihood="categorical", **settings)
    opt.warm_start(model(x) for x in torch.randn(2, 5, 4))
    assert opt.state_dict()["state"]
    return opt


def damaged(key: str, value: Any) -> Callable[[], Any]:
    """A state with another setting, or another entry for its first parameter."""

    def change() -> Any:
        state_dict = copy.deepcopy(started(KFAC, two_layers()).state_dict())
        (group,) = state_dict["param_groups"]
        (state_dict["state"][0] if isinstance(value, list | Tensor) else group)[key] = value
        return state_dict

    return change


def observed(hidden: int) -> Any:
    """A state with an observation that no step has used."""
    model = two_layers(hidden)
    opt = started(KFAC, model)
    opt.observe(model(torch.randn(5, 4)))
    return opt.state_dict()


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "width": (lambda: started(KFAC, two_layers(5)).state_dict(), "of another model"),
    "inverse": (
        lambda: started(KFAC, two_layers(), inverse="eigenbasis").state_dict(),
        "factors must have shapes",
    ),
    "number": (lambda: started(KFAC, nn.Linear(4, 3)).state_dict(), "another model"),
    "observations": (
        lambda: started(KFAC, two_layers()).state_dict() | {"observed": observed(5)["observed"]},
        r"\['observed'\] must have sums of sizes \(4, 4\) for parameter 0, got",
    ),
    "Adam": (lambda: torch.optim.Adam(two_layers().parameters()).state_dict(), "optimizer's"),
    "stats": (damaged("stats", [torch.eye(4)]), r"\['state'\]\[0\]: stats must have shapes"),
    "factors": (damaged("factors", [1, 2]), r"\['state'\]\[0\]: factors must be made"),
    "momentum": (damaged("momentum", torch.zeros(3, 4)), "the momentum must be"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_that_does_not_fit_is_refused(other: str) -> None:
    state, message = OTHERS[other][0](), OTHERS[other][1]
    model = two_layers()
    opt = started(KFAC, model)
    before = Snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match=f"state_dict.*{message}"):
        opt.load_state_dict(state)
    before.assert_unchanged()
