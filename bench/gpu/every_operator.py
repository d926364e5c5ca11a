"""Calls every operator once, on small tensors as unlike as can be: what the sanitizer watches.

``python -m bench.gpu.every_operator [DEVICE]``. Everything is made on the CPU and copied, so that
of the kernels that run nearly all are ours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels import (
    damped_inverse,
    grafted_directions_,
    gram_ema_,
    inverse_root,
    mode_products,
    preconditioned_step_,
)

# Beside multiples of every tile: vectors, one row, a convolution, four modes, a long row that is
# cut into partial sums, and sizes that the widest loads can read.
SHAPES = ((7,), (64,), (1, 9), (65, 33), (64, 128), (16, 3, 9), (5, 2, 3, 7), (9, 20000), (130, 70))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def call_all(device: torch.device) -> None:
    """Calls every operator on every dtype, full and diagonal modes, and one failing inverse.

    Raises:
        ValueError: something is not finite, or the failure was not noticed.
    """
    rng = torch.Generator().manual_seed(0)

    def draw(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(tuple(shape), generator=rng).to(dtype)

    def statistic(d: int, diagonal: bool, dtype: torch.dtype) -> Tensor:
        if diagonal:
            return torch.rand(d, generator=rng).add_(0.5).to(dtype)
        x = draw((d, 2), torch.float32)
        return (x @ x.mT / d + torch.eye(d)).to(dtype)

    for dtype in DTYPES:
        state = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = [draw(shape, dtype).to(device) for shape in SHAPES]
        grads = [draw(shape, dtype).to(device) for shape in SHAPES]
        momenta = [draw(shape, state).to(device) for shape in SHAPES]
        # The longest modes are diagonal: what is slow without a sanitizer never ends under one.
        stats = [
            [statistic(d, (t + i) % 3 == 2 or d > 200, state).to(device) for i, d in enumerate(s)]
            for t, s in enumerate(SHAPES)
        ]
        gram_ema_(stats, tensors, 0.9)
        turned = tensors[3].mT  # read where it lies
        gram_ema_([[stat.clone() for stat in reversed(stats[3])]], [turned], 0.9)
        mode_products([turned], [list(reversed(stats[3]))])
        broken = [statistic(33, False, state).neg().to(device)]
        factors, info = damped_inverse([*stats, broken], 0.1)
        roots, root_info = inverse_root([*stats, broken], 0.1, 4)
        mode_products(tensors, factors[:-1])
        preconditioned_step_(tensors, momenta, grads, factors[:-1], 0.01, 0.9, 0.01)
        second_moments = [torch.ones_like(m) for m in momenta]
        counts = torch.ones(len(SHAPES), 2, dtype=torch.float64, device=device)
        lists = momenta, grads, factors[:-1], 0.9
        plain, own_scales = grafted_directions_(*lists)
        directions, scales = grafted_directions_(*lists, second_moments, counts)
        expected = [0] * len(SHAPES) + [1]
        for name, codes in (("damped_inverse", info), ("inverse_root", root_info)):
            if codes.tolist() != expected:
                raise ValueError(f"info of {name} must be {expected}, got {codes.tolist()}")
        grafted = plain, directions, second_moments, [own_scales, scales]
        for row in (tensors, momenta, *grafted, *factors[:-1], *roots[:-1]):
            for tensor in row:
                if not bool(tensor.cpu().isfinite().all()):
                    raise ValueError(f"{dtype}, {tuple(tensor.shape)}: not finite")


if __name__ == "__main__":
    call_all(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
    print("every operator was called")
