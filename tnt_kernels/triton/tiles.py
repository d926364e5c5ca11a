"""Launch plans: which program of a launch computes which tile of which tensor.

One launch handles many tensors of unlike shapes. Each of its programs reads one row of a *tile
table*, which names a problem (one mode of one tensor) and the program's tile of it. The *problem
table* gives that mode's indices, sizes and strides, and a third table the addresses. The first two
depend on shapes and strides only: they are built once for a set of parameters and stay on the
device.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

# Indices within a mode are 32-bit in the kernels, because 64-bit divisions are slow there; products
# with a stride are 64-bit. The margin lets the last tile end beyond the largest index.
LARGEST_INDEX = 2**31 - 2**13

# A launch of fewer steps than this for each multiprocessor is merged into another.
MERGED_STEPS = 16

STEP = 32  # terms of a sum in one step

# Rows and columns of a large tile. Against 64 x 64 it halves the operands' bytes for each product,
# which hold TF32 at a third of its peak on an H100.
LARGE_BLOCK = 128

# Rows of tiles that programs walk together. At once 132 programs then read 8 + 17 panels, not
# 32 + 5, in a matrix of 32 rows of tiles.
GROUP = 8


def fields(count: int, start: int = 0, width: int = 1) -> tuple[tl.constexpr, ...]:
    """Numbers of columns of a table, for kernels to name: ``start``, ``start + width``, ..."""
    return tuple(tl.constexpr(start + n * width) for n in range(count))


# Numbers of an ``Axis`` in a problem table: its size first.
AXIS_FIELDS = 4

# The first columns of every tile table, int32: a row of the problem table, the tile's row and
# column of tiles. A kernel's own columns follow.
PROBLEM, TILE_ROW, TILE_COLUMN = fields(3)


class Axis(NamedTuple):
    """Some modes of a tensor as one index, which walks at most two dimensions of its memory.

    Index i is at (i % inner) * inner_stride + (i // inner) * outer_stride, in elements.
    """

    size: int
    inner: int
    inner_stride: int
    outer_stride: int


def axis(
    sizes: Sequence[int], strides: Sequence[int], modes: Sequence[int], alone: int | None = None
) -> Axis | None:
    """The index of some modes, the last of them fastest; ``alone`` merges with no other mode.

    None if the modes do not merge into two dimensions, or an index would not fit.
    """
    size = math.prod(sizes[mode] for mode in modes)
    groups: list[tuple[int, int, bool]] = []  # size, stride, whether it is alone; fastest first
    for mode in reversed(modes) if size else ():
        n, stride, is_alone = sizes[mode], strides[mode], mode == alone
        if n == 1 and not is_alone:
            continue
        if groups and not is_alone and not groups[-1][2]:
            inner, inner_stride, _ = groups[-1]
            if stride == inner * inner_stride:
                groups[-1] = inner * n, inner_stride, False
                continue
        groups.append((n, stride, is_alone))
    if len(groups) > 2 or size > LARGEST_INDEX:
        return None
    inner, inner_stride, _ = groups[0] if groups else (1, 1, False)
    return Axis(size, inner, inner_stride, groups[1][1] if len(groups) == 2 else 0)


def by_stride(strides: Sequence[int]) -> list[int]:
    """The modes from the slowest to the fastest."""
    return sorted(range(len(strides)), key=lambda mode: -strides[mode])


def dense_strides(
    sizes: Sequence[int], modes: Sequence[int], gap: int | None = None
) -> tuple[int, ...]:
    """Strides without gaps, ``modes`` from the slowest to the fastest.

    With ``gap`` the fastest mode starts anew after so many elements.
    """
    strides = [1] * len(sizes)
    step = 1
    for mode in reversed(modes):
        strides[mode] = step
        step = gap if gap is not None and mode == modes[-1] else step * sizes[mode]
    return tuple(strides)


class Unfolding(NamedTuple):
    """A tensor as a matrix: some modes are the index of its rows, the others of its columns."""

    rows: Axis
    columns: Axis

    @property
    def rows_are_dense(self) -> bool:
        """Whether neighbours in memory are in the same column (else in the same row)."""
        rows, columns = self
        return rows.inner_stride == 1 and (columns.inner_stride != 1 or columns.size == 1)


def unfolded(sizes: Sequence[int], mode: int, strides: Sequence[int]) -> Unfolding | None:
    """The unfolding of one mode, its columns in the order of their strides."""
    rows = axis(sizes, strides, [mode])
    columns = axis(sizes, strides, [other for other in by_stride(strides) if other != mode])
    return Unfolding(rows, columns) if rows and columns else None


class Groups(NamedTuple):
    """Dimensions merged as far as strides allow, the fastest first; strides for each tensor."""

    sizes: list[int]
    strides: list[tuple[int, ...]]


def merged(sizes: Sequence[int], *strides: Sequence[int]) -> Groups:
    """Merges dimensions that every one of the tensors can walk with one stride.

    Groups are sorted by the first tensor's strides; all tensors visit their elements in the same
    order.
    """
    dimensions = sorted(
        ((tuple(s[i] for s in strides), n) for i, n in reversed(list(enumerate(sizes))) if n != 1),
        key=lambda dimension: dimension[0][0],
    )
    groups = Groups([], [])
    for steps, n in dimensions:
        if groups.sizes and all(
            step == groups.sizes[-1] * last
            for step, last in zip(steps, groups.strides[-1], strict=True)
        ):
            groups.sizes[-1] *= n
        else:
            groups.sizes.append(n)
            groups.strides.append(steps)
    return groups


class Piece(NamedTuple):
    """A part of tensors of one shape, in three dimensions, the fastest first."""

    sizes: list[int]
    starts: list[int]  # in elements from each tensor's first
    strides: list[tuple[int, ...]]  # of each dimension, for each tensor


def pieces(sizes: Sequence[int], *strides: Sequence[int]) -> Iterator[Piece]:
    """Parts that together are all elements of tensors of one shape.

    One, unless more than three dimensions do not merge, which cuts the smallest to single indices,
    or there are more than LARGEST_INDEX elements, which cuts the largest.
    """
    if 0 in sizes:
        return
    groups = merged(sizes, *strides)
    missing = max(0, 3 - len(groups.sizes))
    dimensions = [*groups.sizes, *[1] * missing]
    steps = [*groups.strides, *[(0,) * len(strides)] * missing]
    by_size = sorted(range(len(dimensions)), key=lambda i: dimensions[i])
    kept, largest = sorted(by_size[-3:]), by_size[-1]
    lengths = [n if i in kept else 1 for i, n in enumerate(dimensions)]
    lengths[largest] = LARGEST_INDEX // (math.prod(lengths) // lengths[largest])
    ranges = [range(0, n, length) for n, length in zip(dimensions, lengths, strict=True)]
    for firsts in itertools.product(*ranges):
        counts = [min(w, n - i) for w, n, i in zip(lengths, dimensions, firsts, strict=True)]
        starts = [
            sum(i * step[tensor] for i, step in zip(firsts, steps, strict=True))
            for tensor in range(len(strides))
        ]
        yield Piece([counts[i] for i in kept], starts, [steps[i] for i in kept])


def waves(needs: Mapping[int, int], most: int) -> list[list[int]]:
    """Splits tensors, in the order given, into groups that use the same workspace in turn.

    ``needs`` are the tensors' bytes, by number; the workspace has ``most``, or the largest need.
    """
    groups: list[list[int]] = []
    most = max([most, *needs.values()])
    free = 0
    for number, need in needs.items():
        if not groups or need > free:
            groups.append([])
            free = most
        groups[-1].append(number)
        free -= need
    return groups


def merge_small(
    kinds: dict[Any, list[int]], work: Callable[[Any, int], int], programs: int
) -> None:
    """Merges a wide kind of too few steps into the narrow one, if there is one.

    Kinds are named tuples with the field ``vector``, the number of elements of a load.
    """
    for kind in [kind for kind in kinds if kind.vector > 1]:
        narrow = kind._replace(vector=1)
        if narrow in kinds and sum(work(kind, n) for n in kinds[kind]) < MERGED_STEPS * programs:
            kinds[narrow] = sorted(kinds[narrow] + kinds.pop(kind))


def warps_of(block: int) -> int:
    """Warps of a program: four for 64 x 64 sums, eight so that 128 x 128 do not spill."""
    return {LARGE_BLOCK: 8, 16: 2}.get(block, 4)


@triton.jit
def places(index, axis):
    """Where indices of an ``Axis`` are, in elements; ``axis`` is its place in a table."""
    inner = tl.load(axis + 1).to(tl.int32)
    within = (index % inner).to(tl.int64) * tl.load(axis + 2)
    return within + (index // inner).to(tl.int64) * tl.load(axis + 3)


def blocks(size: int, block: int) -> int:
    """How many blocks cover ``size``."""
    return -(-size // block)


def tile_order(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Row and column of each tile, so that programs that run at once read few panels."""
    return (
        (i, j)
        for first in range(0, rows, GROUP)
        for j in range(columns)
        for i in range(first, min(first + GROUP, rows))
    )


def lower_tiles(rows: int, block: int) -> Iterator[tuple[int, int]]:
    """Row and column of each tile of a symmetric matrix's lower triangle."""
    side = blocks(rows, block)
    return ((i, j) for i, j in tile_order(side, side) if j <= i)


def cut(length: int, most: int) -> list[tuple[int, int]]:
    """Splits ``length`` steps into even parts of at most ``most``: (first, last) of each."""
    parts = max(blocks(length, most), 1)
    ends = [length * part // parts for part in range(parts + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))
