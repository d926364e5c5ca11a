"""Runs the experiments of the page one after the other, within the time there is for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.stage_runs import Outcome, announce, not_run, run_in_time
from experiments.figures.stages import Stage


def run_stages(
    stages: Sequence[Stage],
    folder: Path,
    data: Mapping[str, Path | None],
    seconds: float,
    say: Callable[[str], None] = print,
    tick: float = 30.0,
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
            outcome = not_run(stage.name, f"no {lacks}")
        elif limit < 1:
            outcome = not_run(stage.name, "no time was left for it")
        else:
            say(
                f"[{number + 1}/{len(stages)}] {stage.name}: {stage.does}; "
                f"{_clock(elapsed)} elapsed, some {_clock(to_come)} to go"
            )
            outcome = _run_stage(stage, folder, data, limit, say, tick)
        outcomes.append(outcome)
        announce(outcome, folder, say)
    return outcomes


def _run_stage(
    stage: Stage,
    folder: Path,
    data: Mapping[str, Path | None],
    seconds: float,
    say: Callable[[str], None],
    tick: float,
) -> Outcome:
    def waiting(elapsed: float) -> None:
        expected = max(60 * stage.minutes - elapsed, 0)
        say(
            f"    {stage.name}: {_clock(elapsed)} elapsed, some {_clock(expected)} to go, "
            f"at most {_clock(seconds - elapsed)}"
        )

    arguments = stage.arguments(folder, data)
    return run_in_time(stage.name, arguments, folder, seconds, waiting, tick)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
