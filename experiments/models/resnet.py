"""Residual networks for CIFAR-10; the paper's experiments use ResNet-32."""

from __future__ import annotations

import functools

from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, plus an option-A shortcut, which has no parameters.

    With stride 2 the shortcut takes every second row and column. If the block widens, the new
    channels of the shortcut are zeros, half of them before the old ones and half after.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, images: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, ceil(H / stride), ceil(W / stride))."""
        hidden = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))

    def shortcut(self, images: Tensor) -> Tensor:
        """The block's input in the shape of its output."""
        if self.stride > 1:
            images = images[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            before = self.new_channels // 2
            images = functional.pad(images, (0, 0, 0, 0, before, self.new_channels - before))
        return images


def resnet(depth: int, classes: int = 10) -> nn.Sequential:
    """A ResNet of He et al. 2016 (table 6): images (N, 3, H, W) to logits (N, classes).

    A first convolution, three stages of equally many blocks with 16, 32 and 64 channels, the
    average over all pixels, and a linear layer. Weights of convolutions and of the linear layer are
    drawn by `kaiming_normal_` (fan_in); the linear bias and the batch norms start as PyTorch has
    them.

    Args:
        depth: number of layers with weights, 6 n + 2 for n blocks a stage.
        classes: number of logits.

    Raises:
        ValueError: no number of blocks has this depth.
    """
    blocks, rest = divmod(depth - 2, 6)
    if blocks < 1 or rest:
        raise ValueError(f"depth must be 6 n + 2 for an n from 1, got {depth}")
    channels = 16
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    ]
    for width in (16, 32, 64):
        for index in range(blocks):
            layers.append(BasicBlock(channels, width, 2 if width > 16 and index == 0 else 1))
            channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return model


resnet8 = functools.partial(resnet, 8)
resnet32 = functools.partial(resnet, 32)
