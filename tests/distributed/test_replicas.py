"""Processes with copies of one model: the training of one process on all their batches.

Each is compared with one process that observes the same micro-batches one after the other. States
of processes that share the work are saved, and loaded by as many processes or others.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from kfac_models import least_likely
from optimizers import equal, values, warm_start
from processes import run_in
from replicas import Batches, assert_trained_as, drawn, load, save, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import TNT, Shampoo

STEPS, MICRO, SHAPE = 7, 2, (5, 2, 2, 4)  # SHAPE: of a micro-batch's images

# By name: the method, its settings.
FORMS: dict[str, tuple[type[TNT | Shampoo], dict[str, Any]]] = {
    "tnt": (TNT, {"weight_decay": 0.1}),
    "grafted": (TNT, {"graft": "adam", "relative_damping": True}),
    "grafted to the momentum": (TNT, {"graft": "sgd"}),
    "diagonal": (TNT, {"max_factor_dim": 4}),
    "in blocks": (TNT, {"block_size": 4, "graft": "adam"}),
    "empirical": (TNT, {"fisher": "empirical"}),
    "clipped": (TNT, {"kl_clip": 1e-3, "graft": "sgd", "likelihood": least_likely}),
    "shampoo": (Shampoo, {}),
}
SHARDS = (None, "directions", "inverses")


class Net(nn.Module):
    """A convolution in channels_last and two linear layers; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 3, (2, 3))
        self.hidden = nn.Linear(6, 5)
        self.out = nn.Linear(5, 4)
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.out(torch.tanh(self.hidden(torch.tanh(self.conv(x)).flatten(1))))


def made_optimizer(net: nn.Module, form: str, **more: Any) -> TNT | Shampoo:
    method, settings = FORMS[form]
    rest = [p for name, p in net.named_parameters() if "conv" not in name]
    groups = [{"params": [*net.conv.parameters()], "lr": 0.02}, {"params": rest}]
    defaults = {"lr": 0.05, "damping": 0.1, "stat_interval": 2, "inverse_interval": 3}
    return method.paper(groups, **{**defaults, **settings, **more})


def warm_start_on(batches: Batches, opt: TNT | Shampoo, model: nn.Module) -> None:
    warm_start(opt, model, len(batches), lambda number: batches[number - 900])


@functools.cache
def alone(form: str, processes: int, warm: bool) -> tuple[list[Tensor], list[Tensor]]:
    """End and start of one process's training on the micro-batches of all."""
    net = Net()
    start, opt = values(net), made_optimizer(net, form)
    if warm:
        # The batches of all processes are one batch here. Its sampled labels would be others, so
        # only the forms that sample none are compared. The last batch is the first process's alone.
        parts = drawn(2 * processes + 1, 99, *SHAPE)
        joined = [parts[i : i + processes] for i in range(0, len(parts), processes)]
        warm_start_on([tuple(map(torch.cat, zip(*b, strict=True))) for b in joined], opt, net)  # type: ignore[misc]
    train(net, opt, [drawn(MICRO * processes, step, *SHAPE) for step in range(STEPS)])
    return values(net), start


def replica(
    rank: int, processes: int, form: str, shard: str | None, warm: bool = False
) -> dict[str, Any]:
    """One process's training: its last parameters, and the state it keeps."""
    net = Net()
    model = DistributedDataParallel(net)
    opt = made_optimizer(net, form, shard=shard)
    if warm:
        warm_start_on(drawn(2 * processes + 1, 99, *SHAPE)[rank::processes], opt, model)
    steps = [drawn(MICRO * processes, step, *SHAPE) for step in range(STEPS)]
    train(model, opt, [batches[rank::processes] for batches in steps])
    kept = [sorted(opt.state[p]) for p in net.parameters()]
    sizes = [sum(s.nbytes for s in opt.state[p].get("stats", [])) for p in net.parameters()]
    return {"ends": values(net), "kept": kept, "bytes": sum(sizes)}


WARM = ("empirical", "clipped", "shampoo")
CASES = [*((form, False) for form in FORMS), *((form, True) for form in WARM)]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(("form", "warm"), CASES)
def test_replicas_train_as_one_process(
    form: str, warm: bool, shard: str | None, processes: int
) -> None:
    ranks = run_in(processes, replica, form, shard, warm)
    assert_trained_as([rank["ends"] for rank in ranks], *alone(form, processes, warm))


@pytest.mark.parametrize("processes", [2, 4])
def test_statistics_live_with_their_owner_alone(processes: int) -> None:
    whole = run_in(processes, replica, "tnt", None)[0]["bytes"]
    for shard in ("directions", "inverses"):
        ranks = run_in(processes, replica, "tnt", shard)
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


def train_on_four(
    rank: int, processes: int, net: nn.Module, opt: TNT | Shampoo, steps: range
) -> None:
    """Steps on four micro-batches, however many processes there are."""
    model = net if processes == 1 else DistributedDataParallel(net)
    train(model, opt, [drawn(4, step, *SHAPE)[rank::processes] for step in steps])


def saved(rank: int, processes: int, folder: str, shard: str | None, by_name: bool) -> list[Tensor]:
    """Trains, saves, goes on; returns the last parameters."""
    net = Net()
    opt = made_optimizer(net, "grafted", shard=shard)
    train_on_four(rank, processes, net, opt, range(5))
    save(folder, net, opt, by_name)
    train_on_four(rank, processes, net, opt, range(5, 9))
    return values(net)


def loaded(
    rank: int, processes: int, folder: str, shard: str | None, by_name: bool
) -> tuple[list[Tensor], list[bool]]:
    """Loads and goes on; returns the last parameters, and which statistics the process keeps."""
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    opt = made_optimizer(net, "grafted", shard=shard)
    load(folder, net, opt, by_name)
    train_on_four(rank, processes, net, opt, range(5, 9))
    return values(net), ["stats" in opt.state[p] for p in net.parameters()]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("shard", SHARDS)
def test_as_many_processes_go_on_bit_for_bit(
    shard: str | None, by_name: bool, tmp_path: Path
) -> None:
    wanted = run_in(2, saved, str(tmp_path), shard, by_name)
    found = run_in(2, loaded, str(tmp_path), shard, by_name)
    assert all(equal(end, wanted[0]) for end in (wanted[1], found[0][0], found[1][0]))


def test_other_numbers_of_processes_and_other_shards_go_on(tmp_path: Path) -> None:
    wanted = run_in(4, saved, str(tmp_path), "directions", False)[0]
    for processes, shard in [(2, "directions"), (2, "inverses"), (1, None)]:
        found = run_in(processes, loaded, str(tmp_path), shard, False)
        for end, _ in found:
            for a, b in zip(end, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
        for number in range(len(wanted)):
            assert sum(kept[number] for _, kept in found) == 1
