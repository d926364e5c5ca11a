"""Steps shared by several processes on one machine: traffic, state, seconds, and the difference.

Every process gets the same gradients, as after the all-reduce of DistributedDataParallel, so one
process alone must end where several do; the record has the difference. Seconds are those of
`step`: on one machine the processes share its cores, and gloo copies through memory.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

from tools.measuring.packages import require_bench

require_bench()

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from tqdm import tqdm

from tnt_kernels.benchmark.clock import now
from tnt_kernels.benchmark.records import write_json
from tnt_kernels.benchmark.report import DIGITS, new_record, origin, write
from tnt_kernels.benchmark.tables import table
from tnt_optim import TNT
from tools.measuring.parameter_sets import PARAMETER_SETS
from tools.measuring.state import state_bytes

# How the work is shared: every process does all of it, the two settings of `shard`, and parameters
# that fully_shard has cut.
WAYS = ("none", "directions", "inverses", "fully_shard")
T1, T2 = 2, 4
DAMPING = 0.1
# The kinds of a period of T2 steps, in its order.
KINDS = ("statistics and inverses", "nothing", "statistics", "nothing")
_MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One measurement."""

    parameters: str  # the name of a parameter set
    way: str  # one of `WAYS`; "none" for a single process
    processes: int  # how many
    periods: int  # of T2 steps each, timed after one untimed period
    device: str = "cpu"  # "cpu", or "cuda" with one GPU for each process


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


def gradients(name: str, seed: int, device: str) -> list[Tensor]:
    """A gradient of every parameter, with the rank and decay that training has."""
    rng = torch.Generator().manual_seed(seed)
    grads = []
    for shape in PARAMETER_SETS[name].shapes:
        noise = torch.randn(shape, generator=rng)
        grads.append((noise * torch.rand(shape[-1:], generator=rng) * 1e-2).to(device))
    return grads


# The bytes that a process hands to a collective: the whole tensor to an all-reduce, the owner's
# tensor to a broadcast, all pieces to an all-to-all. The bytes on a wire depend on the backend: a
# ring sends 2 (n - 1) / n of an all-reduce, (n - 1) / n of a gather.
_COUNTED: dict[str, Callable[..., int]] = {
    "all_reduce": lambda tensor, *a, **k: tensor.nbytes,
    "broadcast": lambda tensor, *, group, group_src, **k: (
        tensor.nbytes if group_src == dist.get_rank(group) else 0
    ),
    "all_to_all_single": lambda output, tensor, *a, **k: tensor.nbytes,
}


@contextmanager
def counted_traffic() -> Iterator[list[int]]:
    """The bytes that this process hands to each collective of the optimizers."""
    sent: list[int] = []

    def counting(name: str) -> Callable[..., Any]:
        collective = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(_COUNTED[name](*args, **kwargs))
            return collective(*args, **kwargs)

        return call

    counted: dict[str, Any] = {name: counting(name) for name in _COUNTED}
    with mock.patch.multiple(dist, **counted):
        yield sent


