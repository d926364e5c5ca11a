"""Reinforcement learning: PPO on CartPole, TNT without tuning against AdamW and SOAP.

The loop is that of examples/ppo.py. Each rival has its best learning rate: the one with the longest
episodes on average over a run, from three seeds that the final runs do not use.
"""

from __future__ import annotations

import runpy
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from experiments import options
from experiments.defaults import around
from experiments.methods import METHODS, Settings, build_optimizer
from experiments.models import seeded
from experiments.options import Quick, user_errors
from experiments.run_files import RunFile
from experiments.tasks import modern_settings
from tnt_kernels.benchmark.tables import table

QUICK = [Quick("ppo", "--rollouts 2 --jobs 2")]

UNTUNED = ("tnt", "tnt-ef")
# The rates with which the searches begin.
RIVALS = {"adam": 0.01, "soap": 0.01}
TUNING_SEEDS, SEEDS = range(100, 103), range(10, 15)
# An episode ends after 500 steps. CartPole counts as solved at 475.
SOLVED = 475.0
EXAMPLE = Path(__file__).parents[1] / "examples" / "ppo.py"


def main(
    rollouts: Annotated[int, typer.Option("--rollouts", min=1, help="Of 1024 steps.")] = 100,
    jobs: options.Jobs = 2,
    out: options.Out = None,
) -> None:
    """Reinforcement learning: PPO on CartPole, TNT without tuning against AdamW and SOAP.

    Needs the package gymnasium.
    """
    options.set_machine(1)
    out = out or Path("results/ppo.json")
    with user_errors((*(OSError, ValueError), ModuleNotFoundError)):
        file = RunFile(out, "ppo", {"rollouts": rollouts, "tuning_seeds": list(TUNING_SEEDS)})
        _example()  # a missing package ends the command here
        best = _search(file, rollouts, jobs)
        finals = [_settings(m, best.get(m), seed) for m in (*UNTUNED, *RIVALS) for seed in SEEDS]
        _make(file, finals, rollouts, jobs)
    text = page(file.runs, best)
    print(text)
    out.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")


@cache
def _example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def _settings(method: str, lr: float | None, seed: int) -> Settings:
    return modern_settings(method, lr=lr, seed=seed)


def run(settings: Settings, rollouts: int) -> dict[str, Any]:
    """The mean lengths of the episodes that end in each rollout, and the processor's seconds."""
    torch.set_num_threads(1)
    example = _example()
    agent = seeded(lambda: nn.ModuleList(map(example["network"], (2, 1))), settings.seed)
    likelihood: Any = ("categorical", "gaussian")
    optimizer: Any = build_optimizer(agent, settings, likelihood)
    if settings.optimizer not in UNTUNED:
        optimizer.observe = lambda _: None
    torch.manual_seed(settings.seed)
    began = time.process_time()
    lengths = example["train"](*agent, optimizer, rollouts, settings.seed)
    return {
        "lengths": [round(length, 2) for length in lengths],
        "processor_seconds": round(time.process_time() - began, 2),
    }


def _make(file: RunFile, wanted: Sequence[Settings], rollouts: int, jobs: int) -> None:
    missing = [s for s in wanted if file.find({"settings": asdict(s)}) is None]
    # Ctrl-C ends the processes.
    ends = signal.signal, (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(jobs, get_context("spawn"), *ends) as pool:
        for settings, found in zip(
            missing, pool.map(run, missing, [rollouts] * len(missing)), strict=True
        ):
            file.add({"settings": asdict(settings)}, found)


def _search(file: RunFile, rollouts: int, jobs: int) -> dict[str, float]:
    """The best rate of each rival: both its neighbours in the grid are worse."""
    best = dict(RIVALS)
    while True:
        wanted = {m: around(lr) for m, lr in best.items()}
        _make(
            file,
            [
                _settings(m, lr, s)
                for m, rates in wanted.items()
                for lr in rates
                for s in TUNING_SEEDS
            ],
            rollouts,
            jobs,
        )
        means = {m: {lr: _mean(file.runs, m, lr) for lr in rates} for m, rates in wanted.items()}
        # A tie keeps the present rate, so that the search ends.
        found = {
            m: lr if known[lr] == max(known.values()) else max(known, key=known.__getitem__)
            for (m, lr), known in zip(best.items(), means.values(), strict=True)
        }
        if found == best:
            return best
        best = found


def _lengths(
    runs: Iterable[Mapping[str, Any]], method: str, lr: float, seeds: Iterable[int]
) -> list[list[float]]:
    return [
        run["lengths"]
        for run in runs
        if (s := run["key"]["settings"])["optimizer"] == method
        and s["lr"] == lr
        and s["seed"] in seeds
    ]


def _mean(runs: Iterable[Mapping[str, Any]], method: str, lr: float) -> float:
    return statistics.fmean(map(statistics.fmean, _lengths(runs, method, lr, TUNING_SEEDS)))


def solved_after(lengths: Sequence[float], window: int = 10) -> int | None:
    """The rollouts until the mean over the last ten is that of a solved task; None if never.

    >>> solved_after([100.0] + [500.0] * 12)
    11
    """
    for end in range(window, len(lengths) + 1):
        if statistics.fmean(lengths[end - window : end]) >= SOLVED:
            return end
    return None


def page(runs: Sequence[Mapping[str, Any]], best: Mapping[str, float]) -> str:
    """The table of the final runs."""
    lines = []
    for method in (*UNTUNED, *RIVALS):
        lr = best.get(method, _settings(method, None, 0).lr)
        own = _lengths(runs, method, lr, SEEDS)
        means = [statistics.fmean(lengths) for lengths in own]
        last = [statistics.fmean(lengths[-10:]) for lengths in own]
        solved = [found for lengths in own if (found := solved_after(lengths)) is not None]
        seconds = statistics.median(
            run["processor_seconds"]
            for run in runs
            if run["key"]["settings"]["optimizer"] == method
            and run["key"]["settings"]["seed"] in SEEDS
        )
        lines.append(
            (
                "AdamW" if method == "adam" else METHODS[method].label,
                f"{lr:g}" if method in best else "default",
                f"{statistics.fmean(means):.0f} ± {statistics.stdev(means):.0f}",
                f"{statistics.fmean(last):.0f} ± {statistics.stdev(last):.0f}",
                f"{len(solved)} of {len(own)}",
                f"{statistics.median(solved):.0f}" if 2 * len(solved) > len(own) else "-",
                f"{seconds:.0f}",
            )
        )
    header = (
        *("", "learning rate", "episode, mean over the run", "last 10 rollouts", "solved"),
        *("after rollouts (median)", "processor s"),
    )
    return "\n".join(table(header, lines))
