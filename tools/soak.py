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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
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

# Faults. A step suffers a numerical fault whenever it is taken.
NAN = "a NaN in the sampled gradient of one process"
NEGATIVE = "a statistic that is negative definite"
KILL_ONE, KILL_ALL = "SIGKILL of one process", "SIGKILL of all processes"
KILL_ONE_SAVING = "SIGKILL of one process during a checkpoint"
KILL_ALL_SAVING = "SIGKILL of all processes during a checkpoint"
RESTART = "a planned restart"
# An exception in one process, and the operators that raise it; `observe` alone calls argmin, in the
# likelihood.
ERRORS = {
    "an exception in observe of one process": ("aten::argmin",),
    "an exception in the statistics of one process": ("tnt_kernels::gram_ema_",),
    "an exception in the factors of one process": ("tnt_kernels::damped_inverse",),
    "an exception in the update of one process": (
        "tnt_kernels::mode_products",
        "tnt_kernels::preconditioned_step_",
    ),
}
NUMERICAL = (NAN, NEGATIVE)
KILLS, KILLS_SAVING = (KILL_ONE, KILL_ALL), (KILL_ONE_SAVING, KILL_ALL_SAVING)
KINDS = (*NUMERICAL, *KILLS, *KILLS_SAVING, *ERRORS, RESTART)

BATCH = 64  # divisible by every number of processes
STATISTICS, FACTORS, CHECKPOINTS = 2, 10, 25  # intervals, in steps
SETTINGS: dict[str, Any] = {
    "lr": 0.003,
    "damping": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "stat_interval": STATISTICS,
    "inverse_interval": FACTORS,
}
SIZES = (64, 32, 16, 10)
PROCESSES, SHARDS = (1, 2, 4), ("directions", "inverses")
KEPT = 2  # complete checkpoints
PATIENCE = 300.0  # seconds until a process that waits for a dead one counts as hanging
TOLERANCE = 1e-10  # of the distance of the clean run, in float64: sums in another order
GROWTH_MIB = 4.0  # of a clean run: a leak of 1 KiB a step is 10 MiB after 10,000
INJECTED = 3  # exit status of a process that a planned exception ended


class SoakError(RuntimeError):
    """A process failed that no fault should have ended."""


class InjectedError(RuntimeError):
    """A fault raised this error on purpose."""


@dataclass(frozen=True)
class Fault:
    """A fault of one step."""

    step: int  # from 0
    kind: str  # one of ``KINDS``
    who: float  # in [0, 1): the victim, for any number of processes or parameters

    def victim(self, count: int) -> int:
        """The rank, or the number of the parameter, that it hits."""
        return int(self.who * count)

    def victims(self, processes: int) -> list[int]:
        """The ranks that it ends."""
        everyone = self.kind in (KILL_ALL, KILL_ALL_SAVING)
        return list(range(processes)) if everyone else [self.victim(processes)]


def draw(seed: int, steps: int, faults: int) -> list[Fault]:
    """Draw faults of all kinds in turn, each on a step of its own, as far as they fit."""
    rng = random.Random(seed)
    # The first step makes the first factors: a failure there has no older ones.
    free = set(range(1, steps - 1))
    drawn: list[Fault] = []
    deck: list[str] = []
    for _ in range(faults):
        deck = deck or rng.sample(KINDS, len(KINDS))
        kind = deck.pop()
        places = [step for step in sorted(free) if _possible(kind, step, steps)]
        if places:
            drawn.append(Fault(rng.choice(places), kind, rng.random()))
            free.discard(drawn[-1].step)
    return sorted(drawn, key=lambda fault: fault.step)


def _possible(kind: str, step: int, steps: int) -> bool:
    in_observe, in_statistics, in_factors, _ = ERRORS
    if kind in (NEGATIVE, in_factors):
        return step % FACTORS == 0
    if kind in (NAN, in_observe, in_statistics):
        return step % STATISTICS == 0
    return kind not in KILLS_SAVING or saves_after(step, steps)


