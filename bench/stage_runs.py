"""Parts of a long job, each in a process of its own and within a time limit.

Imports no PyTorch: whatever a part does to its GPU or its process, the job goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "failed", "timed out", "not run"
# The exit status of a stage that lacks something; its last line says what.
LACKS_SOMETHING = 77
_SHOWN_LINES = 20  # of the log of a stage that did not pass
_GRACE = 5.0  # seconds between asking a process to end and ending it


@dataclass(frozen=True)
class Outcome:
    """How a stage ended.

    Attributes:
        stage: its name.
        status: PASSED, FAILED, TIMED_OUT or NOT_RUN.
        seconds: how long it took.
        message: why, where it did not pass.
        log: the file with all that it said, relative to the job's folder.
    """

    stage: str
    status: str
    seconds: float
    message: str
    log: str

    def line(self) -> str:
        """As it stands in a summary."""
        message = f": {self.message}" if self.message else ""
        return f"{self.stage:12} {self.status:9} {self.seconds:6.1f} s{message}"


def not_run(stage: str, why: str) -> Outcome:
    """The outcome of a stage that was not started."""
    return Outcome(stage, NOT_RUN, 0.0, why, "")


def run_in_time(
    stage: str,
    arguments: Sequence[str],
    folder: Path,
    seconds: float,
    waiting: Callable[[float], None] = lambda elapsed: None,
    tick: float = 30.0,
) -> Outcome:
    """Runs Python in its own process; ends it, and what it has started, at the limit.

    Args:
        stage: its name; what it says goes to ``folder / f"{stage}.log"``.
        arguments: Python's.
        folder: there already.
        seconds: the limit.
        waiting: is told every ``tick`` seconds how long it has been running.
        tick: in seconds.
    """
    log = folder / f"{stage}.log"
    start = time.monotonic()
    with log.open("wb") as output:
        # A group of its own, so that it can be ended with all its children, but no session: if the
        # driver is ended together with its session, the stage is too.
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=CHECKOUT,
            env=stage_environment(os.environ),
            process_group=0,
        )
        try:
            code = _wait(process, start, seconds, waiting, tick)
        finally:
            _end(process)
    took = time.monotonic() - start
    status, message = _judged(code, log, seconds)
    return Outcome(stage, status, took, message, log.name)


def stage_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a stage runs in: with both source roots, as nothing may be installed."""
    roots = [str(CHECKOUT), str(CHECKOUT / "python"), environment.get("PYTHONPATH", "")]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, roots)),
        "PYTHONUNBUFFERED": "1",  # or what it said last is lost where it is ended
    }


def announce(outcome: Outcome, folder: Path, say: Callable[[str], None]) -> None:
    """Says how a stage ended, with the end of its log where it did not go well."""
    say(outcome.line())
    if outcome.status in (FAILED, TIMED_OUT):
        for line in _last_lines(folder / outcome.log, _SHOWN_LINES):
            say(f"    | {line}")


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """0, or 1 where a stage failed or ran out of time; one that lacks a tool is no failure."""
    return int(any(o.status in (FAILED, TIMED_OUT) for o in outcomes))


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line for each stage."""
    return "\n".join(outcome.line() for outcome in outcomes)


def _wait(
    process: subprocess.Popen[bytes],
    start: float,
    seconds: float,
    waiting: Callable[[float], None],
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
            waiting(elapsed)


def _judged(code: int | None, log: Path, seconds: float) -> tuple[str, str]:
    last = next(iter(_last_lines(log, 1)), "")
    if code == 0:
        return PASSED, ""
    if code is None:
        return TIMED_OUT, f"ended after {seconds:.0f} s; its last line: {last}"
    if code == LACKS_SOMETHING:
        return NOT_RUN, last or "it did not say why"
    if code < 0:
        return FAILED, f"ended by signal {-code}; its last line: {last}"
    return FAILED, f"exit status {code}; its last line: {last}"


def _last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log that say something; none where there is no log."""
    if not log.is_file():
        return []
    # A progress bar rewrites its line: what counts is what stands there at the end.
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip()][-count:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the process's group: children may outlive it."""
    for signal_number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
