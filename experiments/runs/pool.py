"""Many trainings side by side: one process each, one thread each, records as they finish."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from experiments.problems.problem import Problem
from experiments.runs.settings import Settings
from experiments.runs.training import train


class TrainingFailed(RuntimeError):
    """A worker's training raised, or its process died; the message has the worker's traceback."""


def run_all(
    problem_maker: Callable[[], Problem],
    settings: Sequence[Settings],
    jobs: int,
    on_done: Callable[[Settings, dict[str, Any]], None],
    device: torch.device | str = "cpu",
) -> None:
    """Train once with each of the settings, `jobs` of them at a time.

    With one job everything happens in this process, on the threads that it has. With more, each is
    a process of its own with one thread: matrices of these experiments' sizes gain more from a
    second run than from a second thread. Its seconds are those of a shared machine; measure times
    alone. Whatever ends this call, no worker outlives it.

    Args:
        problem_maker: makes the problem, once in each process; must be picklable, as functions of
            a module and `functools.partial`s of them are.
        settings: of each run.
        jobs: how many runs at a time.
        on_done: called in this process with a run's settings and its record, `Run.record()`, as
            soon as it is done, in the order in which they finish.
        device: where to train.

    Raises:
        ValueError: `jobs` is not positive.
        TrainingFailed: a worker failed. With one job, what the training raised comes as it is.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if not settings:
        return
    if jobs == 1:
        problem = problem_maker()
        for one in settings:
            on_done(one, train(problem, one, device, report_every=0, check_moved=False).record())
        return
    todo = deque(settings)
    workers: dict[Connection, SpawnProcess] = {}
    busy: dict[Connection, Settings] = {}
    try:
        for _ in range(min(jobs, len(settings))):
            connection, process = _start_worker(problem_maker, device)
            workers[connection] = process
            busy[connection] = _give(connection, todo)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                done = busy.pop(ready)
                record = _receive(ready, workers[ready], done)
                if todo:  # first, so that the worker does not wait for on_done
                    busy[ready] = _give(ready, todo)
                on_done(done, record)
    finally:
        for process in workers.values():
            process.terminate()
        for connection, process in workers.items():
            process.join()
            connection.close()


def _start_worker(
    problem_maker: Callable[[], Problem], device: torch.device | str
) -> tuple[Connection, SpawnProcess]:
    # Spawned, not forked: torch's threads do not survive a fork.
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, problem_maker, device), daemon=True)
    process.start()
    theirs.close()  # the worker's alone, so that its death is an end of file here
    return ours, process


def _give(connection: Connection, todo: deque[Settings]) -> Settings:
    settings = todo.popleft()
    try:
        connection.send(settings)
    except OSError:
        pass  # the worker is dead: reading what it left says so
    return settings


def _receive(connection: Connection, process: SpawnProcess, settings: Settings) -> dict[str, Any]:
    try:
        record, error = connection.recv()
    except (EOFError, OSError):
        process.join()
        raise TrainingFailed(
            f"the process that trained with {settings} died with exit code {process.exitcode} "
            "(a negative one is a signal; -9 is often memory that ran out)"
        ) from None
    if error is not None:
        raise TrainingFailed(f"training with {settings} failed in its process:\n{error}")
    found: dict[str, Any] = record
    return found


def _work(
    connection: Connection, problem_maker: Callable[[], Problem], device: torch.device | str
) -> None:
    """A worker's life: settings in, (record, None) or (None, traceback) out."""
    # Ctrl-C reaches all processes of a terminal: the parent is the one that acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    problem: Problem | None = None
    while True:
        settings = connection.recv()
        outcome: tuple[dict[str, Any] | None, str | None]
        try:
            problem = problem_maker() if problem is None else problem
            outcome = (
                train(problem, settings, device, report_every=0, check_moved=False).record(),
                None,
            )
        except Exception:
            outcome = None, traceback.format_exc()
        connection.send(outcome)


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, however that ended."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
