"""KFAC's replicas where something differs between them: reach, failures, calls; what is refused."""

import copy
import functools
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from io import BytesIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from drawn import close
from optimizers import no_host_reads
from processes import run_in
from test_kfac_replicas import (
    Case,
    Net,
    apart,
    ends,
    held,
    in_turn,
    made_net,
    made_optimizer,
    of_a_step,
    summed_loss,
)
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tnt_kernels import damped_inverse
from tnt_optim import KFAC, PreconditionerError
from tnt_optim.kfac.activations import LayerHook
from tnt_optim.kfac.sharing import owners

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "stat_interval": 2, "inverse_interval": 3}
CASE = Case("damped")
# A model's inputs, and labels.
Batch = tuple[tuple[Any, ...], Tensor]
Steps = Sequence[Sequence[Sequence[Batch]]]  # by step and process


def train(
    model: nn.Module, opt: KFAC, steps: Steps, rank: int | None = None, *, gradients: bool = True
) -> list[dict[str, list[Tensor]]]:
    """Trains as one process of several, or as one that does the work of all.

    Args:
        model: DistributedDataParallel for one of several.
        opt: observes every micro-batch.
        steps: the micro-batches.
        rank: which one of several.
        gradients: whether the user's come from the loss; else they are one.

    Returns:
        The statistics and inverses after each step.
    """
    found = []
    net = model.module if isinstance(model, DistributedDataParallel) else model
    for parts in steps:
        opt.zero_grad()
        batches = list(in_turn(parts)) if rank is None else parts[rank]
        number = sum(map(len, parts)) / (1 if rank is None else len(parts))
        for micro, (inputs, y) in enumerate(batches):
            model.require_backward_grad_sync = micro == len(batches) - 1
            out = model(*inputs)
            opt.observe(out)
            if gradients:
                (cross_entropy(out, y) / number).backward()
        if not gradients:
            for p in net.parameters():
                p.grad = torch.ones_like(p)
        opt.step()
        found.append(held(net, opt))
    return found


