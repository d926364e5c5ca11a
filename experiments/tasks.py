"""The problems that every experiment trains on, with each method's settings.

Tables 3 to 7 of the paper, and this project's own settings for the digits and the transformer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.methods import Settings, default_settings, has_statistics, method_settings
from experiments.problems.autoencoders import load_autoencoder
from experiments.problems.classifiers import load_classifier
from experiments.problems.language import load_language
from experiments.problems.problem import Problem

# Autoencoders: Figures 2, 4 and 6.

# (learning rate, damping): the paper's Table 3, and Table 6 for TNT-EF. Adam's is its epsilon.
TABLE_3: dict[str, dict[str, tuple[float, float | None]]] = {
    "mnist": {
        "tnt": (1e-4, 0.1),
        "tnt-ef": (3e-6, 0.01),
        "kfac": (0.003, 0.3),
        "shampoo": (3e-4, 3e-4),
        "adam": (1e-4, 1e-4),
        "adam-authors": (1e-4, 1e-4),
        "sgd": (0.003, None),
    },
    "faces": {
        "tnt": (1e-6, 0.003),
        "tnt-ef": (3e-6, 0.01),
        "kfac": (0.1, 10.0),
        "shampoo": (3e-4, 3e-4),
        "adam": (1e-4, 1e-4),
        "adam-authors": (1e-4, 1e-4),
        "sgd": (0.001, None),
    },
    # Not the paper's: the best of 35 settings a method, as means over seeds 1 to 5 and 60 epochs,
    # by `python -m experiments search digits --seeds 1,2,3,4,5 --jobs 2` (recorded at commit
    # ff3eba1 with its earlier command; 1050 runs, results/rivals.md has the best losses).
    "digits": {
        "tnt": (1e-4, 0.03),
        "tnt-ef": (1e-5, 0.01),
        "kfac": (0.03, 0.1),
        "shampoo": (0.01, 1e-3),
        "adam": (0.01, 1e-4),
        "sgd": (0.032, None),
    },
}
# (learning rate, damping, mu, beta): Table 5, from the search over all four. Its row of Adam is the
# authors' form of it.
TABLE_5: dict[str, dict[str, tuple[float, float | None, float, float | None]]] = {
    "mnist": {
        "tnt": (1e-4, 0.1, 0.9, 0.9),
        "kfac": (3e-5, 0.01, 0.999, 0.999),
        "shampoo": (1e-4, 3e-4, 0.99, 0.99),
        "adam": (1e-4, 1e-4, 0.99, 0.99),
        "adam-authors": (1e-4, 1e-4, 0.99, 0.99),
        "sgd": (0.001, None, 0.99, None),
    },
    "faces": {
        "tnt": (1e-6, 0.003, 0.9, 0.9),
        "kfac": (0.01, 3.0, 0.99, 0.99),
        "shampoo": (1e-4, 3e-4, 0.99, 0.999),
        "adam": (1e-4, 1e-4, 0.9, 0.9),
        "adam-authors": (1e-4, 1e-4, 0.9, 0.9),
        "sgd": (0.001, None, 0.9, None),
    },
}


def autoencoder_settings(
    problem: str, optimizer: str, epochs: int | None = None, table: int = 3
) -> Settings:
    """A method's settings: the paper's, or this project's for the digits.

    Args:
        problem: "mnist", "faces" or "digits".
        optimizer: a method of the table.
        epochs: None for the usual number.
        table: 3 for the paper's search over learning rate and damping, with TNT-EF of Table 6; 5
            for the search over mu and beta, too.
    """
    lr, damping, *decays = (TABLE_5 if table == 5 else TABLE_3)[problem][optimizer]
    momentum, stat_decay = decays or (0.9, None)
    assert lr is not None and momentum is not None
    return method_settings(
        *(optimizer, lr, damping),
        momentum=momentum,
        stat_decay=stat_decay,
        intervals=(1, 20),  # the paper's for both its autoencoders
        batch_size=128 if problem == "digits" else 1000,
        epochs=epochs or (60 if problem == "digits" else 10),
    )


# Convolutional networks: Figures 3 and 5.

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
# VGG16's settings on CIFAR-100 serve CIFAR-10, too: the paper has none.
TABLE_4["vgg16-cifar10"] = TABLE_4["vgg16"]
DAMPING = {"tnt": 0.01, "tnt-ef": 0.01, "kfac-eigen": 0.03, "shampoo": 0.01, "adam": 1e-8}
# (epochs, epochs between two falls of the learning rate to a tenth), after Zhang et al. 2019.
FIRST_ORDER, SECOND_ORDER = (200, 60), (100, 40)


def convnet_settings(problem: str, optimizer: str, epochs: int | None = None) -> Settings:
    """The paper's settings.

    Args:
        problem: a key of `TABLE_4`.
        optimizer: a method of the table.
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


