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
from triton.language.target_info import cuda_capability_geq

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


def fields(count: int, start: int = 0) -> tuple[tl.constexpr, ...]:
    """Numbers of columns of a table, for kernels to name: ``start``, ``start`` + 1, ..."""
    return tuple(tl.constexpr(n) for n in range(start, start + count))


# The first columns of every tile table, int32: a row of the problem table, the tile's row and
# column of tiles. A kernel's own columns follow.
PROBLEM, TILE_ROW, TILE_COLUMN = fields(3)


class Unfolding(NamedTuple):
    """A mode's unfolding, (rows, columns), as it lies in memory.

    Entry (r, c) is, in elements from the tensor's first,
    r * row_stride + (c % inner) * inner_stride + (c // inner) * outer_stride.
    """

    rows: int
    columns: int
    row_stride: int
    inner: int
    inner_stride: int
    outer_stride: int

    @property
    def rows_are_dense(self) -> bool:
        """Whether neighbours in memory are in the same column (else in the same row)."""
        return self.row_stride == 1 and (self.inner_stride != 1 or self.columns == 1)

    def is_wide(self, vector: int) -> bool:
        """Whether all of it can be read ``vector`` elements at a time, given an aligned start."""
        row, inner = self.row_stride, self.inner_stride
        dense, other = (row, inner) if self.rows_are_dense else (inner, row)
        sizes = (self.rows, self.columns, other)
        return dense == 1 and self.inner == self.columns and all(n % vector == 0 for n in sizes)


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


def unfolded(
    sizes: Sequence[int], mode: int, *strides: Sequence[int]
) -> tuple[Unfolding, ...] | None:
    """The unfoldings of one mode of tensors of one shape, their columns in the same order.

    None if the other modes do not merge into two dimensions, or an index would not fit.
    """
    others = [n for i, n in enumerate(sizes) if i != mode]
    groups = merged(others, *([s for i, s in enumerate(row) if i != mode] for row in strides))
    columns = math.prod(others)
    if columns == 0:  # of an empty tensor, whose strides may not merge
        groups = Groups([], [])
    if len(groups.sizes) > 2 or max(columns, sizes[mode]) > LARGEST_INDEX:
        return None
    inner = groups.sizes[0] if groups.sizes else 1
    result = []
    for tensor, row in enumerate(strides):
        steps = [step[tensor] for step in groups.strides]
        inner_stride = steps[0] if steps else 1
        outer_stride = steps[1] if len(steps) == 2 else 0
        result.append(Unfolding(sizes[mode], columns, row[mode], inner, inner_stride, outer_stride))
    return tuple(result)


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


def enlarge(kinds: dict[Any, list[int]], tiles: Callable[[Any, int], int], programs: int) -> None:
    """Moves problems of wide float32 kinds to kinds of large tiles, where these fill the device.

    Kinds are named tuples with the fields ``block`` and ``vector``.
    ``tiles`` gives the number of programs of a problem with large tiles. They are used if there is
    at least one for each multiprocessor. At worst a second wave then has one program and takes
    twice the time, but large tiles are twice as fast (arithmetic, not measured on a GPU yet).
    """
    for kind in [k for k in kinds if k.vector > 1 and 2 * k.block == LARGE_BLOCK]:
        own = {n: tiles(kind, n) for n in kinds[kind]}
        if sum(own.values()) >= programs:
            kinds[kind._replace(block=LARGE_BLOCK)] = [n for n in own if own[n]]
            kinds[kind] = [n for n in own if not own[n]]
            if not kinds[kind]:
                del kinds[kind]


def warps_of(block: int) -> int:
    """Warps of a program: four for 64 x 64 sums, eight so that 128 x 128 do not spill."""
    return {LARGE_BLOCK: 8, 16: 2}.get(block, 4)


@triton.constexpr_function
def depth_of(step, precision, is_tight):
    """Terms of a sum that a kernel loads at once: a step, or half of one if registers are tight.

    Before sm_90 and from sm_120 on, matrix units take operands from registers only. A step of 32 in
    3xTF32 then needs more registers than there are, if tiles are large or loads are narrow.
    """
    reads_shared_memory = cuda_capability_geq(9, 0) and not cuda_capability_geq(12, 0)
    halved = precision == "tf32x3" and is_tight and not reads_shared_memory
    return step // 2 if halved else step


@triton.jit
def offsets(column, inner, inner_stride, outer_stride, VECTOR: tl.constexpr):
    """Offsets of an unfolding's columns (see ``Unfolding``); VECTOR > 1 if it is wide."""
    if VECTOR > 1:
        return column.to(tl.int64) * inner_stride
    within = (column % inner).to(tl.int64) * inner_stride
    return within + (column // inner).to(tl.int64) * outer_stride


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
