"""The mode products G x_1 A_1 ... x_k A_k of many tensors, and their epilogue.

One launch multiplies one mode of every tensor: the last launch computes every tensor's last
product, the launch before it the second to last, and so on.

A tensor's modes are contracted in the order of their strides, the smallest first, and every
intermediate product is stored with the next mode dense. A factor is read by rows. So both operands
of every product are dense along the summed index, as the matrix units want them: loads are wide in
every mode, and one loop handles all of them.
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

from tnt_kernels.triton import cublas
from tnt_kernels.triton.launch import (
    ELEMENTS,
    VECTOR_BYTES,
    Layout,
    Prepared,
    addresses_of,
    block_of,
    contiguous,
    contiguous_copies,
    launch,
    planned,
    precision,
    scalar_on,
    state_dtype,
    table,
    tile_tables,
)
from tnt_kernels.triton.momentum import over_elements, scaled_step_kernel
from tnt_kernels.triton.tiles import (
    LARGE_BLOCK,
    LARGEST_INDEX,
    PROBLEM,
    STEP,
    TILE_COLUMN,
    TILE_ROW,
    Unfolding,
    blocks,
    depth_of,
    enlarge,
    fields,
    merge_small,
    offsets,
    tile_order,
    unfolded,
    warps_of,
    waves,
)

# The problem table, int64: sizes, then the locations of source and result. A location is an index
# into the addresses (SCRATCH: the workspace), an offset in bytes, and strides.
ROWS, COLUMNS, INNER, IS_DIAGONAL, FACTOR = fields(5)
READ, WRITTEN = tl.constexpr(5), tl.constexpr(10)  # each is such a location:
ADDRESS, OFFSET, ROW_STRIDE, INNER_STRIDE, OUTER_STRIDE = fields(5)
PROBLEM_FIELDS = tl.constexpr(15)
TILE_FIELDS = tl.constexpr(3)

SCRATCH = -1
# Tensors share a wave as long as their workspace stays below this, or below the need of the largest
# tensor if that is more. It is half of an H100's second-level cache.
SCRATCH_BYTES = 24 << 20


@triton.jit
def _address(addresses, scratch, place):
    """The address of a place of a problem."""
    index = tl.load(place + ADDRESS)
    listed = tl.load(addresses + tl.maximum(index, 0))
    return tl.where(index < 0, scratch.to(tl.int64), listed) + tl.load(place + OFFSET)


@triton.jit
def _epilogue(
    value,
    tile,
    problems,
    addresses,
    scratch,
    lr,
    weight_decay,
    RESULT: tl.constexpr,
    UPDATE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Stores a tile P of the product, or updates W <- W - lr (P + weight_decay W) with it.

    It loads its own operands, which would otherwise hold registers during the product.
    """
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    row = tl.load(tile + TILE_ROW) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + TILE_COLUMN) * BLOCK + tl.arange(0, BLOCK)
    rows, columns = tl.load(problem + ROWS).to(tl.int32), tl.load(problem + COLUMNS).to(tl.int32)
    inner = tl.load(problem + INNER).to(tl.int32)
    place = problem + WRITTEN
    result = _address(addresses, scratch, place).to(tl.pointer_type(RESULT))
    row_stride = tl.load(place + ROW_STRIDE)
    inner_stride, outer_stride = tl.load(place + INNER_STRIDE), tl.load(place + OUTER_STRIDE)
    if VECTOR > 1:
        result, columns = tl.multiple_of(result, 16), tl.multiple_of(columns, VECTOR)
        row_stride, inner_stride = tl.multiple_of(row_stride, VECTOR), 1
    at = result + (row.to(tl.int64) * row_stride)[:, None]
    at = at + offsets(column, inner, inner_stride, outer_stride, VECTOR)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if UPDATE:
        alpha, gamma = tl.load(lr).to(value.dtype), tl.load(weight_decay).to(value.dtype)
        weight = tl.load(at, mask=inside, other=0).to(value.dtype)
        decay = alpha * gamma
        shrunk = decay * tl.where(decay == 0, 0, weight)  # an infinite W that does not decay stays
        value = weight - (alpha * value + shrunk)
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
    STEP: tl.constexpr,
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
    factor = tl.load(addresses + tl.load(problem + FACTOR)).to(tl.pointer_type(STATE))
    place = problem + READ
    source = _address(addresses, scratch, place).to(tl.pointer_type(ELEMENT))
    row_stride = tl.load(place + ROW_STRIDE)
    inner_stride, outer_stride = tl.load(place + INNER_STRIDE), tl.load(place + OUTER_STRIDE)
    if VECTOR > 1:
        source, factor = tl.multiple_of(source, 16), tl.multiple_of(factor, 16)
        rows, inner_stride = tl.multiple_of(rows, VECTOR), tl.multiple_of(inner_stride, VECTOR)
        row_stride = 1

    # The tile's transpose, (columns, rows): x and a are then dense along their rows.
    at_column = source + offsets(column, inner, inner_stride, outer_stride, VECTOR)[:, None]
    in_column = (column < columns)[:, None]
    if is_diagonal:
        scale = tl.load(factor + row, mask=row < rows, other=0)
        at = at_column + (row.to(tl.int64) * row_stride)[None, :]
        x = tl.load(at, mask=in_column & (row < rows)[None, :], other=0)
        total = x.to(STATE) * scale[None, :]
    else:
        DEPTH: tl.constexpr = depth_of(STEP, PRECISION, BLOCK > 64 or VECTOR == 1)
        total = tl.zeros((BLOCK, BLOCK), STATE)
        at_row = factor + (row.to(tl.int64) * rows)[:, None]
        for start in range(0, rows, DEPTH):
            term = start + tl.arange(0, DEPTH)
            inside = (term < rows)[None, :]
            a = tl.load(at_row + term[None, :], mask=(row < rows)[:, None] & inside, other=0)
            at = at_column + (term.to(tl.int64) * row_stride)[None, :]
            x = tl.load(at, mask=in_column & inside, other=0)
            total = tl.dot(
                x.to(STATE), tl.trans(a), total, input_precision=PRECISION, out_dtype=STATE
            )
    tables = tile, problems, addresses, scratch, lr, weight_decay
    _epilogue(tl.trans(total), *tables, RESULT, UPDATE, BLOCK, VECTOR)


