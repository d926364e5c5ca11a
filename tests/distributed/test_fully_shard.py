"""Parameters that fully_shard has sharded train as one process on the batches of all."""

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import close
from optimizers import EARLY, equal
from processes import run_in
from replicas import Batches, assert_trained_as, drawn, load, save, train, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from tnt_optim import TNT, Shampoo, with_fallback

STEPS, SHAPE = 7, (6, 4)  # SHAPE: of a batch's inputs

FORMS: dict[str, tuple[type[TNT | Shampoo], dict[str, Any]]] = {
    "tnt": (TNT, {"weight_decay": 0.1}),
    "grafted": (TNT, {"graft": "adam", "relative_damping": True, "estimator": "mle"}),
    "in groups": (TNT, {}),
    "in blocks": (TNT, {"block_size": 4}),
    "empirical": (TNT, EARLY),
    "shampoo": (Shampoo, {"graft": "sgd"}),
}
FLOAT64 = MixedPrecisionPolicy()  # FSDP's default: the dtype of the parameters
# Processes, and whether half of them replicate the others (HSDP).
MESHES = [(2, False), (4, False), (4, True)]
LARGER = [(8, False), (8, True)]


class Net(nn.Module):
    """Sizes that no number of processes divides, one vector shorter than four; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hidden = nn.Linear(4, 5)
        self.middle = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.out = nn.Linear(7, 3)
        self.unused = nn.Linear(2, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.out(self.middle(torch.tanh(self.hidden(x))))
        return logits


def sharded_net(
    processes: int, hybrid: bool, *, reshard: bool = True, policy: MixedPrecisionPolicy = FLOAT64
) -> Net:
    net = Net()
    shape, names = ((processes,), ("shard",))
    if hybrid:
        shape, names = (2, processes // 2), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(net.middle, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


def made_optimizer(net: nn.Module, form: str) -> TNT | Shampoo:
    method, settings = FORMS[form]
    defaults: dict[str, Any] = {
        "lr": 0.05,
        "damping": 0.1,
        "stat_interval": 2,
        "inverse_interval": 3,
    }
    if method is TNT:
        defaults["likelihood"] = "categorical"
    params: Any = net.parameters()
    if form == "in groups":  # one has a single bias: most processes own nothing of it
        single = net.get_parameter("hidden.bias")
        rest = [p for p in net.parameters() if p is not single]
        params = [{"params": rest}, {"params": [single], "stat_interval": 3}]
    return method.paper(params, **{**defaults, **settings})


def refusal_of_graphs(rank: int, processes: int) -> str:
    opt = Shampoo.paper(sharded_net(processes, False).parameters())
    vars(opt)["capturable"] = True  # no GPU is needed to be refused
    with pytest.raises(RuntimeError) as caught:
        opt.step()
    return str(caught.value)


def test_cuda_graphs_are_refused_even_by_a_single_process() -> None:
    assert all("whole parameters" in message for message in run_in(1, refusal_of_graphs))


@functools.cache
def alone(form: str, processes: int) -> tuple[list[Tensor], list[Tensor]]:
    """End and start of one process's training on the batches of all."""
    net = Net()
    start, opt = whole(net), made_optimizer(net, form)
    train(net, opt, [drawn(processes, step, *SHAPE) for step in range(STEPS)])
    return whole(net), start


