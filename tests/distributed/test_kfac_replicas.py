"""KFAC in several processes with copies of one model: the training of one on all their batches.

Each is compared with one process that observes the same micro-batches in turn.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from processes import run_in
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import KFAC

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 7
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A convolution, a norm that takes the momentum, layers with and without bias; float64."""

    def __init__(self) -> None:
        super().__init__()
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


@dataclass(frozen=True)
class Case:
    """How the processes train.

    Attributes:
        inverse: KFAC's.
        likelihood: KFAC's, and what the loss is of.
        micro: micro-batches of a step and process, all but the last with no_sync; "uneven": the
            processes before half of them have one more.
        warm: whether a warm start comes first, with one batch more in process 0.
        wrapped: whether KFAC is given DistributedDataParallel itself.
        shard: KFAC's.
    """

    inverse: str
    likelihood: str = "categorical"
    micro: int | str = 2
    warm: bool = False
    wrapped: bool = False
    shard: str | None = None


CASES = [
    *(
        Case(inverse, likelihood, micro)
        for inverse in ("damped", "eigenbasis")
        for likelihood in ("categorical", "gaussian")
        for micro in (1, 2, "uneven")
    ),
    *(
        Case(inverse, warm=True, shard=shard)
        for inverse in ("damped", "eigenbasis")
        for shard in (None, "inverses")
    ),
    *(Case(inverse, shard="inverses") for inverse in ("damped", "eigenbasis")),
    Case("damped", "bernoulli"),
    Case("damped", warm=True, wrapped=True),
]


def made_net() -> Net:
    torch.manual_seed(3)
    return Net()


def made_optimizer(model: nn.Module, case: Case, **more: Any) -> KFAC:
    return KFAC(
        model,
        lr=0.05,
        damping=0.1,
        weight_decay=0.1,
        stat_interval=2,
        inverse_interval=3,
        inverse=case.inverse,
        likelihood=case.likelihood,
        **{"shard": case.shard, **more},
    )


def drawn(key: int, counts: Sequence[int]) -> list[list[Batch]]:
    """Each process's micro-batches, of 3 to 6 rows: images and labels."""
    rng = torch.Generator().manual_seed(key)

    def batch() -> Batch:
        rows = int(torch.randint(3, 7, (), generator=rng))
        images = torch.randn(rows, 2, 2, 4, generator=rng, dtype=torch.float64)
        return images, torch.randint(4, (rows,), generator=rng)

    return [[batch() for _ in range(count)] for count in counts]


def of_a_step(case: Case, processes: int, step: int) -> list[list[Batch]]:
    if isinstance(case.micro, int):
        return drawn(step, [case.micro] * processes)
    return drawn(step, [3 if rank < processes // 2 else 2 for rank in range(processes)])


def of_a_warm_start(processes: int) -> list[list[Batch]]:
    return drawn(99, [3, *[2] * (processes - 1)])


def in_turn(parts: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Everyone's first, then everyone's second."""
    for index in range(max(map(len, parts))):
        yield from (part[index] for part in parts if index < len(part))


def summed_loss(case: Case, output: Tensor, labels: Tensor) -> Tensor:
    if case.likelihood == "categorical":
        return cross_entropy(output, labels, reduction="sum")
    return mse_loss(output, torch.eye(4, dtype=output.dtype)[labels], reduction="sum") / 2


def ends(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def held(net: nn.Module, opt: KFAC) -> dict[str, list[Tensor]]:
    """Statistics and inverses of all layers."""
    states = {name: opt.state.get(p, {}) for name, p in net.named_parameters()}
    return {
        f"{name}: {key}": [matrix.clone() for matrix in state[key]]
        for name, state in states.items()
        for key in ("stats", "factors")
        if key in state
    }


def apart(ends: Sequence[Tensor], wanted: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """How far from where they should be, relative to how far they should have moved."""

    def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        return torch.cat([(x - y).reshape(-1) for x, y in zip(a, b, strict=True)]).norm()

    moved = distance(wanted, start)
    assert moved > 0.01
    return float(distance(ends, wanted) / moved)


@functools.cache
def alone(case: Case, processes: int) -> dict[str, Any]:
    """One process's training on the micro-batches of all, in turn."""
    net = made_net()
    start, opt = ends(net), made_optimizer(net, case)
    if case.warm:
        opt.warm_start(net(x) for x, _ in in_turn(of_a_warm_start(processes)))
    for step in range(STEPS):
        opt.zero_grad()
        batches = list(in_turn(of_a_step(case, processes, step)))
        rows = sum(len(x) for x, _ in batches)
        for x, y in batches:
            out = net(x)
            opt.observe(out)
            (summed_loss(case, out, y) / rows).backward()
        opt.step()
    return {"start": start, "ends": ends(net), "held": held(net, opt)}


def replica(rank: int, processes: int) -> list[dict[str, Any]]:
    """One process's training, of every case."""
    found = []
    for case in CASES:
        net = made_net()
        replicas = DistributedDataParallel(net)
        opt = made_optimizer(replicas if case.wrapped else net, case)
        if case.warm:
            opt.warm_start(replicas(x) for x, _ in of_a_warm_start(processes)[rank])
        for step in range(STEPS):
            opt.zero_grad()
            parts = of_a_step(case, processes, step)
            rows = sum(len(x) for part in parts for x, _ in part)
            for micro, (x, y) in enumerate(parts[rank]):
                replicas.require_backward_grad_sync = micro == len(parts[rank]) - 1  # as no_sync()
                out = replicas(x)
                opt.observe(out)
                # DistributedDataParallel takes the mean over the processes.
                (summed_loss(case, out, y) * processes / rows).backward()
            opt.step()
        found.append({"ends": ends(net), "held": held(net, opt)})
    return found


@functools.cache
def together(processes: int) -> list[list[dict[str, Any]]]:
    """Every case by rank; one start of the processes for all of them."""
    return run_in(processes, replica)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replicas_train_as_one_process(case: Case, processes: int) -> None:
    wanted = alone(case, processes)
    ranks = [rank[CASES.index(case)] for rank in together(processes)]
    assert apart(ranks[0]["ends"], wanted["ends"], wanted["start"]) <= FLOAT64_TRAJECTORY
    for key, matrices in wanted["held"].items():
        for place, matrix in enumerate(matrices):
            if "stats" in key:
                got = ranks[0]["held"][key][place]
                assert float((got - matrix).norm() / matrix.norm()) <= FLOAT64_TRAJECTORY
                assert torch.equal(got, got.T)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_processes_have_the_same_bits(case: Case, processes: int) -> None:
    first, *others = [rank[CASES.index(case)] for rank in together(processes)]
    assert len(first["held"]) == 6
    for rank in others:
        assert all(map(torch.equal, rank["ends"], first["ends"]))
        assert rank["held"].keys() == first["held"].keys()
        for key, matrices in first["held"].items():
            assert all(map(torch.equal, rank["held"][key], matrices))