def run_rank(rank: int, folder: str, case: Case, threads: int) -> None:
    """Run a case as one of its processes; write the result to a file. The target of `spawn`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    if case.device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", case.processes)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if case.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=case.processes,
        timeout=timedelta(minutes=10),
    )
    torch.save(_measured(case), f"{folder}/{rank}.pt")
    # Wait for all, then exit without destroying the group: gloo's threads sometimes abort the
    # interpreter at its end.
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(case.processes)])
    os._exit(0)


def _measured(case: Case) -> dict[str, Any]:
    model = Parameters(case.parameters).to(case.device)
    if case.way == "fully_shard":
        fully_shard(model, mesh=init_device_mesh(case.device, (case.processes,)))
    opt = TNT.paper(
        model.parameters(),
        lr=1e-4,
        damping=DAMPING,
        stat_interval=T1,
        inverse_interval=T2,
        likelihood=lambda loss: loss,  # its gradient is the sampled one
        shard=case.way if case.way in ("directions", "inverses") else None,
    )
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    sent: dict[str, int] = {}
    for step in range((1 + case.periods) * T2):
        opt.zero_grad()
        opt.observe(model(gradients(case.parameters, 2 * step, case.device)))
        model(gradients(case.parameters, 2 * step + 1, case.device)).backward()
        dist.barrier()
        with counted_traffic() as handed:
            start = now(case.device)
            opt.step()
            taken = now(case.device) - start
        if step >= T2:
            kind = KINDS[step % T2]
            seconds[kind].append(taken)
            sent[kind] = sum(handed)
    ends = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return {
        "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
        "sent": sent,
        "state": state_bytes(opt),
        "ends": [end.detach().cpu() for end in ends],
    }


def measured(case: Case, threads: int) -> dict[str, Any]:
    """The row of one case, with ``threads`` for all processes; seconds are the slowest process's.

    Differences are relative to how far one process alone has moved the parameters.
    """
    ranks = _ranks(case, threads)
    ends = [rank["ends"] for rank in ranks]
    start = [weight.detach() for weight in Parameters(case.parameters).weights]
    alone = _alone_end(replace(case, way="none", processes=1), threads)
    moved = _distance(alone, start)
    return {
        "parameters": case.parameters,
        "way": case.way,
        "processes": case.processes,
        "seconds": {kind: max(rank["seconds"][kind] for rank in ranks) for kind in KINDS},
        "sent_bytes": {kind: [rank["sent"][kind] for rank in ranks] for kind in KINDS},
        "state_bytes": [rank["state"] for rank in ranks],
        "difference": max(_distance(end, alone) for end in ends) / moved,
        "processes_differ": max(_distance(end, ends[0]) for end in ends) / moved,
    }


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    norms = [(a - b).norm() for a, b in zip(some, others, strict=True)]
    return float(torch.stack(norms).norm())


@functools.cache
def _alone_end(case: Case, threads: int) -> list[Tensor]:
    ends: list[Tensor] = _ranks(case, threads)[0]["ends"]
    return ends


def _ranks(case: Case, threads: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        each = max(1, threads // case.processes)
        spawn(run_rank, (folder, case, each), nprocs=case.processes)
        paths = [f"{folder}/{rank}.pt" for rank in range(case.processes)]
        return [torch.load(path, weights_only=True) for path in paths]


def page(record: Mapping[str, Any]) -> str:
    """The page of a record."""
    kinds = list(dict.fromkeys(KINDS))
    header = ["parameters", "processes", "shared", "state of the largest process, MiB"]
    header += ["of all, MiB", *(f"{kind}: ms" for kind in kinds)]
    header += [*(f"{kind}: MiB sent" for kind in kinds)]
    header += ["difference from one process", "between processes"]
    rows = [
        [
            row["parameters"],
            row["processes"],
            row["way"],
            f"{max(row['state_bytes']) / _MIB:.1f}",
            f"{sum(row['state_bytes']) / _MIB:.1f}",
            *(f"{1000 * row['seconds'][kind]:.1f}" for kind in kinds),
            *(f"{sum(row['sent_bytes'][kind]) / _MIB:.1f}" for kind in kinds),
            f"{row['difference']:.1e}",
            f"{row['processes_differ']:.1e}",
        ]
        for row in record["rows"]
    ]
    text = [
        "# Steps shared by several processes",
        "",
        *origin(record),
        "Milliseconds are of `step`, the slowest process's median. MiB sent is what all processes "
        "together hand to collectives in one step. The difference of the final parameters is "
        "relative to how far they have moved.",
        "",
        *table(header, rows),
    ]
    return "\n".join(text).rstrip() + "\n"


def main(
    out: Annotated[Path, typer.Option(help="the record; its page next to it")] = Path(
        "results/processes.json"
    ),
    sets: Annotated[str, typer.Option(help="parameter sets, separated by commas")] = "mnist_ae",
    processes: Annotated[str, typer.Option(help="numbers of processes")] = "2,4",
    periods: Annotated[int, typer.Option(min=1, help="of 4 steps")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="of all processes together")] = None,
) -> None:
    """Measure traffic, state and seconds of processes that share TNT's steps."""
    threads = threads or torch.get_num_threads()
    counts = [int(count) for count in processes.split(",")]
    settings = {"t1": T1, "t2": T2, "damping": DAMPING, "periods": periods}
    record = new_record(out, device, **settings, threads_of_all_processes=threads)
    cases = [
        Case(name, way, count, periods, device)
        for name in sets.split(",")
        for count in dict.fromkeys([1, *counts])
        for way in (WAYS if count > 1 else WAYS[:1])
    ]
    for case in tqdm(cases, disable=None):
        record["rows"].append(measured(case, threads))
        write_json(out, record, DIGITS)
    write(out, record, page)
    typer.echo(f"wrote {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    typer.run(main)
