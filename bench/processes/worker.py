"""What each process of the benchmark does."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.processes.traffic import counted, nbytes
from tnt_optim import TNT
from tools.measuring.parameter_sets import PARAMETER_SETS

# How the work is shared: each process all of it, the two ways of `shard`, and parameters that
# fully_shard has cut.
WAYS = ("none", "directions", "inverses", "fully_shard")
T1, T2 = 2, 4
# The kinds of a period of T2 steps, in its order.
KINDS = ("statistics and inverses", "nothing", "statistics", "nothing")
DAMPING = 0.1


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        parameters: the name of a parameter set.
        way: one of `WAYS`; only "none" for a single process.
        processes: how many.
        periods: of T2 steps each, timed after one that is not.
    """

    parameters: str
    way: str
    processes: int
    periods: int

    @property
    def key(self) -> dict[str, Any]:
        """What its run is found by."""
        return {"parameters": self.parameters, "way": self.way, "processes": self.processes}


class Parameters(nn.Module):
    """The parameters of a set, in a module for fully_shard; its output is their inner product."""

    def __init__(self, name: str) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        shapes = PARAMETER_SETS[name].shapes
        weights = [torch.randn(shape, generator=rng) * 0.02 for shape in shapes]
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in weights)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        """A loss whose gradients are the given ones."""
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def gradients(name: str, key: int) -> list[Tensor]:
    """A gradient of every parameter, of the rank and decay that training has."""
    rng = torch.Generator().manual_seed(key)
    found = []
    for shape in PARAMETER_SETS[name].shapes:
        noise = torch.randn(shape, generator=rng)
        found.append(noise * torch.rand(shape[-1:], generator=rng) * 1e-2)
    return found


def measure(rank: int, folder: str, case: Case, threads: int) -> None:
    """Runs a case as one of its processes, and leaves what it found in a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    store = FileStore(f"{folder}/store", case.processes)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=case.processes,
        timeout=timedelta(minutes=10),
    )
    torch.save(_measured(case), f"{folder}/{rank}.pt")
    # Not before all are through, and without taking anything down: gloo's threads abort the
    # interpreter's end now and then.
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(case.processes)])
    os._exit(0)


def _measured(case: Case) -> dict[str, Any]:
    model = Parameters(case.parameters)
    if case.way == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (case.processes,)))
    opt = TNT(
        model.parameters(),
        lr=1e-4,
        damping=DAMPING,
        stat_interval=T1,
        inverse_interval=T2,
        likelihood=lambda loss: loss,  # whose gradient is the sampled one
        shard=case.way if case.way in ("directions", "inverses") else None,
    )
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    sent: dict[str, tuple[int, int]] = {}
    for step in range((1 + case.periods) * T2):
        opt.zero_grad()
        opt.observe(model(gradients(case.parameters, 2 * step)))
        model(gradients(case.parameters, 2 * step + 1)).backward()
        dist.barrier()
        with counted() as traffic:
            start = time.perf_counter()
            opt.step()
            taken = time.perf_counter() - start
        if step >= T2:
            kind = KINDS[step % T2]
            seconds[kind].append(taken)
            sent[kind] = (traffic.size, traffic.calls)
    ends = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return {
        "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
        "sent": sent,
        "state": sum(nbytes(opt.state[p]) for p in opt.state),
        "ends": [end.detach().clone() for end in ends],
    }
