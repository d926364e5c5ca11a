"""Processes with copies of one model: the training of one process on all their batches.

Each is compared with one process that observes the same micro-batches one after the other. States
of processes that share the work are saved, and loaded by as many processes or others.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizers import observe, values, warm_start
from processes import run_in
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import TNT, Shampoo

STEPS, ROWS, MICRO = 7, 5, 2


# By name: the method, its settings.
FORMS: dict[str, tuple[type[TNT | Shampoo], dict[str, Any]]] = {
    "tnt": (TNT, {"weight_decay": 0.1}),
    "grafted": (TNT, {"graft": "adam", "relative_damping": True}),
    "grafted to the momentum": (TNT, {"graft": "sgd"}),
    "diagonal": (TNT, {"max_factor_dim": 4}),
    "in blocks": (TNT, {"block_size": 4, "graft": "adam"}),
    "empirical": (TNT, {"fisher": "empirical"}),
    "clipped": (TNT, {"kl_clip": 1e-3, "graft": "sgd"}),
    "shampoo": (Shampoo, {}),
}


SHARDS = (None, "directions", "inverses")


class Net(nn.Module):
    """A convolution in channels_last and two linear layers; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (2, 3))
        self.hidden = nn.Linear(6, 5)
        self.out = nn.Linear(5, 4)
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.out(torch.tanh(self.hidden(torch.tanh(self.conv(x)).flatten(1))))


def made_net() -> Net:
    torch.manual_seed(3)
    return Net()


def made_optimizer(net: nn.Module, form: str, **more: Any) -> TNT | Shampoo:
    method, settings = FORMS[form]
    rest = [p for name, p in net.named_parameters() if "conv" not in name]
    groups = [{"params": [*net.conv.parameters()], "lr": 0.02}, {"params": rest}]
    defaults = {"lr": 0.05, "damping": 0.1, "stat_interval": 2, "inverse_interval": 3}
    return method(groups, **{**defaults, **settings, **more})


def drawn(batches: int, key: int) -> tuple[Tensor, Tensor]:
    """Images and labels of micro-batches."""
    rng = torch.Generator().manual_seed(key)
    images = torch.randn(batches, ROWS, 2, 2, 4, generator=rng, dtype=torch.float64)
    return images, torch.randint(4, (batches, ROWS), generator=rng)


@functools.cache
def alone(form: str, processes: int, warm: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Start and end of one process's training on the micro-batches of all."""
    net = made_net()
    start, opt = values(net), made_optimizer(net, form)
    if warm:
        # The batches of all processes are one batch here. Its sampled labels would be others, so
        # only the methods that sample none are compared.
        images, labels = drawn(2 * processes, 99)
        chunks = zip(images.chunk(2), labels.chunk(2), strict=True)
        pairs = [(x.flatten(0, 1), y.flatten(0, 1)) for x, y in chunks]
        warm_start(opt, net, len(pairs), lambda number, pairs=pairs: pairs[number - 900])
    for step in range(STEPS):
        opt.zero_grad()
        for x, y in zip(*drawn(MICRO * processes, step), strict=True):
            out = net(x)
            observe(opt, out)
            (cross_entropy(out, y) / (MICRO * processes)).backward()
        opt.step()
    return start, values(net)


def replica(
    rank: int, processes: int, cases: Sequence[tuple[str, str | None, bool]]
) -> list[dict[str, Any]]:
    """One process's training in several forms: its last parameters, and the state it keeps."""
    found = []
    for form, shard, warm in cases:
        net = made_net()
        replicas = DistributedDataParallel(net)
        opt = made_optimizer(net, form, shard=shard)
        if warm:
            images, labels = drawn(2 * processes, 99)
            own = slice(rank, None, processes)
            pairs = list(zip(images[own], labels[own], strict=True))
            warm_start(opt, replicas, len(pairs), lambda number, pairs=pairs: pairs[number - 900])
        for step in range(STEPS):
            opt.zero_grad()
            images, labels = drawn(MICRO * processes, step)
            for micro in range(MICRO):
                x, y = images[micro * processes + rank], labels[micro * processes + rank]
                replicas.require_backward_grad_sync = micro == MICRO - 1  # what no_sync() sets
                out = replicas(x)
                observe(opt, out)
                (cross_entropy(out, y) / MICRO).backward()
            opt.step()
        kept = [sorted(opt.state[p]) for p in net.parameters()]
        sizes = [sum(s.nbytes for s in opt.state[p].get("stats", [])) for p in net.parameters()]
        found.append({"ends": values(net), "kept": kept, "bytes": sum(sizes)})
    return found


CASES = [(form, shard, False) for form in FORMS for shard in SHARDS] + [
    (form, shard, True) for form in ("empirical", "shampoo") for shard in SHARDS
]


@functools.cache
def together(processes: int) -> dict[tuple[str, str | None, bool], list[dict[str, Any]]]:
    """Every case, by rank; the processes start once for all of them."""
    ranks = run_in(processes, replica, CASES)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(CASES)}


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replicas_train_as_one_process(case: tuple[str, str | None, bool], processes: int) -> None:
    form, _, warm = case
    start, wanted = alone(form, processes, warm)
    ranks = together(processes)[case]
    for rank in ranks:
        assert all(map(torch.equal, rank["ends"], ranks[0]["ends"]))
    moved = torch.cat([(a - b).reshape(-1) for a, b in zip(wanted, start, strict=True)]).norm()
    apart = torch.cat(
        [(a - b).reshape(-1) for a, b in zip(ranks[0]["ends"], wanted, strict=True)]
    ).norm()
    assert moved > 0.01
    assert apart <= FLOAT64_TRAJECTORY * moved


