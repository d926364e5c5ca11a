"""What this GPU can do at most, measured in the run that is held against it: copy and products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bench.gpu.clocks import Clock, Run
from bench.kernels.timing import summary

ROUNDS = 10
COPY_BYTES = 1 << 30  # beyond every cache
SIDE = 8192
# What PyTorch's switch says -> the ceiling of products under it.
CEILING_OF = {"highest": "float32", "high": "tf32"}


@contextmanager
def precision(setting: str) -> Iterator[None]:
    """PyTorch's float32 matmul precision, set for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_ceilings(
    clock: Clock, device: torch.device, side: int = SIDE, copied: int = COPY_BYTES
) -> dict[str, float]:
    """Bytes a second of a copy, read and written both counted; flops a second of large products.

    The best of ten, on random numbers.
    """
    source = torch.randn(copied // 4, device=device)
    target = torch.empty_like(source)
    rates = {"copy": 2 * source.nbytes / _least(clock, lambda: target.copy_(source))}
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    c = torch.empty_like(a)
    for setting, name in CEILING_OF.items():
        with precision(setting):
            rates[name] = 2 * side**3 / _least(clock, lambda: torch.mm(a, b, out=c))
    a, b, c = (x.bfloat16() for x in (a, b, c))
    rates["bf16"] = 2 * side**3 / _least(clock, lambda: torch.mm(a, b, out=c))
    return rates


def _least(clock: Clock, run: Run) -> float:
    for _ in range(3):
        clock.seconds(run)
    return float(summary([clock.seconds(run) for _ in range(ROUNDS)])["least"])
