"""The stage ``training``: the paper's MNIST autoencoder, three epochs, as on the CPU.

The loop, the model and the settings are ``experiments``'s. TNT comes first, in PyTorch's
default precision; then in TF32, then SGD-m and Adam, as far as the time goes.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

import torch

from bench.gpu.ceilings import precision
from bench.gpu.json_lines import JsonLines
from bench.gpu.origin import origin
from bench.gpu.stage_process import Job, SomethingIsMissing, present_gpu, run

EPOCHS = 3
RUNS = (("tnt", "highest"), ("tnt", "high"), ("sgd", "highest"), ("adam", "highest"))


def train_autoencoder(job: Job) -> bool:
    """Trains on the present GPU; returns whether no run diverged."""
    return train_all(job, present_gpu())


def train_all(job: Job, device: torch.device, epochs: int = EPOCHS) -> bool:
    """Trains with every optimizer for which there is time."""
    if not job.data.is_dir():
        raise SomethingIsMissing(f"{job.data} has no MNIST files (--data says where they are)")
    # Here, not above: it wants tqdm, and its absence is no failure.
    from experiments.problems.autoencoders import default_settings, load_autoencoder
    from experiments.runs.methods import LABELS
    from experiments.runs.training import train

    try:
        problem = load_autoencoder(str(job.data))
    except FileNotFoundError as error:
        raise SomethingIsMissing(str(error)) from error
    lines = JsonLines(job.folder / "training.jsonl")
    lines.add("origin", **origin(device, job.commit))
    longest = 0.0
    well = True
    for optimizer, setting in RUNS:
        left = job.left()
        if left < 1.5 * longest:  # as long as the longest so far, and some
            named = {"optimizer": LABELS[optimizer], "precision": setting}
            lines.add("not run", **named, why="out of time")
            continue
        settings = replace(default_settings("mnist", optimizer), epochs=epochs)
        with precision(setting):
            result = train(problem, settings, device)
        longest = max(longest, left - job.left())
        well = well and result.diverged_at_step is None
        lines.add(
            "training",
            optimizer=result.label,
            precision=setting,
            diverged_at_step=result.diverged_at_step,
            warm_start_seconds=result.warm_start_seconds,
            seconds_per_epoch=result.seconds_per_epoch,
            epochs=[asdict(epoch) for epoch in result.epochs],
            settings=asdict(settings),
        )
        print(
            f"{result.label}, {setting}: smoothed loss {result.final_loss:.2f} after "
            f"{len(result.epochs)} epochs, {result.seconds_per_epoch:.3f} s an epoch",
            flush=True,
        )
    return well


if __name__ == "__main__":
    sys.exit(run(train_autoencoder))
