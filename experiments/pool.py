"""Many trainings of one problem into one file, in this process or several."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiments.methods import Settings
from experiments.problems.problem import Problem
from experiments.run_files import Key, RunFile
from experiments.training import train

Record = dict[str, Any]


def make_runs(
    file: RunFile,
    problem_maker: Callable[[], Problem],
    wanted: Mapping[Settings, Key],
    kept: Callable[[Record], Mapping[str, Any]],
    jobs: int,
) -> None:
    """Make the runs that a file lacks, on the CPU. A run that was stopped goes on.

    Args:
        file: of the runs.
        problem_maker: makes the problem, once in each process; must be picklable.
        wanted: the key in the file of every run's settings.
        kept: the part of a run's record that the file keeps.
        jobs: runs at a time.
    """
    missing = {
        settings: file.checkpoint(key) for settings, key in wanted.items() if file.find(key) is None
    }
    with (
        closing(run_all(problem_maker, missing, jobs)) as finished,
        tqdm(total=len(missing), desc=file.path.stem, unit="run", disable=None) as bar,
    ):
        for settings, record in finished:
            file.add(wanted[settings], kept(record))
            loss = record["final_smoothed_loss"]
            bar.set_postfix_str(f"{settings.optimizer}, loss {loss:.4g}", refresh=False)
            bar.update()


def run_all(
    problem_maker: Callable[[], Problem], wanted: Mapping[Settings, Path | None], jobs: int
) -> Generator[tuple[Settings, Record]]:
    """Train once with each of the settings, `jobs` of them at a time.

    Each run continues from its checkpoint, if it has one; None for no checkpoint.

    With one job all runs are in this process. With more, each is in a process with one thread:
    matrices of these sizes gain more from a second run than from a second thread. The seconds are
    then those of a shared machine. If this process dies, so do the others.

    Yields:
        The settings and the record of each run, in the order in which the runs finish.
    """
    if jobs == 1 or len(wanted) < 2:
        if wanted:
            _make_problem(problem_maker)
        for one, checkpoint in wanted.items():
            yield one, _train(one, checkpoint)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    pool = ProcessPoolExecutor(
        min(jobs, len(wanted)), get_context("spawn"), _start_worker, (problem_maker,)
    )
    try:
        futures = {pool.submit(_train, one, path): one for one, path in wanted.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_problem: Problem | None = None  # the problem of this process


def _make_problem(problem_maker: Callable[[], Problem]) -> None:
    global _problem
    _problem = problem_maker()


def _start_worker(problem_maker: Callable[[], Problem]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C ends it: an exception would only end its run, and the next one in the queue begin.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    _make_problem(problem_maker)


def _train(settings: Settings, checkpoint: Path | None) -> Record:
    assert _problem is not None
    run = train(_problem, settings, report_every=0, checkpoint=checkpoint, check_moved=False)
    return run.record()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
