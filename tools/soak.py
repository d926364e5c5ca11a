"""A soak: TNT trains under faults in 1, 2 or 4 processes, and must end where a clean run ends.

Faults are drawn from a seed before the training starts. A numerical fault belongs to a step. Any
other fault ends all processes once; a new set of processes, of another number, then goes on from
the last complete checkpoint. The process that a fault names kills itself, or raises, at a fixed
place of its program, and only once all processes have reached that step. So every life of a soak is
a function of the seed, and nothing depends on how fast a process dies.

A batch, and the labels of the sampled loss, are functions of the step's number. A process that
trains alone can therefore repeat what any number of processes have done, up to rounding.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.state_dict_saver import save as save_in_parts
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from tnt_optim import TNT
from tools.measuring.provenance import provenance
from tools.measuring.records import check_writable, write_json

BATCH = 64  # divisible by every number of processes
STATISTICS, FACTORS, CHECKPOINTS, FAULTS = 2, 10, 25, 25  # intervals, in steps
SETTINGS: dict[str, Any] = {
    "lr": 0.003,
    "damping": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "stat_interval": STATISTICS,
    "inverse_interval": FACTORS,
}
PROCESSES, SHARDS = (1, 2, 4), ("directions", "inverses")
PATIENCE = 300.0  # seconds until a process that waits for a dead one counts as hanging
TOLERANCE = 1e-10  # of the distance of the clean run, in float64: sums in another order
GROWTH_MIB = 4.0  # of a clean run: a leak of 1 KiB a step is 10 MiB after 10,000
INJECTED = 3  # exit status of a process that a planned exception ended


class SoakError(RuntimeError):
    """A process failed that no fault should have ended."""


class InjectedError(RuntimeError):
    """A fault raised this error on purpose."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    interval: int = 1  # it is possible every so many steps
    everyone: bool = False  # it ends all processes, not one
    saving: bool = False  # it comes during the checkpoint after its step
    raising: tuple[str, ...] = ()  # the operators that raise


NAN = Kind("a NaN in the sampled gradient of one process", STATISTICS)
NEGATIVE = Kind("a statistic that is negative definite", FACTORS)
NUMERICAL = (NAN, NEGATIVE)  # a step suffers them whenever it is taken
KILLS = (
    Kind("SIGKILL of one process"),
    Kind("SIGKILL of all processes", everyone=True),
    Kind("SIGKILL of one process during a checkpoint", CHECKPOINTS, saving=True),
    Kind("SIGKILL of all processes during a checkpoint", CHECKPOINTS, everyone=True, saving=True),
)
ERRORS = tuple(
    Kind(f"an exception in {place} of one process", interval, raising=operators)
    for place, interval, operators in (
        ("observe", STATISTICS, ("aten::argmin",)),  # only the likelihood calls it
        ("the statistics", STATISTICS, ("tnt_kernels::gram_ema_",)),
        ("the factors", FACTORS, ("tnt_kernels::damped_inverse",)),
        ("the update", 1, ("tnt_kernels::mode_products", "tnt_kernels::preconditioned_step_")),
    )
)
RESTART = Kind("a planned restart")
KINDS = (*NUMERICAL, *KILLS, *ERRORS, RESTART)
NOTHING = Kind("no fault")


@dataclass(frozen=True)
class Fault:
    """A fault of one step."""

    step: int  # from 0
    kind: Kind
    who: float  # in [0, 1): the victim, for any number of processes or parameters

    def victim(self, count: int) -> int:
        """The rank, or the number of the parameter, that it hits."""
        return int(self.who * count)

    def victims(self, processes: int) -> list[int]:
        """The ranks that it hits."""
        return list(range(processes)) if self.kind.everyone else [self.victim(processes)]


def draw(seed: int, steps: int, faults: int) -> list[Fault]:
    """Draw faults of all kinds in turn, each on a step of its own, as far as they fit."""
    rng = random.Random(seed)
    # The first step makes the first factors: a failure there has no older ones.
    free = list(range(1, steps - 1))
    drawn: list[Fault] = []
    deck: list[Kind] = []
    for _ in range(faults):
        deck = deck or rng.sample(KINDS, len(KINDS))
        kind = deck.pop()
        places = [step for step in free if (step + kind.saving) % kind.interval == 0]
        if places:
            drawn.append(Fault(rng.choice(places), kind, rng.random()))
            free.remove(drawn[-1].step)
    return sorted(drawn, key=lambda fault: fault.step)