def piece(rank: int, processes: int, hybrid: bool, form: str) -> dict[str, Any]:
    net = sharded_net(processes, hybrid, reshard=form != "grafted")
    params = list(net.parameters())
    opt = made_optimizer(net, form)
    train(net, opt, [[drawn(processes, step, *SHAPE)[rank]] for step in range(STEPS)])
    return {
        "ends": whole(net),
        "own": [bool(opt.state[p].get("stats")) if p in opt.state else None for p in params],
        "empty": sum(p.to_local().numel() == 0 for p in params),  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize(
    ("form", "processes", "hybrid"),
    [
        *((form, *mesh) for form in FORMS for mesh in MESHES),
        *(("grafted", *mesh) for mesh in LARGER),
    ],
)
def test_pieces_train_as_one_process(form: str, processes: int, hybrid: bool) -> None:
    ranks = run_in(processes, piece, hybrid, form)
    wanted, start = alone(form, processes)
    assert_trained_as([rank["ends"] for rank in ranks], wanted, start)
    # Every parameter has one owner rank, in each half; unused ones have no state.
    for number in range(len(wanted)):
        own = [rank["own"][number] for rank in ranks]
        assert own == [None] * processes if number >= 6 else own.count(True) == 1 + hybrid
    if processes >= 4 and not hybrid:
        assert sum(rank["empty"] for rank in ranks) > 0  # a vector of 3 over 4 processes, and so on


def accumulated(rank: int, processes: int, hybrid: bool) -> dict[str, Any]:
    """Two micro-batches a step, averaged at the second."""
    net = sharded_net(processes, hybrid)
    opt = made_optimizer(net, "tnt")
    params, found = list(net.parameters()), {}
    for step in range(3):
        opt.zero_grad()
        for micro in range(2):
            x, y = drawn(2 * processes, step, *SHAPE)[micro * processes + rank]
            net.set_requires_gradient_sync(micro == 1)  # type: ignore[operator]
            out = net(x)
            opt.observe(out)
            (cross_entropy(out, y) / 2).backward()
        if step == 0:
            found["grads"] = [p.grad.full_tensor() for p in params[:6]]  # type: ignore[union-attr]
        opt.step()
        if step == 0:
            held = [opt.state[p].get("stats", []) for p in params[:6]]
            found["stats"] = [[stat.clone() for stat in stats] for stats in held]
    return found


@pytest.mark.parametrize(("processes", "hybrid"), [(2, False), (4, True)])
def test_accumulated_gradients_are_kept_and_the_first_micro_batch_is_observed(
    processes: int, hybrid: bool
) -> None:
    ranks = run_in(processes, accumulated, hybrid)
    net = Net()
    opt = made_optimizer(net, "tnt")
    for micro, (x, y) in enumerate(drawn(2 * processes, 0, *SHAPE)):
        out = net(x)
        if micro < processes:
            opt.observe(out)
        (cross_entropy(out, y) / (2 * processes)).backward()
    grads = [p.grad.clone() for p in list(net.parameters())[:6] if p.grad is not None]
    opt.step()
    for rank in ranks:
        close(rank["grads"], grads)
    for number, param in enumerate(list(net.parameters())[:6]):
        held = [rank["stats"][number] for rank in ranks if rank["stats"][number]]
        assert len(held) == 1 + hybrid
        for stats in held:
            close(stats, opt.state[param]["stats"])


# How the gradients of a micro-batch wait for those of the next: the settings of FSDP, whether
# half of the processes replicate the others, and what keeps them waiting.
WAITING = {
    "in every process": (FLOAT64, False, "set_requires_gradient_sync"),
    "in another dtype": (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        False,
        "set_requires_gradient_sync",
    ),
    "in each half": (FLOAT64, True, "set_requires_all_reduce"),
}


def observed_late(rank: int, processes: int, how: str) -> None:
    policy, hybrid, wait = WAITING[how]
    net = sharded_net(processes, hybrid, policy=policy)
    opt = made_optimizer(net, "tnt")
    getattr(net, wait)(False)
    x, y = drawn(processes, 2, *SHAPE)[rank]
    cross_entropy(net(x).double(), y).backward()
    with pytest.raises(RuntimeError, match="first micro-batch"):
        opt.observe(net(x))


@pytest.mark.parametrize("how", WAITING)
def test_an_observation_after_the_first_micro_batch_is_refused(how: str) -> None:
    run_in(2, observed_late, how)


def with_a_fallback(rank: int, processes: int) -> dict[str, Any]:
    """All gradients, also those of a fallback's parameters, with and without an observation."""
    found: dict[str, Any] = {}
    for observed in (False, True):
        net = sharded_net(processes, False)
        matrices = [p for p in net.parameters() if p.dim() == 2]
        rest = [p for p in net.parameters() if p.dim() < 2]
        main = TNT.paper(matrices, stat_interval=1, likelihood="categorical")
        opt = with_fallback(main, torch.optim.SGD(rest, lr=0.1))
        x, y = drawn(processes, 0, *SHAPE)[rank]
        out = net(x)
        if observed:
            opt.observe(out)
        cross_entropy(out, y).backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        found[f"grads {observed}"] = [g.full_tensor() for g in grads]  # type: ignore[attr-defined]
        if observed:
            opt.step()
            found["figures"] = opt.diagnostics()
    return found


def test_an_observation_leaves_all_gradients_alone() -> None:
    ranks = run_in(2, with_a_fallback)
    for rank in ranks:
        assert len(rank["grads True"]) == 6
        assert all(map(torch.equal, rank["grads True"], rank["grads False"]))
    # Each process has figures of the parameters that it owns.
    keys = [set(rank["figures"]) for rank in ranks]
    assert keys[0] and keys[1] and not keys[0] & keys[1]
    assert {key.split("/")[0] for key in keys[0]} >= {"momentum_norm", "condition"}


def hooked(rank: int, processes: int, hybrid: bool) -> list[tuple[int, bool]]:
    """What hooks after the gradients, of a parameter and of an input, have seen after each call."""
    net = sharded_net(processes, hybrid)
    opt = made_optimizer(net, "tnt")
    weight = net.hidden.weight
    x, y = drawn(processes, 0, *SHAPE)[rank]
    x.requires_grad_()
    seen: list[Tensor] = []
    handles = [
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone())),
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone())),
    ]
    found = []
    for _ in range(2):
        out = net(x)
        opt.observe(out)
        found.append((len(seen), x.grad is None and weight.grad is None))
        cross_entropy(out, y).backward()
        grads = [weight.grad.to_local(), x.grad]  # type: ignore[union-attr, attr-defined]
        own = all(any(map(torch.equal, [g] * 2, seen)) for g in grads)
        found.append((len(seen), own))
        for handle in handles:
            handle.remove()  # the second time the same gradients come, and no hook runs
        weight.grad, x.grad = None, None
    return found


