"""The models of the experiments, one family a file, and `seeded`, which starts them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def seeded(builder: Callable[[], Model], seed: int) -> Model:
    """`builder()`, the same for the same seed; the global random state does not change.

    The model is built on the CPU, so a run on a GPU starts from the same parameters.

    Args:
        builder: makes the model; draws its parameters from the default generator only.
        seed: of PyTorch's default generator on the CPU.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return builder()
