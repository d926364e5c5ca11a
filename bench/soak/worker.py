"""One process of a soak: trains, says where it is, and suffers the faults of the plan."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.soak import checkpoints
from bench.soak.plan import ERRORS, NAN, NEGATIVE, RESIZE, Fault, at
from bench.soak.training import SCHEDULE, Training, part, rest, write_data

SILENCE = timedelta(seconds=60)  # after which a process gives up waiting for another

_CALLED = {
    "the statistics": "tnt_optim.update.gram_ema_",
    "the factors": "tnt_optim.tnt.damped_inverse",
    "the update": "tnt_optim.update.DeviceStep.update",
}


Target = Callable[..., None]


class InjectedError(RuntimeError):
    """Raised on purpose."""


@dataclass(frozen=True)
class Life:
    """What a set of processes is started with.

    Attributes:
        work: the folder of all files.
        data: the digits.
        store: through which the processes find each other.
        seed: of the training.
        steps: after which it is over.
        processes: how many.
        shard: TNT's setting.
        start: the checkpoint to go on from, if any.
        faults: that are still to come.
    """

    work: Path
    data: Path
    store: Path
    seed: int
    steps: int
    processes: int
    shard: str | None
    start: Path | None
    faults: Sequence[Fault]


@dataclass(frozen=True)
class Message:
    """What a process says.

    Attributes:
        kind: "step" and "saving" before, "saved" after; "restart", "done" and "failed" at the end.
        step: which.
        memory: resident bytes.
        text: with "failed" the error, with "restart" and "done" a digest of the parameters.
    """

    kind: str
    step: int
    memory: int
    text: str = ""


def live(rank: int, life: Life, pipe: Connection) -> None:
    """Trains until the end, a planned restart, or an error. The target of a process."""
    step = -1

    def say(kind: str, text: str = "") -> None:
        pipe.send(Message(kind, step, resident(), text))

    try:
        _quiet()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{life.store}",
            rank=rank,
            world_size=life.processes,
            timeout=SILENCE,
        )
        training = Training(life.data, life.seed, life.shard)
        diary, first = checkpoints.Diary(life.steps), 0
        if life.start is not None:
            checkpoints.load(training, diary, life.start)
            first = checkpoints.steps_of(life.start)
        training.model = DistributedDataParallel(training.net)
        for step in range(first, life.steps):
            if at(life.faults, step, (RESIZE,)):
                break
            say("step")
            _take(training, diary, step, rank, life)
            if SCHEDULE.saves_after(step, life.steps):
                say("saving")
                checkpoints.save(training, diary, life.work, step + 1, rank)
                say("saved")
        else:
            step = life.steps
        if rank == 0 and step == life.steps:
            write_end(training, diary, life.work / "end.pt")
        dist.barrier()
        say("done" if step == life.steps else "restart", digest(training))
        dist.destroy_process_group()
    except Exception as error:
        say("failed", repr(error))
        os._exit(1)  # gloo may wait for its peers where it is taken down


def live_cleanly(life: Life, pipe: Connection) -> None:
    """Repeats alone and without a break what ``end.pt`` says that the others have done."""
    _quiet()
    training = Training(life.data, life.seed)
    left_out = torch.load(life.work / "end.pt", weights_only=True)["left_out"].tolist()
    diary = checkpoints.Diary(life.steps)
    for step in range(life.steps):
        pipe.send(Message("step", step, resident()))
        processes, who = left_out[step]
        observed = rest(who, processes) if processes > 1 else None
        negative = at(life.faults, step, (NEGATIVE,))
        training.step(
            step,
            part(0, 1),
            observed=observed,
            spoiled=processes == 1,
            negative=negative.who if negative else None,
        )
        diary.taken[step] += 1
    write_end(training, diary, life.work / "clean.pt")
    pipe.send(Message("done", life.steps, resident(), digest(training)))


def _take(training: Training, diary: checkpoints.Diary, step: int, rank: int, life: Life) -> None:
    """Takes one step, with what befalls it."""
    fault, negative = at(life.faults, step, (NAN,)), at(life.faults, step, (NEGATIVE,))
    spoiled = fault is not None and int(fault.who * life.processes) == rank
    if fault is not None:
        diary.left_out[step, 0] = life.processes
        diary.left_out[step, 1] = int(fault.who * life.processes)
    with _errors(at(life.faults, step, tuple(ERRORS)), training, rank, life.processes):
        training.step(
            step,
            part(rank, life.processes),
            spoiled=spoiled,
            negative=negative.who if negative else None,
        )
    diary.taken[step] += 1


@contextmanager
def _errors(fault: Fault | None, training: Training, rank: int, processes: int) -> Iterator[None]:
    """Has what the fault names raise, in the process that it names."""
    if fault is None or int(fault.who * processes) != rank:
        yield
        return

    def fail(*_: Any, **__: Any) -> None:
        raise InjectedError(fault.kind)

    place = ERRORS[fault.kind]
    called = _CALLED.get(place)
    patch = mock.patch(called, fail) if called else mock.patch.object(training.opt, "observe", fail)
    with patch:
        yield


def write_end(training: Training, diary: checkpoints.Diary, path: Path) -> None:
    """Writes where a training has ended."""
    opt, params = training.opt, list(training.net.parameters())
    end = {
        "parameters": training.parameters(),
        "taken": diary.taken,
        "left_out": diary.left_out,
        "loss": training.loss(),
        "failures": opt.failures(),
        "steps": [group["step"] for group in opt.param_groups],
        "updates": [opt.state[p]["updates"] for p in params],
    }
    torch.save(end, path)


def digest(training: Training) -> str:
    """Of the parameters' bits."""
    found = hashlib.blake2b(digest_size=8)
    for param in training.parameters():
        found.update(param.numpy().tobytes())
    return found.hexdigest()


def resident(process: int | str = "self") -> int:
    """Bytes that a process has in memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def make_data(path: Path, pipe: Connection) -> None:
    """Writes the digits, in a process of its own: to read them takes a large library."""
    write_data(path)
    pipe.send(Message("done", 0, resident()))


def _quiet() -> None:
    """Of failures, which are counted; and one thread: the matrices are small."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
