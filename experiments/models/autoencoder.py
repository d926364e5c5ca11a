"""The autoencoders of the experiments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

# Hinton & Salakhutdinov 2006, as in the paper's section 6.1.
MNIST_WIDTHS = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
FACES_WIDTHS = (625, 2000, 1000, 500, 30, 500, 1000, 2000, 625)
# MNIST's shape scaled to 8x8 images: a code of an eighth of the pixels is too small to copy them.
DIGITS_WIDTHS = (64, 128, 64, 32, 8, 32, 64, 128, 64)


def autoencoder(widths: Sequence[int]) -> nn.Sequential:
    """A fully connected autoencoder with PyTorch's default initialisation.

    ReLU after every layer but two: the middle one, whose output is the code, and the last one,
    whose output is the logits for `reconstruction_loss`, or the pixels for `squared_error`.

    Args:
        widths: an odd number of sizes, at least 3, from the input through the code, in the middle,
            to the output.
    """
    linear_layers = (len(widths) // 2 - 1, len(widths) - 2)
    layers: list[nn.Module] = []
    for index in range(len(widths) - 1):
        layers.append(nn.Linear(widths[index], widths[index + 1]))
        if index not in linear_layers:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def reconstruction_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Binary cross entropy with logits, summed over the pixels, averaged over the batch."""
    total = functional.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    return total / images.shape[0]


def squared_error(outputs: Tensor, images: Tensor) -> Tensor:
    """Half the squared error, summed over the pixels, averaged over the batch."""
    return functional.mse_loss(outputs, images, reduction="sum") / (2 * images.shape[0])


def loss_floor(images: Tensor) -> float:
    """The entropy of the pixels as probabilities, the lower bound of `reconstruction_loss`."""
    return -(torch.xlogy(images, images) + torch.xlogy(1 - images, 1 - images)).sum().item() / len(
        images
    )