def observed_after_the_backward(rank: int, processes: int) -> None:
    net = sharded_net(processes, False)
    x, y = drawn(processes, 0, *SHAPE)[rank]
    out = net(x)
    cross_entropy(out, y).backward()
    with pytest.raises(RuntimeError, match="observe must be called before the backward"):
        made_optimizer(net, "tnt").observe(out)


def test_an_observation_after_the_backward_is_refused() -> None:
    run_in(2, observed_after_the_backward)


@pytest.mark.parametrize(("processes", "hybrid"), MESHES)
def test_hooks_after_the_gradients_see_only_those_of_the_training(
    processes: int, hybrid: bool
) -> None:
    for found in run_in(processes, hooked, hybrid):
        assert [count for count, _ in found] == [0, 2, 2, 2]
        assert all(right for _, right in found)


def steps_on_one_batch(numbers: range) -> list[Batches]:
    """The same batch for every process, so that the mean does not depend on their number."""
    return [drawn(1, step, *SHAPE) for step in numbers]


def saved(rank: int, processes: int, folder: str) -> list[Tensor]:
    net = sharded_net(processes, False)
    opt = made_optimizer(net, "empirical")
    train(net, opt, steps_on_one_batch(range(4)))
    save(folder, net, opt)
    train(net, opt, steps_on_one_batch(range(4, 8)))
    return whole(net)


def loaded(rank: int, processes: int, folder: str) -> list[Tensor]:
    net = sharded_net(processes, False)
    opt = made_optimizer(net, "empirical")
    for param in list(net.unused.parameters()):
        param.requires_grad_(False)  # it has no state to load
    load(folder, net, opt)
    train(net, opt, steps_on_one_batch(range(4, 8)))
    return whole(net)


