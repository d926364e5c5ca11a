"""The mode products G x_1 A_1 ... x_k A_k of many tensors, and their epilogue.

One launch multiplies one mode of every tensor: the j-th launch from the end computes every tensor's
j-th product from its end, so the last launch finishes them all. Intermediate products are
contiguous in a workspace. Modes are walked by strides; nothing is permuted.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton.launch import (
    ELEMENTS,
    VECTOR_BYTES,
    Layout,
    addresses_of,
    block_of,
    contiguous,
    keep_for_graph,
    launch,
    planned,
    precision,
    readable,
    state_dtype,
    table,
    tile_tables,
)
from tnt_kernels.triton.tiles import (
    LARGEST_INDEX,
    MERGED_STEPS,
    PROBLEM,
    TILE_COLUMN,
    TILE_ROW,
    Unfolding,
    blocks,
    fields,
    merge_small,
    offsets,
    unfolded,
    waves,
)

# The problem table, int64: sizes, then where the product reads and where it writes. A place is an
# index into the addresses (SCRATCH: the workspace), an offset in bytes, and strides.
ROWS, COLUMNS, INNER, IS_DIAGONAL, ROWS_ARE_DENSE, FACTOR = fields(6)
READ, WRITTEN = tl.constexpr(6), tl.constexpr(11)  # each is such a place:
ADDRESS, OFFSET, ROW_STRIDE, INNER_STRIDE, OUTER_STRIDE = fields(5)
PROBLEM_FIELDS = tl.constexpr(16)
TILE_FIELDS = tl.constexpr(3)

WARPS = 4
SCRATCH = -1
# Tensors share a wave as long as their workspace stays below this, or below the need of the largest
# tensor if that is more. It is half of an H100's second-level cache.
SCRATCH_BYTES = 24 << 20


def depth_of(vector: int) -> int:
    """Terms of a sum in one step: at 32, the addresses of single elements would spill."""
    return 32 if vector > 1 else 16


@triton.jit
def _address(addresses, scratch, place):
    """The address of a place of a problem."""
    index = tl.load(place + ADDRESS)
    listed = tl.load(addresses + tl.maximum(index, 0))
    return tl.where(index < 0, scratch.to(tl.int64), listed) + tl.load(place + OFFSET)


@triton.jit
def _epilogue(
    value,
    row,
    column,
    problem,
    addresses,
    scratch,
    lr,
    weight_decay,
    RESULT: tl.constexpr,
    UPDATE: tl.constexpr,
):
    """Stores a tile P of the product, or updates W <- W - lr (P + weight_decay W) with it.

    It loads its own operands, which would otherwise hold registers during the product.
    """
    rows, columns = tl.load(problem + ROWS).to(tl.int32), tl.load(problem + COLUMNS).to(tl.int32)
    inner = tl.load(problem + INNER).to(tl.int32)
    place = problem + WRITTEN
    result = _address(addresses, scratch, place).to(tl.pointer_type(RESULT))
    row_stride = tl.load(place + ROW_STRIDE)
    inner_stride, outer_stride = tl.load(place + INNER_STRIDE), tl.load(place + OUTER_STRIDE)
    at = result + row.to(tl.int64) * row_stride
    at = at + offsets(column, inner, inner_stride, outer_stride, 1)
    inside = (row < rows) & (column < columns)
    if UPDATE:
        alpha, gamma = tl.load(lr).to(value.dtype), tl.load(weight_decay).to(value.dtype)
        weight = tl.load(at, mask=inside, other=0).to(value.dtype)
        value = weight - alpha * (value + gamma * weight)
    tl.store(at, value.to(RESULT), mask=inside)


@triton.jit
def product_kernel(
    tiles,
    problems,
    addresses,
    scratch,
    lr,
    weight_decay,
    ELEMENT: tl.constexpr,
    STATE: tl.constexpr,
    RESULT: tl.constexpr,
    UPDATE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of the product of one mode of a tensor with its factor.

    Grid: one program for each tile, BLOCK x BLOCK. A program reads BLOCK rows of the factor (of a
    diagonal one, BLOCK entries) and BLOCK columns of the unfolding (of a diagonal one, the tile),
    and writes the tile; with UPDATE it reads the tile too. Bound: matrix units from about 128 rows
    on, memory below that and for diagonal factors.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    row = tl.load(tile + TILE_ROW) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + TILE_COLUMN) * BLOCK + tl.arange(0, BLOCK)
    rows, columns = tl.load(problem + ROWS).to(tl.int32), tl.load(problem + COLUMNS).to(tl.int32)
    inner = tl.load(problem + INNER).to(tl.int32)
    is_diagonal = tl.load(problem + IS_DIAGONAL) != 0
    rows_are_dense = tl.load(problem + ROWS_ARE_DENSE) != 0
    factor = tl.load(addresses + tl.load(problem + FACTOR)).to(tl.pointer_type(STATE))
    place = problem + READ
    source = _address(addresses, scratch, place).to(tl.pointer_type(ELEMENT))
    row_stride = tl.load(place + ROW_STRIDE)
    inner_stride, outer_stride = tl.load(place + INNER_STRIDE), tl.load(place + OUTER_STRIDE)

    if VECTOR > 1:
        source, factor = tl.multiple_of(source, 16), tl.multiple_of(factor, 16)
        row_stride = tl.multiple_of(row_stride, VECTOR)
        inner_stride = tl.multiple_of(inner_stride, VECTOR)
        rows, columns = tl.multiple_of(rows, VECTOR), tl.multiple_of(columns, VECTOR)
    tables = (problem, addresses, scratch, lr, weight_decay)
    if rows_are_dense:
        # The tile's transpose, (columns, rows): the last dimension is contiguous in memory.
        inside = (column < columns)[:, None] & (row < rows)[None, :]
        at_column = source + offsets(column, inner, inner_stride, outer_stride, VECTOR)
        if is_diagonal:
            scale = tl.load(factor + row, mask=row < rows, other=0)
            whole = tl.load(at_column[:, None] + row[None, :], mask=inside, other=0)
            total = whole.to(STATE) * scale[None, :]
        else:
            total = tl.zeros((BLOCK, BLOCK), STATE)
            for start in range(0, rows, DEPTH):
                term = start + tl.arange(0, DEPTH)
                x = tl.load(
                    at_column[:, None] + term[None, :],
                    mask=(column < columns)[:, None] & (term < rows)[None, :],
                    other=0,
                )
                a = tl.load(
                    factor + term.to(tl.int64)[:, None] * rows + row[None, :],
                    mask=(term < rows)[:, None] & (row < rows)[None, :],
                    other=0,
                )
                total = tl.dot(x.to(STATE), a, total, input_precision=PRECISION, out_dtype=STATE)
        _epilogue(total, row[None, :], column[:, None], *tables, RESULT, UPDATE)
    else:
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        if VECTOR > 1:
            offset = column.to(tl.int64)
        else:
            offset = offsets(column, inner, inner_stride, outer_stride, 1)
        if is_diagonal:
            scale = tl.load(factor + row, mask=row < rows, other=0)
            at_row = source + row.to(tl.int64) * row_stride
            whole = tl.load(at_row[:, None] + offset[None, :], mask=inside, other=0)
            total = whole.to(STATE) * scale[:, None]
        else:
            total = tl.zeros((BLOCK, BLOCK), STATE)
            for start in range(0, rows, DEPTH):
                term = start + tl.arange(0, DEPTH)
                a = tl.load(
                    factor + row.to(tl.int64)[:, None] * rows + term[None, :],
                    mask=(row < rows)[:, None] & (term < rows)[None, :],
                    other=0,
                )
                x = tl.load(
                    (source + term.to(tl.int64) * row_stride)[:, None] + offset[None, :],
                    mask=(term < rows)[:, None] & (column < columns)[None, :],
                    other=0,
                )
                total = tl.dot(a, x.to(STATE), total, input_precision=PRECISION, out_dtype=STATE)
        _epilogue(total, row[:, None], column[None, :], *tables, RESULT, UPDATE)


class Kind(NamedTuple):
    """The products of one launch: their wave and step, dtypes, and elements of a load."""

    wave: int
    step: int
    last: bool
    element: torch.dtype
    result: torch.dtype
    vector: int

    @property
    def state(self) -> torch.dtype:
        """The factors' dtype."""
        return state_dtype(self.element)


