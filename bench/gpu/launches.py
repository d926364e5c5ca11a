"""How many kernels and copies one run launches, by PyTorch's profiler.

Counted after everything has been timed: the profiler's hooks stay and slow launches down.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def count_launches(run: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """Of the second of two runs; None where the profiler sees nothing."""
    if device.type != "cuda":
        return None
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    names = [e.name for e in profiler.events() or () if e.device_type.name == "CUDA"]
    copied = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    if not names:
        return None
    return {"kernels": len(names) - copied, "copies": copied}
