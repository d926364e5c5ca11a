"""Runs stages one after the other, each in a process of its own and within a time limit.

Imports no PyTorch: whatever a stage does to its GPU or its process, the driver goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.records import write_json

CHECKOUT = Path(__file__).resolve().parents[2]
OUTCOMES = "outcomes.json"

NO_DEVICE = "no CUDA device: nothing to measure"

PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "failed", "timed out", "not run"
# The exit status of a stage that lacks something; its last line says what.
LACKS_SOMETHING = 77
GRACE = 5.0  # seconds between asking a process to end and ending it
SHOWN_LINES = 20


@dataclass(frozen=True)
class Stage:
    """One part of the job.

    Attributes:
        name: as on the command line.
        does: what it does, in a few words.
        seconds: its share of the time. What earlier stages leave over is added.
        command: Python's arguments, to which ``--folder`` and ``--seconds`` are added.
        needs_device: whether it is of no use without a GPU.
    """

    name: str
    does: str
    seconds: float
    command: tuple[str, ...]
    needs_device: bool = True


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


def run_stages(
    stages: Sequence[Stage],
    folder: Path,
    seconds: float,
    arguments: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Runs ``stages`` in their order, whatever becomes of each.

    Args:
        stages: what to run.
        folder: where the stages write, and the logs and ``outcomes.json`` go, as they end.
        seconds: for all of them. A stage gets its share and what the ones before it left over.
        arguments: further arguments for every stage.
        say: prints a line.

    Returns:
        How each of them ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for number, stage in enumerate(stages):
        kept = sum(later.seconds for later in stages[number + 1 :])
        left = end - time.monotonic()
        # Where the shares are more than there is, the first stages come first.
        limit = min(left, max(left - kept, stage.seconds))
        if limit < 1:
            outcome = Outcome(stage.name, NOT_RUN, 0.0, "no time was left for it", "")
        else:
            say(f"{stage.name}: {stage.does} (at most {limit:.0f} s)")
            outcome = run_stage(stage, folder, limit, arguments)
        outcomes.append(outcome)
        write_json(folder / OUTCOMES, {"stages": [asdict(o) for o in outcomes]})
        say(_line(outcome))
        if outcome.status in (FAILED, TIMED_OUT):
            for line in _last_lines(folder / outcome.log, SHOWN_LINES):
                say(f"    | {line}")
    return outcomes


def run_stage(stage: Stage, folder: Path, seconds: float, arguments: Sequence[str] = ()) -> Outcome:
    """Runs one stage in its own process; ends it, and what it has started, at the limit."""
    log = folder / f"{stage.name}.log"
    command = [sys.executable, *stage.command, "--folder", str(folder)]
    command += ["--seconds", f"{seconds:.1f}", *arguments]
    start = time.monotonic()
    with log.open("wb") as output:
        # A group of its own, so that it can be ended with all its children, but no session: if the
        # driver is ended together with its session, the stage is too.
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
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    took = time.monotonic() - start
    status, message = _judged(code, log, seconds)
    return Outcome(stage.name, status, took, message, log.name)


def stage_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a stage runs in: with both source roots, as nothing may be installed."""
    roots = [str(CHECKOUT), str(CHECKOUT / "python"), environment.get("PYTHONPATH", "")]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, roots)),
        "PYTHONUNBUFFERED": "1",  # or what it said last is lost where it is ended
    }


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """0, or 1 where a stage failed or ran out of time; one that lacks a tool is no failure."""
    return int(any(o.status in (FAILED, TIMED_OUT) for o in outcomes))


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line for each stage."""
    return "\n".join(_line(outcome) for outcome in outcomes)


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


def _line(outcome: Outcome) -> str:
    message = f": {outcome.message}" if outcome.message else ""
    return f"{outcome.stage:10} {outcome.status:9} {outcome.seconds:6.1f} s{message}"


def _last_lines(log: Path, count: int) -> list[str]:
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


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
