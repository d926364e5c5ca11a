"""Figures 3 and 5: ResNet-32 on CIFAR-10 and VGG16 on CIFAR-100 (Tables 4 and 7)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from experiments import options
from experiments.comparison import run_comparison
from experiments.methods import Settings, has_statistics, method_settings
from experiments.options import Quick, chosen, numbers, overridden, user_errors
from experiments.problems.classifiers import NETWORKS, load_classifier

QUICK = [Quick("resnet32", 3, "resnet32 --examples 768 --optimizer all --epochs 2", True)]

# The paper's methods in its order, with TNT-EF after TNT.
OPTIMIZERS = ("tnt", "tnt-ef", "kfac-eigen", "shampoo", "adam", "sgd")

# (learning rate, weight decay): the paper's Table 4, and Table 7 for TNT-EF.
TABLE_4: dict[str, dict[str, tuple[float, float]]] = {
    "resnet32": {
        "tnt": (1e-4, 10.0),
        "tnt-ef": (1e-4, 10.0),
        "kfac-eigen": (0.01, 0.1),
        "shampoo": (0.01, 0.1),
        "adam": (0.003, 0.1),
        "sgd": (0.03, 0.01),
    },
    "vgg16": {
        "tnt": (3e-5, 10.0),
        "tnt-ef": (3e-6, 100.0),
        "kfac-eigen": (3e-4, 0.1),
        "shampoo": (0.003, 0.1),
        "adam": (3e-5, 10.0),
        "sgd": (0.03, 0.01),
    },
}
DAMPING = {"tnt": 0.01, "tnt-ef": 0.01, "kfac-eigen": 0.03, "shampoo": 0.01, "adam": 1e-8}
# (epochs, epochs between two falls of the learning rate to a tenth), after Zhang et al. 2019.
FIRST_ORDER, SECOND_ORDER = (200, 60), (100, 40)


def convnet_settings(problem: str, optimizer: str, epochs: int | None = None) -> Settings:
    """The paper's settings.

    Args:
        problem: "resnet32" or "vgg16".
        optimizer: one of `OPTIMIZERS`.
        epochs: for a run of another length. The learning rate then falls at the same fractions of
            the run (every 0.3 of it for first-order methods, 0.4 for second-order ones), rounded to
            whole epochs, at least one.
    """
    lr, weight_decay = TABLE_4[problem][optimizer]
    whole, interval = SECOND_ORDER if has_statistics(optimizer) else FIRST_ORDER
    epochs = whole if epochs is None else epochs
    return method_settings(
        *(optimizer, lr, DAMPING.get(optimizer)),
        weight_decay=weight_decay,
        intervals=(10, 100),
        schedule=f"step:{max(1, round(epochs * interval / whole))}",
        batch_size=128,
        epochs=epochs,
    )


def main(
    problem: Annotated[str, typer.Argument(help=f"One of {', '.join(NETWORKS)}.")],
    optimizer: options.Optimizers = "all",
    data: options.Data = None,
    examples: options.Examples = None,
    seeds: options.Seeds = "0",
    epochs: options.Epochs = None,
    changes: options.Overrides = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    out: options.Out = None,
) -> None:
    """Figures 3, 5: ResNet-32 on CIFAR-10, VGG16 on CIFAR-100, with Tables 4 and 7."""
    if problem not in NETWORKS:
        raise typer.BadParameter(f"problem must be one of {', '.join(NETWORKS)}, got {problem!r}")
    where = options.set_machine(threads, device)
    with user_errors():
        loaded = load_classifier(problem, data, examples)
        each = [
            overridden(convnet_settings(problem, name, epochs), changes)
            for name in chosen(optimizer, OPTIMIZERS)
        ]
    wanted = [replace(settings, seed=seed) for seed in numbers(seeds) for settings in each]
    out = out or Path(f"results/convnets/{problem}.json")
    run_comparison("convnet", loaded, wanted, out, where, metric="validation_error")
