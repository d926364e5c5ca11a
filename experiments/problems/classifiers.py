"""The paper's convolutional networks on CIFAR, and every method's settings for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    CIFAR100_MEAN,
    CIFAR100_STD,
    Cifar,
    cifar10,
    cifar100,
    crop_and_flip,
    normalised,
)
from experiments.models import resnet32, vgg16
from experiments.problems.problem import Problem
from experiments.runs.methods import METHODS, has_statistics, takes_graft
from experiments.runs.settings import Settings

# What the paper compares on the convolutional networks, in its order, with TNT-EF after TNT.
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
_DAMPING = {"tnt": 0.01, "tnt-ef": 0.01, "kfac-eigen": 0.03, "shampoo": 0.01, "adam": 1e-8}
# (epochs, epochs until the learning rate is a tenth), after Zhang et al. 2019.
_FIRST_ORDER_COURSE = (200, 60)
_SECOND_ORDER_COURSE = (100, 40)
# Images of the validation set at a time; any number gives the same errors.
_EVALUATED_AT_ONCE = 500


@dataclass(frozen=True)
class Network:
    """One of the paper's networks with its data.

    Attributes:
        label: what plots call the two.
        source: the data set's name.
        read: reads it from a folder.
        build: makes the model for a number of classes.
        mean: of the channels.
        std: likewise.
    """

    label: str
    source: str
    read: Callable[[str | Path], Cifar]
    build: Callable[[int], nn.Module]
    mean: tuple[float, ...]
    std: tuple[float, ...]


NETWORKS = {
    "resnet32": Network(
        "ResNet-32 on CIFAR-10", "CIFAR-10", cifar10, resnet32, CIFAR10_MEAN, CIFAR10_STD
    ),
    "vgg16": Network(
        "VGG16 on CIFAR-100", "CIFAR-100", cifar100, vgg16, CIFAR100_MEAN, CIFAR100_STD
    ),
}


class Classifier(Problem):
    """Images to classify, cropped and flipped at random in training; the test set validates.

    The images stay bytes, a quarter of the memory, and each batch is normalised on its own: the
    augmentation's black border must be there before that.

    Args:
        name: "resnet32" or "vgg16".
        data: images of 32x32 pixels, all of them on the CPU.
    """

    likelihood = "categorical"
    loss_label = "nats per image"

    def __init__(self, name: str, data: Cifar) -> None:
        self.name, self.data = name, data
        self._network = NETWORKS[name]
        self.label = self._network.label
        self.examples = data.train_images.shape[0]
        self._mean = torch.tensor(self._network.mean)
        self._std = torch.tensor(self._network.std)

    def first(self, count: int) -> Classifier:
        """The problem with `count` of its training images, evenly over the classes.

        They are the first images of every class, in the order of the whole; classes of which there
        is one more than of others are those that come first. The validation set stays whole.

        Raises:
            ValueError: there are not so many images.
        """
        if not 1 <= count <= self.examples:
            raise ValueError(f"must be from 1 to {self.examples}, the training images, got {count}")
        labels = self.data.train_labels
        earlier = functional.one_hot(labels, self.data.classes).cumsum(0)
        place_in_class = earlier.gather(1, labels[:, None])[:, 0]
        chosen = place_in_class.argsort(stable=True)[:count].sort().values
        images, labels = self.data.train_images[chosen], labels[chosen]
        return Classifier(self.name, replace(self.data, train_images=images, train_labels=labels))

    def build(self) -> nn.Module:
        """The network, as the paper starts it; channels last where the images are on the CPU."""
        model = self._network.build(self.data.classes)
        if self.data.train_images.device.type == "cpu":
            # Faster forward and backward on a CPU, and equal up to rounding.
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def to(self, device: torch.device) -> Classifier:
        """The problem with its images on a device."""
        moved = copy.copy(self)
        moved.data = replace(
            self.data,
            train_images=self.data.train_images.to(device),
            train_labels=self.data.train_labels.to(device),
            test_images=self.data.test_images.to(device),
            test_labels=self.data.test_labels.to(device),
        )
        moved._mean, moved._std = self._mean.to(device), self._std.to(device)
        return moved

    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """Cropped, flipped and normalised images, and their classes."""
        images = crop_and_flip(self.data.train_images[indices], augment)
        return normalised(images, self._mean, self._std), self.data.train_labels[indices]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, averaged over the batch."""
        return functional.cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The validation set's error, a fraction of its images, and its mean loss.

        In evaluation mode, which changes no buffer; the model is then in the mode it was in.
        """
        images, labels = self.data.test_images, self.data.test_labels
        wrong = torch.zeros((), dtype=torch.int64, device=labels.device)
        loss = torch.zeros((), dtype=torch.float64, device=labels.device)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for some, classes in zip(
                    images.split(_EVALUATED_AT_ONCE), labels.split(_EVALUATED_AT_ONCE), strict=True
                ):
                    outputs = model(normalised(some, self._mean, self._std))
                    wrong += (outputs.argmax(1) != classes).sum()
                    loss += functional.cross_entropy(outputs, classes, reduction="sum")
        finally:
            model.train(was_training)
        count = labels.shape[0]
        return {"validation_error": wrong.item() / count, "validation_loss": loss.item() / count}

    def description(self) -> dict[str, Any]:
        """Data and model."""
        return {
            "problem": self.name,
            "source": self._network.source,
            "examples": self.examples,
            "validation_examples": self.data.test_labels.shape[0],
            "augmentation": "cropped after padding with 4 black pixels, flipped",
        }


def load_classifier(name: str, folder: str | Path) -> Classifier:
    """The network's problem, on the data set in a folder.

    Args:
        name: "resnet32" or "vgg16".
        folder: holds CIFAR-10 or CIFAR-100, as the Python version unpacks.

    Raises:
        ValueError, OSError: the data cannot be read.
    """
    return Classifier(name, NETWORKS[name].read(folder))


def default_settings(problem: str, optimizer: str, epochs: int | None = None) -> Settings:
    """The paper's settings.

    Args:
        problem: "resnet32" or "vgg16".
        optimizer: one of `OPTIMIZERS`.
        epochs: for a run of another length than the paper's, 200 epochs for first-order and 100 for
            second-order methods. The learning rate then falls to a tenth at the same fractions of
            the run, rounded to whole epochs and never less than one: every 0.3 or 0.4 of it.
    """
    lr, weight_decay = TABLE_4[problem][optimizer]
    second_order = has_statistics(optimizer)
    whole, interval = _SECOND_ORDER_COURSE if second_order else _FIRST_ORDER_COURSE
    epochs = whole if epochs is None else epochs
    return Settings(
        optimizer=optimizer,
        lr=lr,
        damping=_DAMPING.get(optimizer),
        momentum=0.9,
        stat_decay=METHODS[optimizer].stat_decay,
        weight_decay=weight_decay,
        stat_interval=10 if second_order else None,
        inverse_interval=100 if second_order else None,
        warm_start=True if second_order else None,
        relative_damping=False if takes_graft(optimizer) else None,
        graft=None,
        schedule=f"step:{max(1, round(epochs * interval / whole))}",
        batch_size=128,
        epochs=epochs,
        seed=0,
    )
