"""What the inverses make the device do, counted from plans and sizes.

``inverse_root``'s launches are those of its real plan, for a number of iterations that is assumed.
``damped_inverse`` is planned in C++; counted here are one block for each matrix of up to 128 and
PyTorch's Cholesky routines for the larger ones, whose share of a GPU's rate is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.kernels.planned_work import Diagonal, LaunchWork, Views, layouts_of, statistics
from tnt_kernels.triton import inverse_root, newton
from tnt_kernels.triton.tiles import blocks

# Programs of one multiprocessor at a time: of the float32 classes of compile_report.md for sm_90.
RESIDENT = {
    "newton.product_kernel": 2,
    "newton, other kernels": 5,
    "invert_kernel": 4,
    "damped_inverse, other kernels": 8,
    "PyTorch's Cholesky": 1,
}

# Assumed. Damped statistics of condition 1e4 take about so many iterations in float32.
ITERATIONS = 20
# Assumed: the part of the float32 rate that a library's factorisation and solves reach.
LIBRARY_SHARE = 0.5
# Factor, and two triangular solves of the identity: flops over n^3.
LIBRARY_FLOPS = 1 / 3 + 2
LARGEST_IN_BLOCK = 128  # csrc/cuda/damped_inverse.cuh, kLargestInBlock
LARGEST_BATCHED = 1024  # csrc/cuda/factor_plan.h, kLargestBatched
PANEL = 8  # columns that invert_kernel takes at a time


def full_sizes(views: Views, diagonal: Diagonal) -> list[int]:
    """The sizes of all full modes."""
    return [
        d
        for view, kinds in zip(views, diagonal, strict=True)
        for d, flat in zip(view, kinds, strict=True)
        if not flat
    ]


def roots_of(views: Views) -> list[int]:
    """Shampoo's: twice the number of modes."""
    return [2 * len(view) for view in views]


def products_an_iteration(root: int) -> int:
    """How many matrix products an iteration of the coupled Newton iteration makes."""
    return sum(len(level) for level in inverse_root.levels(root))


def root_flops(views: Views, diagonal: Diagonal) -> int:
    """One triangle of every product of every iteration: n^3 each."""
    return ITERATIONS * sum(
        products_an_iteration(root) * d**3
        for view, kinds, root in zip(views, diagonal, roots_of(views), strict=True)
        for d, flat in zip(view, kinds, strict=True)
        if not flat
    )


def inverse_root_launches(
    views: Views, diagonal: Diagonal, multiprocessors: int, cache: int
) -> list[LaunchWork]:
    """The launches of ``inverse_root`` for float32 statistics, ``ITERATIONS`` of them."""
    p = inverse_root.plan(
        layouts_of(statistics(views, diagonal)),
        tuple(len(view) for view in views),
        tuple(roots_of(views)),
        torch.device("cpu"),
        multiprocessors,
    )
    launches: list[LaunchWork] = []
    for wave in p.waves:
        matrices = wave.matrices.view(wave.modes, -1)
        size = wave.state.itemsize
        leaves = wave.scratch * size > cache

        strips = _moving(wave.strips.rows.view(-1, 2), matrices, size)
        tiles = _moving(wave.tiles.rows.view(-1, 4), matrices, 2 * size)
        few = LaunchWork("newton, other kernels", False, 1, torch.ones(wave.modes), 0, 0, 0)
        launches += [strips, tiles, few]
        once = [_level(level.rows, matrices, wave.block, size, leaves) for level in wave.products]
        launches += ITERATIONS * [*once, few]
        launches += [tiles, few, tiles]
    return launches


def _moving(programs: Tensor, matrices: Tensor, size: int) -> LaunchWork:
    """A launch that takes ``size`` bytes for each entry of its tiles from one place to another."""
    n = programs[:, 0].long()
    rows = matrices[n, newton.ROWS.value].clamp(max=inverse_root.TILE)
    moved = int((rows * rows).sum()) * size
    return LaunchWork("newton, other kernels", False, 1, torch.ones_like(n), 0, moved, moved)


def _level(table: Tensor, matrices: Tensor, block: int, size: int, leaves: bool) -> LaunchWork:
    rows = table.view(-1, 6).long()
    n, i, j = rows[:, 0], rows[:, 1], rows[:, 2]
    d = matrices[n, newton.ROWS.value]
    height, width = ((d - at * block).clamp(max=block) for at in (i, j))
    entries = torch.where(i == j, height * (height + 1) // 2, height * width)
    read = (height + width) * d * size
    written = 2 * height * width * size
    # Every matrix of the level once, where the scratch memory is too large for the cache.
    distinct = torch.unique(rows[:, [0, 3, 4]], dim=0)
    once = 2 * int((matrices[distinct[:, 0], newton.ROWS.value] ** 2).sum()) * size
    return LaunchWork(
        "newton.product_kernel",
        True,
        2 * block * block * inverse_root.DEPTH,
        -(-d // inverse_root.DEPTH),
        int((2 * entries * d).sum()),
        int((read + written).sum()),
        (once + int(written.sum())) if leaves else 0,
    )


def damped_inverse_launches(
    views: Views, diagonal: Diagonal, multiprocessors: int
) -> list[LaunchWork]:
    """The launches of ``damped_inverse`` for float32 statistics."""
    sizes = full_sizes(views, diagonal)
    small = torch.tensor([d for d in sizes if d <= LARGEST_IN_BLOCK])
    vectors = sum(math.prod(shape) for shape in statistics(views, diagonal) if len(shape) == 1)
    other = "damped_inverse, other kernels"
    rescale = LaunchWork(other, False, 1, torch.ones(len(views)), 0, 4 * sum(sizes), 4 * sum(sizes))
    launches = [LaunchWork(other, False, 1, torch.ones(1), 0, 0, 0), rescale]
    if len(small):
        steps = -(-small // PANEL)
        flops, moved = int((small**3).sum()), 4 * int((small**2).sum()) * 2
        launches.append(
            LaunchWork(
                "invert_kernel", False, -(-flops // int(steps.sum())), steps, flops, moved, moved
            )
        )
    launches += [_library(batch, multiprocessors) for batch in _batches(sizes)]
    moved = 4 * 2 * (int((small**2).sum()) + 2 * vectors)
    pieces = torch.ones(max(blocks(moved, 8 * 4096), 1))
    judge = LaunchWork(other, False, 1, torch.ones(len(views)), 0, 0, 0)
    return [*launches, judge, LaunchWork(other, False, 1, pieces, 0, moved, moved)]


def _batches(sizes: list[int]) -> Iterator[list[int]]:
    """Matrices that are inverted in one call: of about one size up to 1024, larger ones alone."""
    batch: list[int] = []
    for d in sorted((d for d in sizes if d > LARGEST_IN_BLOCK), reverse=True):
        if batch and (batch[0] > LARGEST_BATCHED or batch[0] - d > max(batch[0] // 16, 16)):
            yield batch
            batch = []
        batch.append(d)
    if batch:
        yield batch


def _library(batch: list[int], multiprocessors: int) -> LaunchWork:
    size = batch[0]
    flops = LIBRARY_FLOPS * size**3 * len(batch)
    steps = torch.full((multiprocessors,), blocks(size, PANEL))
    # Read, padded, factored, solved, mirrored, copied: every pass over the batch.
    moved = 4 * 12 * size * size * len(batch)
    return LaunchWork(
        "PyTorch's Cholesky",
        False,
        math.ceil(flops / LIBRARY_SHARE / int(steps.sum())),
        steps,
        sum(d**3 for d in batch),
        moved,
        moved,
    )
