"""What is trained: a small convolutional classifier of scikit-learn's digits.

A batch is a function of a seed and of the step's number, so that a training can be repeated from
any step on.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from experiments.data.digits import digits_images

BATCH = 128
VALIDATION = 360
CHANNELS, HIDDEN, CLASSES = 8, 32, 10


class Classifier(nn.Sequential):
    """Logits (N, 10) of images (N, 1, 8, 8): two convolutions and two linear layers."""

    def __init__(self, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(
                nn.Conv2d(1, CHANNELS, 3, padding=1),
                nn.Tanh(),
                nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
                nn.Tanh(),
                nn.Flatten(),
                nn.Linear(16 * CHANNELS, HIDDEN),
                nn.Tanh(),
                nn.Linear(HIDDEN, CLASSES),
            )


@functools.cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels for training, and those for validation; the same split every time."""
    from sklearn.datasets import load_digits

    images = digits_images().view(-1, 1, 8, 8)
    labels = torch.from_numpy(load_digits().target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    rest, held = order[VALIDATION:], order[:VALIDATION]
    return images[rest], labels[rest], images[held], labels[held]


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Images and labels of one step."""
    images, labels, _, _ = data()
    rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
    chosen = torch.randperm(len(images), generator=rng)[:BATCH]
    return images[chosen], labels[chosen]