class Kind(NamedTuple):
    """The products of one launch: their wave and step, dtypes, tile, and elements of a load."""

    wave: int
    step: int
    last: bool
    element: torch.dtype
    result: torch.dtype
    block: int
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
    by_cublas: dict[int, int]  # tensors that cuBLAS multiplies, and their first factors


def plan(
    tensors: tuple[Layout, ...],
    results: tuple[Layout, ...],
    factors: tuple[Layout, ...],
    device: torch.device,
    programs: int,
    setting: str = "ieee",
    in_place: bool = False,
) -> Plan:
    """Plans the products; ``factors`` flat, contiguous; ``setting`` is Triton's precision.

    ``in_place``: the results are the tensors.
    """
    first_factors = list(itertools.accumulate((len(t.shape) for t in tensors), initial=0))
    problems: list[tuple[int, ...]] = []
    kinds: dict[Kind, list[int]] = defaultdict(list)
    copied: set[int] = set()
    scratch = 0
    by_cublas = {
        t: first
        for t, (layout, first) in enumerate(zip(tensors, first_factors, strict=False))
        if cublas.choose(device, setting, layout)
        and any(len(factor.shape) == 2 for factor in factors[first : first + 2])
    }
    needs = {
        t: _scratch_of(layout)
        for t, layout in enumerate(tensors)
        if 0 not in layout.shape and t not in by_cublas
    }
    for wave, members in enumerate(waves(needs, SCRATCH_BYTES)):
        most = max(len(tensors[t].shape) for t in members)
        free = 0
        for t in members:
            source, result = tensors[t], results[t]
            unfoldings = _unfoldings(source, result)
            # A product may not write what its other tiles read. The last of several reads scratch.
            is_alone = in_place and len(source.shape) == 1 < len(factors[first_factors[t]].shape)
            if unfoldings is None or is_alone:
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
            for step, (mode, u, to) in enumerate(unfoldings):
                f = first_factors[t] + mode
                last = step == order - 1
                read = source.vector if step == 0 else VECTOR_BYTES // state.itemsize
                vector = min(read, factors[f].vector, result.vector if last else read)
                kind = Kind(
                    wave,
                    most - order + step,
                    last,
                    source.dtype if step == 0 else state,
                    result.dtype if last else state,
                    block_of(state),
                    vector if _is_wide(u, to, vector) else 1,
                )
                kinds[kind].append(len(problems))
                problems.append(
                    (
                        *(u.rows, u.columns, u.inner, len(factors[f].shape) == 1),
                        2 * len(tensors) + f,
                        *(*ends[step], u.row_stride, u.inner_stride, u.outer_stride),
                        *(*ends[step + 1], to.row_stride, to.inner_stride, to.outer_stride),
                    )
                )
            free += _scratch_of(source)
        scratch = max(scratch, free)
    enlarge(kinds, lambda kind, n: _large_tiles(problems[n]), programs)
    merge_small(kinds, lambda kind, n: _work(kind, problems[n]), programs)
    tiles = {
        kind: [tile for n in kinds[kind] for tile in _tiles(kind, n, problems[n])]
        for kind in sorted(kinds, key=lambda kind: (kind.wave, kind.step))
    }
    launches = tile_tables(tiles, device)
    problem_table = table(problems, torch.int64, device)
    return Plan(problem_table, launches, scratch, frozenset(copied), by_cublas)


def _buffer_of(layout: Layout) -> int:
    """The bytes of one intermediate product, rounded up to the alignment of the next."""
    size = math.prod(layout.shape) * state_dtype(layout.dtype).itemsize
    return blocks(size, VECTOR_BYTES) * VECTOR_BYTES


def _scratch_of(layout: Layout) -> int:
    """A tensor's bytes of workspace: products alternate between at most two buffers."""
    return _buffer_of(layout) * min(len(layout.shape) - 1, 2)


