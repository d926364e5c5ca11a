"""Optimizers of other projects, timed where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

Make = Callable[[Sequence[nn.Parameter], float, int], torch.optim.Optimizer]


def distributed_shampoo() -> Make | None:
    """facebookresearch's Distributed Shampoo, in one process; None where it is not installed.

    The function returned takes parameters, learning rate, and how many steps lie between two
    refreshes of the inverse roots. Statistics are refreshed at every step, as its authors have it.
    """
    try:
        module = importlib.import_module("distributed_shampoo.distributed_shampoo")
    except ImportError:
        return None

    def make(params: Sequence[nn.Parameter], lr: float, interval: int) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = module.DistributedShampoo(
            params,
            lr=lr,
            betas=(0.9, 0.9),
            epsilon=1e-3,
            max_preconditioner_dim=8192,
            precondition_frequency=interval,
        )
        return optimizer

    return make
