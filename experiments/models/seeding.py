"""The same start for every optimizer and every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def seeded(builder: Callable[[], Model], seed: int) -> Model:
    """`builder()`, the same for the same seed; the caller's random state is untouched.

    Built on the CPU, whatever the default device, so that a run on a GPU starts from the same
    parameters.

    Args:
        builder: makes the model and draws its parameters, from the default generator alone:
            `seeded(lambda: vgg16(classes=10), 0)`, or just `seeded(resnet32, 0)`.
        seed: of PyTorch's default generator on the CPU.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return builder()
