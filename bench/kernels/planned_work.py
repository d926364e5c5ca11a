"""What the launchers' plans make the device do, counted tile by tile.

The plans are the real ones, made for CPU tensors and a GPU's number of multiprocessors. Counted are
steps (each a full tile's flops, whether or not its rows are there), bytes through the second-level
cache, and bytes of device memory if a wave's operands are each read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tnt_kernels.triton import chain, gram_ema, momentum
from tnt_kernels.triton.launch import Layout, block_of, contiguous

Views = Sequence[Sequence[int]]
Diagonal = Sequence[Sequence[bool]]

# Programs of one multiprocessor at a time: the least of the compile report's float32 classes for
# sm_90. tests/test_compile_report.py holds the two together.
RESIDENT = {
    "gram_kernel": 2,
    "sum_kernel": 2,
    "diagonal_kernel": 2,
    "momentum_kernel": 5,
    "product_kernel": 2,
}


@dataclass(frozen=True)
class LaunchWork:
    """One launch of a kernel.

    Attributes:
        kernel: its name.
        matrix: whether its flops are products of tiles.
        step_flops: of one step of a program, all rows and columns of a tile counted.
        steps: of every program, in order.
        useful: flops that the result needs.
        cache: bytes read and written, all of which pass the second-level cache.
        memory: bytes of device memory.
    """

    kernel: str
    matrix: bool
    step_flops: int
    steps: Tensor
    useful: int
    cache: int
    memory: int


def layouts_of(views: Views, dtype: torch.dtype = torch.float32) -> tuple[Layout, ...]:
    """Contiguous, aligned tensors of these shapes."""
    return tuple(contiguous(Layout(tuple(view), (), dtype, True)) for view in views)


def statistics(views: Views, diagonal: Diagonal) -> list[tuple[int, ...]]:
    """The shapes of the statistics, mode after mode."""
    return [
        (d,) if flat else (d, d)
        for view, kinds in zip(views, diagonal, strict=True)
        for d, flat in zip(view, kinds, strict=True)
    ]


def gram_launches(
    views: Views, diagonal: Diagonal, multiprocessors: int, cache: int
) -> list[LaunchWork]:
    """The launches of ``gram_ema_`` for float32 tensors, decay neither 0 nor 1.

    Args:
        views: the tensors' shapes.
        diagonal: for each of their modes, whether only its diagonal is kept.
        multiprocessors: of the device.
        cache: bytes of its second-level cache.
    """
    p = gram_ema.plan(
        layouts_of(views),
        tuple(flat for kinds in diagonal for flat in kinds),
        torch.device("cpu"),
        multiprocessors,
    )
    problems = p.problems.view(-1, 9)
    launches = []
    # Partial sums pass device memory only where they do not stay in the cache.
    partial_bytes = sum(count * state.itemsize for state, count in p.partials.items())
    partials_leave = partial_bytes > cache
    for kind, _, table in p.tiles:
        block, depth = block_of(kind.state), gram_ema.DEPTH
        size, state = kind.element.itemsize, kind.state.itemsize
        n, i, j, first, last, part = table.view(-1, 6).long().unbind(1)
        rows, columns = problems[n, 2], problems[n, 3]
        height = (rows - i * block).clamp(max=block)
        width = (rows - j * block).clamp(max=block)
        terms = torch.minimum(last * depth, columns) - first * depth
        split = part >= 0
        blended = int((_blended(i, j, height, width) * ~split).sum()) * state
        partial = int((height * width * split).sum()) * state
        # The lower triangle, the diagonal included.
        entries = torch.where(i == j, height * (height + 1) // 2, height * width)
        operands = _memory_bytes(
            [
                (torch.stack([n, panel, first]), terms * extent * size, problems[n, 0])
                for panel, extent in ((i, height), (j, width))
            ],
            {t: size * math.prod(views[t]) for t in problems[n, 0].unique().tolist()},
            multiprocessors * RESIDENT["gram_kernel"],
            cache,
        )
        launches.append(
            LaunchWork(
                "gram_kernel",
                True,
                2 * block * block * depth,
                last - first,
                int((2 * entries * terms).sum()),
                int((terms * (height + width)).sum()) * size + blended + partial,
                operands + blended + (partial if partials_leave else 0),
            )
        )
    for dtype, _, table in p.sums:
        block, state = block_of(dtype), dtype.itemsize
        n, i, j, _, count = table.view(-1, 5).long().unbind(1)
        height = (problems[n, 2] - i * block).clamp(max=block)
        width = (problems[n, 2] - j * block).clamp(max=block)
        read = int((count * height * width).sum()) * state
        blended = int(_blended(i, j, height, width).sum()) * state
        stays = blended + (read if partials_leave else 0)
        launches.append(
            LaunchWork("sum_kernel", False, block * block, count, 0, read + blended, stays)
        )
    for kind, _, table in p.diagonals:
        block = depth = block_of(kind.state)
        n, i = table.view(-1, 2).long().unbind(1)
        height = (problems[n, 2] - i * block).clamp(max=block)
        terms = problems[n, 3]
        moved = int((height * terms).sum()) * kind.element.itemsize
        moved += 2 * int(height.sum()) * kind.state.itemsize
        launches.append(
            LaunchWork(
                "diagonal_kernel",
                False,
                2 * block * depth,
                -(-terms // depth),
                int((2 * height * terms).sum()),
                moved,
                moved,
            )
        )
    return launches


def product_launches(
    views: Views, diagonal: Diagonal, multiprocessors: int, cache: int, *, update: bool
) -> list[LaunchWork]:
    """The launches of a chain of products of float32 tensors; with ``update`` into parameters."""
    tensors = layouts_of(views)
    factors = layouts_of(statistics(views, diagonal))
    p = chain.plan(tensors, tensors, factors, torch.device("cpu"), multiprocessors)
    problems = p.problems.view(-1, 16)
    scratch_leaves = p.scratch > cache
    launches = []
    for kind, _, table in p.launches:
        block, depth = block_of(kind.state), chain.depth_of(kind.vector)
        size, state, result = kind.element.itemsize, kind.state.itemsize, kind.result.itemsize
        n, row, column = table.view(-1, 3).long().unbind(1)
        rows, columns, flat = problems[n, 0], problems[n, 1], problems[n, 3] != 0
        height = (rows - row * block).clamp(max=block)
        width = (columns - column * block).clamp(max=block)
        of_factor = torch.where(flat, height, height * rows) * state
        of_source = torch.where(flat, height * width, rows * width) * size
        written = height * width * result * (2 if update and kind.last else 1)
        in_memory = (problems[n, 6] >= 0) | scratch_leaves
        out_of_memory = (problems[n, 11] >= 0) | scratch_leaves
        # Of a diagonal factor every tile has its own part of the source.
        own = torch.where(flat, row, -1)
        operands = _memory_bytes(
            [
                (torch.stack([2 * n, row, 0 * n]), of_factor, 2 * n),
                (torch.stack([2 * n + 1, column, own]), of_source * in_memory, 2 * n + 1),
            ],
            {
                **{2 * k: state * (r if f else r * r) for k, r, _, f in _sides(problems, n)},
                **{2 * k + 1: size * r * c for k, r, c, _ in _sides(problems, n)},
            },
            multiprocessors * RESIDENT["product_kernel"],
            cache,
        )
        launches.append(
            LaunchWork(
                "product_kernel",
                True,
                2 * block * block * depth,
                torch.where(flat, 1, -(-rows // depth)),
                int((torch.where(flat, 1, 2 * rows) * height * width).sum()),
                int((of_factor + of_source + written).sum()),
                operands + int((written * out_of_memory).sum()),
            )
        )
    return launches


def momentum_launches(views: Views, multiprocessors: int) -> list[LaunchWork]:
    """The launches that update float32 momenta by float32 gradients."""
    tensors = layouts_of(views)
    p = momentum.plan(tensors, tensors, torch.device("cpu"), multiprocessors)
    problems = p.problems.view(-1, 11)
    launches = []
    for kind, _, table in p.launches:
        span, block = momentum.SPAN, momentum.BLOCK
        n, i = table.view(-1, 2).long().unbind(1)
        count = (problems[n, 2] - i * span).clamp(max=span)
        total = int(count.sum())
        moved = total * (kind.element.itemsize + 2 * kind.state.itemsize)
        steps = torch.full_like(n, span // block)
        launches.append(
            LaunchWork("momentum_kernel", False, 2 * block, steps, 2 * total, moved, moved)
        )
    return launches


def _blended(i: Tensor, j: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Numbers of a statistic that a tile reads (the lower triangle) and writes (both)."""
    diagonal = height * (height + 1) // 2 + height * height
    return torch.where(i == j, diagonal, 3 * height * width)


