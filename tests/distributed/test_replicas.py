"""Processes with copies of one model: the training of one process on all their batches.

Each is compared with one process that observes the same micro-batches in turn.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from processes import run_in
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import TNT, Shampoo

pytestmark = pytest.mark.usefixtures("one_thread")

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


def observe(opt: TNT | Shampoo, output: Tensor) -> None:
    if isinstance(opt, TNT):
        opt.observe(output)


def warm_up(opt: TNT | Shampoo, net: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """A warm start from outputs, or from losses where the statistics are of training gradients."""
    sampled = isinstance(opt, TNT) and opt.fisher == "sampled"
    opt.warm_start(net(x) if sampled else cross_entropy(net(x), y) for x, y in batches)


def ends(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


@functools.cache
def alone(form: str, processes: int, warm: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Start and end of one process's training on the micro-batches of all."""
    net = made_net()
    start, opt = ends(net), made_optimizer(net, form)
    if warm:
        # A batch of all processes is one batch here; the sampled labels must be theirs, so it is
        # compared for the methods that sample none.
        images, labels = drawn(2 * processes, 99)
        pairs = zip(images.chunk(2), labels.chunk(2), strict=True)
        warm_up(opt, net, [(x.flatten(0, 1), y.flatten(0, 1)) for x, y in pairs])
    for step in range(STEPS):
        opt.zero_grad()
        for x, y in zip(*drawn(MICRO * processes, step), strict=True):
            out = net(x)
            observe(opt, out)
            (cross_entropy(out, y) / (MICRO * processes)).backward()
        opt.step()
    return start, ends(net)


def replica(
    rank: int, processes: int, cases: Sequence[tuple[str, str | None, bool]]
) -> list[dict[str, Any]]:
    """One process's training in several forms: where its parameters end, what it keeps."""
    found = []
    for form, shard, warm in cases:
        net = made_net()
        replicas = DistributedDataParallel(net)
        opt = made_optimizer(net, form, shard=shard)
        if warm:
            images, labels = drawn(2 * processes, 99)
            own = slice(rank, None, processes)
            warm_up(opt, replicas, list(zip(images[own], labels[own], strict=True)))
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
        found.append({"ends": ends(net), "kept": kept, "bytes": sum(sizes)})
    return found


CASES = [(form, shard, False) for form in FORMS for shard in SHARDS] + [
    (form, shard, True) for form in ("empirical", "shampoo") for shard in SHARDS
]


@functools.cache
def together(processes: int) -> dict[tuple[str, str | None, bool], list[dict[str, Any]]]:
    """Every case, by rank; one start of the processes for all of them."""
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