def test_a_checkpoint_goes_on_to_the_bit_and_in_other_numbers_of_processes(tmp_path: Path) -> None:
    wanted = run_in(2, saved, str(tmp_path))[0]
    for end in run_in(2, loaded, str(tmp_path)):
        assert equal(end, wanted)
    for end in run_in(4, loaded, str(tmp_path)):
        torch.testing.assert_close(end, wanted, rtol=0, atol=1e-11)


def consolidated(rank: int, processes: int, hybrid: bool) -> dict[str, Any]:
    """The state of all in process 0, and parameters then and four steps later."""
    net = sharded_net(processes, hybrid)
    opt = made_optimizer(net, "empirical")
    train(net, opt, steps_on_one_batch(range(4)))
    opt.consolidate_state_dict()
    found = {"state": copy.deepcopy(opt.state_dict()), "then": whole(net)}
    train(net, opt, steps_on_one_batch(range(4, 8)))
    return {**found, "ends": whole(net)}


@pytest.mark.parametrize(("processes", "hybrid"), [(2, False), (4, True)])
def test_a_consolidated_state_goes_on_in_one_process(processes: int, hybrid: bool) -> None:
    found = run_in(processes, consolidated, hybrid)[0]
    net = Net()
    with torch.no_grad():
        for param, value in zip(net.parameters(), found["then"], strict=True):
            param.copy_(value)
    opt = made_optimizer(net, "empirical")
    opt.load_state_dict(found["state"])
    train(net, opt, steps_on_one_batch(range(4, 8)))
    for param, wanted in zip(net.parameters(), found["ends"], strict=True):
        torch.testing.assert_close(param.detach(), wanted, rtol=0, atol=1e-11)


def gathered(rank: int, processes: int, hybrid: bool, how: str) -> dict[str, Any]:
    """Ends of a training, and of one resumed from a state that process 0 gathers and sends.

    The state is whole by a "call" before, by a "hook", or not at all; also returns the warnings.
    """
    net, other = sharded_net(processes, hybrid), sharded_net(processes, hybrid)
    opt, fresh = made_optimizer(net, "empirical"), made_optimizer(other, "empirical")
    train(net, opt, steps_on_one_batch(range(4)))
    if how == "call":
        opt.consolidate_state_dict()
    elif how == "hook":
        opt.register_state_dict_pre_hook(lambda opt: opt.consolidate_state_dict())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        whole_state = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(net, opt, options=whole_state)
        other.load_state_dict(net.state_dict())
        for param in other.unused.parameters():
            param.requires_grad_(False)  # it has no state to load
        fresh.allocate_state()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_optimizer_state_dict(other, fresh, state, options=options)
    for model, optimizer in ((net, opt), (other, fresh)):
        train(model, optimizer, steps_on_one_batch(range(4, 8)))
    said_here = [str(w.message) for w in said if w.category is RuntimeWarning]
    return {"ends": whole(net), "resumed": whole(other), "said": said_here}


@pytest.mark.parametrize("how", ["call", "hook"])
@pytest.mark.parametrize(("processes", "hybrid"), [(2, False), (4, True)])
def test_a_full_state_goes_on_to_the_bit(processes: int, hybrid: bool, how: str) -> None:
    for found in run_in(processes, gathered, hybrid, how):
        assert equal(found["ends"], found["resumed"])
        assert found["said"] == []


def test_a_full_state_of_one_part_is_warned_of() -> None:
    """Where it is saved, in every process; where it is loaded, in those that it leaves at zero."""
    ranks = run_in(2, gathered, False, "")
    assert not equal(ranks[0]["ends"], ranks[0]["resumed"])
    for rank, found in enumerate(ranks):
        assert "one process's part of the state" in found["said"][0]
        assert "full_state_dict=True, call consolidate_state_dict()" in found["said"][0]
        assert ["zeros for the statistics" in text for text in found["said"][1:]] == [True] * rank