@dataclass
class Plan:
    """The launches, in order, that multiply tensors of given layouts."""

    problems: Tensor
    launches: list[tuple[Kind, int, Tensor]]
    scratch: int  # bytes
    copied: frozenset[int]  # tensors to copy first: their modes or their results' do not merge


def plan(
    tensors: tuple[Layout, ...],
    results: tuple[Layout, ...],
    factors: tuple[Layout, ...],
    device: torch.device,
    programs: int,
) -> Plan:
    """Plans the products; ``factors`` flat, contiguous."""
    first_factors = list(itertools.accumulate((len(t.shape) for t in tensors), initial=0))
    problems: list[tuple[int, ...]] = []
    kinds: dict[Kind, list[int]] = defaultdict(list)
    copied: set[int] = set()
    scratch = 0
    needs = {t: _scratch_of(layout) for t, layout in enumerate(tensors) if 0 not in layout.shape}
    for wave, members in enumerate(waves(needs, SCRATCH_BYTES)):
        most = max(len(tensors[t].shape) for t in members)
        free = 0
        for t in members:
            source, result = tensors[t], results[t]
            unfoldings = _unfoldings(source, result)
            if unfoldings is None:
                copied.add(t)
                source, result = contiguous(source), contiguous(result)
                unfoldings = _unfoldings(source, result)
            if unfoldings is None:
                raise ValueError(
                    f"tensor {t} must have unfoldings of at most {LARGEST_INDEX} rows and columns, "
                    f"got {tuple(source.shape)}"
                )
            order = len(source.shape)
            state = state_dtype(source.dtype)
            size = _buffer_of(source)
            between = [(SCRATCH, free + step % 2 * size) for step in range(order - 1)]
            ends = [(t, 0), *between, (len(tensors) + t, 0)]
            for step, (u, to) in enumerate(unfoldings):
                f = first_factors[t] + order - 1 - step
                vector = min(
                    source.vector if step == 0 else VECTOR_BYTES // state.itemsize,
                    factors[f].vector,
                )
                kind = Kind(
                    wave,
                    most - order + step,
                    step == order - 1,
                    source.dtype if step == 0 else state,
                    result.dtype if step == order - 1 else state,
                    vector if u.is_wide(vector) else 1,
                )
                kinds[kind].append(len(problems))
                problems.append(
                    (
                        *(u.rows, u.columns, u.inner, len(factors[f].shape) == 1, u.rows_are_dense),
                        2 * len(tensors) + f,
                        *(*ends[step], u.row_stride, u.inner_stride, u.outer_stride),
                        *(*ends[step + 1], to.row_stride, to.inner_stride, to.outer_stride),
                    )
                )
            free += _scratch_of(source)
        scratch = max(scratch, free)
    merge_small(kinds, lambda kind, n: _work(kind, problems[n]), MERGED_STEPS * programs)
    tiles = {
        kind: [tile for n in kinds[kind] for tile in _tiles(kind, n, problems[n])]
        for kind in sorted(kinds, key=lambda kind: (kind.wave, kind.step))
    }
    launches = tile_tables(tiles, device)
    return Plan(table(problems, torch.int64, device), launches, scratch, frozenset(copied))


