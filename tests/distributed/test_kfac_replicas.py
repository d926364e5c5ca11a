"""KFAC in several processes with copies of one model: the training of one on all their batches.

Each training is compared with one process that observes the same micro-batches in turn.
"""

import copy
import math
import pickle
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from drawn import close, noise
from kfac_models import Heads, Sides, least_likely, missed
from optimizers import NO_FAILURES, equal, no_host_reads, through_a_file, values
from processes import run_in
from replicas import assert_trained_as
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from tnt_kernels import damped_inverse
from tnt_optim import KFAC, PreconditionerError


class Batch(NamedTuple):
    """A micro-batch: what the model takes, labels, and whether its output is observed."""

    inputs: tuple[Any, ...]
    labels: Tensor
    observed: bool = True


Steps = Sequence[Sequence[Sequence[Batch]]]  # by step and process


def made(model: nn.Module, **settings: Any) -> KFAC:
    defaults = {"lr": 0.05, "damping": 0.1, "weight_decay": 0.1, "likelihood": "categorical"}
    return KFAC.paper(model, **{"stat_interval": 2, "inverse_interval": 3, **defaults, **settings})


def in_turn(parts: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """The first of each process, then the second of each."""
    for index in range(max(map(len, parts))):
        yield from (part[index] for part in parts if index < len(part))


def states(net: nn.Module, opt: KFAC) -> dict[str, list[Tensor]]:
    """The statistics and inverses of all layers, as far as this process keeps them."""
    held = {name: opt.state.get(p, {}) for name, p in net.named_parameters()}
    return {
        f"{name}: {key}": [matrix.clone() for matrix in state[key]]
        for name, state in held.items()
        if state.get("first_step") is not None
        for key in ("stats", "factors")
        if key in state
    }


def summed_loss(output: Tensor, labels: Tensor, likelihood: str = "categorical") -> Tensor:
    if likelihood == "categorical":
        return cross_entropy(output, labels, reduction="sum")
    return mse_loss(output, torch.eye(4, dtype=output.dtype)[labels], reduction="sum") / 2


def trained(
    model: nn.Module,
    opt: KFAC,
    steps: Steps,
    rank: int | None = None,
    *,
    likelihood: str = "categorical",
    dictated: bool = False,
) -> dict[str, Any]:
    """Trains as the process of some rank, or as one that does the work of all.

    Of several outputs the first is observed. With ``dictated`` all gradients are one. Returns the
    parameters at the start and the end, the states after each step, and what was reported.
    """
    net = model.module if isinstance(model, DistributedDataParallel) else model
    start, found = values(net), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for parts in steps:
            opt.zero_grad()
            batches = list(in_turn(parts)) if rank is None else parts[rank]
            rows = sum(len(batch.labels) for part in parts for batch in part)
            # DistributedDataParallel takes the mean over the processes.
            scale = (1 if rank is None else len(parts)) / rows
            for micro, batch in enumerate(batches):
                model.require_backward_grad_sync = micro == len(batches) - 1  # as no_sync() does
                outputs = model(*batch.inputs)
                outputs = outputs if isinstance(outputs, list) else [outputs]
                if batch.observed:
                    opt.observe(outputs[0])
                losses = [summed_loss(output, batch.labels, likelihood) for output in outputs]
                if not dictated:
                    (scale * sum(losses)).backward()
            for p in net.parameters() if dictated else ():
                p.grad = torch.ones_like(p)
            opt.step()
            found.append(states(net, opt))
    result = {"start": start, "ends": values(net), "states": found, "failures": opt.failures()}
    texts = [str(warning.message) for warning in warned]
    return {**result, "warned": texts, "unreached": missed(opt)}


def assert_same_training(ranks: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """All processes have the same bits after each step, and those of one process but rounding."""
    first = ranks[0]
    assert_trained_as([rank["ends"] for rank in ranks], wanted["ends"], wanted["start"])
    for rank in ranks:
        for mine, theirs in zip(rank["states"], first["states"], strict=True):
            assert all(equal(mine[key], theirs[key]) for key in mine.keys() & theirs.keys())
    for number, expected in enumerate(wanted["states"]):
        got = {key: own for rank in ranks for key, own in rank["states"][number].items()}
        assert got.keys() == expected.keys()
        for key in (key for key in expected if "stats" in key):
            for a, b in zip(got[key], expected[key], strict=True):
                assert float((a - b).norm()) <= FLOAT64_TRAJECTORY * float(b.norm())
                assert torch.equal(a, a.T)


# ------------------------------------------------------------------ the training of one process


class Net(nn.Module):
    """A convolution, a norm that takes the momentum, layers with and without bias; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 3, (2, 3), padding=(0, 1))
        self.hidden = nn.Linear(12, 5)
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, 4, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Logits, or means."""
        hidden = self.hidden(torch.tanh(self.conv(x)).flatten(1))
        logits: Tensor = self.out(torch.tanh(self.norm(hidden)))
        return logits


SIZES = [3, 13, 5, 13, 4, 5]  # of its statistics


def drawn(key: int, counts: Sequence[int]) -> list[list[Batch]]:
    """Each process's micro-batches for ``Net``, of 3 to 6 rows."""
    rng = torch.Generator().manual_seed(key)

    def batch() -> Batch:
        rows = int(torch.randint(3, 7, (), generator=rng))
        x = torch.randn(rows, 2, 2, 4, generator=rng, dtype=torch.float64)
        return Batch((x,), torch.randint(4, (rows,), generator=rng))

    return [[batch() for _ in range(count)] for count in counts]


@dataclass(frozen=True)
class Case:
    """How the processes train."""

    inverse: str
    likelihood: str = "categorical"  # KFAC's, and that of the loss
    micro: int | str = 2  # micro-batches; "uneven": 3 in the first half of the processes, then 2
    warm: bool = False  # whether a warm start comes first, with one batch more in process 0
    wrapped: bool = False  # whether KFAC is given DistributedDataParallel itself
    shard: str | None = None
    grafted: bool = False  # and relatively damped

    def steps(self, processes: int, numbers: Iterable[int] = range(7)) -> Steps:
        """The micro-batches of some steps."""
        counts: Any = [self.micro] * processes
        if self.micro == "uneven":
            counts = [3 if rank < processes // 2 else 2 for rank in range(processes)]
        return [drawn(number, counts) for number in numbers]

    def train(self, processes: int, rank: int | None = None) -> dict[str, Any]:
        """The training of one process, or of all in one."""
        net = Net()
        model = net if rank is None else DistributedDataParallel(net)
        settings: dict[str, Any] = {
            "inverse": self.inverse,
            "likelihood": self.likelihood,
            "shard": self.shard,
        }
        settings |= {"relative_damping": True, "graft": "adam"} if self.grafted else {}
        opt = made(model if self.wrapped else net, **settings)
        if self.warm:
            parts = drawn(99, [3, *[2] * (processes - 1)])
            batches = in_turn(parts) if rank is None else parts[rank]
            opt.warm_start(model(*batch.inputs) for batch in batches)
        steps = self.steps(processes)
        return trained(model, opt, steps, rank, likelihood=self.likelihood)


CASES = [
    Case("damped", micro=1),
    Case("damped", "gaussian"),
    Case("damped", micro="uneven"),
    Case("eigenbasis"),
    Case("eigenbasis", "gaussian", "uneven"),
    *(
        Case(inverse, warm=warm, shard=shard)
        for inverse in ("damped", "eigenbasis")
        for warm, shard in ((True, None), (True, "inverses"), (False, "inverses"))
    ),
    Case("damped", "bernoulli"),
    Case("damped", warm=True, wrapped=True),
    *(Case(inverse, grafted=True, shard="inverses") for inverse in ("damped", "eigenbasis")),
]
IN_FOUR = [
    Case("damped", "gaussian", "uneven"),
    Case("eigenbasis", micro="uneven"),
    Case("damped", warm=True, shard="inverses"),
    Case("eigenbasis", warm=True, shard="inverses"),
]


def train(rank: int, processes: int, case: Case) -> dict[str, Any]:
    return case.train(processes, rank)


@pytest.mark.parametrize(
    ("processes", "case"),
    [*((2, case) for case in CASES), *((4, case) for case in IN_FOUR)],
    ids=str,
)
def test_replicas_train_as_one_process(processes: int, case: Case) -> None:
    ranks = run_in(processes, train, case)
    assert len(ranks) == processes
    assert len({key for rank in ranks for key in rank["states"][-1]}) == 6
    assert_same_training(ranks, case.train(processes))


# ------------------------------------------------------------------ layers reached by some


def batch(key: int, rank: int, *heads: int, observed: bool = True) -> Batch:
    """A micro-batch for some heads."""
    rng = torch.Generator().manual_seed(1000 * key + rank)
    x = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    return Batch((x, *heads), torch.randint(3, (6,), generator=rng), observed)


def made_heads(heads: int, **settings: Any) -> tuple[Heads, KFAC]:
    torch.manual_seed(0)
    model = Heads(heads)
    return model, made(model, **settings)


# The heads of the micro-batches, by step and process. A model of three heads uses all; one of four
# does not.
USED = [
    [[0], [1]],
    [[0], [1]],
    [[0, 0], [0, 0]],  # statistics are due, and no output reaches head 1
    [[0, 1], [0, 2]],  # none are, but of head 1 that was missed, and of head 2 that is new
    [[0], [2]],
    [[2, 1], [0, 0]],
    [[0], [0]],
]
USED_STEPS: Steps = [
    [
        [batch(10 * step + micro, rank, head) for micro, head in enumerate(heads)]
        for rank, heads in enumerate(parts)
    ]
    for step, parts in enumerate(USED)
]


def heads_of_their_own(rank: int, processes: int, heads: int) -> dict[str, Any]:
    model, opt = made_heads(heads)
    replicas = DistributedDataParallel(model, find_unused_parameters=True)
    return trained(replicas, opt, USED_STEPS, rank)


@pytest.mark.parametrize("heads", [3, 4])
def test_layers_that_some_processes_use_or_none(heads: int) -> None:
    ranks = run_in(2, heads_of_their_own, heads)
    assert_same_training(ranks, trained(*made_heads(heads), USED_STEPS))
    steps = ranks[0]["states"]
    assert [sum("stats" in key for key in step) for step in steps] == [3, 3, 3, 4, 4, 4, 4]
    assert not any("heads.3" in key for key in steps[-1])
    ways = (1, 1, True), (1, 2, False), (1, 3, True), (2, 3, False), (2, 5, True)
    for head, before, kept in ways:
        key = f"heads.{head}.weight: stats"
        pairs = zip(steps[before][key], steps[before + 1][key], strict=True)
        assert all(torch.equal(a, b) == kept for a, b in pairs)


# A second head that the loss has and the observed output has not: without statistics, with those of
# a warm start, called by the first process only; and outputs that both processes observe at step 0,
# the second one at step 2, and none at step 4.
HEADS = ("never observed", "warm", "called by one", "observed by some")


def with_head(rank: int | None, processes: int, how: str) -> dict[str, Any]:
    # Without sampling: one process that leaves out an observation numbers the draws otherwise.
    net, opt = made_heads(2, likelihood=least_likely)
    both = how != "called by one"
    model = net
    if rank is not None:
        model = DistributedDataParallel(net, find_unused_parameters=not both)
    heads = [(0, 1), (0, 1) if both else (0,)]
    observed = [0 if how == "observed by some" else 4, 2 if how == "observed by some" else 4]
    steps = [
        [[batch(s, r, *heads[r], observed=s <= observed[r])] for r in range(2)] for s in range(5)
    ]
    if how == "warm":
        ranks = range(2) if rank is None else [rank]
        opt.warm_start(sum(model(*batch(9, r, 0, 1).inputs)) for r in ranks)
    first = states(net, opt)
    return {"first": first, **trained(model, opt, steps, rank)}


@pytest.mark.parametrize("how", HEADS)
def test_layers_that_no_output_reaches_keep_what_they_have(how: str) -> None:
    ranks = run_in(2, with_head, how)
    assert_same_training(ranks, with_head(None, 2, how))
    for rank in ranks:
        # All processes ask for a layer that was called again when statistics are due.
        assert rank["unreached"] == ({} if how == "warm" else {2: True})
        said = sum("observe(output)" in text for text in rank["warned"])  # at step 2
        assert said == (how == "observed by some")
        assert rank["failures"] == NO_FAILURES | {"unreached": len(rank["unreached"])}
    first, last = ranks[0]["first"], ranks[0]["states"][-1]
    kept, moved = "heads.1.weight: stats", "body.weight: stats"
    assert (kept in last) == (how == "warm")
    if how == "warm":
        assert equal(first[kept], last[kept])
        assert not any(map(torch.equal, first[moved], last[moved]))


# A warm start's batches by process, of heads; None: a batch that is not finite.
WARM: dict[str, list[list[int | None]]] = {
    "one has none": [[0, 1, 0], []],
    "heads of their own": [[0, 0], [1, 1, 2, 1]],
    "not finite": [[0, None], [1, 0, None]],
}


def warm_started(rank: int | None, processes: int, how: str) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(8)

    def inputs(head: int | None) -> tuple[Tensor, int]:
        x = torch.randn(int(torch.randint(2, 9, (), generator=rng)), 4, generator=rng).double()
        return (x * math.nan, 0) if head is None else (x, head)

    parts = [[inputs(head) for head in part] for part in WARM[how]]
    # Without sampling: one process would number its draws otherwise.
    model, opt = made_heads(3, likelihood=least_likely)
    opt.warm_start(model(*given) for given in (in_turn(parts) if rank is None else parts[rank]))
    return {"states": states(model, opt), "failures": opt.failures()}


@pytest.mark.parametrize("how", WARM)
def test_a_warm_start_is_over_the_batches_of_all(how: str) -> None:
    wanted, ranks = warm_started(None, 2, how), run_in(2, warm_started, how)
    assert wanted["failures"]["skipped_statistics"] == (2 if how == "not finite" else 0)
    for rank in ranks:
        assert rank["failures"] == wanted["failures"]
        assert rank["states"].keys() == wanted["states"].keys()
        for key, matrices in wanted["states"].items():
            close(rank["states"][key], matrices)
            assert equal(rank["states"][key], ranks[0]["states"][key])


# ------------------------------------------------------------------ failures


def made_sides() -> tuple[Sides, KFAC]:
    torch.manual_seed(0)
    model, factor = Sides(), noise(5)
    likelihood = lambda z: (z * factor).sum() / len(z)  # noqa: E731
    return model, made(model, stat_interval=1, likelihood=likelihood)


def spoiled(bad: Sequence[Iterable[int]], layers: str = "left") -> Steps:
    """A micro-batch for each of two processes; ``bad``: by step, whose is not finite.

    The input of the left layer is not finite, or the inputs of both.
    """
    rng = torch.Generator().manual_seed(5)
    steps = []
    for ranks in bad:
        parts = []
        for rank in range(2):
            rows = 4 + rank
            x, y = (torch.randn(rows, n, generator=rng, dtype=torch.float64) for n in (3, 2))
            if rank in ranks:
                x[1, 1] = math.nan
                y[2, 0] = math.inf if layers == "both" else y[2, 0]
            parts.append([Batch((x, y), torch.zeros(rows, dtype=torch.int64))])
        steps.append(parts)
    return steps


LEFT_OUT: dict[str, Steps] = {
    "at first": spoiled([(1,), ()]),
    "one": spoiled([(), (1,), (0,), ()]),
    "one, in both layers": spoiled([(), (1,), ()], "both"),
    "all": spoiled([(), (0, 1), ()]),
}


def not_finite(rank: int | None, processes: int, how: str) -> dict[str, Any]:
    return trained(*made_sides(), LEFT_OUT[how], rank, dictated=True)


@pytest.mark.parametrize("how", LEFT_OUT)
def test_what_is_not_finite_in_one_process_is_left_out_in_all(how: str) -> None:
    ranks, wanted = run_in(2, not_finite, how), not_finite(None, 2, how)
    assert_same_training(ranks, wanted)
    skipped = int(how == "all")
    for rank in (wanted, *ranks):
        assert rank["failures"] == NO_FAILURES | {"skipped_statistics": skipped}
        assert sum("not finite" in text for text in rank["warned"]) == skipped
    if skipped:
        before, after = (ranks[0]["states"][step]["right.weight: stats"] for step in (0, 1))
        assert equal(before, after)


def failures(rank: int, processes: int) -> dict[str, Any]:
    """The first statistics are finite in neither process; later, five in a row are not."""
    model, opt = made_sides()
    found: dict[str, Any] = {"start": values(model)}
    with pytest.raises(PreconditionerError) as first:
        trained(model, opt, spoiled([(0, 1)]), rank, dictated=True)
    found["kept"], found["states"] = values(model), len(opt.state_dict()["state"])
    inputs = spoiled([(0, 1)])[0][rank][0].inputs
    with pytest.raises(PreconditionerError) as warm_start:
        opt.warm_start(model(*inputs) for _ in range(2))
    with pytest.raises(ValueError, match="at least one batch"):
        opt.warm_start(iter(()))
    trained(model, opt, spoiled([(), (), *[(0, 1)] * 4]), rank, dictated=True)
    found["before"] = values(model)
    with pytest.raises(PreconditionerError) as last:
        trained(model, opt, spoiled([(0, 1)]), rank, dictated=True)
    found["ends"], found["failures"] = values(model), opt.failures()
    found["messages"] = [str(error.value) for error in (first, warm_start, last)]
    return {**found, "after": trained(model, opt, spoiled([()]), rank, dictated=True)["ends"]}


def test_failures_raise_in_all_processes_at_the_same_step() -> None:
    ranks = run_in(2, failures)
    for rank in ranks:
        first, warm_start, last = rank["messages"]
        assert "first gradient for the statistics" in first and "'left.weight'" in first
        assert "none of 4 batches gave a finite gradient" in warm_start
        assert "time 5 in a row" in last
        assert rank["messages"] == ranks[0]["messages"]
        assert equal(rank["start"], rank["kept"]) and rank["states"] == 0
        assert equal(rank["before"], rank["ends"])
        assert rank["failures"] == NO_FAILURES | {"skipped_statistics": 5}
        assert not any(map(torch.equal, rank["ends"], rank["after"]))  # all go on
        assert equal(rank["after"], ranks[0]["after"])


def inverses_fail(rank: int, processes: int, inverse: str, shard: str | None) -> dict[str, Any]:
    """Without damping G is singular: the rows of g sum to zero."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    opt = made(model, stat_interval=1, inverse=inverse, shard=shard)
    steps = [[[batch(step, r)] for r in range(2)] for step in range(4)]
    replicas = DistributedDataParallel(model)
    trained(replicas, opt, steps[:1], rank)
    opt.param_groups[0]["damping"] = 0.0
    return trained(replicas, opt, steps[1:], rank)


@pytest.mark.parametrize("shard", [None, "inverses"])
@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_inverses_that_fail_are_kept_and_counted_everywhere(
    inverse: str, shard: str | None
) -> None:
    ranks = run_in(2, inverses_fail, inverse, shard)
    for rank in ranks:
        # Inverses at 1 and 2, within the first T2 steps, and 3.
        assert rank["failures"] == NO_FAILURES | {"failed_inverses": 3}
        assert sum("factor G could not" in text for text in rank["warned"]) == 3
        assert equal(rank["ends"], ranks[0]["ends"])
        for key in rank["states"][-1].keys() & ranks[0]["states"][-1].keys():
            assert equal(rank["states"][-1][key], ranks[0]["states"][-1][key])


def shared_inverses(rank: int, processes: int) -> dict[str, Any]:
    """Which inverses a rank makes; then all that it makes fail."""
    net = Net()
    replicas = DistributedDataParallel(net)
    opt = made(net, shard="inverses")
    steps, sizes = Case("damped").steps(processes, range(9)), []

    def counted(stats: Any, *rest: Any) -> Any:
        sizes.extend(len(matrix) for (matrix,) in stats)
        return damped_inverse(stats, *rest)

    with mock.patch("tnt_optim.kfac.inverses.damped_inverse", counted):
        trained(replicas, opt, steps[:1], rank)
    for weight in opt._observed.weights:
        if stats := opt.state[weight].get("stats"):  # of its owner
            stats[1].fill_(math.inf)
    opt.param_groups[0].update({"stat_interval": 1000, "inverse_interval": 1})
    with pytest.raises(PreconditionerError) as error:
        trained(replicas, opt, steps[1:], rank)
    found = {"message": str(error.value), "step": opt.param_groups[0]["step"]}
    return {**found, "sizes": sizes, "ends": values(net), "states": states(net, opt)}


def test_each_inverse_is_made_by_one_rank_and_its_failure_known_to_all() -> None:
    ranks = run_in(2, shared_inverses)
    assert all(rank["sizes"] for rank in ranks)
    assert sorted(ranks[0]["sizes"] + ranks[1]["sizes"]) == sorted(SIZES)
    for rank in ranks:
        assert rank["step"] == 5
        assert "time 5 in a row" in rank["message"] and "input factor A" in rank["message"]
        assert rank["message"] == ranks[0]["message"]
        assert equal(rank["ends"], ranks[0]["ends"])
        for key in (key for key in rank["states"] if "factors" in key):
            assert equal(rank["states"][key], ranks[0]["states"][key])


# ------------------------------------------------------------------ groups, copies, saved states


def in_groups(rank: int, processes: int) -> dict[str, Any]:
    """Two groups of two that train separately, and copies that have lost their group."""
    own, place = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], rank % 2
    net, numbers = Net(), range(100 * (rank // 2), 100 * (rank // 2) + 5)
    steps = Case("damped").steps(2, numbers)
    replicas = DistributedDataParallel(net, process_group=own)
    opt = made(net, process_group=own)
    trained(replicas, opt, steps[:2], place)
    twins = [copy.deepcopy((net, opt)), pickle.loads(pickle.dumps((net, opt)))]
    found = {"ends": trained(replicas, opt, steps[2:], place)["ends"], "copies": []}
    for model, other in twins:
        with pytest.raises(RuntimeError, match="process_group of a copied"):
            other.observe(model(*steps[0][place][0].inputs))
        other.process_group = own
        replicas = DistributedDataParallel(model, process_group=own)
        found["copies"].append(trained(replicas, other, steps[2:], place)["ends"])
    return found


@pytest.mark.parametrize("group", [0, 1])
def test_groups_train_separately_and_copies_are_given_theirs(group: int) -> None:
    ranks = run_in(4, in_groups)[2 * group : 2 * group + 2]
    net = Net()
    steps = Case("damped").steps(2, range(100 * group, 100 * group + 5))
    wanted = trained(net, made(net), steps)
    assert_trained_as([rank["ends"] for rank in ranks], wanted["ends"], wanted["start"])
    for rank in ranks:
        assert len(rank["copies"]) == 2
        assert all(equal(copied, rank["ends"]) for copied in rank["copies"])


SAVED = [  # the inverse, whether KFAC has the wrapper, how the work is divided
    ("damped", True, None),
    ("eigenbasis", False, None),
    ("eigenbasis", False, "inverses"),
]


def saved_states(
    rank: int, processes: int, inverse: str, wrapped: bool, shard: str | None
) -> dict[str, Any]:
    """All processes load the first one's state: wrapped or not, with another shard, as copies."""
    steps = Case(inverse).steps(processes, range(8))

    def go_on(replicas: nn.Module, opt: KFAC) -> list[Tensor]:
        return trained(replicas, opt, steps[4:], rank)["ends"]

    replicas = DistributedDataParallel(Net())
    opt = made(replicas if wrapped else replicas.module, inverse=inverse, shard=shard)
    trained(replicas, opt, steps[:4], rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first process has the whole state, the other a part
        opt.consolidate_state_dict()
        sent = [through_a_file({"net": replicas.module.state_dict(), "opt": opt.state_dict()})]
    dist.broadcast_object_list(sent)
    results = []
    for other_shard in (shard, None if shard else "inverses"):
        for other_wrapped in (False, True):
            again = DistributedDataParallel(Net())
            again.module.load_state_dict(sent[0]["net"])
            fresh = made(
                again if other_wrapped else again.module, inverse=inverse, shard=other_shard
            )
            fresh.load_state_dict(sent[0]["opt"])
            results.append(go_on(again, fresh))
    twins = copy.deepcopy((replicas, opt)), pickle.loads(pickle.dumps((replicas, opt)))
    alike = [*results[:2], *(go_on(*pair) for pair in (*twins, (replicas, opt)))]
    return {"saved": sent[0], "alike": alike, "otherwise": results[2:]}


@pytest.mark.parametrize(("inverse", "wrapped", "shard"), SAVED)
def test_the_state_of_one_process_goes_on_in_all(
    inverse: str, wrapped: bool, shard: str | None
) -> None:
    ranks = run_in(2, saved_states, inverse, wrapped, shard)
    first, start = ranks[0]["alike"][-1], values(Net())
    for rank in ranks:
        assert len(rank["alike"]) == 5 and len(rank["otherwise"]) == 2
        assert all(equal(result, first) for result in rank["alike"])
    # And in a single process, on the batches of all.
    net, saved = Net(), ranks[0]["saved"]
    opt = made(net, inverse=inverse)
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    wanted = trained(net, opt, Case(inverse).steps(2, range(4, 8)))["ends"]
    for found in ([first], *zip(*(rank["otherwise"] for rank in ranks), strict=True)):
        assert_trained_as(found, wanted, start)


# ------------------------------------------------------------------ refusals, and what is sent


def refusals(rank: int, processes: int) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    with pytest.raises(ValueError, match="model must have whole parameters, and '0.weight' is in"):
        KFAC(model, likelihood="categorical")


def test_sharded_parameters_are_refused() -> None:
    run_in(2, refusals)


def steady(rank: int, processes: int) -> list[list[int]]:
    """How many numbers each step sends. Once all layers have statistics no value is read."""
    net = Net()
    replicas, opt, sent = DistributedDataParallel(net), made(net), []
    # On the CPU a report has arrived when it is read; on a GPU a copy that no one waits for.
    never = mock.patch("tnt_optim.failures.Delivery.arrived", lambda self: False)
    with never, mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        for step, parts in enumerate(Case("damped").steps(processes, range(4))):
            opt.zero_grad()
            out = replicas(*parts[rank][0].inputs)
            with no_host_reads() if step in (1, 2) else nullcontext():
                opt.observe(out)
            cross_entropy(out, parts[rank][0].labels).backward()
            with no_host_reads() if step in (1, 2) else nullcontext():
                opt.step()
            sent.append([call.args[0].numel() for call in reduced.call_args_list])
            reduced.reset_mock()
    return sent


def test_later_steps_send_half_of_each_matrix_and_wait_for_no_value() -> None:
    triangles = sum(n * (n + 1) // 2 for n in SIZES)
    counts = 1 + 3 * 3
    # At first: a key of the shapes; who observes, and who should have; and which layers.
    alike, asked = 2, 3 + 2 * 3
    wanted = [[alike, asked, counts, triangles], [], [counts, triangles], []]
    assert run_in(2, steady) == [wanted, wanted]


# ------------------------------------------------------------------ without a likelihood


def from_the_training(rank: int, processes: int, shard: str | None) -> list[Tensor]:
    """One process takes the batches of two as micro-batches, whose losses it halves."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    model = net if processes == 1 else DistributedDataParallel(net)
    opt = KFAC(net, stat_interval=2, inverse_interval=3, interval_warmup=0, shard=shard)
    for step in range(7):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(2, 8, 6, generator=draw, dtype=torch.float64)
        y = torch.randint(4, (2, 8), generator=draw)
        opt.zero_grad()
        for part in range(rank, 2, processes):
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            (loss if processes == 2 else loss / 2).backward()
        opt.step()
    return values(net)


@pytest.mark.parametrize("shard", [None, "inverses", "directions"])
def test_training_gradients_are_those_of_all_processes(shard: str | None) -> None:
    ranks, alone = run_in(2, from_the_training, shard), from_the_training(0, 1, None)
    assert equal(ranks[0], ranks[1])
    for own, other in zip(ranks[0], alone, strict=True):
        close(own, other)