def assert_same_training(ranks: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """All processes end with the same bits, where one does but for rounding."""
    for rank in ranks:
        assert all(map(torch.equal, rank["ends"], ranks[0]["ends"]))
    assert apart(ranks[0]["ends"], wanted["ends"], wanted["start"]) <= FLOAT64_TRAJECTORY
    for got, expected in zip(ranks[0]["held"], wanted["held"], strict=True):
        assert got.keys() == expected.keys()
        for key, matrices in expected.items():
            if "stats" in key:
                for a, b in zip(got[key], matrices, strict=True):
                    assert float((a - b).norm()) <= FLOAT64_TRAJECTORY * float(b.norm())
    for rank in ranks:
        for step, first in zip(rank["held"], ranks[0]["held"], strict=True):
            assert all(all(map(torch.equal, step[key], first[key])) for key in first)


class Heads(nn.Module):
    """One body and some heads, of which a batch uses one; float64."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(heads))
        self.double()

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Logits of one head."""
        logits: Tensor = self.heads[head](torch.tanh(self.body(x)))
        return logits


# By step and process, the heads of its micro-batches. Of three all are used, of four not the last:
# once all have statistics no process asks any more whom the outputs reached.
USED = [
    [[0], [1]],
    [[0], [1]],
    [[0, 0], [0, 0]],  # statistics are due, and nobody reaches head 1
    [[0, 1], [0, 2]],  # none are, but of head 2 that is new, with the second process's second
    [[0], [2]],
    [[2, 1], [0, 0]],
    [[0], [0]],
]


def heads_of_batches(processes: int) -> Steps:
    rng = torch.Generator().manual_seed(1)

    def batch(head: int) -> Batch:
        x = torch.randn(6, 4, generator=rng, dtype=torch.float64)
        return (x, head), torch.randint(3, (6,), generator=rng)

    return [[[batch(head) for head in heads] for heads in step] for step in USED]


def made_heads(heads: int = 3, **settings: Any) -> tuple[Heads, KFAC]:
    torch.manual_seed(0)
    model = Heads(heads)
    return model, KFAC(model, **{**SETTINGS, **settings})


def heads_of_their_own(rank: int, processes: int) -> dict[int, Any]:
    found = {}
    for heads in (3, 4):
        model, opt = made_heads(heads)
        replicas = DistributedDataParallel(model, find_unused_parameters=True)
        steps = train(replicas, opt, heads_of_batches(processes), rank)
        found[heads] = {"held": steps, "ends": ends(model)}
    return found


@pytest.mark.parametrize("heads", [3, 4])
def test_layers_that_some_processes_use_or_none(heads: int) -> None:
    model, opt = made_heads(heads)
    start = ends(model)
    wanted = {"start": start, "held": train(model, opt, heads_of_batches(2)), "ends": ends(model)}
    ranks = [rank[heads] for rank in together(heads_of_their_own)]
    assert_same_training(ranks, wanted)
    steps = ranks[0]["held"]
    assert [sum("stats" in key for key in step) for step in steps] == [3, 3, 3, 4, 4, 4, 4]
    assert not any("heads.3" in key for key in steps[-1])
    for head, before, kept in ((1, 1, True), (1, 3, True), (2, 3, False), (2, 5, True)):
        key = f"heads.{head}.weight: stats"
        pairs = zip(steps[before][key], steps[before + 1][key], strict=True)
        assert all(torch.equal(a, b) == kept for a, b in pairs)


class Aside(nn.Module):
    """A head that a loss may have, and the output has not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aside = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor, beside: bool = True) -> tuple[Tensor, Tensor]:
        """Logits of both heads, or those of the first and zeros."""
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        return logits, self.aside(hidden) if beside else torch.zeros_like(logits)


# How the head aside is used: it is not warm-started, it is, the first process alone calls it; or
# the other process alone observes.
BESIDE = ("never observed", "warm", "called by one", "observed by one")


def train_beside(model: nn.Module, opt: KFAC, ranks: Sequence[int], how: str) -> list[Any]:
    """One process that does the work of ``ranks``, each with a batch of its own."""
    net = model.module if isinstance(model, DistributedDataParallel) else model
    if how == "warm":
        opt.warm_start(sum(model(batch(rank, 9)[0])) for rank in ranks)
    found = [held(net, opt)]
    for step in range(5):
        opt.zero_grad()
        for rank in ranks:
            x, y = batch(rank, step)
            out, aside = model(x, how != "called by one" or rank == 0)
            if how != "observed by one" or rank == 1:
                opt.observe(out)
            ((cross_entropy(out, y) + cross_entropy(aside, y)) / len(ranks)).backward()
        opt.step()
        found.append(held(net, opt))
    return found


def batch(rank: int, key: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * key + rank)
    x = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    return x, torch.randint(3, (6,), generator=rng)


def made_aside() -> tuple[Aside, KFAC]:
    torch.manual_seed(0)
    model = Aside()
    # Without sampling: one process that leaves out an observation numbers others than several.
    return model, KFAC(model, likelihood=least_likely, **SETTINGS)


def least_likely(output: Tensor) -> Tensor:
    """A likelihood that samples nothing: the loss at the least likely labels."""
    return cross_entropy(output, output.detach().argmin(1))


def beside(rank: int, processes: int) -> dict[str, Any]:
    found = {}
    for how in BESIDE:
        model, opt = made_aside()
        replicas = DistributedDataParallel(model, find_unused_parameters=how == "called by one")
        steps = train_beside(replicas, opt, [rank], how)
        found[how] = {"held": steps, "ends": ends(model), "unreached": opt._observed.unreached}
    return found


@pytest.mark.parametrize("how", BESIDE)
def test_layers_that_no_output_reaches_keep_what_they_have(how: str) -> None:
    model, opt = made_aside()
    start = ends(model)
    wanted = {"start": start, "held": train_beside(model, opt, [0, 1], how), "ends": ends(model)}
    ranks = [rank[how] for rank in together(beside)]
    assert_same_training(ranks, wanted)
    for rank in ranks:
        # One that was called is next asked for where statistics are due: the same everywhere.
        assert rank["unreached"] == opt._observed.unreached
    assert opt._observed.unreached == ({} if how == "warm" else {2: True})
    first, *_, last = ranks[0]["held"]
    assert ("aside.weight: stats" in last) == (how == "warm")
    if how == "warm":
        kept, moved = "aside.weight: stats", "body.weight: stats"
        assert all(map(torch.equal, first[kept], last[kept]))
        assert not any(map(torch.equal, first[moved], last[moved]))


class Side(nn.Module):
    """Two layers, each on an input of its own; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 3)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(N, 3) and (N, 2) to (N, 5)."""
        return torch.cat([self.left(x), self.right(y)], dim=1)


def made_side(**settings: Any) -> tuple[Side, KFAC]:
    torch.manual_seed(0)
    model = Side()
    factor = torch.randn(5, dtype=torch.float64)
    more = {"stat_interval": 1, "likelihood": lambda z: (z * factor).sum() / len(z), **settings}
    return model, KFAC(model, **{**SETTINGS, **more})


def spoiled(bad: Sequence[Iterable[int]], layers: str = "left") -> Steps:
    """A micro-batch for each of two processes, in each step those of some not finite.

    Args:
        bad: by step, whose.
        layers: what is not finite: the input of the left layer, or of both.
    """
    rng = torch.Generator().manual_seed(5)
    steps = []
    for ranks in bad:
        parts = []
        for rank in range(2):
            rows = 4 + rank
            x = torch.randn(rows, 3, generator=rng, dtype=torch.float64)
            y = torch.randn(rows, 2, generator=rng, dtype=torch.float64)
            if rank in ranks:
                x[1, 1] = math.nan
                y[2, 0] = math.inf if layers == "both" else y[2, 0]
            parts.append([((x, y), torch.zeros(rows, dtype=torch.int64))])
        steps.append(parts)
    return steps


LEFT_OUT: dict[str, Steps] = {
    "at first": spoiled([(1,), ()]),
    "one": spoiled([(), (1,), (0,), ()]),
    "one, in both layers": spoiled([(), (1,), ()], "both"),
    "all": spoiled([(), (0, 1), ()]),
}


def train_spoiled(steps: Steps, rank: int | None) -> dict[str, Any]:
    model, opt = made_side()
    start = ends(model)
    # No gradient of the loss is finite: they are dictated, and nothing has to average them.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = train(model, opt, steps, rank, gradients=False)
    texts = [str(w.message) for w in warned]
    result = {"held": found, "start": start, "ends": ends(model), "failures": opt.failures()}
    return {**result, "warned": sum("not finite" in text for text in texts)}


def not_finite(rank: int, processes: int) -> dict[str, Any]:
    return {name: train_spoiled(steps, rank) for name, steps in LEFT_OUT.items()}


def test_what_is_not_finite_in_one_process_is_left_out_in_all() -> None:
    found = together(not_finite)
    for name, steps in LEFT_OUT.items():
        wanted, ranks = train_spoiled(steps, None), [rank[name] for rank in found]
        assert_same_training(ranks, wanted)
        skipped = int(name == "all")
        for rank in (wanted, *ranks):
            assert rank["failures"] == {"skipped_statistics": skipped, "failed_inverses": 0}
            assert rank["warned"] == skipped
        if skipped:
            before, after = (ranks[0]["held"][step]["right.weight: stats"] for step in (0, 1))
            assert all(map(torch.equal, before, after))


def failures(rank: int, processes: int) -> dict[str, Any]:
    """First statistics that are not finite in either, then five later ones."""
    model, opt = made_side()
    found: dict[str, Any] = {"messages": [], "start": ends(model)}
    with pytest.raises(PreconditionerError) as first:
        train(model, opt, spoiled([(0, 1)]), rank, gradients=False)
    found["first"], found["kept"] = str(first.value), ends(model)
    found["states"] = len(opt.state_dict()["state"])
    with pytest.raises(PreconditionerError) as none_finite:
        inputs = spoiled([(0, 1)])[0][rank][0][0]
        opt.warm_start(model(*inputs) for _ in range(2))
    found["warm start"] = str(none_finite.value)
    with pytest.raises(ValueError, match="at least one batch") as none:
        opt.warm_start(iter(()))
    found["no batch"] = str(none.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, opt, spoiled([(), (), (0, 1), (0, 1), (0, 1), (0, 1)]), rank, gradients=False)
        found["before"] = ends(model)
        with pytest.raises(PreconditionerError) as last:
            train(model, opt, spoiled([(0, 1)]), rank, gradients=False)
    found["last"], found["failures"], found["ends"] = str(last.value), opt.failures(), ends(model)
    train(model, opt, spoiled([()]), rank, gradients=False)  # all can go on
    found["after"] = ends(model)
    return found


def test_failures_raise_in_all_processes_at_the_same_step() -> None:
    ranks = together(failures)
    for rank in ranks:
        assert "first inputs or gradients" in rank["first"] and "layer 'left'" in rank["first"]
        assert all(map(torch.equal, rank["start"], rank["kept"]))
        assert rank["states"] == 0
        assert "none of 4 batches was finite" in rank["warm start"]
        assert "time 5 in a row" in rank["last"]
        assert all(map(torch.equal, rank["before"], rank["ends"]))
        assert rank["failures"] == {"skipped_statistics": 5, "failed_inverses": 0}
        assert not any(map(torch.equal, rank["ends"], rank["after"]))
        for key in ("first", "warm start", "last"):
            assert rank[key] == ranks[0][key]
        assert all(map(torch.equal, rank["after"], ranks[0]["after"]))


WAYS = [(inverse, shard) for inverse in ("damped", "eigenbasis") for shard in (None, "inverses")]


def inverses_fail(rank: int, processes: int) -> dict[Any, Any]:
    """Without damping G is singular: the rows of g sum to zero."""
    found: dict[Any, Any] = {}
    for inverse, shard in WAYS:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        opt = KFAC(model, **{**SETTINGS, "stat_interval": 1}, inverse=inverse, shard=shard)
        steps = [[[((x,), y)] for x, y in (batch(r, key) for r in range(2))] for key in range(4)]
        replicas = DistributedDataParallel(model)
        train(replicas, opt, steps[:1], rank)
        opt.param_groups[0]["damping"] = 0.0
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            train(replicas, opt, steps[1:], rank)
        failed = opt.failures()["failed_inverses"]
        said = sum("factor G could not" in str(w.message) for w in warned)
        found[inverse, shard] = [said, failed, ends(model), held(model, opt)]
    return found


def test_inverses_that_fail_are_kept_and_counted_everywhere() -> None:
    ranks = together(inverses_fail)
    for way in WAYS:
        for warned, failed, end, matrices in (rank[way] for rank in ranks):
            # Inverses at 1 and 2, which are young, and 3.
            assert warned == failed == 3
            assert all(map(torch.equal, end, ranks[0][way][2]))
            for key, pair in ranks[0][way][3].items():
                assert all(map(torch.equal, matrices[key], pair))


def shared_inverses(rank: int, processes: int) -> dict[str, Any]:
    """Who makes what; then each process's statistics of what it makes inverses of fail."""
    net = made_net()
    replicas = DistributedDataParallel(net)
    opt = made_optimizer(net, CASE, shard="inverses")
    made = []

    def counted(stats: Any, *rest: Any) -> Any:
        made.append([len(matrix) for (matrix,) in stats])
        return damped_inverse(stats, *rest)

    found: dict[str, Any] = {}
    with mock.patch("tnt_optim.kfac.inverses.damped_inverse", counted):
        train_one(replicas, opt, of_a_step(CASE, processes, 0), rank)
    found["made"] = made
    stats = {weight: state["stats"] for weight, state in opt._layer_states().items()}
    for weight, owner in owners(stats, processes).items():
        if owner == rank:
            stats[weight][1].fill_(math.inf)
    opt.param_groups[0].update({"stat_interval": 1000, "inverse_interval": 1})
    found["raised at"], found["message"] = None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 9):
            opt.zero_grad()
            try:
                train_one(replicas, opt, of_a_step(CASE, processes, step), rank)
            except PreconditionerError as error:
                found["raised at"], found["message"] = step, str(error)
                break
    return {**found, "ends": ends(net), "failures": opt.failures(), "held": held(net, opt)}


