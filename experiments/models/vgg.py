"""The convolutional network of the paper's CIFAR-100 experiments."""

from __future__ import annotations

import math

from torch import nn

# The channels of the 13 convolutions; after each stage the images are halved, 32x32 to 1x1.
_STAGES = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)


def vgg16(classes: int = 100) -> nn.Sequential:
    """VGG16 of Simonyan & Zisserman 2015 (model D): images (N, 3, 32, 32) to logits (N, classes).

    With batch norm after each convolution, and no dropout. Convolution weights are drawn from
    N(0, 2 / (k^2 out)) for a k x k kernel, convolution biases are 0; the linear layers and the
    batch norms start as PyTorch has them. The convolution biases never learn, since batch norm
    cancels them; the paper has them.
    """
    layers: list[nn.Module] = []
    channels = 3
    for stage in _STAGES:
        for width in stage:
            layers += [_convolution(channels, width), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    layers += [nn.Linear(channels, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
    nn.init.normal_(convolution.weight, std=math.sqrt(2 / (3 * 3 * outputs)))
    assert convolution.bias is not None  # for mypy
    nn.init.zeros_(convolution.bias)
    return convolution
