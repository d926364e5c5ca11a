"""Starts the processes of a soak, kills them as planned, and starts others after them."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench.soak import checkpoints
from bench.soak.plan import (
    ERRORS,
    KILL_ALL,
    KILL_ALL_SAVING,
    KILLS,
    KILLS_SAVING,
    RESIZE,
    Fault,
    at,
)
from bench.soak.worker import Life, Message, Target, live, live_cleanly, make_data, resident

PROCESSES = (1, 2, 4)
SHARDS = ("directions", "inverses")
# Others notice that one has died when they next talk to it; who has not by then is killed, too.
GRACE = 20.0
# Memory counts from so many steps after a start, and its growth from so many: two checkpoints.
SETTLED = 20
GROWING = 60


class SoakError(RuntimeError):
    """Something failed that was not meant to."""


@dataclass
class Record:
    """What has happened.

    Attributes:
        lives: of each set of processes what it was and how it ended.
        memory: (step, resident bytes, number of processes) of settled ones, in the order of time.
        growth: (steps, bytes) by which a process grew from ``GROWING`` on to its end.
        own: (step, resident bytes) of the supervisor itself.
        fired: the kinds of the faults that ended processes.
        noticed: how many survivors ended on their own.
        not_noticed: how many had to be killed.
        broken: how many checkpoints were found half written.
        retaken: how many steps were taken and lost with their processes.
        identifiers: of all processes that were started.
    """

    lives: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[int, int, int]] = field(default_factory=list)
    growth: list[tuple[int, int]] = field(default_factory=list)
    own: list[tuple[int, int]] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    noticed: int = 0
    not_noticed: int = 0
    broken: int = 0
    retaken: int = 0
    identifiers: list[int] = field(default_factory=list)


class Processes:
    """Some processes and the pipes through which they speak."""

    def __init__(self, target: Target, arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("forkserver")
        # Imported once, by the process that all others are forked from.
        context.set_forkserver_preload(["bench.soak.worker"])
        self.running: list[Any] = []
        self.pipes: list[Connection] = []
        for own in arguments:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=target, args=(*own, there), daemon=True)
            process.start()
            there.close()
            self.running.append(process)
            self.pipes.append(here)

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL, of one or of all."""
        for process in self.running if rank is None else [self.running[rank]]:
            process.kill()

    def messages(self, timeout: float | None = None) -> list[tuple[int, Message | None]]:
        """What was said since, by whom; None from one that is gone; nothing after the timeout."""
        found: list[tuple[int, Message | None]] = []
        open_pipes = [pipe for pipe in self.pipes if not pipe.closed]
        for pipe in wait(open_pipes, timeout):
            assert isinstance(pipe, Connection)
            rank = self.pipes.index(pipe)
            try:
                found.append((rank, pipe.recv()))
            except (EOFError, ConnectionResetError):
                pipe.close()
                found.append((rank, None))
        return found

    def alive(self) -> int:
        """How many have not closed their pipe."""
        return sum(not pipe.closed for pipe in self.pipes)

    def end(self) -> None:
        """Kills what still runs, and forgets all of it."""
        self.kill()
        for process, pipe in zip(self.running, self.pipes, strict=True):
            process.join()
            process.close()
            pipe.close()


