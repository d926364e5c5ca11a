"""What is trained, and with which settings: the problems and every optimizer's defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.experiments.data import digits_images, mnist_images
from bench.experiments.models import DIGITS_WIDTHS, MNIST_WIDTHS

OPTIMIZERS = ("tnt", "tnt-ef", "sgd", "adam")
LABELS = {"tnt": "TNT", "tnt-ef": "TNT-EF", "sgd": "SGD-m", "adam": "Adam"}
PROBLEM_LABELS = {"mnist": "MNIST", "digits": "8x8 digit"}
DIGITS_SEARCH = Path(__file__).resolve().parents[1] / "results" / "digits_search.json"

# (learning rate, damping): the paper's Table 3, and Table 6 for TNT-EF. Adam's is its epsilon.
_PAPER_MNIST: dict[str, tuple[float, float | None]] = {
    "tnt": (1e-4, 0.1),
    "tnt-ef": (3e-6, 0.01),
    "sgd": (0.003, None),
    "adam": (1e-4, 1e-4),
}


@dataclass(frozen=True)
class Problem:
    """Images to reconstruct, shape (N, pixels) in [0, 1], and the autoencoder's widths."""

    name: str
    images: Tensor
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """Every setting of one run. What an optimizer does not have is None."""

    optimizer: str
    lr: float  # alpha in the paper
    damping: float | None  # epsilon in the paper; Adam's epsilon
    momentum: float  # mu in the paper; Adam's beta_1
    stat_interval: int | None  # T_1 in the paper
    inverse_interval: int | None  # T_2 in the paper
    warm_start: bool | None
    batch_size: int
    epochs: int
    seed: int


def has_statistics(optimizer: str) -> bool:
    """Whether the optimizer is a TNT: with statistics, inverses and a warm start."""
    return optimizer in ("tnt", "tnt-ef")


def load_problem(data: str) -> Problem:
    """The digits for `"digits"`, otherwise MNIST from the folder of that name.

    Raises:
        ValueError, OSError: as `mnist_images`.
    """
    if data == "digits":
        return Problem("digits", digits_images(), DIGITS_WIDTHS)
    return Problem("mnist", mnist_images(data), MNIST_WIDTHS)


def steps_per_epoch(problem: Problem, settings: Settings) -> int:
    """The number of whole batches in the data: the rest of an epoch's shuffle is dropped.

    Raises:
        ValueError: not even one batch is whole.
    """
    examples = problem.images.shape[0]
    if settings.batch_size > examples:
        raise ValueError(
            f"batch_size must be at most the number of examples, {examples}, "
            f"got {settings.batch_size}"
        )
    return examples // settings.batch_size


def problem_settings(
    problem: str, optimizer: str, lr: float, damping: float | None, seed: int = 0
) -> Settings:
    """The settings of a problem that are the same for all its optimizers, with these two."""
    batch_size, epochs = {"mnist": (1000, 10), "digits": (128, 60)}[problem]
    second_order = has_statistics(optimizer)
    return Settings(
        optimizer=optimizer,
        lr=lr,
        damping=damping,
        momentum=0.9,
        # the paper's intervals for both its autoencoders
        stat_interval=1 if second_order else None,
        inverse_interval=20 if second_order else None,
        warm_start=True if second_order else None,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
    )


def default_settings(problem: str, optimizer: str) -> Settings:
    """The paper's settings for MNIST; for the digits the best ones of the recorded search."""
    if problem == "mnist":
        lr, damping = _PAPER_MNIST[optimizer]
    else:
        best = recorded_search()["best"][optimizer]
        lr, damping = best["lr"], best["damping"]
    return problem_settings(problem, optimizer, lr, damping)


def recorded_search() -> dict[str, Any]:
    """The record of `python -m bench.experiments.search` in bench/results."""
    record: dict[str, Any] = json.loads(DIGITS_SEARCH.read_text(encoding="utf-8"))
    return record
