"""The clock of everything that is timed here."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