class Supervisor:
    """Sees a soak through.

    Args:
        work: a folder of its own.
        seed: of everything.
        steps: how many.
        faults: that befall them.
        progress: called with the number of the step that is next.
    """

    def __init__(
        self,
        work: Path,
        seed: int,
        steps: int,
        faults: Sequence[Fault],
        progress: Callable[[int], None],
    ) -> None:
        self.record = Record()
        self._work, self._seed, self._steps = work, seed, steps
        self._faults, self._progress = list(faults), progress
        self._rng = random.Random(seed + 1)
        # Of a step, and of a checkpoint, in seconds.
        self._durations: dict[str, list[float]] = {"step": [0.01], "saving": [0.05]}

    def prepare(self) -> None:
        """Has a first process write the data; what all others are forked from runs then."""
        self._run_alone(make_data, (self._data(),), lambda _: None)

    def train(self) -> None:
        """Trains under faults until the last step is taken."""
        while not self._live_once():
            pass
        self.record.broken += checkpoints.remove_incomplete(self._work)

    def say_progress_to(self, progress: Callable[[int], None]) -> None:
        """From now on calls another function with the number of the step that is next."""
        self._progress = progress

    def train_cleanly(self) -> list[tuple[int, int]]:
        """Has one process repeat it without faults; returns (step, resident bytes) of it."""
        memory: list[tuple[int, int]] = []

        def listen(message: Message) -> None:
            self._progress(message.step)
            if message.step >= SETTLED and message.step % 10 == 0:
                memory.append((message.step, message.memory))

        self._run_alone(live_cleanly, (self._life(1, None),), listen)
        return memory

    def _data(self) -> Path:
        return self._work / "digits.pt"

    def _life(self, processes: int, shard: str | None) -> Life:
        whole = checkpoints.complete(self._work)
        return Life(
            work=self._work,
            data=self._data(),
            store=self._work / f"store-{len(self.record.lives)}",
            seed=self._seed,
            steps=self._steps,
            processes=processes,
            shard=shard,
            start=whole[-1] if whole else None,
            faults=self._faults,
        )

    def _run_alone(
        self, target: Target, arguments: tuple[Any, ...], listen: Callable[[Message], None]
    ) -> None:
        processes = Processes(target, [arguments])
        self.record.identifiers += [process.pid for process in processes.running]
        try:
            done = False
            while processes.alive():
                for _, message in processes.messages():
                    if message is not None:
                        listen(message)
                        done |= message.kind == "done"
            if not done:
                raise SoakError(f"{target.__name__} ended early")
        finally:
            processes.end()

    def _live_once(self) -> bool:
        """Starts a set of processes and stays with it to its end; returns whether that is all."""
        record = self.record
        record.broken += checkpoints.remove_incomplete(self._work)
        last = record.lives[-1]["processes"] if record.lives else None
        count = self._rng.choice([n for n in PROCESSES if n != last])
        life = self._life(count, self._rng.choice(SHARDS))
        processes = Processes(live, [(rank, life) for rank in range(count)])
        record.identifiers += [process.pid for process in processes.running]
        watch = _Watch(life, processes, self._durations, self._progress)
        try:
            watch.until_it_ends()
        finally:
            processes.end()
            life.store.unlink(missing_ok=True)
        start = 0 if life.start is None else checkpoints.steps_of(life.start)
        ended = watch.fault.kind if watch.fault else "done"
        record.lives.append({
            "processes": count, "shard": life.shard, "from": start, "to": watch.step, "end": ended,
        })  # fmt: skip
        record.memory += [(step, size, count) for step, size in watch.memory]
        record.growth += watch.growth()
        record.own.append((watch.step, resident()))
        if watch.fault is None:
            return True
        self._faults.remove(watch.fault)
        record.fired.append(watch.fault.kind)
        record.noticed += watch.noticed
        record.not_noticed += watch.not_noticed
        whole = checkpoints.complete(self._work)
        record.retaken += watch.step - (checkpoints.steps_of(whole[-1]) if whole else 0)
        return False


