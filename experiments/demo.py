"""The demo: TNT, SGD-m and Adam train an autoencoder from the same start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from experiments import options
from experiments.figures2to6 import summary
from experiments.options import user_errors
from experiments.plots import plot_runs
from experiments.tasks import TASKS
from experiments.training import train
from tools.measuring.provenance import provenance
from tools.measuring.records import check_writable, write_json

# A typical start, not one of the search's: each of the three ends within 0.3 of its mean over the
# search's five seeds. From seed 6 or 12 SGD-m ends well above its mean, which would flatter TNT.
SEED = 8


def main(
    problem: Annotated[str, options.problem_argument(["digits", "mnist"])] = "digits",
    data: options.Data = None,
    epochs: options.Epochs = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = SEED,
    threads: options.Threads = None,
    out: options.Out = None,
) -> None:
    """Train an autoencoder with SGD-m, Adam and TNT: a table and a picture in seconds."""
    options.set_machine(1 if threads is None and problem == "digits" else threads)
    out = out or Path(f"results/demo/{problem}.json")
    with user_errors():
        check_writable(out)
        loaded = TASKS[problem].load(data, None)
    origin, runs = provenance(), []
    for name in ("sgd", "adam", "tnt"):
        # An epoch of TNT on MNIST takes some 16 s on two cores, one on the digits 0.05 s.
        length = epochs or (60 if problem == "digits" else 3)
        settings = replace(TASKS[problem].settings(name, length), seed=seed)
        runs.append(train(loaded, settings, report_every=-(-length // 10)))
    write_json(out, {"provenance": origin, "runs": [run.record() for run in runs]})
    plot_runs(runs, out.with_suffix(".png"), f"{loaded.label}, same start", loaded.loss_label)
    print(f"\n{summary(runs)}\npicture: {out.with_suffix('.png')}\nrecord:  {out}")