def divided(rank: int, processes: int) -> list[list[Tensor]]:
    """Statistics with FSDP's own division of gradients, and with the user's."""
    found = []
    for factor in (None, 1.0):
        net = sharded_net(processes, False)
        if factor is not None:
            net.set_gradient_divide_factor(factor)  # type: ignore[operator]
        opt = made_optimizer(net, "tnt")
        train(net, opt, [[drawn(processes, 0, *SHAPE)[rank]]])
        found.append([s for state in opt.state.values() for s in state.get("stats", [])])
    return found


def test_statistics_do_not_depend_on_the_users_division_of_gradients() -> None:
    for own, divided_by_one in run_in(2, divided):
        assert own and equal(own, divided_by_one)


def refused(rank: int, processes: int) -> list[str]:
    messages = []
    for which in ("some", "a later group", "two dimensions", "master copies"):
        net = Net()
        mesh = init_device_mesh("cpu", (processes,))
        if which in ("some", "a later group"):
            fully_shard(net.middle, mesh=mesh)
        elif which == "master copies":
            fully_shard(net.bfloat16(), mesh=mesh)
        else:
            both = init_device_mesh("cpu", (1, processes), mesh_dim_names=("a", "b"))
            weight = torch.distributed.tensor.distribute_tensor(
                net.out.weight, both, [Shard(0), Shard(1)]
            )
            net = nn.ParameterList([nn.Parameter(weight)])  # type: ignore[assignment]
        try:
            params: Any = net.parameters()
            if which == "a later group":
                params = [{"params": net.out.parameters()}, {"params": net.middle.parameters()}]
            opt = Shampoo.paper(params, rounding="master")
            for param in net.parameters():
                param.grad = torch.ones_like(param)
            opt.step()
        except ValueError as error:
            messages.append(str(error))
    return messages


def tensor_parallel(rank: int, processes: int) -> str:
    """Processes with the same batch and pieces of the layers."""
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    mesh = init_device_mesh("cpu", (processes,))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    opt = TNT(net.parameters(), likelihood="categorical")
    with pytest.raises(ValueError, match="sharded by fully_shard") as caught:
        opt.observe(net(torch.ones(5, 4)))
    assert all(param.grad is None for param in net.parameters())
    return str(caught.value)


def test_sampled_gradients_of_tensor_parallelism_are_refused() -> None:
    assert all(
        "Without warm_start and likelihood, TNT works" in message
        for message in run_in(2, tensor_parallel)
    )


class TokenNet(nn.Module):
    """An embedding and layers that tensor parallelism can divide; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(10, 6)
        self.wide = nn.Linear(6, 8, bias=False)
        self.narrow = nn.Linear(8, 10, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.narrow(torch.tanh(self.wide(self.tokens(x))))
        return hidden


def token_batches() -> list[Batches]:
    rng = torch.Generator().manual_seed(0)
    pairs = [torch.randint(10, (2, 12), generator=rng) for _ in range(STEPS)]
    return [[(x, y)] for x, y in pairs]


def tensor_parallel_tokens(rank: int, processes: int, embedding: str) -> list[Tensor]:
    net = TokenNet()
    layouts = {
        "rows": RowwiseParallel(input_layouts=Replicate()),
        "columns": ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {"tokens": layouts[embedding], "wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (processes,)), plan)
    train(net, Shampoo.paper(net.parameters(), lr=0.01), token_batches())
    return whole(net)


@pytest.mark.parametrize("embedding", ["rows", "columns"])
def test_tensor_parallel_layers_train_as_one_process(embedding: str) -> None:
    """The gradient of an embedding that is cut by rows comes whole."""
    ends = run_in(2, tensor_parallel_tokens, embedding)
    alone = TokenNet()
    start = whole(alone)
    train(alone, Shampoo.paper(alone.parameters(), lr=0.01), token_batches())
    assert_trained_as(ends, whole(alone), start)


def test_other_placements_and_master_copies_are_refused() -> None:
    for messages in run_in(2, refused):
        assert "all be sharded over one device mesh, or none" in messages[0]
        assert "or none, got both: parameter" in messages[1]
        assert "sharded along one dimension" in messages[2]
        assert "rounding='master' is not for sharded parameters" in messages[3]