# Beyond the paper: optimizers without any argument, and their rivals.

BATCH_SIZE = 32
SCHEDULE = "warmup-cosine"
# The rivals' learning rates, to begin a search with; momentum and decay of the second moment: for
# AdamW as in Muon's AdamW and in the grafts, for the others as their authors or libraries set them.
# No weight decay and no warm start: the runs are short, and the learning rate warms up.
RIVALS: Mapping[str, Mapping[str, float | None]] = {
    "adam": {"lr": 5.6e-3, "damping": 1e-8, "momentum": 0.9, "stat_decay": 0.99},
    "muon": {"lr": 1.8e-2, "damping": None, "momentum": 0.95},
    "soap": {"lr": 1e-2, "damping": 1e-8, "momentum": 0.95, "stat_decay": 0.95},
    "normuon": {"lr": 1.8e-2, "damping": None, "momentum": 0.95},
    "kl-shampoo": {"lr": 1.8e-2, "damping": 1e-8, "momentum": 0.9},
    "psgd": {"lr": 3.2e-3, "damping": None, "momentum": 0.9},
}
UNTUNED = ("tnt", "tnt-ef", "shampoo", "kfac")


def modern_settings(
    method: str,
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
) -> Settings:
    """The settings of one of `UNTUNED`, its defaults, or of one of `RIVALS`.

    Args:
        method: its name.
        epochs: length of the run; None for 8, which are 400 steps of the transformer.
        lr: the learning rate; None for the method's own.
        batch_size: examples in a step.
        seed: of the start, the batches and the samples.
    """
    shared: dict[str, Any] = {
        "epochs": epochs or 8,
        "batch_size": batch_size,
        "schedule": SCHEDULE,
    }
    if method in RIVALS:
        own: dict[str, Any] = {**RIVALS[method], "warm_start": False, **shared}
        found = method_settings(method, own.pop("lr"), own.pop("damping"), **own)
    else:
        found = default_settings(method, **shared)
    return replace(found, lr=found.lr if lr is None else lr, seed=seed)


# The problems by name.


@dataclass(frozen=True)
class Task:
    """A problem with each method's settings.

    Attributes:
        methods: names of the methods, in the order of tables and legends.
        load: loads the problem from a data folder (None: TNT_DATA) with a number of examples (None:
            all); picklable.
        settings: a method's settings for a number of epochs; None for the usual number.
        metric: the metric of the epochs that is drawn and minimised; None for the loss.
    """

    methods: Sequence[str]
    load: Callable[[Path | None, int | None], Problem]
    settings: Callable[[str, int | None], Settings]
    metric: str | None = None


def _load_language(data: Path | None, examples: int | None) -> Problem:
    if examples is not None:
        raise ValueError("--examples: the text is read whole")
    return load_language(data)


def _tasks() -> Iterator[tuple[str, Task]]:
    partial = functools.partial
    for name, methods in TABLE_3.items():
        settings = partial(autoencoder_settings, name)
        yield name, Task(list(methods), partial(load_autoencoder, name), settings)
    for name, tuned in TABLE_5.items():
        settings = partial(autoencoder_settings, name, table=5)
        yield f"{name}-tuned", Task(list(tuned), partial(load_autoencoder, name), settings)
    for name, rates in TABLE_4.items():
        settings, load = partial(convnet_settings, name), partial(load_classifier, name)
        yield name, Task(list(rates), load, settings, "validation_error")
    yield "language", Task([*UNTUNED, *RIVALS], _load_language, modern_settings, "validation_loss")


TASKS: Mapping[str, Task] = dict(_tasks())