def saves_after(step: int, steps: int) -> bool:
    """Whether a checkpoint follows a step; none follows the last one."""
    return (step + 1) % CHECKPOINTS == 0 and step + 1 < steps


def at(faults: Iterable[Fault], step: int, *kinds: str) -> Fault | None:
    """The fault of some kinds at a step."""
    return next((f for f in faults if f.step == step and f.kind in kinds), None)


# The training.


class Training:
    """A small classifier of the digits in ``data``, its optimizer, and a diary.

    A checkpoint holds all three. The seed decides the start of the model and all batches.
    """

    def __init__(self, data: Path, seed: int, steps: int, shard: str | None = None) -> None:
        self.images, self.labels = torch.load(data, weights_only=True)
        self.seed = seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            for inputs, outputs in zip(SIZES, SIZES[1:], strict=False):
                layers += [nn.Linear(inputs, outputs), nn.Tanh()]
            self.net = nn.Sequential(*layers[:-1]).double()
        self.model: nn.Module = self.net
        self.spoiled = False
        self.opt = TNT(self.net.parameters(), likelihood=self._likelihood, shard=shard, **SETTINGS)
        # For each step: how often it was made; and the part of its batch that the statistics lack:
        # the number of processes (0 if they lack none), and the rank.
        self.taken = torch.zeros(steps, dtype=torch.int64)
        self.left_out = torch.zeros(steps, 2, dtype=torch.int64)

    def step(
        self,
        step: int,
        rows: Sequence[int],
        *,
        observed: Sequence[int] | None = None,
        spoiled: bool = False,
        negative: Fault | None = None,
    ) -> None:
        """Take one step with some rows of its batch.

        The statistics may come from other rows (``observed``), the sampled gradient may be NaN
        (``spoiled``), and a fault may make the statistics of one parameter negative.
        """
        self.spoiled = spoiled
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = torch.randint(len(self.images), (BATCH,), generator=rng)
        images, labels = self.images[chosen], self.labels[chosen]
        self.opt.zero_grad()
        output = self.model(images[rows])
        self.opt.observe(output if observed is None else self.net(images[observed]))
        loss: Tensor = cross_entropy(output, labels[rows])
        loss.backward()
        params = list(self.net.parameters())
        hit = [] if negative is None else [params[negative.victim(len(params))]]
        stats = [stat for p in hit for stat in self.opt.state[p].get("stats", [])]
        before = [stat.clone() for stat in stats]
        for stat in stats:
            stat.copy_(-1e6 * torch.eye(len(stat), dtype=stat.dtype))
        self.opt.step()
        with torch.no_grad():
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
        diary = {"taken": self.taken, "left_out": self.left_out}
        return {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "diary": diary}

    def save(self, folder: Path, rank: int, writer: FileSystemWriter) -> None:
        """Write a checkpoint from all processes; rank 0 then removes old ones."""
        save_in_parts(self.content(), storage_writer=writer)
        for old in checkpoints(folder)[:-KEPT] if rank == 0 else []:
            (old / ".metadata").unlink()  # first, or half a folder could look complete
            shutil.rmtree(old)

    def load(self, path: Path) -> None:
        """Load a checkpoint of any number of processes."""
        self.opt.allocate_state()
        content = self.content()
        load_in_place(content, checkpoint_id=path)
        self.net.load_state_dict(content["net"])
        self.opt.load_state_dict(content["opt"])

    def write_end(self, path: Path) -> None:
        """Write where the training ended."""
        end = {
            "parameters": self.parameters(),
            "taken": self.taken,
            "left_out": self.left_out,
            "failures": self.opt.failures(),
            "steps": [group["step"] for group in self.opt.param_groups],
            "updates": sorted({self.opt.state[p]["updates"] for p in self.net.parameters()}),
        }
        torch.save(end, path)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first; torch writes `.metadata` last."""
    return [f for f in sorted(folder.glob("after-*")) if (f / ".metadata").exists()]


def part(rank: int, processes: int) -> list[int]:
    """The rows of a batch that one process has."""
    return list(range(rank * BATCH // processes, (rank + 1) * BATCH // processes))


def rest(rank: int, processes: int) -> list[int]:
    """The rows of a batch that the other processes have."""
    return [row for row in range(BATCH) if row not in part(rank, processes)]


def write_data(path: Path) -> None:
    """Write scikit-learn's digits and their labels, in float64."""
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    torch.save([images / 16.0, labels], path)


