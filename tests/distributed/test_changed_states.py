"""States that no longer fit, and states that are only allocated, in several processes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizers import equal, made
from processes import run_in
from replicas import drawn, train, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

SHAPE = (6, 4)  # of a batch's inputs
KINDS = ("fully_shard", None, "directions", "inverses")
# (how the processes divide the work, the optimizer)
CASES = [(kind, name) for kind in KINDS for name in ("sampled", "empirical", "shampoo")]
CASES += [(kind, "kfac") for kind in (None, "inverses")]
CASES += [(kind, "fallback") for kind in ("fully_shard", None)]


def started(kind: str | None, name: str) -> tuple[nn.Module, nn.Module, Any]:
    """The parameters' module, the model to call, and a new optimizer."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model: nn.Module = net
    if kind == "fully_shard":
        fully_shard(net, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    else:
        model = DistributedDataParallel(net)
    shard = {} if kind in (None, "fully_shard") else {"shard": kind}
    return net, model, made(name, net, graft="adam", **shard)


def steps(numbers: range, rank: int, processes: int) -> list[list[tuple[Tensor, Tensor]]]:
    return [[drawn(processes, number, *SHAPE)[rank]] for number in numbers]


def content(opt: Any) -> dict[Any, dict[str, Any]]:
    """Copies of all entries of the state."""
    return {p: copy.deepcopy(state) for p, state in opt.state.items()}


def is_same(a: Any, b: Any) -> bool:
    """Whether both have the same entries, to the bit."""
    if isinstance(a, DTensor):
        return torch.equal(a.to_local(), b.to_local())
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


def changed(rank: int, processes: int, kind: str | None, name: str) -> list[Any]:
    """Messages of two refused steps, and whether nothing has changed."""
    net, model, opt = started(kind, name)
    train(model, opt, steps(range(2), rank, processes))
    param = net.get_parameter("2.weight")
    value: Tensor = torch.ones(5, 3, dtype=torch.float64)
    if isinstance(param, DTensor):  # its shape cannot be set: another parameter gets the state
        value = distribute_tensor(value, param.device_mesh, param.placements)
        new = nn.Parameter(value)
        for group in opt.param_groups:
            group["params"][:] = [new if p is param else p for p in group["params"]]
        states = opt.main.state if name == "fallback" else opt.state
        states[new] = states.pop(param)
        param = new
    else:
        param.data = value
    param.grad = torch.ones_like(param)
    before, state = whole(net), content(opt)
    counts = [group.get("step") for group in opt.param_groups]
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            opt.step()
        messages.append(str(caught.value))
    same = equal(before, whole(net)) and is_same(state, content(opt))
    return [messages, same and counts == [group.get("step") for group in opt.param_groups]]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_process_refuses_a_changed_shape(kind: str | None, name: str) -> None:
    """A process that keeps nothing of the parameter's shape in its state, too."""
    for messages, same in run_in(2, changed, kind, name):
        assert same
        for message in messages:
            assert "2.weight" in message if name == "kfac" else "shape (5, 3)" in message
            assert "del opt.state[param]" in message


def asked(rank: int, processes: int, kind: str | None, name: str) -> list[list[Tensor]]:
    """Ends of two trainings; torch asks for a state before the second one."""
    ends = []
    for asks in (False, True):
        net, model, opt = started(kind, name)
        if asks:
            get_optimizer_state_dict(model, opt)
            assert all(p.grad is None and opt.state[p] for p in net.parameters())
            assert all(group["lr"] > 0 and not group.get("step") for group in opt.param_groups)
        train(model, opt, steps(range(5), rank, processes))
        ends.append(whole(net))
    return ends


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_state_that_torch_asks_for_changes_no_training(kind: str | None, name: str) -> None:
    """With 4 processes of ``fully_shard`` one has no piece of the last layer."""
    for without, found in run_in(4 if kind == "fully_shard" else 2, asked, kind, name):
        assert equal(without, found)


def warmed_up(rank: int, processes: int) -> list[int]:
    """The step count after a real first step with a rate of zero."""
    net, model, opt = started("fully_shard", "empirical")
    opt.param_groups[0]["lr"] = 0.0
    pieces = [p.to_local().numel() for p in net.parameters()]  # type: ignore[attr-defined]
    # The loss reaches the bias of three entries alone: the last process has no piece of it.
    output = model(drawn(1, 0, *SHAPE)[0][0])
    (output * torch.ones(3, dtype=torch.float64)).sum().backward()
    for param in list(net.parameters())[:3]:
        param.grad = torch.zeros_like(param)
    opt.step()
    return [opt.param_groups[0]["step"], pieces[3]]


def test_a_process_without_a_piece_takes_part_in_a_step_with_a_rate_of_zero() -> None:
    assert run_in(4, warmed_up) == [[1, 1], [1, 1], [1, 1], [1, 0]]


def resumed(
    rank: int, processes: int, folder: str, kind: str | None, name: str
) -> list[list[Tensor]]:
    """Ends of a training, and of one that loads its state by name without ``allocate_state``."""
    net, model, opt = started(kind, name)
    train(model, opt, steps(range(3), rank, processes))
    saved = {"net": net.state_dict(), "opt": get_optimizer_state_dict(model, opt)}
    dcp.save(saved, checkpoint_id=folder)
    other, other_model, fresh = started(kind, name)
    target = {"net": other.state_dict(), "opt": get_optimizer_state_dict(other_model, fresh)}
    dcp.load(target, checkpoint_id=folder)
    other.load_state_dict(target["net"])
    set_optimizer_state_dict(other_model, fresh, target["opt"])
    for m, o in ((model, opt), (other_model, fresh)):
        train(m, o, steps(range(3, 6), rank, processes))
    return [whole(net), whole(other)]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_checkpoint_loads_into_the_state_that_torch_asks_for(
    kind: str | None, name: str, tmp_path: Path
) -> None:
    for wanted, found in run_in(2, resumed, str(tmp_path), kind, name):
        assert equal(wanted, found)