def _unfoldings(source: Layout, result: Layout) -> list[tuple[int, Unfolding, Unfolding]] | None:
    """Each product's mode, and the unfoldings that it reads and writes; None: no fit."""
    sizes, order = source.shape, len(source.shape)
    # From the slowest mode to the fastest. Each product brings the last of them to the front.
    modes = sorted(range(order), key=lambda mode: -source.strides[mode])
    read, unfoldings = source.strides, list[tuple[int, Unfolding, Unfolding]]()
    for step in range(order):
        mode = modes.pop()
        modes.insert(0, mode)
        written = result.strides if step == order - 1 else _strides(sizes, modes)
        pair = unfolded(sizes, mode, read, written)
        if pair is None:
            return None
        unfoldings.append((mode, pair[0], pair[1]))
        read = written
    return unfoldings


def _strides(sizes: Sequence[int], modes: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, ``modes`` sorted from the slowest to the fastest."""
    strides = [1] * len(sizes)
    for faster, slower in itertools.pairwise(modes[::-1]):
        strides[slower] = strides[faster] * sizes[faster]
    return tuple(strides)


def _is_wide(read: Unfolding, written: Unfolding, vector: int) -> bool:
    """Whether a product can read along its rows and write along its columns, ``vector`` at once."""
    return (
        read.rows_are_dense
        and read.is_wide(vector)
        and not written.rows_are_dense
        and written.is_wide(vector)
    )


def _tiles(kind: Kind, number: int, problem: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    rows, columns = (blocks(size, kind.block) for size in problem[:2])
    return ((number, row, column) for row, column in tile_order(rows, columns))


def _large_tiles(problem: tuple[int, ...]) -> int:
    """How many large tiles a problem has; none if they were mostly padding, or for no sums."""
    rows, columns = problem[ROWS.value], problem[COLUMNS.value]
    if problem[IS_DIAGONAL.value] or min(rows, columns) < LARGE_BLOCK:
        return 0
    return blocks(rows, LARGE_BLOCK) * blocks(columns, LARGE_BLOCK)


def _work(kind: Kind, problem: tuple[int, ...]) -> int:
    """The steps of all tiles of a problem."""
    rows, columns = (blocks(size, kind.block) for size in problem[:2])
    depth = 1 if problem[IS_DIAGONAL.value] else blocks(problem[0], STEP)
    return rows * columns * depth


def products(
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    factors: Sequence[Tensor],
    step: tuple[Tensor, Tensor] | None = None,
) -> list[Prepared]:
    """Prepares results[t] <- P = tensors[t] x_1 A_1 ... x_k A_k.

    With ``step``, (lr, weight_decay), the results W, of any dtype, become W - lr (P + weight_decay
    W); else they have the factors' dtype and are contiguous. The numbers of a step may be on the
    host. ``factors`` are the A_i, flat. ``results`` may be the list ``tensors`` itself.
    """
    device = tensors[0].device
    factors = contiguous_copies(factors)
    setting = precision(device)
    p = planned(plan, tensors, results, factors, rest=(setting, results is tensors))
    read, written = list(tensors), list(results)
    for t in p.copied:  # copies: a contiguous tensor itself may not be aligned, as the plan says
        read[t], written[t] = (
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (read[t], written[t])
        )
    addresses = addresses_of([*read, *written, *factors])
    lr, weight_decay = addresses, addresses  # not read without a step
    if step is not None:
        lr, weight_decay = scalar_on(device, step[0]), scalar_on(device, step[1])

    def start(scratch: Tensor) -> None:
        for t in p.copied:
            read[t].copy_(tensors[t])
            written[t].copy_(results[t])
        for kind, count, tiles in p.launches:
            launch(
                product_kernel,
                *(count, tiles, p.problems, addresses, scratch, lr, weight_decay),
                ELEMENT=ELEMENTS[kind.element],
                STATE=ELEMENTS[kind.state],
                RESULT=ELEMENTS[kind.result],
                UPDATE=step is not None and kind.last,
                BLOCK=kind.block,
                STEP=STEP,
                VECTOR=kind.vector,
                PRECISION=setting,
                num_warps=warps_of(kind.block),
            )
        for t in p.copied:
            results[t].copy_(written[t])

    prepared = [Prepared(p.scratch, start)]
    if not p.by_cublas:
        return prepared
    cublas.check(device)
    # A step's products P use this memory one after the other.
    most = 0 if step is None else max(tensors[t].numel() for t in p.by_cublas)
    buffer = torch.empty(most, dtype=torch.float32, device=device)
    for t, first in p.by_cublas.items():
        target, row = results[t], factors[first : first + 2]
        if step is None:
            prepared.append(cublas.chain(tensors[t], row, target))
            continue
        product = buffer[: target.numel()].view(target.shape)
        lists, numbers = [[target], [product]], (lr, weight_decay, lr)
        update, _ = over_elements(scaled_step_kernel, lists, numbers, decayed=(True,), SCALED=False)
        prepared += [cublas.chain(tensors[t], row, product), update]
    return prepared
