"""The autoencoder problems: MNIST, FACES and scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import data_folder
from experiments.data.digits import digits_images
from experiments.data.faces import faces_images
from experiments.data.mnist import mnist_images
from experiments.models.autoencoder import (
    DIGITS_WIDTHS,
    FACES_WIDTHS,
    MNIST_WIDTHS,
    autoencoder,
    loss_floor,
    reconstruction_loss,
    squared_error,
)
from experiments.problems.problem import Problem

LABELS = {
    "mnist": "Autoencoder on MNIST images",
    "faces": "Autoencoder on FACES patches",
    "digits": "Autoencoder on 8x8 digit images",
}


class Autoencoder(Problem):
    """Images to reconstruct.

    Args:
        name: "mnist", "faces" or "digits".
        images: (N, pixels), in [0, 1] except for the faces.
        widths: of the model.
        source: where the images come from, in words.
    """

    def __init__(
        self, name: str, images: Tensor, widths: tuple[int, ...], source: str = ""
    ) -> None:
        self.name, self.images, self.widths, self.source = name, images, widths, source
        self.label = LABELS[name]
        self.examples = images.shape[0]
        if name == "faces":
            self.likelihood, self.loss_label = "gaussian", "½ squared error per image"
        else:
            self.likelihood, self.loss_label = "bernoulli", "nats per image"
            self.loss_floor = loss_floor(images)

    def build(self) -> nn.Module:
        """The autoencoder."""
        return autoencoder(self.widths)

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


def load_autoencoder(
    name: str, data: Path | None = None, examples: int | None = None
) -> Autoencoder:
    """An autoencoder problem.

    Args:
        name: "mnist", "faces" or "digits" (from scikit-learn).
        data: `--data`, for "mnist" and "faces".
        examples: number of images; None for all. FACES spreads them evenly over the faces; the
            other problems take the first images.

    Raises:
        ValueError, OSError: the data cannot be read, or are too few.
    """
    if name == "faces":
        images, source = faces_images(data_folder("olivetti", data), examples)
        return Autoencoder(name, images, FACES_WIDTHS, source)
    if name == "digits":
        images, widths, source = digits_images(), DIGITS_WIDTHS, "scikit-learn"
    else:
        images, widths = mnist_images(data_folder("mnist", data)), MNIST_WIDTHS
        source = "MNIST, training"
    if examples is not None and not 1 <= examples <= len(images):
        raise ValueError(f"examples must be from 1 to {len(images)}, got {examples}")
    return Autoencoder(name, images[:examples], widths, source)
