"""Replicas that differ: unused parameters, failures, missing calls, faults; and refusals."""

import copy
import math
import os
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import flat
from commands import python
from drawn import close
from kfac_models import Heads, least_likely
from optimizers import NO_FAILURES, ValueHead, equal, values
from oracle import contraction
from processes import run_in
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import KFAC, TNT, Masked, PreconditionerError, Shampoo
from tnt_optim.distributed.ownership import Load, assign, load_of
from tnt_optim.failures import FAILURES_IN_A_ROW

ROWS = 6
SETTINGS: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "stat_interval": 1, "inverse_interval": 2}
SHARDS = (None, "directions", "inverses")


def gradient(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    return {n: g for n, g in zip(named, grads, strict=True) if g is not None}


def heads_of_their_own(rank: int, processes: int) -> dict[str, Any]:
    """Process r uses head r; at the third step both use head 0; the third head is unused."""
    torch.manual_seed(0)
    model = Heads(3)
    replicas = DistributedDataParallel(model, find_unused_parameters=True)
    opt = TNT.paper(model.parameters(), likelihood=least_likely, **SETTINGS)
    named = dict(model.named_parameters())
    first: dict[str, Tensor] = {}
    for step, head in enumerate((rank, rank, 0)):
        opt.zero_grad()
        x = torch.randn(processes, ROWS, 4, dtype=torch.float64)[rank]
        output = replicas(x, head)
        if step == 0:
            first = gradient(model, least_likely(output))
        if step == 2:
            held = [s.clone() for s in opt.state[named["heads.1.weight"]]["stats"]]
        opt.observe(output)
        cross_entropy(output, torch.zeros(ROWS, dtype=torch.int64)).backward()
        if step == 0:
            grads = {n: None if p.grad is None else p.grad.clone() for n, p in named.items()}
        opt.step()
        if step == 0:
            stats = {n: [s.clone() for s in opt.state[p]["stats"]] for n, p in named.items()
                     if opt.state.get(p)}  # fmt: skip
    kept = opt.state[named["heads.1.weight"]]["stats"]
    return {
        "sampled": first,
        "stats": stats,
        "grads": grads,
        "head 1 kept": all(map(torch.equal, kept, held)),
        "ends": values(model),
    }


def test_unused_parameters_of_some_processes_and_of_all() -> None:
    ranks = run_in(2, heads_of_their_own)
    for rank in ranks:
        assert all(map(torch.equal, rank["ends"], ranks[0]["ends"]))
        for name, stats in rank["stats"].items():
            sampled = [r["sampled"].get(name, torch.zeros(1, dtype=torch.float64)) for r in ranks]
            mean = (sampled[0] + sampled[1]) / 2
            for mode, stat in enumerate(stats):
                close(stat, contraction(mean, mode))
        # A parameter has statistics and a gradient if at least one process used it.
        assert set(rank["stats"]) == {n for n in rank["grads"] if "heads.2" not in n}
        assert rank["grads"]["heads.2.weight"] is None
        assert rank["head 1 kept"]  # at a step at which no process reached it


def own_net() -> tuple[nn.Module, DistributedDataParallel]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return net, DistributedDataParallel(net)


def batch(rank: int, key: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * key + rank)
    x = torch.randn(ROWS, 4, generator=rng, dtype=torch.float64)
    return x, torch.randint(3, (ROWS,), generator=rng)


def forward(model: nn.Module, opt: TNT, rank: int, key: int) -> Tensor:
    """The loss of one process's batch; its output is observed."""
    opt.zero_grad()
    x, y = batch(rank, key)
    output = model(x)
    opt.observe(output)
    return cross_entropy(output, y)


def one_is_not_finite(rank: int, processes: int, shard: str | None) -> dict[str, Any]:
    """A sampled gradient that is not finite, of one process and then of both, five times."""
    net, replicas = own_net()

    def likelihood(output: Tensor) -> Tensor:
        loss = least_likely(output)
        return loss * math.nan if step > 1 or step == rank == 1 else loss

    opt = TNT.paper(net.parameters(), likelihood=likelihood, shard=shard, **SETTINGS)
    weight = net[0].weight
    found: dict[str, Any] = {"failures": [], "stats": [], "sampled": [], "message": ""}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(7):
            opt.zero_grad()
            x, y = batch(rank, step)
            output = replicas(x)
            found["sampled"].append(gradient(net, least_likely(output))["0.weight"])
            opt.observe(output)
            cross_entropy(output, y).backward()
            try:
                opt.step()
            except PreconditionerError as error:
                found["message"] = str(error)
            found["failures"].append(opt.failures()["skipped_statistics"])
            found["stats"].append([s.clone() for s in opt.state[weight].get("stats", [])])
    found["warned"] = sum("not finite" in str(w.message) for w in warned)
    found["ends"] = values(net)
    return found


@pytest.mark.parametrize("shard", SHARDS)
def test_an_observation_that_is_not_finite_in_one_is_left_out_in_all(
    shard: str | None,
) -> None:
    ranks = run_in(2, one_is_not_finite, shard)
    for rank in ranks:
        assert all(map(torch.equal, rank["ends"], ranks[0]["ends"]))
        assert all(bool(end.isfinite().all()) for end in rank["ends"])
        assert rank["failures"] == [0, 0, 1, 2, 3, 4, 5]
        assert rank["warned"] == 4
        assert "time 5 in a row" in rank["message"]
        assert rank["message"] == ranks[0]["message"]
        if rank["stats"][0]:
            both = (ranks[0]["sampled"][0] + ranks[1]["sampled"][0]) / 2
            alone = ranks[0]["sampled"][1]
            for mode in range(2):
                first = contraction(both, mode)
                close(rank["stats"][0][mode], first)
                close(rank["stats"][1][mode], 0.9 * first + 0.1 * contraction(alone, mode))
                assert torch.equal(rank["stats"][2][mode], rank["stats"][1][mode])
    assert sum(bool(rank["stats"][0]) for rank in ranks) == (1 if shard else 2)


def inverses_fail(rank: int, processes: int, shard: str | None) -> dict[str, Any]:
    """The statistics of one parameter become infinite in its owner rank, and in no other."""
    net, replicas = own_net()
    opt = TNT.paper(net.parameters(), likelihood=least_likely, shard=shard, **SETTINGS)
    found: dict[str, Any] = {"raised at": None, "message": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(20):
            forward(replicas, opt, rank, step).backward()
            try:
                opt.step()
            except PreconditionerError as error:
                found.update({"raised at": step, "message": str(error)})
                break
            for stat in opt.state[net[0].weight].get("stats", []):
                stat.fill_(math.inf)
    found["failures"] = opt.failures()
    found["ends"] = values(net)
    return found


@pytest.mark.parametrize("shard", SHARDS)
def test_repeated_failures_of_an_owner_rank_stop_all(shard: str | None) -> None:
    ranks = run_in(2, inverses_fail, shard)
    # Inverses at 1 (they are young), 2, 4, 6 and 8; the fifth in a row is one too many.
    assert [rank["raised at"] for rank in ranks] == [8, 8]
    assert "time 5 in a row" in ranks[0]["message"]
    assert ranks[0]["message"] == ranks[1]["message"]
    assert ranks[0]["failures"] == ranks[1]["failures"]
    assert all(map(torch.equal, ranks[0]["ends"], ranks[1]["ends"]))


def observed_by_some(rank: int, processes: int, find_unused: bool) -> dict[str, Any]:
    """Both observe at first, then one of them, then none."""
    net, _ = own_net()
    replicas = DistributedDataParallel(net, find_unused_parameters=find_unused)
    opt = TNT.paper(net.parameters(), likelihood=least_likely, **SETTINGS)
    if find_unused:  # then every step asks which parameters are reached
        opt.warm_start([replicas(batch(rank, 9)[0])])
    stats, sampled = [opt.state[p]["stats"][0].clone() for p in [net[0].weight] if find_unused], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step, who in enumerate([(1,), ()] if find_unused else [(0, 1), (1,), ()]):
            opt.zero_grad()
            x, y = batch(rank, step)
            output = replicas(x)
            sampled.append(gradient(net, least_likely(output))["0.weight"])
            if rank in who:
                opt.observe(output)
            cross_entropy(output, y).backward()
            opt.step()
            stats.append(opt.state[net[0].weight]["stats"][0].clone())
    messages = [str(w.message) for w in warned]
    return {"stats": stats, "sampled": sampled, "warned": messages, "failures": opt.failures()}


@pytest.mark.parametrize("find_unused", [False, True])
def test_an_observation_of_some_counts_and_one_of_none_warns(find_unused: bool) -> None:
    ranks = run_in(2, observed_by_some, find_unused)
    for rank in ranks:
        first, alone = rank["stats"][0], ranks[1]["sampled"][-2]
        if not find_unused:
            close(first, contraction((ranks[0]["sampled"][0] + ranks[1]["sampled"][0]) / 2, 0))
        close(rank["stats"][1], 0.9 * first + 0.1 * contraction(alone, 0))
        assert torch.equal(rank["stats"][2], rank["stats"][1])
        assert rank["failures"] == NO_FAILURES
    # With find_unused both processes know that one of them lacks an output.
    first, second = (rank["warned"] for rank in ranks)
    lacking, complete = "output, but this one did not", "output, but another one did not"
    assert [lacking in text for text in first] == [True]
    assert len(second) == 1
    assert (complete if find_unused else "observe(output) was not called") in second[0]


def refusals(rank: int, processes: int, made: Callable[[nn.Module], TNT | KFAC]) -> Tensor:
    """A static graph, whose gradients are still averaged, and CUDA graphs; the gradient."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    replicas = DistributedDataParallel(net, static_graph=True)
    opt = made(replicas)
    x, y = batch(rank, 0)
    output = replicas(x)
    for call in (lambda: opt.observe(output), lambda: opt.warm_start([output])):
        with pytest.raises(RuntimeError, match="static_graph=True"):
            call()
    assert not opt.state
    cross_entropy(output, y).backward()
    capturable = Shampoo.paper(net.parameters())
    vars(capturable)["capturable"] = True  # its constructor asks for a GPU
    with pytest.raises(RuntimeError, match="single process"):
        capturable.step()
    assert net.weight.grad is not None
    return net.weight.grad


def tnt_of(model: nn.Module) -> TNT:
    return TNT.paper(model.parameters(), likelihood="categorical")


def kfac_of(model: nn.Module) -> KFAC:
    return KFAC(model, likelihood="categorical")


def observed_by_one(
    rank: int, processes: int, made: Callable[[nn.Module], TNT | KFAC], attached: bool
) -> dict[str, Any]:
    """A step in which process 1 observes nothing; if ``attached``, because its batch has no row."""
    net, replicas = own_net()
    opt = made(replicas)
    if rank == 0 or attached:
        opt.attach(replicas, lambda output: output[: 0 if rank else None])
    x, y = batch(rank, 0)
    before = values(net)
    cross_entropy(replicas(x), y).backward()
    error = ""
    try:
        opt.step()
    except RuntimeError as caught:
        error = str(caught)
    return {"error": error, "moved": not equal(before, values(net)), "state": len(opt.state)}


@pytest.mark.parametrize("made", [tnt_of, kfac_of])
def test_a_process_that_never_observes_is_an_error_in_all(
    made: Callable[[nn.Module], TNT | KFAC],
) -> None:
    first, second = run_in(2, observed_by_one, made, False)
    assert "This process observed an output, but another one did not" in first["error"]
    assert "Another process observed an output, but this one did not" in second["error"]
    assert not (first["moved"] or second["moved"] or first["state"] or second["state"])


@pytest.mark.parametrize("made", [tnt_of, kfac_of])
def test_a_process_whose_batch_has_no_row_is_no_error(
    made: Callable[[nn.Module], TNT | KFAC],
) -> None:
    for rank in run_in(2, observed_by_one, made, True):
        assert not rank["error"] and rank["moved"]


def other_shapes(rank: int, processes: int, made: Callable[[nn.Module], TNT | KFAC]) -> list[str]:
    """What a process says of parameters that the other one has not."""
    net = nn.Linear(4, 3 + rank).double()
    opt = made(net)
    x, y = batch(rank, 0)
    opt.observe(output := net(x))
    cross_entropy(output, y).backward()
    messages = []
    for call in (opt.step, lambda: opt.warm_start([net(x)])):
        with pytest.raises(ValueError, match="process_group") as caught:
            call()
        messages.append(str(caught.value))
    assert not opt.state
    return messages


@pytest.mark.parametrize("made", [tnt_of, kfac_of])
def test_processes_with_other_parameters_are_refused(
    made: Callable[[nn.Module], TNT | KFAC],
) -> None:
    for messages in run_in(2, other_shapes, made):
        assert all("parameters of other shapes" in message for message in messages)


def early_question(rank: int, processes: int, shard: str) -> list[Tensor]:
    """One process asks for the memory before a layer is frozen; the weights after three steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    opt = TNT(net.double().parameters(), shard=shard, likelihood="categorical")
    if rank == 0:
        opt.memory_estimate()
    net[2].requires_grad_(False)
    model = DistributedDataParallel(net)
    for step in range(3):
        if step == 2:
            net, opt = copy.deepcopy((net, opt))
            net[2].requires_grad_(True)
            model = DistributedDataParallel(net)
        opt.zero_grad()
        x, y = batch(rank, step)
        opt.observe(output := model(x))
        cross_entropy(output, y).backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("shard", ["directions", "inverses"])
def test_owners_do_not_depend_on_when_a_process_asks(shard: str) -> None:
    one, other = run_in(2, early_question, shard)
    assert equal(one, other)
    assert all(bool(p.isfinite().all()) and p.abs().max() < 10 for p in one)


def divided_by_zero_redundancy(net: nn.Module, made: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own imports
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(net.parameters(), made)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "matrices of one shape": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    "a matrix and a vector": lambda: nn.Linear(4, 4),
}


def zero_redundancy(rank: int, processes: int, model: str, made: Any) -> str:
    """The error of the first step, and of a warm start."""
    net = MODELS[model]()
    opt = divided_by_zero_redundancy(net, made)
    x, before = torch.randn(5, 4), copy.deepcopy(list(net.parameters()))
    opt.optim.observe(net(x))
    net(x).square().mean().backward()
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer") as caught:
        opt.step()
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer"):
        opt.optim.warm_start([net(x)])
    assert equal(before, list(net.parameters())) and not opt.optim.state
    return str(caught.value)


SAMPLED = partial(TNT, likelihood="categorical")


@pytest.mark.parametrize(
    "made", [SAMPLED, *(partial(m, shard="directions") for m in (TNT, Shampoo))]
)
@pytest.mark.parametrize("model", MODELS)
def test_zero_redundancy_is_refused_where_processes_share_work(model: str, made: Any) -> None:
    """Also if the parameters of both processes have the same shapes, or one has only vectors."""
    messages = run_in(2, zero_redundancy, model, made)
    assert all("shard='directions'" in message for message in messages)


def zero_redundancy_trains(rank: int, processes: int, made: Any) -> list[list[Tensor]]:
    """With ZeroRedundancyOptimizer and without."""
    ends = []
    for divided in (True, False):
        torch.manual_seed(0)
        net = MODELS["matrices of one shape"]()
        opt = divided_by_zero_redundancy(net, made) if divided else made(net.parameters())
        for x in torch.randn(3, 5, 4):
            opt.zero_grad()
            output = net(x)
            getattr(opt, "optim", opt).observe(output)
            output.square().mean().backward()
            opt.step()
        ends.append([p.detach() for p in net.parameters()])
    return ends


@pytest.mark.parametrize(
    ("made", "processes"),
    [(SAMPLED, 1), (TNT, 1), (partial(TNT, early_roots=False), 2), (Shampoo, 2)],
)
def test_zero_redundancy_trains_where_processes_share_nothing(made: Any, processes: int) -> None:
    """Early roots end by the average over the parameters that a process has."""
    for found, wanted in run_in(processes, zero_redundancy_trains, made):
        assert equal(found, wanted)


def steps_of_padding(
    rank: int, processes: int, made: Callable[[nn.Module], TNT | KFAC], sharded: bool = False
) -> dict[str, Any]:
    """No row counts in any process, then in the second only."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3, bias=False).double()
    if sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (processes,)))
    model = net if sharded else DistributedDataParallel(net)
    opt = made(net)
    opt.param_groups[0]["stat_interval"] = 1
    kept = []
    for step in range(FAILURES_IN_A_ROW + 2):
        x, y = batch(rank, step)
        last = step == FAILURES_IN_A_ROW + 1
        counts = step == 0 or (last and rank == 1)
        opt.observe(Masked(output := model(x), torch.full((len(x),), counts)))
        cross_entropy(output, y).backward()
        opt.step()
        kept.append([s.clone() for s in opt.state[net.weight].get("stats", [])])
    return {"kept": kept, "failures": opt.failures()}


@pytest.mark.parametrize("made", [tnt_of, kfac_of])
def test_steps_of_padding_keep_the_statistics_and_are_no_failures(
    made: Callable[[nn.Module], TNT | KFAC],
) -> None:
    ranks = run_in(2, steps_of_padding, made)
    for rank in ranks:
        *kept, last = rank["kept"]
        assert all(equal(kept[0], stats) for stats in kept)
        assert not equal(kept[0], last) and equal(last, ranks[0]["kept"][-1])
        assert rank["failures"] == NO_FAILURES


def test_steps_of_padding_of_sharded_models_are_those_of_replicas() -> None:
    wanted = run_in(2, steps_of_padding, tnt_of)[0]["kept"]
    ranks = run_in(2, steps_of_padding, tnt_of, True)
    assert all(rank["failures"] == NO_FAILURES for rank in ranks)
    (found,) = [rank["kept"] for rank in ranks if rank["kept"][0]]  # the owner's
    for own, other in zip(found, wanted, strict=True):
        assert all(map(torch.allclose, own, other))


def padding_beside_nothing(rank: int, processes: int, shard: str | None, at: int) -> dict[str, Any]:
    """At one step one process's mask counts no row, and ``attach`` has none in the other."""
    net, replicas = own_net()
    opt = TNT.paper(net.parameters(), likelihood="categorical", **{**SETTINGS, "shard": shard})
    error = ""
    for step in range(4):
        opt.zero_grad()
        x, y = batch(rank, step)
        with opt.attach(net, lambda output: output[:0]):
            output = replicas(x)
        if step != at:
            opt.observe(output)
        elif rank == 0:
            opt.observe(Masked(output, torch.zeros(ROWS, dtype=torch.bool)))
        cross_entropy(output, y).backward()
        try:
            opt.step()
        except PreconditionerError as failure:
            error = str(failure)
            break
    return {"error": error, "ends": values(net), "failures": opt.failures()}


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("at", [0, 2])
def test_padding_in_one_and_nothing_in_another_is_the_same_in_both(
    shard: str | None, at: int
) -> None:
    ranks = run_in(2, padding_beside_nothing, shard, at)
    for rank in ranks:
        assert equal(rank["ends"], ranks[0]["ends"])
        assert ("no row of the output counts" in rank["error"]) == (at == 0)
        assert rank["failures"] == NO_FAILURES


def warm_started(rank: int, processes: int, how: str) -> list[Tensor]:
    """Statistics from the first process's batches: the second has padding only, or none."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3, bias=False).double()
    if how == "sharded":
        fully_shard(net, mesh=init_device_mesh("cpu", (processes,)))
    opt = TNT.paper(net.parameters(), likelihood="categorical", **SETTINGS)
    keys = range(0 if how == "none" and rank else 3)
    masks = torch.full((ROWS,), rank == 0)
    opt.warm_start((Masked(net(batch(rank, key)[0]), masks) for key in keys), model=net)
    return [s.clone() for s in opt.state[net.weight].get("stats", [])]


def test_a_warm_start_leaves_padding_out_in_all_processes() -> None:
    wanted = run_in(2, warm_started, "none")[0]
    assert all(stat.any() for stat in wanted)
    for how in ("padding", "sharded"):
        owners = [stats for stats in run_in(2, warm_started, how) if stats]
        assert len(owners) == (1 if how == "sharded" else 2)
        for stats in owners:
            close(stats, wanted)


def parted(rank: int, processes: int) -> list[str]:
    """The warning of a state that is one process's part, when the processes have separated."""
    net, replicas = own_net()
    opt = TNT.paper(
        net.parameters(), likelihood="categorical", **{**SETTINGS, "shard": "directions"}
    )
    forward(replicas, opt, rank, 0).backward()
    opt.step()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(dist, "is_initialized", lambda: False)
        opt.state_dict()
    return [str(warning.message) for warning in said]


def test_a_part_of_a_state_is_warned_of_after_the_processes_have_separated() -> None:
    for said in run_in(2, parted):
        assert len(said) == 1 and "one process's part of the state" in said[0]


def in_another_group(rank: int, processes: int) -> str:
    net, group = nn.Linear(4, 3), dist.new_group([0])
    if rank == 0:
        return ""
    opt = TNT(net.parameters(), process_group=group)
    net(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="process_group must contain this process") as caught:
        opt.step()
    return str(caught.value)


def test_a_group_without_this_process_is_refused() -> None:
    assert run_in(2, in_another_group)[1]


@pytest.mark.parametrize("made", [tnt_of, kfac_of])
def test_static_graphs_and_cuda_graphs_are_refused(made: Callable[[nn.Module], TNT | KFAC]) -> None:
    ranks = run_in(2, refusals, made)
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    loss = sum(cross_entropy(net(x), y) for x, y in (batch(rank, 0) for rank in range(2))) / 2
    for found in ranks:
        close(found, gradient(net, loss)["weight"])


def estimates(rank: int, processes: int, shard: str | None) -> tuple[int, int, bool]:
    """The estimated bytes, those after a step, and whether copies take the next step."""
    net, replicas = own_net()
    opt = Shampoo.paper(net.parameters(), shard=shard, graft="adam")
    estimate = opt.memory_estimate()["total"]
    for key in range(2):
        opt.zero_grad()
        x, y = batch(rank, key)
        cross_entropy(replicas(x), y).backward()
        opt.step()
    there = sum(t.nbytes for t in flat(dict(opt.state)))
    both = {"net": net, "opt": opt}
    copies = [copy.deepcopy(both), pickle.loads(pickle.dumps(both))]
    for twin in (both, *copies):
        for param in twin["net"].parameters():
            param.grad = torch.ones_like(param)
        twin["opt"].step()
    same = all(
        torch.equal(a, b)
        for twin in copies
        for a, b in zip(twin["net"].parameters(), net.parameters(), strict=True)
    )
    return estimate, there, same


@pytest.mark.parametrize("shard", SHARDS)
def test_memory_is_what_was_estimated(shard: str | None) -> None:
    ranks = run_in(2, estimates, shard)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    alone = Shampoo.paper(net.parameters(), graft="adam").memory_estimate()["total"]
    assert alone == 8 * (2 * (16 + 25 + 25 + 9) + 2 * (25 + 9) + 2 * (20 + 5 + 15 + 3))
    for estimate, there, same in ranks:
        assert estimate == there
        assert same
    total = sum(estimate for estimate, _, _ in ranks)
    if shard == "directions":
        assert total == alone
    elif shard is None:
        assert total == 2 * alone


def test_owners_are_balanced_in_work_and_bytes() -> None:
    rng = torch.Generator().manual_seed(0)
    sizes = torch.randint(8, 512, (60, 2), generator=rng).tolist()
    (group,) = TNT.paper([nn.Parameter(torch.ones(1))], likelihood="categorical").param_groups
    loads = [load_of(nn.Parameter(torch.ones(m, n)), group, "directions") for m, n in sizes]
    for processes in (2, 3, 8):
        owners = assign(loads, [Load()] * processes)
        assert owners == assign(loads, [Load()] * processes)
        for quantity in ("work", "size"):
            held = [0.0] * processes
            for owner, load in zip(owners, loads, strict=True):
                held[owner] += getattr(load, quantity)
            # A greedy choice exceeds the mean by at most the largest item.
            largest = max(getattr(load, quantity) for load in loads)
            assert max(held) <= sum(held) / processes + largest


def left_alone(rank: int, folder: str) -> None:
    """Process 1 observes but does not step; at last it exits.

    Process 0 shortens its timeout only before it waits in vain: a slow machine changes nothing.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found: list[tuple[str, bool]] = []
    for shard in SHARDS:
        group = dist.new_group()
        net, _ = own_net()
        model = DistributedDataParallel(net, process_group=group)
        share = {"shard": shard, "process_group": group}
        opt = TNT.paper(net.parameters(), likelihood=least_likely, **share, **SETTINGS)
        forward(model, opt, rank, 0).backward()
        opt.step()
        forward(model, opt, rank, 1).backward()
        if rank == 1:
            continue
        if shard == SHARDS[-1]:
            store.set("exit", "")
        else:
            _set_pg_timeout(timedelta(seconds=1), group)
        before = values(net)
        try:
            opt.step()
        except RuntimeError as error:
            found.append((str(error), equal(before, values(net))))
    if rank == 1:
        store.wait(["exit"])
        os._exit(1)
    torch.save(found, f"{folder}/found.pt")
    os._exit(0)  # gloo would wait for the other process


def test_a_process_that_does_not_step_is_an_error_for_the_others(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    started = [context.Process(target=left_alone, args=(r, str(tmp_path))) for r in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 1]
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert [unchanged for _, unchanged in found] == [True] * 3
    assert all("imeout" in message or "imed out" in message for message, _ in found[:2])


# ------------------------------------------------------------------ the end of the group

ENDED = """
import weakref
import torch, torch.distributed as dist
from tnt_optim import TNT
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
opt = TNT(torch.nn.Linear(2, 2).parameters(), likelihood="categorical")
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None
"""


def test_an_optimizer_leaves_no_reference_to_the_default_group() -> None:
    """Else gloo's threads run until Python exits, which sometimes aborts the process."""
    done = python("-c", ENDED)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ out of every output's reach


def with_a_value_head(
    rank: int, processes: int, shard: str | None, begins: int, saved: bool
) -> tuple[list[Tensor], dict[str, int]]:
    """The value's loss begins at a step; before the fourth, optimizer and state start over."""
    torch.manual_seed(0)
    model = ValueHead().double()
    replicas = DistributedDataParallel(model, find_unused_parameters=True)

    def made() -> TNT:
        return TNT(
            model.parameters(),
            stat_interval=10,
            interval_warmup=0,
            shard=shard,
            likelihood="categorical",
        )

    opt = made()
    for step in range(6):
        if saved and step == 3:
            state, opt = opt.state_dict(), made()
            opt.load_state_dict(state)
        rng = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(ROWS, 4, generator=rng, dtype=torch.float64)
        opt.zero_grad()
        logits, value = replicas(x)
        opt.observe(logits)
        loss = cross_entropy(logits, torch.zeros(ROWS, dtype=torch.int64))
        if step >= begins:
            loss = loss + value.square().mean()
        loss.backward()
        opt.step()
    return values(model), opt.failures()


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("begins", [0, 2])
def test_a_head_that_no_output_reaches_trains_and_resumes(shard: str | None, begins: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = run_in(2, with_a_value_head, shard, begins, False)
        again = run_in(2, with_a_value_head, shard, begins, True)
    for (plain, failures), (resumed, _) in zip(whole, again, strict=True):
        assert equal(plain, whole[0][0]) and equal(plain, resumed)
        assert failures == NO_FAILURES | {"unreached": 1}  # its bias is plain by default