def test_each_inverse_is_made_by_one_process_and_its_failure_told_to_all() -> None:
    ranks = together(shared_inverses)
    made = [sorted(size for call in rank["made"] for size in call) for rank in ranks]
    assert all(made) and sorted(made[0] + made[1]) == sorted([3, 13, 5, 13, 4, 5])
    for rank in ranks:
        assert rank["raised at"] == 5
        assert "time 5 in a row" in rank["message"] and "input factor A" in rank["message"]
        assert rank["message"] == ranks[0]["message"]
        assert rank["failures"] == {"skipped_statistics": 0, "failed_inverses": 15}
        assert all(map(torch.equal, rank["ends"], ranks[0]["ends"]))
        for key in (key for key in rank["held"] if "factors" in key):
            assert all(map(torch.equal, rank["held"][key], ranks[0]["held"][key]))


def observed_by_some(rank: int, processes: int) -> dict[bool, Any]:
    return {find_unused: observed_by(rank, find_unused) for find_unused in (False, True)}


def observed_by(rank: int, find_unused: bool) -> dict[str, Any]:
    """Both observe at first, then one of them, then none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    replicas = DistributedDataParallel(model, find_unused_parameters=find_unused)
    opt = KFAC(model, **{**SETTINGS, "stat_interval": 1})
    stats, found = [], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step, who in enumerate([(0, 1), (1,), (), ()]):
            opt.zero_grad()
            x, y = batch(rank, step)
            output = replicas(x)
            if rank in who:
                opt.observe(output)
            cross_entropy(output, y).backward()
            opt.step()
            stats.append([s.clone() for s in opt.state[model[0].weight]["stats"]])
            rows = torch.cat([x, torch.ones(6, 1)], 1)
            found.append(rows.T @ rows / 6)
    texts = [str(w.message) for w in warned]
    return {"stats": stats, "inputs": found, "warned": texts, "failures": opt.failures()}


@pytest.mark.parametrize("find_unused", [False, True])
def test_what_some_observe_counts_and_what_none_does_is_warned_of(find_unused: bool) -> None:
    ranks = [rank[find_unused] for rank in together(observed_by_some)]
    for rank in ranks:
        first, second, third, last = (pair[1] for pair in rank["stats"])
        close(first, (ranks[0]["inputs"][0] + ranks[1]["inputs"][0]) / 2)
        close(second, 0.9 * first + 0.1 * ranks[1]["inputs"][1])
        for later in (2, 3):
            assert all(map(torch.equal, rank["stats"][later], rank["stats"][1]))
        assert sum("observe(output) was not called" in text for text in rank["warned"]) == 1
        assert rank["failures"] == {"skipped_statistics": 0, "failed_inverses": 0}
    assert all(map(torch.equal, ranks[0]["stats"][1], ranks[1]["stats"][1]))


# A warm start's batches by process, of heads; None: a batch that is not finite.
WARM: dict[str, list[list[int | None]]] = {
    "one has none": [[0, 1, 0], []],
    "heads of their own": [[0, 0], [1, 1, 2, 1]],
    "not finite": [[0, None], [1, 0, None]],
}


def warm_batches(heads: Sequence[Sequence[int | None]]) -> list[list[tuple[Tensor, int]]]:
    rng = torch.Generator().manual_seed(8)

    def drawn(head: int | None) -> tuple[Tensor, int]:
        x = torch.randn(int(torch.randint(2, 9, (), generator=rng)), 4, generator=rng).double()
        return (x * math.nan, 0) if head is None else (x, head)

    return [[drawn(head) for head in part] for part in heads]


def warm_started(batches: Iterable[tuple[Tensor, int]]) -> dict[str, Any]:
    # Processes number their batches as if all had as many: it is compared without sampling.
    model, opt = made_heads(likelihood=least_likely)
    opt.warm_start(model(x, head) for x, head in batches)
    return {"held": held(model, opt), "failures": opt.failures()}


def warm_starts(rank: int, processes: int) -> dict[str, Any]:
    return {name: warm_started(warm_batches(heads)[rank]) for name, heads in WARM.items()}


def test_warm_start_is_over_the_batches_of_all() -> None:
    ranks = together(warm_starts)
    for name, heads in WARM.items():
        wanted = warm_started(in_turn(warm_batches(heads)))
        for rank in ranks:
            assert rank[name]["failures"] == wanted["failures"]
            assert rank[name]["held"].keys() == wanted["held"].keys()
            for key, matrices in wanted["held"].items():
                for a, b in zip(rank[name]["held"][key], matrices, strict=True):
                    close(a, b)
            for key, matrices in ranks[0][name]["held"].items():
                assert all(map(torch.equal, rank[name]["held"][key], matrices))
    assert ranks[0]["not finite"]["failures"]["skipped_statistics"] == 2


def in_groups(rank: int, processes: int) -> dict[str, Any]:
    """Two groups of two that train apart, and a copy that has lost its group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own, place = groups[rank // 2], rank % 2
    net = made_net()
    replicas = DistributedDataParallel(net, process_group=own)
    opt = made_optimizer(net, CASE, process_group=own)

    def go_on(replicas: nn.Module, opt: KFAC, steps: range) -> None:
        for step in steps:
            opt.zero_grad()
            parts = of_a_step(CASE, 2, 100 * (rank // 2) + step)
            train_one(replicas, opt, parts, place)

    go_on(replicas, opt, range(2))
    twin_net = copy.deepcopy(net)
    twin = copy.deepcopy(opt)
    twins = [(twin._model, twin), pickle.loads(pickle.dumps((twin_net, opt)))]
    message = []
    for model, other in twins:
        with pytest.raises(RuntimeError, match="process_group of a copied") as lost:
            other.observe(model(of_a_step(CASE, 2, 0)[place][0][0]))
        message.append(str(lost.value))
        other.process_group = own
    go_on(replicas, opt, range(2, 5))
    found = {"ends": ends(net), "message": message, "copies": []}
    for _, other in twins:
        model = other._model
        go_on(DistributedDataParallel(model, process_group=own), other, range(2, 5))
        found["copies"].append(ends(model))
    return found


def train_one(replicas: nn.Module, opt: KFAC, parts: Sequence[Sequence[Any]], place: int) -> None:
    """One step of a process on its part."""
    rows = sum(len(x) for part in parts for x, _ in part)
    for micro, (x, y) in enumerate(parts[place]):
        replicas.require_backward_grad_sync = micro == len(parts[place]) - 1
        out = replicas(x)
        opt.observe(out)
        (summed_loss(CASE, out, y) * len(parts) / rows).backward()
    opt.step()


def test_groups_train_apart_and_copies_must_be_told_theirs() -> None:
    ranks = run_in(4, in_groups)
    for number in range(2):
        net = made_net()
        start, opt = ends(net), made_optimizer(net, CASE)
        for step in range(5):
            opt.zero_grad()
            parts = of_a_step(CASE, 2, 100 * number + step)
            train_one(net, opt, [list(in_turn(parts))], 0)
        for rank in ranks[2 * number : 2 * number + 2]:
            assert apart(rank["ends"], ends(net), start) <= FLOAT64_TRAJECTORY
            assert all(map(torch.equal, rank["ends"], ranks[2 * number]["ends"]))
            for copied in rank["copies"]:
                assert all(map(torch.equal, copied, rank["ends"]))
    assert not torch.equal(ranks[0]["ends"][0], ranks[2]["ends"][0])


# What is saved: the inverse, whether KFAC has the wrapper, how the work is shared.
SAVED = [
    ("damped", False, None),
    ("damped", True, None),
    ("eigenbasis", False, None),
    ("eigenbasis", False, "inverses"),
]


def states(rank: int, processes: int) -> list[dict[str, Any]]:
    """The first process's state goes on in all: as it was, of what is wrapped, shared otherwise."""
    found = []
    for inverse, wrapped, shard in SAVED:
        case = Case(inverse)

        def go_on(replicas: nn.Module, opt: KFAC, steps: range, case: Case = case) -> list[Tensor]:
            for step in steps:
                opt.zero_grad()
                train_one(replicas, opt, of_a_step(case, processes, step), rank)
            return ends(replicas.module)

        net = made_net()
        replicas = DistributedDataParallel(net)
        opt = made_optimizer(replicas if wrapped else net, case, shard=shard)
        go_on(replicas, opt, range(4))
        file = BytesIO()
        torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, file)
        sent = [file.getvalue() if rank == 0 else None]
        dist.broadcast_object_list(sent)
        saved = torch.load(BytesIO(sent[0]))
        results = []
        for other_shard in (shard, None if shard else "inverses"):
            for other_wrapped in (False, True):
                other = Net()
                other.load_state_dict(saved["net"])
                again = DistributedDataParallel(other)
                fresh = made_optimizer(again if other_wrapped else other, case, shard=other_shard)
                fresh.load_state_dict(saved["opt"])
                results.append(go_on(again, fresh, range(4, 8)))
        same, otherwise = results[:2], results[2:]
        for twin, twin_opt in (
            copy.deepcopy((replicas, opt)),
            pickle.loads(pickle.dumps((replicas, opt))),
            (replicas, opt),
        ):
            same.append(go_on(twin, twin_opt, range(4, 8)))
        found.append({"saved": sent[0], "same": same, "otherwise": otherwise})
    return found


@pytest.mark.parametrize("way", SAVED, ids=str)
def test_state_of_one_process_goes_on_in_all(way: tuple[str, bool, str | None]) -> None:
    case, ranks = Case(way[0]), [rank[SAVED.index(way)] for rank in together(states)]
    first = ranks[0]["same"][-1]
    for rank in ranks:
        assert len(rank["same"]) == 5
        assert all(all(map(torch.equal, result, first)) for result in rank["same"])
    # And in a single process, on the batches of all.
    net = made_net()
    start, opt = ends(net), made_optimizer(net, case)
    saved = torch.load(BytesIO(ranks[0]["saved"]))
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    for step in range(4, 8):
        opt.zero_grad()
        train_one(net, opt, [list(in_turn(of_a_step(case, 2, step)))], 0)
    assert apart(first, ends(net), start) <= FLOAT64_TRAJECTORY
    for number, result in enumerate(ranks[0]["otherwise"]):
        assert apart(result, ends(net), start) <= FLOAT64_TRAJECTORY
        assert all(map(torch.equal, result, ranks[1]["otherwise"][number]))


def refusals(rank: int, processes: int) -> dict[str, Any]:
    """What is refused, by what was tried, and whether training goes on after it."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    replicas = DistributedDataParallel(net, static_graph=True)
    opt = KFAC(replicas, **SETTINGS)
    x, y = batch(rank, 0)
    output = replicas(x)
    for name, call in {
        "observe": lambda: opt.observe(output),
        "warm_start": lambda: opt.warm_start([output]),
    }.items():
        with pytest.raises(RuntimeError) as refused:
            call()
        found[name] = str(refused.value)
    cross_entropy(output, y).backward()  # whose gradients are still averaged
    found["gradient"], found["states"] = net.weight.grad.clone(), len(opt.state)
    found["observed"] = opt._observed.count
    model = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    with pytest.raises(ValueError) as pieces:
        KFAC(model)
    found["pieces"] = str(pieces.value)
    hooks = [hook for m in model.modules() for hook in m._forward_hooks.values()]
    found["hooks"] = sum(isinstance(hook, LayerHook) for hook in hooks)
    return found


def test_static_graphs_and_parameters_in_pieces_are_refused() -> None:
    ranks = together(refusals)
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    loss = sum(cross_entropy(net(x), y) for x, y in (batch(rank, 0) for rank in range(2))) / 2
    (gradient,) = torch.autograd.grad(loss, [net.weight])
    for found in ranks:
        assert "static_graph=True" in found["observe"]
        assert found["warm_start"] == found["observe"]
        close(found["gradient"], gradient)
        assert found["states"] == found["observed"] == found["hooks"] == 0
        assert "model must have whole parameters, and '0.weight' is in pieces" in found["pieces"]


def steady(rank: int, processes: int) -> list[list[int]]:
    """How many numbers each step sends. Once all layers have statistics no value is read."""
    net = made_net()
    replicas = DistributedDataParallel(net)
    opt = made_optimizer(net, CASE)
    sent = []
    # Reports reach the host by a copy nobody waits for; on the CPU reading them is the arrival.
    never = mock.patch("tnt_optim.failures._Delivery.arrived", lambda self: False)
    with never, mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        for step in range(4):
            opt.zero_grad()
            x, y = of_a_step(CASE, processes, step)[rank][0]
            out = replicas(x)
            with no_host_reads() if step in (1, 2) else nullcontext():
                opt.observe(out)
            cross_entropy(out, y).backward()
            with no_host_reads() if step in (1, 2) else nullcontext():
                opt.step()
            sent.append([call.args[0].numel() for call in reduced.call_args_list])
            reduced.reset_mock()
    return sent


def test_later_steps_send_half_of_each_matrix_and_wait_for_no_value() -> None:
    triangles = sum(n * (n + 1) // 2 for n in (3, 13, 5, 13, 4, 5))
    counts = 1 + 3 * 3
    asked = 1 + 2 * 3  # at first: whether anyone observes, and what
    wanted = [[asked, counts, triangles], [], [counts, triangles], []]
    assert together(steady) == [wanted, wanted]


FUNCTIONS: list[Callable[[int, int], Any]] = [
    heads_of_their_own,
    beside,
    not_finite,
    failures,
    inverses_fail,
    shared_inverses,
    observed_by_some,
    warm_starts,
    states,
    refusals,
    steady,
]


def all_of_it(rank: int, processes: int) -> dict[str, Any]:
    return {function.__name__: function(rank, processes) for function in FUNCTIONS}


@functools.cache
def of_all() -> list[dict[str, Any]]:
    """What every function returns: two processes start but once."""
    return run_in(2, all_of_it)


def together(function: Callable[[int, int], Any]) -> list[Any]:
    """What a function returns in each of two processes."""
    return [rank[function.__name__] for rank in of_all()]