class _Watch:
    """What is seen of one set of processes.

    Attributes:
        step: that the furthest of them has begun.
        fault: that ended them; None where they came to the end.
        memory: (step, resident bytes), once they have settled.
        noticed: how many survivors ended on their own.
        not_noticed: how many did not within ``GRACE``.
    """

    def __init__(
        self,
        life: Life,
        processes: Processes,
        durations: dict[str, list[float]],
        progress: Callable[[int], None],
    ) -> None:
        self.step = 0 if life.start is None else checkpoints.steps_of(life.start)
        self.fault: Fault | None = None
        self.memory: list[tuple[int, int]] = []
        self.noticed = self.not_noticed = 0
        self._life, self._processes = life, processes
        self._durations, self._progress = durations, progress
        self._first = self.step
        self._began: dict[int, tuple[str, float]] = {}
        self._grown: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self._digests: dict[int, str] = {}
        self._killed: set[int] = set()

    def growth(self) -> list[tuple[int, int]]:
        """(steps, bytes) of each process from ``GROWING`` on."""
        return [(b[0] - a[0], b[1] - a[1]) for a, b in self._grown.values() if b[0] > a[0]]

    def until_it_ends(self) -> None:
        """Listens, and kills as planned."""
        deadline: float | None = None
        while self._processes.alive():
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            heard = self._processes.messages(timeout)
            if not heard:
                self.not_noticed = self._processes.alive()
                self._processes.kill()
            for rank, message in heard:
                if message is not None:
                    self._hear(rank, message)
                elif rank not in self._killed and rank not in self._digests and self.fault is None:
                    raise SoakError(f"process {rank} died at step {self.step}")
            if self.fault is not None and deadline is None:
                deadline = time.monotonic() + GRACE
        if len(set(self._digests.values())) > 1:
            raise SoakError(f"parameters differ between processes: {self._digests}")

    def _hear(self, rank: int, message: Message) -> None:
        now = time.monotonic()
        kind, began = self._began.pop(rank, ("", 0.0))
        if message.kind in ("step", "saving", "saved"):
            if kind:
                kept = self._durations[kind]
                self._durations[kind] = [*kept[-20:], now - began]
            if message.kind != "saved":
                self._began[rank] = (message.kind, now)
            self.step = max(self.step, message.step)
            self._progress(message.step)
            self._weigh(rank, message)
            self._maybe_kill(rank, message)
        elif message.kind in ("done", "restart"):
            self._digests[rank] = message.text
            self.step = message.step
            if message.kind == "restart":
                self.fault = at(self._life.faults, message.step, (RESIZE,))
        else:
            self.noticed += "InjectedError" not in message.text
            if self.fault is None:
                self.fault = self._raised()
            if self.fault is None:
                raise SoakError(f"process {rank} at step {message.step}: {message.text}")

    def _raised(self) -> Fault | None:
        """The planned exception that has been reached by now; another process may be a step on."""
        reached = range(self._first, self.step + 1)
        faults = self._life.faults
        return next((f for f in faults if f.kind in ERRORS and f.step in reached), None)

    def _weigh(self, rank: int, message: Message) -> None:
        if message.step >= self._first + SETTLED and message.step % 10 == 0:
            here = (message.step, message.memory)
            self.memory.append(here)
        if message.step >= self._first + GROWING:
            here = (message.step, message.memory)
            self._grown[rank] = (self._grown.get(rank, (here, here))[0], here)

    def _maybe_kill(self, rank: int, message: Message) -> None:
        kinds = {"step": KILLS, "saving": KILLS_SAVING}.get(message.kind, ())
        fault = at(self._life.faults, message.step, kinds)
        if fault is None or self.fault is not None:
            return
        who = int(fault.who * self._life.processes)
        if who != rank:
            return
        time.sleep(fault.when * statistics.median(self._durations[message.kind]))
        everyone = fault.kind in (KILL_ALL, KILL_ALL_SAVING)
        self._processes.kill(None if everyone else who)
        self._killed |= set(range(self._life.processes)) if everyone else {who}
        self.fault = fault


def left_running(record: Record) -> int:
    """How many of the processes that were started are still there."""
    return sum(_runs(identifier) for identifier in set(record.identifiers))


def _runs(identifier: int) -> bool:
    try:
        command = Path(f"/proc/{identifier}/cmdline").read_bytes()
    except OSError:
        return False
    return b"forkserver" in command  # or it is another process that got the number