def _memory_bytes(
    operands: Iterable[tuple[Tensor, Tensor, Tensor]],
    sizes: dict[int, int],
    resident: int,
    cache: int,
) -> int:
    """Bytes of operands from device memory.

    Once each where all of them stay in the cache; else every wave of resident programs reads each
    part that it needs once, and of no operand more than all.

    Args:
        operands: for each operand of a program: what part it reads (a key in three rows), its
            bytes, and the number of the tensor it is of.
        sizes: each tensor's bytes.
        resident: programs at a time.
        cache: bytes of the second-level cache.
    """
    keys, weights, owners = (torch.cat(parts, -1) for parts in zip(*operands, strict=True))
    programs = keys.shape[1] // 2
    if not programs:
        return 0
    wave = torch.arange(programs).repeat(2) // resident
    parts = torch.cat([wave[None], keys, owners[None]])
    distinct, inverse = torch.unique(parts, dim=1, return_inverse=True)
    bytes_of = torch.zeros(distinct.shape[1], dtype=torch.int64)
    bytes_of.scatter_reduce_(0, inverse, weights, "amax")
    touched = {int(o) for o in owners[weights > 0].unique()}
    once = sum(size for owner, size in sizes.items() if owner in touched)
    if once <= cache:
        return once
    pairs, group = torch.unique(distinct[[0, 4]], dim=1, return_inverse=True)
    sums = torch.zeros(pairs.shape[1], dtype=torch.int64).scatter_add_(0, group, bytes_of)
    most = torch.tensor([sizes[owner] for owner in pairs[1].tolist()])
    return max(once, int(torch.minimum(sums, most).sum()))


def _sides(problems: Tensor, numbers: Tensor) -> Iterable[tuple[int, int, int, bool]]:
    """Number, rows, columns and whether the factor is diagonal, of problems."""
    for n in numbers.unique().tolist():
        rows, columns, _, flat = problems[n, :4].tolist()
        yield n, rows, columns, bool(flat)
