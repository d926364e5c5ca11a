"""The autoencoder problems, and every method's settings on them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import curves_images, digits_images, faces_images, mnist_images
from experiments.models import (
    CURVES_WIDTHS,
    DIGITS_WIDTHS,
    FACES_WIDTHS,
    MNIST_WIDTHS,
    autoencoder,
    loss_floor,
    reconstruction_loss,
    squared_error,
)
from experiments.problems.problem import Problem
from experiments.runs.methods import METHODS, has_statistics, takes_graft
from experiments.runs.settings import Settings
from experiments.tuning.recorded_search import best_settings

DIGITS_SEARCH = Path(__file__).resolve().parents[2] / "results" / "digits_search.json"
# What the paper compares on the autoencoders, in its order, with TNT-EF after TNT.
OPTIMIZERS = ("tnt", "tnt-ef", "kfac", "shampoo", "adam", "sgd")

_LABELS = {
    "mnist": "Autoencoder on MNIST images",
    "faces": "Autoencoder on FACES patches",
    "curves": "Autoencoder on CURVES images",
    "digits": "Autoencoder on 8x8 digit images",
}

# (learning rate, damping): the paper's Table 3, and Table 6 for TNT-EF. Adam's is its epsilon.
TABLE_3: dict[str, dict[str, tuple[float, float | None]]] = {
    "mnist": {
        "tnt": (1e-4, 0.1),
        "tnt-ef": (3e-6, 0.01),
        "kfac": (0.003, 0.3),
        "shampoo": (3e-4, 3e-4),
        "adam": (1e-4, 1e-4),
        "sgd": (0.003, None),
    },
    "faces": {
        "tnt": (1e-6, 0.003),
        "tnt-ef": (3e-6, 0.01),
        "kfac": (0.1, 10.0),
        "shampoo": (3e-4, 3e-4),
        "adam": (1e-4, 1e-4),
        "sgd": (0.001, None),
    },
}
# (learning rate, damping, mu, beta): Table 5, of the search over all four.
TABLE_5: dict[str, dict[str, tuple[float, float | None, float, float | None]]] = {
    "mnist": {
        "tnt": (1e-4, 0.1, 0.9, 0.9),
        "kfac": (3e-5, 0.01, 0.999, 0.999),
        "shampoo": (1e-4, 3e-4, 0.99, 0.99),
        "adam": (1e-4, 1e-4, 0.99, 0.99),
        "sgd": (0.001, None, 0.99, None),
    },
    "faces": {
        "tnt": (1e-6, 0.003, 0.9, 0.9),
        "kfac": (0.01, 3.0, 0.99, 0.99),
        "shampoo": (1e-4, 3e-4, 0.99, 0.999),
        "adam": (1e-4, 1e-4, 0.9, 0.9),
        "sgd": (0.001, None, 0.9, None),
    },
}


class Autoencoder(Problem):
    """Images to reconstruct.

    Args:
        name: "mnist", "faces", "curves" or "digits".
        images: (N, pixels), in [0, 1] but for the faces.
        widths: the model's.
        source: where the images come from, in words.
    """

    def __init__(
        self, name: str, images: Tensor, widths: tuple[int, ...], source: str = ""
    ) -> None:
        self.name, self.images, self.widths, self.source = name, images, widths, source
        self.label = _LABELS[name]
        self.examples = images.shape[0]
        if name == "faces":
            self.likelihood, self.loss_label = "gaussian", "½ squared error per image"
        else:
            self.likelihood, self.loss_label = "bernoulli", "nats per image"
            self.loss_floor = loss_floor(images)

    def build(self) -> nn.Module:
        """The autoencoder."""
        return autoencoder(self.widths)

    def to(self, device: torch.device) -> Autoencoder:
        """The problem with its images on a device."""
        moved = copy.copy(self)
        moved.images = self.images.to(device)
        return moved

    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images, twice: they are their own targets."""
        images = self.images[indices]
        return images, images

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over the pixels, averaged over the batch."""
        if self.name == "faces":
            return squared_error(outputs, targets)
        return reconstruction_loss(outputs, targets)

    def description(self) -> dict[str, Any]:
        """Data and model."""
        return {
            "problem": self.name,
            "source": self.source,
            "examples": self.examples,
            "widths": list(self.widths),
        }


def load_autoencoder(data: str, count: int | None = None) -> Autoencoder:
    """The autoencoder problem that `data` names.

    Args:
        data: "digits" (scikit-learn's) or "curves" (generated), or a folder: with MNIST's IDX
            files, or with a FACES file (the original patches, or the Olivetti faces).
        count: how many of the images, evenly over FACES and the first of others; None for all.

    Raises:
        ValueError, OSError: the data cannot be read, or are too few.
    """
    if data == "digits":
        return _first(Autoencoder("digits", digits_images(), DIGITS_WIDTHS, "scikit-learn"), count)
    if data == "curves":
        images = curves_images() if count is None else curves_images(count)
        return Autoencoder("curves", images, CURVES_WIDTHS, "generated")
    folder = Path(data)
    if folder.is_dir() and any(folder.glob("*.mat")):
        faces = faces_images(folder) if count is None else faces_images(folder, count)
        return Autoencoder("faces", faces.images, FACES_WIDTHS, faces.source)
    return _first(Autoencoder("mnist", mnist_images(data), MNIST_WIDTHS, "MNIST, training"), count)


def _first(problem: Autoencoder, count: int | None) -> Autoencoder:
    if count is None:
        return problem
    if count > problem.examples:
        raise ValueError(f"count must be at most {problem.examples}, got {count}")
    return Autoencoder(problem.name, problem.images[:count], problem.widths, problem.source)


def autoencoder_settings(
    problem: str,
    optimizer: str,
    lr: float,
    damping: float | None,
    momentum: float = 0.9,
    stat_decay: float | None = None,
    seed: int = 0,
) -> Settings:
    """The settings that are the same for all of a problem's optimizers, with these.

    Args:
        problem: "mnist", "faces", "curves" or "digits".
        optimizer: one of `OPTIMIZERS`.
        lr: alpha in the paper.
        damping: epsilon in the paper.
        momentum: mu in the paper.
        stat_decay: beta in the paper; None for the method's own.
        seed: of the start, the batches and the samples.
    """
    batch_size, epochs = (128, 60) if problem == "digits" else (1000, 10)
    second_order = has_statistics(optimizer)
    return Settings(
        optimizer=optimizer,
        lr=lr,
        damping=damping,
        momentum=momentum,
        stat_decay=stat_decay or METHODS[optimizer].stat_decay,
        weight_decay=0.0,
        # the paper's intervals for both its autoencoders
        stat_interval=1 if second_order else None,
        inverse_interval=20 if second_order else None,
        warm_start=True if second_order else None,
        relative_damping=False if takes_graft(optimizer) else None,
        graft=None,
        schedule="constant",
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
    )


def default_settings(problem: str, optimizer: str, table: int = 3) -> Settings:
    """The paper's settings for MNIST and FACES; the best ones of the recorded search on the digits.

    CURVES, which the paper does not have, takes MNIST's: images of the same size and the same loss.

    Args:
        problem: "mnist", "faces", "curves" or "digits".
        optimizer: one of `OPTIMIZERS`.
        table: 3 for the paper's search over learning rate and damping, 5 for the one that was also
            over mu and beta (and has no TNT-EF).

    Raises:
        ValueError: the table has no such method.
    """
    if problem == "digits":
        best = best_settings(DIGITS_SEARCH, optimizer)
        return autoencoder_settings(problem, optimizer, best.lr, best.damping)
    paper = "faces" if problem == "faces" else "mnist"
    if table == 5:
        if optimizer not in TABLE_5[paper]:
            known = ", ".join(TABLE_5[paper])
            raise ValueError(f"the paper's Table 5 has {known}, but not {optimizer}")
        return autoencoder_settings(problem, optimizer, *TABLE_5[paper][optimizer])
    if optimizer not in TABLE_3[paper]:
        known = ", ".join(TABLE_3[paper])
        raise ValueError(f"the paper's Table 3 has {known}, but not {optimizer}")
    return autoencoder_settings(problem, optimizer, *TABLE_3[paper][optimizer])


def unsearched_settings(problem: str, optimizer: str) -> Settings:
    """`default_settings`, but on the digits: theirs are what a search is to find."""
    if problem != "digits":
        return default_settings(problem, optimizer)
    damping = 0.1 if METHODS[optimizer].damped else None
    return autoencoder_settings(problem, optimizer, 1e-3, damping)
