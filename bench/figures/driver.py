"""Runs stages one after the other, each in a process of its own and within a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.figures.stages import CHECKOUT, Stage
from bench.gpu.driver import (
    FAILED,
    GRACE,
    NOT_RUN,
    PASSED,
    TIMED_OUT,
    Outcome,
    exit_status,
    stage_environment,
)

__all__ = ["exit_status", "run_stages", "summary"]

SHOWN_LINES = 10
_TICK = 30.0  # seconds between two lines of progress


def run_stages(
    stages: Sequence[Stage],
    folder: Path,
    data: Mapping[str, Path | None],
    seconds: float,
    say: Callable[[str], None] = print,
    tick: float = _TICK,
) -> list[Outcome]:
    """Runs `stages` in their order, whatever becomes of each.

    Args:
        stages: what to run.
        folder: where their records, pictures and logs go.
        data: by their names, what there is.
        seconds: for all of them.
        say: prints a line.
        tick: seconds between two lines while a stage runs.

    Returns:
        How each of them ended.
    """
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for number, stage in enumerate(stages):
        to_come = sum(60 * later.minutes for later in stages[number:])
        elapsed = time.monotonic() - began
        lacks = stage.lacks(data)
        # No stage takes from those after it what they are expected to need.
        kept = sum(60 * later.minutes for later in stages[number + 1 :])
        left = seconds - elapsed
        limit = min(60 * stage.limit_minutes, left, max(left - kept, 60 * stage.minutes))
        if lacks:
            outcome = Outcome(stage.name, NOT_RUN, 0.0, f"no {lacks}", "")
        elif limit < 1:
            outcome = Outcome(stage.name, NOT_RUN, 0.0, "no time was left for it", "")
        else:
            say(
                f"[{number + 1}/{len(stages)}] {stage.name}: {stage.does}; "
                f"{_clock(elapsed)} elapsed, some {_clock(to_come)} to go"
            )
            outcome = run_stage(stage, folder, data, limit, say, tick)
        outcomes.append(outcome)
        say(_line(outcome))
        if outcome.status in (FAILED, TIMED_OUT):
            for line in last_lines(folder / outcome.log, SHOWN_LINES):
                say(f"    | {line}")
    return outcomes


def run_stage(
    stage: Stage,
    folder: Path,
    data: Mapping[str, Path | None],
    seconds: float,
    say: Callable[[str], None] = print,
    tick: float = _TICK,
) -> Outcome:
    """Runs one stage in its own process; ends it, and what it has started, at the limit."""
    log = folder / f"{stage.name}.log"
    command = [sys.executable, *stage.arguments(folder, data)]
    start = time.monotonic()
    with log.open("wb") as output:
        # A group of its own, so that it can be ended with all its children.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=CHECKOUT,
            env=stage_environment(os.environ),
            process_group=0,
        )
        try:
            code = _watched(process, stage, start, seconds, say, tick)
        finally:
            _end(process)
    took = time.monotonic() - start
    last = next(iter(last_lines(log, 1)), "")
    if code is None:
        message = f"ended after {seconds:.0f} s; its last line: {last}"
        return Outcome(stage.name, TIMED_OUT, took, message, log.name)
    if code:
        how = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
        message = f"{how}; its last line: {last}"
        return Outcome(stage.name, FAILED, took, message, log.name)
    return Outcome(stage.name, PASSED, took, "", log.name)


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line for each stage."""
    return "\n".join(_line(outcome) for outcome in outcomes)


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log that say something; none where there is no log."""
    if not log.is_file():
        return []
    # A progress bar rewrites its line: what counts is what stands there at the end.
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip()][-count:]


def _watched(
    process: subprocess.Popen[bytes],
    stage: Stage,
    start: float,
    seconds: float,
    say: Callable[[str], None],
    tick: float,
) -> int | None:
    """The exit status; None where the limit came first."""
    while True:
        left = start + seconds - time.monotonic()
        try:
            return process.wait(timeout=max(0.0, min(tick, left)))
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - start
            if elapsed >= seconds:
                return None
            expected = max(60 * stage.minutes - elapsed, 0)
            say(
                f"    {stage.name}: {_clock(elapsed)} elapsed, some {_clock(expected)} to go, "
                f"at most {_clock(seconds - elapsed)}"
            )


def _line(outcome: Outcome) -> str:
    message = f": {outcome.message}" if outcome.message else ""
    return f"{outcome.stage:12} {outcome.status:9} {outcome.seconds:6.1f} s{message}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the process's group: children may outlive it."""
    for signal_number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