# The training.


class Training:
    """A small classifier of scikit-learn's digits, its optimizer, and how often it took each step.

    A checkpoint holds all three. The seed decides the start of the model and all batches.
    """

    def __init__(self, seed: int, steps: int, shard: str | None = None) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.from_numpy(images) / 16.0, torch.from_numpy(labels)
        self.seed = seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = (nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 10))
            self.net = nn.Sequential(*layers).double()
        self.model: nn.Module = self.net
        self.spoiled = False
        self.opt = TNT.paper(
            self.net.parameters(), likelihood=self._likelihood, shard=shard, **SETTINGS
        )
        self.taken = torch.zeros(steps, dtype=torch.int64)

    def step(self, step: int, fault: Fault, processes: int, rank: int | None = None) -> None:
        """Take one step as a process takes it; without a rank, as all processes together do."""
        victim = fault.victim(processes)
        rows = list(range(BATCH)) if rank is None else part(rank, processes)
        observed = rows
        self.spoiled = fault.kind == NAN and (processes == 1 or rank == victim)
        if fault.kind == NAN and rank is None and not self.spoiled:
            observed = [row for row in rows if row not in part(victim, processes)]
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = torch.randint(len(self.images), (BATCH,), generator=rng)
        images, labels = self.images[chosen], self.labels[chosen]
        self.opt.zero_grad()
        output = self.model(images[rows])
        self.opt.observe(output if observed is rows else self.net(images[observed]))
        loss: Tensor = cross_entropy(output, labels[rows])
        loss.backward()
        params = list(self.net.parameters())
        hit = [params[fault.victim(len(params))]] if fault.kind == NEGATIVE else []
        stats = [stat for p in hit for stat in self.opt.state[p].get("stats", [])]
        before = [stat.clone() for stat in stats]
        for stat in stats:
            stat.copy_(-1e6 * torch.eye(len(stat), dtype=stat.dtype))
        self.opt.step()
        for stat, value in zip(stats, before, strict=True):
            stat.copy_(value)
        self.taken[step] += 1

    def _likelihood(self, output: Tensor) -> Tensor:
        """Samples nothing: the loss at the least likely labels."""
        loss = cross_entropy(output, output.detach().argmin(1))
        return loss * math.nan if self.spoiled else loss

    def parameters(self) -> Tensor:
        """All parameters in one vector."""
        return nn.utils.parameters_to_vector(self.net.parameters()).detach()

    def content(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "taken": self.taken}

    def load(self, path: Path) -> None:
        """Load a checkpoint of any number of processes."""
        self.opt.allocate_state()
        content = self.content()
        load_in_place(content, checkpoint_id=path)
        self.net.load_state_dict(content["net"])
        self.opt.load_state_dict(content["opt"])

    def end(self) -> dict[str, Any]:
        """Where the training ended."""
        return {
            "parameters": self.parameters(),
            "taken": self.taken,
            "failures": self.opt.failures(),
        }