@pytest.mark.parametrize("processes", [2, 4])
def test_statistics_live_with_their_owner_alone(processes: int) -> None:
    whole = together(processes)["tnt", None, False][0]["bytes"]
    for shard in ("directions", "inverses"):
        ranks = together(processes)["tnt", shard, False]
        assert sum(rank["bytes"] for rank in ranks) == whole
        for number in range(len(ranks[0]["kept"])):
            kept = [rank["kept"][number] for rank in ranks]
            owners = [keys for keys in kept if "stats" in keys]
            others = [keys for keys in kept if "stats" not in keys]
            assert len(owners) == 1
            assert {"factors", "momentum"} <= set(owners[0])
            for keys in others:
                assert ("momentum" in keys) == ("factors" in keys) == (shard == "inverses")


# ------------------------------------------------------------------ checkpoints

BEFORE, AFTER = 5, 4
FORM = "grafted"


def train(net: nn.Module, opt: TNT | Shampoo, rank: int, processes: int, steps: range) -> None:
    """Steps on batches that do not depend on how many processes there are."""
    model = net if processes == 1 else DistributedDataParallel(net)
    for step in steps:
        opt.zero_grad()
        images, labels = drawn(4, step)
        own = slice(rank, None, processes)
        pieces = list(zip(images[own], labels[own], strict=True))
        for number, (x, y) in enumerate(pieces):
            if processes > 1:
                model.require_backward_grad_sync = number == len(pieces) - 1
            out = model(x)
            observe(opt, out)
            (cross_entropy(out, y) / len(pieces)).backward()
        opt.step()


def save(rank: int, processes: int, folder: str, shard: str | None, by_name: bool) -> list[Tensor]:
    """Trains, saves, goes on; returns the last parameters."""
    net = made_net()
    opt = made_optimizer(net, FORM, shard=shard)
    train(net, opt, rank, processes, range(BEFORE))
    state = get_optimizer_state_dict(net, opt) if by_name else opt.state_dict()
    dcp.save({"net": net.state_dict(), "opt": state}, checkpoint_id=folder)
    train(net, opt, rank, processes, range(BEFORE, BEFORE + AFTER))
    return values(net)


def load(
    rank: int, processes: int, folder: str, shard: str | None, by_name: bool
) -> tuple[list[Tensor], list[str]]:
    """Loads and goes on; returns the last parameters, and the keys of the state it keeps."""
    net = made_net()
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    opt = made_optimizer(net, FORM, shard=shard)
    opt.allocate_state()
    state = get_optimizer_state_dict(net, opt) if by_name else opt.state_dict()
    target = {"net": net.state_dict(), "opt": state}
    dcp.load(target, checkpoint_id=folder)
    net.load_state_dict(target["net"])
    if by_name:
        set_optimizer_state_dict(net, opt, target["opt"])
    else:
        opt.load_state_dict(target["opt"])
    train(net, opt, rank, processes, range(BEFORE, BEFORE + AFTER))
    return values(net), [str(sorted(opt.state[p])) for p in net.parameters()]


WAYS = [(shard, by_name) for shard in (None, "directions", "inverses") for by_name in (0, 1)]


def save_and_load(rank: int, processes: int, folder: str) -> list[bool]:
    """For every way, whether a loaded state goes on to the same bits."""
    same = []
    for shard, by_name in WAYS:
        place = f"{folder}/{shard}-{by_name}"
        wanted = save(rank, processes, place, shard, bool(by_name))
        got, _ = load(rank, processes, place, shard, bool(by_name))
        same.append(all(map(torch.equal, got, wanted)))
    return same


def test_as_many_processes_go_on_bit_for_bit(tmp_path: Path) -> None:
    assert run_in(2, save_and_load, str(tmp_path)) == [[True] * len(WAYS)] * 2


def test_other_numbers_of_processes_and_other_shards_go_on(tmp_path: Path) -> None:
    wanted = run_in(4, save, str(tmp_path / "saved"), "directions", False)[0]
    for processes, shard in [(2, "directions"), (2, "inverses"), (1, None)]:
        got = run_in(processes, load, str(tmp_path / "saved"), shard, False)
        for end, _ in got:
            for a, b in zip(end, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
        kept = [kinds for _, kinds in got]
        for number in range(len(wanted)):
            assert sum("'stats'" in kinds[number] for kinds in kept) == 1
