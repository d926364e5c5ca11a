"""States of processes that share the work: saved, loaded by as many or others, and their size."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import run_in
from test_replicas import drawn, ends, made_net, made_optimizer, observe
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import TNT, Shampoo

pytestmark = pytest.mark.usefixtures("one_thread")

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
    """Trains, saves, goes on; returns where the parameters end."""
    net = made_net()
    opt = made_optimizer(net, FORM, shard=shard)
    train(net, opt, rank, processes, range(BEFORE))
    state = get_optimizer_state_dict(net, opt) if by_name else opt.state_dict()
    dcp.save({"net": net.state_dict(), "opt": state}, checkpoint_id=folder)
    train(net, opt, rank, processes, range(BEFORE, BEFORE + AFTER))
    return ends(net)


def load(
    rank: int, processes: int, folder: str, shard: str | None, by_name: bool
) -> tuple[list[Tensor], list[str]]:
    """Loads and goes on; returns where the parameters end, and what this process keeps."""
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
    return ends(net), [str(sorted(opt.state[p])) for p in net.parameters()]


WAYS = [(shard, by_name) for shard in (None, "directions", "inverses") for by_name in (0, 1)]


def save_and_load(rank: int, processes: int, folder: str) -> list[bool]:
    """Whether a loaded state goes on to the same bits, in every way."""
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