# One process.


@dataclass(frozen=True)
class Life:
    """What a set of processes starts with."""

    folder: Path  # of all files
    number: int  # of the life, from 0
    seed: int  # of the training
    steps: int  # of the soak
    processes: int  # how many
    shard: str  # TNT's setting
    first: int  # step, that of the last complete checkpoint
    numerical: Sequence[Fault]  # faults of the steps
    end: Fault | None  # the fault that ends this life; None for the last life


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


def live(rank: int, life: Life) -> None:
    """Train to the end of a life: the target of a process.

    Exit status: 0 at the end or a planned restart, ``INJECTED`` after a planned exception, 1 after
    any other exception; a file then has its text.
    """
    try:
        _quiet()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{life.folder}/store-{life.number}",
            rank=rank,
            world_size=life.processes,
            timeout=timedelta(seconds=PATIENCE / 2),
        )
        training = Training(life.folder / "digits.pt", life.seed, life.steps, life.shard)
        if life.first:
            training.load(life.folder / f"after-{life.first:07d}")
        training.model = DistributedDataParallel(training.net)
        end = life.end
        stop = life.steps if end is None else end.step + (end.kind != RESTART)
        for step in range(life.first, stop):
            _take(training, step, rank, life)
        if end is None and rank == 0:
            training.write_end(life.folder / "end.pt")
        ends: list[Any] = [None] * life.processes
        dist.all_gather_object(ends, training.parameters())
        if not all(torch.equal(ends[0], other) for other in ends):
            raise SoakError(f"parameters differ between processes: {ends}")
        dist.destroy_process_group()
    except InjectedError:
        os._exit(INJECTED)
    except BaseException:
        (life.folder / f"error-{life.number}-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # gloo may wait for its peers while it is destroyed


def _take(training: Training, step: int, rank: int, life: Life) -> None:
    """Take one step, with its faults, and save a checkpoint after it if one is due."""
    end = life.end if life.end is not None and life.end.step == step else None
    kind = "" if end is None else end.kind
    hit = end is not None and rank in end.victims(life.processes)
    if end is not None:
        _meet(life, rank)
    if hit and kind in KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    nan = at(life.numerical, step, NAN)
    if nan is not None:
        training.left_out[step, 0] = life.processes
        training.left_out[step, 1] = nan.victim(life.processes)
    with _Failing(ERRORS[kind]) if hit and kind in ERRORS else nullcontext():
        training.step(
            step,
            part(rank, life.processes),
            spoiled=nan is not None and nan.victim(life.processes) == rank,
            negative=at(life.numerical, step, NEGATIVE),
        )
    if saves_after(step, life.steps):
        path = life.folder / f"after-{step + 1:07d}"
        if kind in KILLS_SAVING:
            _meet(life, rank, "saving")
        writer = _DyingWriter if hit and kind in KILLS_SAVING else FileSystemWriter
        training.save(life.folder, rank, writer(path))


def _meet(life: Life, rank: int, place: str = "step") -> None:
    """Wait until every process is here, by files: no process has died before that."""
    (life.folder / f"met-{life.number}-{place}-{rank}").touch()
    pattern = f"met-{life.number}-{place}-*"
    while len(list(life.folder.glob(pattern))) < life.processes:
        time.sleep(0.001)


def live_cleanly(life: Life) -> None:
    """Make alone and without a break the steps that ``end.pt`` names: the target of a process."""
    _quiet()
    training = Training(life.folder / "digits.pt", life.seed, life.steps)
    left_out = torch.load(life.folder / "end.pt", weights_only=True)["left_out"].tolist()
    sizes = []
    for step, (processes, who) in enumerate(left_out):
        training.step(
            step,
            part(0, 1),
            observed=rest(who, processes) if processes > 1 else None,
            spoiled=processes == 1,
            negative=at(life.numerical, step, NEGATIVE),
        )
        sizes.append(_resident())
    training.write_end(life.folder / "clean.pt")
    (life.folder / "growth").write_text(str(sizes[-1] - sizes[len(sizes) // 10]))


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _quiet() -> None:
    """No warnings, since failures are counted; one thread, since the matrices are small."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")


# The supervisor.


class Soak:
    """Starts one set of processes after the other; ``folder`` is its own."""

    def __init__(self, folder: Path, seed: int, steps: int, faults: Sequence[Fault]) -> None:
        self.folder, self.seed, self.steps = folder, seed, steps
        self.numerical = [f for f in faults if f.kind in NUMERICAL]
        self.ends = [f for f in faults if f.kind not in NUMERICAL]
        self.lives: list[dict[str, Any]] = []
        self.broken = self.hanging = 0
        self._rng = random.Random(seed + 1)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tnt_optim", "torch.distributed.checkpoint"])
        write_data(folder / "digits.pt")

    def train(self) -> None:
        """Live through all faults, to the last step."""
        for end in tqdm([*self.ends, None], "lives", disable=None):
            self._live(end)
        self._run(live_cleanly, [(self._life(1, SHARDS[0], None),)])

    def _life(self, processes: int, shard: str, end: Fault | None) -> Life:
        whole = checkpoints(self.folder)
        first = int(whole[-1].name.removeprefix("after-")) if whole else 0
        number = len(self.lives)
        return Life(self.folder, number, self.seed, self.steps, processes, shard, first,
                    self.numerical, end)  # fmt: skip

    def _live(self, end: Fault | None) -> None:
        for broken in set(self.folder.glob("after-*")) - set(checkpoints(self.folder)):
            self.broken += 1
            shutil.rmtree(broken)
        last = self.lives[-1]["processes"] if self.lives else None
        count = self._rng.choice([n for n in PROCESSES if n != last])
        life = self._life(count, self._rng.choice(SHARDS), end)
        codes = self._run(live, [(rank, life) for rank in range(count)])
        wanted = expected_codes(end, count)
        if codes != wanted:
            errors = [p.read_text() for p in sorted(self.folder.glob(f"error-{life.number}-*"))]
            raise SoakError(f"exit codes must be {wanted}, got {codes}: {life}\n{errors}")
        for pattern in ("error", "met", "store"):
            for path in self.folder.glob(f"{pattern}-{life.number}*"):
                path.unlink()
        self.lives.append({
            "processes": count,
            "shard": life.shard,
            "from": life.first,
            "to": self.steps if end is None else end.step,
            "end": "done" if end is None else end.kind,
        })  # fmt: skip

    def _run(self, target: Any, arguments: Sequence[tuple[Any, ...]]) -> list[int | None]:
        """The exit codes of some processes; None of a process that hangs and is killed."""
        running = [self._context.Process(target=target, args=args) for args in arguments]
        for process in running:
            process.start()
        deadline = time.monotonic() + PATIENCE + 0.05 * self.steps
        codes: list[int | None] = []
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode)
            if process.exitcode is None:
                self.hanging += 1
                process.kill()
                process.join()
            process.close()
        return codes


def expected_codes(end: Fault | None, processes: int) -> list[int]:
    """The exit code of each rank; survivors of a fault fail in a collective."""
    if end is None or end.kind == RESTART:
        return [0] * processes
    own = INJECTED if end.kind in ERRORS else -signal.SIGKILL
    return [own if rank in end.victims(processes) else 1 for rank in range(processes)]


# The result.


def compared(folder: Path, soak: Soak) -> dict[str, Any]:
    """Where the soak and its clean run ended, and what the diary counts."""
    end, clean = (torch.load(folder / name, weights_only=True) for name in ("end.pt", "clean.pt"))
    start = Training(folder / "digits.pt", soak.seed, soak.steps).parameters()
    moved = (clean["parameters"] - start).norm()
    alone = int((end["left_out"][:, 0] == 1).sum())
    return {
        "relative": float((end["parameters"] - clean["parameters"]).norm() / moved),
        "steps_not_taken_once": int((end["taken"] != 1).sum()),
        "step_counters": end["steps"],
        "update_counters": end["updates"],
        "failures": end["failures"],
        "failures_clean": clean["failures"],
        # In one process of several a NaN leaves out its part; nothing is skipped.
        "failures_injected": {
            "skipped_statistics": alone,
            "failed_inverses": sum(fault.kind == NEGATIVE for fault in soak.numerical),
        },
        "parts_left_out": int((end["left_out"][:, 0] > 1).sum()),
        "starts": len(soak.lives),
        "ended_by": dict(sorted(Counter(fault.kind for fault in soak.ends).items())),
        "half_written_checkpoints": soak.broken,
        "hanging_processes": soak.hanging,
        "steps_taken_again": sum(
            before["to"] - after["from"] for before, after in itertools.pairwise(soak.lives)
        ),
        "clean_run_grew_mib": int((folder / "growth").read_text()) / 2**20,
        "files": sorted(p.name for p in folder.iterdir() if not p.name.startswith("after-")),
    }


def checks(result: Mapping[str, Any], soak: Soak) -> dict[str, bool]:
    """What must hold."""
    injected = result["failures_injected"]
    nans = sum(fault.kind == NAN for fault in soak.numerical)
    return {
        "every step was made once": result["steps_not_taken_once"] == 0
        and result["step_counters"] == result["update_counters"] == [soak.steps],
        "the clean run ends in the same place": result["relative"] <= TOLERANCE,
        "failures are the injected ones": result["failures"] == injected
        and result["failures_clean"] == injected
        and result["parts_left_out"] == nans - injected["skipped_statistics"],
        "no process hangs": result["hanging_processes"] == 0,
        "memory is flat": result["clean_run_grew_mib"] <= GROWTH_MIB,
        "no file is left": result["files"] == ["clean.pt", "digits.pt", "end.pt", "growth"],
    }


def main(
    out: Annotated[Path, typer.Option(help="the record")] = Path("results/soak.json"),
    steps: Annotated[int, typer.Option(min=3)] = 10_000,
    faults: Annotated[int | None, typer.Option(min=1, help="(default: steps / 25)")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of everything")] = 0,
) -> None:
    """Train under faults and compare with a clean run; exit status 1 if a check fails."""
    check_writable(out)
    origin, began = provenance(), time.monotonic()
    drawn = draw(seed, steps, faults or max(1, steps // 25))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), seed, steps, drawn)
        soak.train()
        result = compared(Path(folder), soak)
    found = checks(result, soak)
    protocol = {"steps": steps, "seed": seed, "batch": BATCH, "tnt": SETTINGS,
                "checkpoint_interval": CHECKPOINTS, "tolerance": TOLERANCE}  # fmt: skip
    write_json(out, {
        "provenance": origin,
        "protocol": protocol,
        "checks": found,
        "result": {"seconds": round(time.monotonic() - began, 1), **result},
        "rows": soak.lives,
    })  # fmt: skip
    for name, good in found.items():
        typer.echo(f"{'ok    ' if good else 'FAILED'} {name}")
    typer.echo(f"wrote {out}")
    raise typer.Exit(int(not all(found.values())))


if __name__ == "__main__":
    typer.run(main)
