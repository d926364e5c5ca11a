"""Runs the stages of the GPU job one after the other, each within its share of the time.

Imports no PyTorch: whatever a stage does to its GPU or its process, the driver goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.stage_runs import Outcome, announce, not_run, run_in_time
from tools.measuring.records import write_json

OUTCOMES = "outcomes.json"
NO_DEVICE = "no CUDA device: nothing to measure"


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
            outcome = not_run(stage.name, "no time was left for it")
        else:
            say(f"{stage.name}: {stage.does} (at most {limit:.0f} s)")
            outcome = run_stage(stage, folder, limit, arguments)
        outcomes.append(outcome)
        write_json(folder / OUTCOMES, {"stages": [asdict(o) for o in outcomes]})
        announce(outcome, folder, say)
    return outcomes


def run_stage(stage: Stage, folder: Path, seconds: float, arguments: Sequence[str] = ()) -> Outcome:
    """Runs one stage in its own process; ends it, and what it has started, at the limit."""
    limits = ["--folder", str(folder), "--seconds", f"{seconds:.1f}"]
    return run_in_time(stage.name, [*stage.command, *limits, *arguments], folder, seconds)