def part(rank: int, processes: int) -> list[int]:
    """The rows of a batch that one process has."""
    return list(range(rank * BATCH // processes, (rank + 1) * BATCH // processes))


# One process.


@dataclass(frozen=True)
class Soak:
    """What a soak is a function of, and its folder."""

    folder: Path  # of all files; its own
    seed: int
    steps: int
    faults: Sequence[Fault]


@dataclass(frozen=True)
class Life:
    """What a set of processes starts with."""

    soak: Soak
    number: int  # of the life, from 0
    half_written: int  # checkpoints that the life before left
    first: int  # step, that of the last complete checkpoint
    processes: int  # how many
    shard: str  # TNT's setting
    end: Fault  # the fault that ends this life; ``NOTHING`` after the last step

    def fault(self, step: int) -> Fault:
        """The fault of a step: an end comes in one life, a numerical fault in each."""
        for fault in self.soak.faults:
            if fault.step == step and (fault == self.end or fault.kind in NUMERICAL):
                return fault
        return Fault(step, NOTHING, 0.0)


class _DyingWriter(FileSystemWriter):
    """Writes half a file, then SIGKILL."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        (Path(self.path) / "__half.distcp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


class _Failing(TorchDispatchMode):
    """Raises where one of the operators is called."""

    def __init__(self, operators: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in self.operators:
            raise InjectedError(func.name())
        return func(*args, **(kwargs or {}))


def live(rank: int, life: Life, barrier: Barrier) -> None:
    """Train to the end of a life: the target of a process.

    Exit status: 0 at the end or a planned restart, ``INJECTED`` after a planned exception, 1 after
    any other exception; a file then has its text.
    """
    soak, end = life.soak, life.end
    try:
        torch.set_num_threads(1)  # the matrices are small
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        warnings.simplefilter("ignore")  # failures are counted
        dist.init_process_group(
            "gloo",
            init_method=f"file://{soak.folder}/store-{life.number}",
            rank=rank,
            world_size=life.processes,
            timeout=timedelta(seconds=PATIENCE / 2),
        )
        training = Training(soak.seed, soak.steps, life.shard)
        if life.first:
            training.load(checkpoint(soak, life.first))
        training.model = DistributedDataParallel(training.net)
        for step in range(life.first, end.step + (end.kind not in (RESTART, NOTHING))):
            _take(training, step, rank, life, barrier)
        if end.kind == NOTHING and rank == 0:
            torch.save(training.end(), soak.folder / "end.pt")
        ends: list[Any] = [None] * life.processes
        dist.all_gather_object(ends, training.parameters())
        if not all(torch.equal(ends[0], other) for other in ends):
            raise SoakError(f"parameters differ between processes: {ends}")
        dist.destroy_process_group()
    except InjectedError:
        os._exit(INJECTED)
    except BaseException:
        (soak.folder / f"error-{life.number}-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # gloo may wait for its peers while it is destroyed


def _take(training: Training, step: int, rank: int, life: Life, barrier: Barrier) -> None:
    """Take one step, with its fault, and save a checkpoint after it if one is due."""
    fault = life.fault(step)
    kind, is_hit = fault.kind, rank in fault.victims(life.processes)
    if fault == life.end:
        barrier.wait()  # no process has died before that
    if is_hit and kind in KILLS and not kind.saving:
        os.kill(os.getpid(), signal.SIGKILL)
    with _Failing(kind.raising) if is_hit and kind in ERRORS else nullcontext():
        training.step(step, fault, life.processes, rank)
    if (step + 1) % CHECKPOINTS == 0:
        if kind.saving:
            barrier.wait()
        writer = _DyingWriter if is_hit and kind.saving else FileSystemWriter
        save_in_parts(training.content(), storage_writer=writer(checkpoint(life.soak, step + 1)))


def checkpoint(soak: Soak, steps: int) -> Path:
    """The folder of the checkpoint after so many steps."""
    return soak.folder / f"after-{steps:07d}"


# The supervisor.


def train(soak: Soak) -> list[Life]:
    """Live through all faults, to the last step.

    Raises:
        SoakError: a process ended in another way than planned, or hung.
    """
    rng = random.Random(soak.seed + 1)
    ends = [fault for fault in soak.faults if fault.kind not in NUMERICAL]
    ends.append(Fault(soak.steps, NOTHING, 0.0))
    lives: list[Life] = []
    for number, end in enumerate(tqdm(ends, "lives", disable=None)):
        begun = sorted(soak.folder.glob("after-*"))
        whole = [path for path in begun if (path / ".metadata").exists()]  # torch writes it last
        for path in set(begun) - set(whole[-1:]):
            shutil.rmtree(path)
        before = lives[-1].processes if lives else None
        life = Life(
            soak,
            number,
            half_written=len(begun) - len(whole),
            first=int(whole[-1].name.removeprefix("after-")) if whole else 0,
            processes=rng.choice([count for count in PROCESSES if count != before]),
            shard=rng.choice(SHARDS),
            end=end,
        )
        codes, wanted = _exit_codes(life), expected_codes(end, life.processes)
        if codes != wanted:
            errors = [p.read_text() for p in sorted(soak.folder.glob(f"error-{number}-*"))]
            raise SoakError(f"exit codes must be {wanted}, got {codes}: {end}\n{errors}")
        lives.append(life)
    return lives


def _exit_codes(life: Life) -> list[int | None]:
    """The exit codes of the processes of a life; None of one that hangs and is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tnt_optim", "torch.distributed.checkpoint", "sklearn.datasets"]
    )
    barrier = context.Barrier(life.processes)
    running = [
        context.Process(target=live, args=(rank, life, barrier)) for rank in range(life.processes)
    ]
    for process in running:
        process.start()
    deadline = time.monotonic() + PATIENCE + 0.05 * life.soak.steps
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in running]
    for process in running:
        process.kill()
        process.join()
    return codes