def _buffer_of(layout: Layout) -> int:
    """The bytes of one intermediate product, rounded up to the alignment of the next."""
    size = math.prod(layout.shape) * state_dtype(layout.dtype).itemsize
    return blocks(size, VECTOR_BYTES) * VECTOR_BYTES


def _scratch_of(layout: Layout) -> int:
    """A tensor's bytes of workspace: products alternate between at most two buffers."""
    return _buffer_of(layout) * min(len(layout.shape) - 1, 2)


def _unfoldings(source: Layout, result: Layout) -> list[tuple[Unfolding, ...]] | None:
    """The unfoldings that each product reads and writes, the last mode first; None: no fit."""
    order = len(source.shape)
    between = contiguous(source).strides
    pairs = []
    for mode in reversed(range(order)):
        pair = unfolded(
            source.shape,
            mode,
            source.strides if mode == order - 1 else between,
            result.strides if mode == 0 else between,
        )
        if pair is None:
            return None
        pairs.append(pair)
    return pairs


def _tiles(kind: Kind, number: int, problem: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Tiles of the same columns follow each other: they read the same part of the tensor."""
    rows, columns = (blocks(size, block_of(kind.state)) for size in problem[:2])
    return ((number, row, column) for column in range(columns) for row in range(rows))


def _work(kind: Kind, problem: tuple[int, ...]) -> int:
    """The steps of all tiles of a problem."""
    rows, columns = (blocks(size, block_of(kind.state)) for size in problem[:2])
    depth = 1 if problem[IS_DIAGONAL.value] else blocks(problem[0], depth_of(kind.vector))
    return rows * columns * depth


def products(
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    factors: Sequence[Tensor],
    programs: int,
    step: tuple[Tensor, Tensor] | None = None,
) -> None:
    """results[t] <- P = tensors[t] x_1 A_1 ... x_k A_k, with ``factors`` the A_i, flat.

    With ``step``, (lr, weight_decay), the results W, of any dtype, become W - lr (P + weight_decay
    W); else they have the factors' dtype. ``programs`` is how many the device runs at once.
    """
    device = tensors[0].device
    factors = readable(factors, contiguous=True)
    p = planned(plan, tensors, results, factors, rest=(device, programs))
    keep_for_graph(device, p)
    read, written = list(tensors), list(results)
    for t in p.copied:
        read[t], written[t] = read[t].contiguous(), written[t].contiguous()
    addresses = addresses_of([*read, *written, *factors])
    scratch = torch.empty(p.scratch, dtype=torch.uint8, device=device)
    lr, weight_decay = step or (addresses, addresses)  # not read without a step
    for kind, count, tiles in p.launches:
        launch(
            product_kernel,
            count,
            *(tiles, p.problems, addresses, scratch, lr, weight_decay),
            ELEMENT=ELEMENTS[kind.element],
            STATE=ELEMENTS[kind.state],
            RESULT=ELEMENTS[kind.result],
            UPDATE=step is not None and kind.last,
            BLOCK=block_of(kind.state),
            DEPTH=depth_of(kind.vector),
            VECTOR=kind.vector,
            PRECISION=precision(device),
            num_warps=WARPS,
        )
    for t in p.copied:
        if written[t] is not results[t]:
            results[t].copy_(written[t])
