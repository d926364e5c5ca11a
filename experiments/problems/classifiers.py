"""Image classifiers on CIFAR: the paper's convolutional networks and two small networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import data_folder
from experiments.data.cifar import Cifar, crop_and_flip, read_cifar
from experiments.models.resnet import resnet8, resnet32
from experiments.models.vgg import vgg16
from experiments.models.vision_transformer import VisionTransformer
from experiments.problems.problem import Problem

# Images of the validation set at a time; the errors do not depend on it.
_EVALUATED_AT_ONCE = 500


@dataclass(frozen=True)
class Network:
    """A network with its data.

    Attributes:
        label: of both, in plots.
        classes: 10 for CIFAR-10, 100 for CIFAR-100.
        build: makes the model for a number of classes.
        mean: of the channels of pixels in [0, 1], as in the paper's code.
        std: likewise. For CIFAR-10 it is the mean of each image's deviation, not the deviation of
            all pixels (0.2470, 0.2435, 0.2616).
        autocast: forward and backward in bfloat16 where PyTorch's autocast says so; weights,
            gradients and optimizers stay float32. Half the time on a processor with AMX.
    """

    label: str
    classes: int
    build: Callable[[int], nn.Module]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    autocast: bool = False


_CIFAR10 = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
NETWORKS = {
    "resnet8": Network("ResNet-8 on CIFAR-10", 10, resnet8, *_CIFAR10),
    "vit": Network("Vision transformer on CIFAR-10", 10, VisionTransformer, *_CIFAR10),
    "resnet32": Network("ResNet-32 on CIFAR-10", 10, resnet32, *_CIFAR10, autocast=True),
    "vgg16": Network(
        *("VGG16 on CIFAR-100", 100, vgg16),
        *((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
        autocast=True,
    ),
    # Not the paper's: for those who have CIFAR-10 only.
    "vgg16-cifar10": Network("VGG16 on CIFAR-10", 10, vgg16, *_CIFAR10, autocast=True),
}


class Classifier(Problem):
    """Images to classify, randomly cropped and mirrored in training; the test set validates.

    The images stay bytes, a quarter of the memory. Each batch is normalised after the augmentation,
    whose border is black before the normalisation.

    Args:
        name: one of `NETWORKS`.
        data: images of 32x32 pixels, on the CPU.
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

    def first(self, examples: int | None = None, validation: int | None = None) -> Classifier:
        """The problem with this many of its images, evenly over the classes.

        They are the first images of every class, in the order of the whole set.

        Args:
            examples: number of training images; None for all.
            validation: number of validation images; None for all.

        Raises:
            ValueError: there are fewer images.
        """
        data = self.data
        train = _first_of_each_class(data.train_labels, data.classes, "examples", examples)
        test = _first_of_each_class(data.test_labels, data.classes, "validation", validation)
        images = data.train_images[train], data.train_labels[train]
        return Classifier(
            self.name,
            Cifar(*images, data.test_images[test], data.test_labels[test], data.classes),
        )

    def build(self) -> nn.Module:
        """The network as the paper starts it; in channels_last for images on the CPU."""
        model = self._network.build(self.data.classes)
        if self.data.train_images.device.type == "cpu":
            # Faster forward and backward on a CPU, equal up to rounding.
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """Cropped, mirrored and normalised images, and their classes."""
        images = crop_and_flip(self.data.train_images[indices], augment)
        return self.normalised(images), self.data.train_labels[indices]

    def normalised(self, images: Tensor) -> Tensor:
        """(images / 255 - mean) / std for each channel, float32; images: uint8 (N, C, H, W)."""
        pixels = images.to(torch.float32).div_(255.0)
        return pixels.sub_(self._mean[:, None, None]).div_(self._std[:, None, None])

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Logits in float32."""
        enabled = self._network.autocast
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=enabled):
            return super().outputs(model, inputs).float()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, averaged over the batch."""
        return functional.cross_entropy(outputs, targets)

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """The validation set's error, a fraction of its images, and its mean loss."""
        images, labels = self.data.test_images, self.data.test_labels
        wrong = torch.zeros((), dtype=torch.int64, device=labels.device)
        loss = torch.zeros((), dtype=torch.float64, device=labels.device)
        for some, classes in zip(
            images.split(_EVALUATED_AT_ONCE), labels.split(_EVALUATED_AT_ONCE), strict=True
        ):
            outputs = self.outputs(model, self.normalised(some))
            wrong += (outputs.argmax(1) != classes).sum()
            loss += functional.cross_entropy(outputs, classes, reduction="sum")
        count = labels.shape[0]
        return {"validation_error": wrong.item() / count, "validation_loss": loss.item() / count}

    def description(self) -> dict[str, Any]:
        """Data and model."""
        return {
            "problem": self.name,
            "source": f"CIFAR-{self.data.classes}",
            "examples": self.examples,
            "validation_examples": self.data.test_labels.shape[0],
            **({"precision": "bfloat16 autocast"} if self._network.autocast else {}),
            "augmentation": "cropped after padding with 4 black pixels, flipped",
        }


def load_classifier(
    name: str,
    data: Path | None = None,
    examples: int | None = None,
    validation: int | None = None,
) -> Classifier:
    """A network's problem on its data set.

    Args:
        name: one of `NETWORKS`.
        data: `--data`.
        examples: number of training images; None for all.
        validation: number of validation images; None for all.

    Raises:
        ValueError, OSError: the data cannot be read, or are too few.
    """
    classes = NETWORKS[name].classes
    problem = Classifier(name, read_cifar(data_folder(f"cifar{classes}", data), classes))
    return problem.first(examples, validation)


def _first_of_each_class(
    labels: Tensor, classes: int, name: str, count: int | None
) -> Tensor | slice:
    """Indices of `count` images, in their order; `name` is the argument's, for the error."""
    if count is None:
        return slice(None)
    if not 1 <= count <= len(labels):
        raise ValueError(f"{name} must be from 1 to {len(labels)}, got {count}")
    earlier = functional.one_hot(labels, classes).cumsum(0)
    place_in_class = earlier.gather(1, labels[:, None])[:, 0]
    return place_in_class.argsort(stable=True)[:count].sort().values