def expected_codes(end: Fault, processes: int) -> list[int]:
    """The exit code of each rank; survivors of a fault fail in a collective."""
    if end.kind in (RESTART, NOTHING):
        return [0] * processes
    own = INJECTED if end.kind in ERRORS else -signal.SIGKILL
    return [own if rank in end.victims(processes) else 1 for rank in range(processes)]


# The result.


def run_cleanly(soak: Soak, lives: Sequence[Life]) -> tuple[dict[str, Any], float]:
    """Repeat alone, without a break, the steps of the lives; the end, and the MiB it grew by."""
    training = Training(soak.seed, soak.steps)
    pages = []  # of this process in memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(soak.steps):
            training.step(step, lives[-1].fault(step), processes_at(lives, step))
            pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    grown = (pages[-1] - pages[len(pages) // 10]) * os.sysconf("SC_PAGE_SIZE")
    return training.end(), grown / 2**20


def processes_at(lives: Sequence[Life], step: int) -> int:
    """How many processes took a step, in the last life that took it."""
    return [life.processes for life in lives if life.first <= step][-1]


def compared(soak: Soak, lives: Sequence[Life]) -> dict[str, Any]:
    """Where the soak and its clean run ended, and what the lives count."""
    end = torch.load(soak.folder / "end.pt", weights_only=True)
    clean, grown = run_cleanly(soak, lives)
    moved = (clean["parameters"] - Training(soak.seed, soak.steps).parameters()).norm()
    # In one process of several a NaN leaves out its part; nothing is skipped.
    alone = [f for f in soak.faults if f.kind == NAN and processes_at(lives, f.step) == 1]
    return {
        "relative": float((end["parameters"] - clean["parameters"]).norm() / moved),
        "steps_not_taken_once": int((end["taken"] != 1).sum()),
        "failures": end["failures"],
        "failures_clean": clean["failures"],
        "failures_injected": {
            "skipped_statistics": len(alone),
            "failed_inverses": sum(fault.kind == NEGATIVE for fault in soak.faults),
            "unreached": 0,
        },
        "faults": len(soak.faults),
        "starts": len(lives),
        "half_written_checkpoints": sum(life.half_written for life in lives),
        "steps_taken_again": sum(
            before.end.step - after.first for before, after in itertools.pairwise(lives)
        ),
        "clean_run_grew_mib": grown,
    }


def checks(result: dict[str, Any]) -> dict[str, bool]:
    """What must hold."""
    return {
        "every step was made once": result["steps_not_taken_once"] == 0,
        "the clean run ends in the same place": result["relative"] <= TOLERANCE,
        "failures are the injected ones": result["failures"]
        == result["failures_clean"]
        == result["failures_injected"],
        "memory is flat": result["clean_run_grew_mib"] <= GROWTH_MIB,
    }


def main(
    out: Annotated[Path, typer.Option(help="the record")] = Path("results/soak.json"),
    steps: Annotated[int, typer.Option(min=FAULTS, help="with a fault in 25")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="of everything")] = 0,
) -> None:
    """Train under faults and compare with a clean run; exit status 1 if a check fails."""
    check_writable(out)
    origin, began = provenance(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), seed, steps, draw(seed, steps, steps // FAULTS))
        lives = train(soak)
        result = compared(soak, lives)
    found = checks(result)
    record = {
        "provenance": origin,
        "protocol": {"steps": steps, "seed": seed},
        "checks": found,
        "result": {"seconds": round(time.monotonic() - began, 1), **result},
    }
    write_json(out, record)
    for name, good in found.items():
        typer.echo(f"{'ok    ' if good else 'FAILED'} {name}")
    typer.echo(f"wrote {out}")
    raise typer.Exit(int(not all(found.values())))


if __name__ == "__main__":
    typer.run(main)
