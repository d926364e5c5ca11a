"""The chained mode product of many tensors, for ``mode_products`` and ``preconditioned_step_``.

A product with one mode's factor is one launch for all tensors: the j-th launch from the end makes
every tensor's j-th product from its end, so the last launch finishes them all. In between, products
lie in scratch memory, contiguous; the modes are walked by strides, nothing is permuted.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton.launch import (
    ELEMENTS,
    VECTOR_BYTES,
    Addresses,
    Layout,
    block_of,
    contiguous,
    hold,
    launch,
    layouts,
    precision,
    state_dtype,
    table,
)
from tnt_kernels.triton.tiles import (
    LARGEST_INDEX,
    MERGED_STEPS,
    Unfolding,
    blocks,
    merge_small,
    offsets,
    unfolded,
    waves,
)

WARPS = 4
SCRATCH = -1  # in a problem, for an address: the scratch memory, at an offset
# Tensors go through their products together as long as their scratch memory stays below this or,
# if it is more, what the largest of them needs: on an H100 it is half of the second-level cache.
SCRATCH_BYTES = 24 << 20


def depth_of(vector: int) -> int:
    """Terms of a sum in a step: at 32, the addresses of single elements spill from registers."""
    return 32 if vector > 1 else 16


@triton.jit
def _start(addresses, scratch, entry):
    """The address that two entries of a problem name: an index, or SCRATCH, and bytes."""
    index = tl.load(entry)
    listed = tl.load(addresses + tl.maximum(index, 0))
    return tl.where(index < 0, scratch.to(tl.int64), listed) + tl.load(entry + 1)


@triton.jit
def _deliver(
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
    """Stores a tile of the product, or makes it W <- W - lr (product + weight_decay W).

    What it needs is loaded here, not before the product: it would take registers all the while.
    """
    rows, columns = tl.load(problem).to(tl.int32), tl.load(problem + 1).to(tl.int32)
    inner = tl.load(problem + 2).to(tl.int32)
    result = _start(addresses, scratch, problem + 11).to(tl.pointer_type(RESULT))
    to_row, near, far = tl.load(problem + 13), tl.load(problem + 14), tl.load(problem + 15)
    at = result + row.to(tl.int64) * to_row + offsets(column, inner, near, far, 1)
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
    """One tile of the product of one mode of a tensor with its factor."""
    tile = tiles + tl.program_id(0) * 3
    problem = problems + tl.load(tile) * 16
    row = tl.load(tile + 1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + 2) * BLOCK + tl.arange(0, BLOCK)
    rows, columns = tl.load(problem).to(tl.int32), tl.load(problem + 1).to(tl.int32)
    inner = tl.load(problem + 2).to(tl.int32)
    is_diagonal, rows_are_dense = tl.load(problem + 3) != 0, tl.load(problem + 4) != 0
    factor = tl.load(addresses + tl.load(problem + 5)).to(tl.pointer_type(STATE))
    source = _start(addresses, scratch, problem + 6).to(tl.pointer_type(ELEMENT))
    row_stride, near, far = tl.load(problem + 8), tl.load(problem + 9), tl.load(problem + 10)

    if VECTOR > 1:
        source, factor = tl.multiple_of(source, 16), tl.multiple_of(factor, 16)
        row_stride, near = tl.multiple_of(row_stride, VECTOR), tl.multiple_of(near, VECTOR)
        rows, columns = tl.multiple_of(rows, VECTOR), tl.multiple_of(columns, VECTOR)
    tables = (problem, addresses, scratch, lr, weight_decay)
    if rows_are_dense:
        # The tile's transpose, (columns, rows): what is dense in memory comes last.
        inside = (column < columns)[:, None] & (row < rows)[None, :]
        at_column = source + offsets(column, inner, near, far, VECTOR)
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
        _deliver(total, row[None, :], column[:, None], *tables, RESULT, UPDATE)
    else:
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        offset = column.to(tl.int64) if VECTOR > 1 else offsets(column, inner, near, far, 1)
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
        _deliver(total, row[:, None], column[None, :], *tables, RESULT, UPDATE)


class Kind(NamedTuple):
    """Products that one launch makes: their wave and step, dtypes, and how wide they are read."""

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
    """What the products of tensors of given layouts launch, in order."""

    problems: Tensor
    launches: list[tuple[Kind, int, Tensor]]
    scratch: int  # bytes
    copied: frozenset[int]  # tensors or results whose modes do not merge where they lie
    addresses: Addresses = field(default_factory=Addresses)


@functools.lru_cache(maxsize=64)
def plan(
    tensors: tuple[Layout, ...],
    results: tuple[Layout, ...],
    factors: tuple[Layout, ...],
    device: torch.device,
    programs: int,
) -> Plan:
    """Plans the products; ``factors`` flat, contiguous.

    Raises:
        ValueError: where an unfolding has more columns than a 32-bit index can count.
    """
    first_factors = list(itertools.accumulate((len(t.shape) for t in tensors), initial=0))
    problems: list[tuple[int, ...]] = []
    kinds: dict[Kind, list[int]] = defaultdict(list)
    copied: set[int] = set()
    room = 0
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
            ends = [(t, 0), *_buffers(source, free), (len(tensors) + t, 0)]
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
                        *(*ends[step], u.row, u.near, u.far),
                        *(*ends[step + 1], to.row, to.near, to.far),
                    )
                )
            free += _scratch_of(source)
        room = max(room, free)
    merge_small(kinds, lambda kind, n: _work(kind, problems[n]), MERGED_STEPS * programs)
    launches = []
    for kind in sorted(kinds, key=lambda kind: (kind.wave, kind.step)):
        tiles = [tile for n in kinds[kind] for tile in _tiles(kind, n, problems[n])]
        launches.append((kind, len(tiles), table(tiles, torch.int32, device)))
    return Plan(table(problems, torch.int64, device), launches, room, frozenset(copied))


def _buffer_of(layout: Layout) -> int:
    """The bytes of one product of a tensor, up to where the next may start."""
    size = math.prod(layout.shape) * state_dtype(layout.dtype).itemsize
    return blocks(size, VECTOR_BYTES) * VECTOR_BYTES


def _scratch_of(layout: Layout) -> int:
    """The scratch memory of a tensor, bytes: products are read from one buffer into another."""
    return _buffer_of(layout) * min(len(layout.shape) - 1, 2)


def _buffers(layout: Layout, start: int) -> list[tuple[int, int]]:
    """Where the products between a tensor's first and last mode lie."""
    size = _buffer_of(layout)
    return [(SCRATCH, start + step % 2 * size) for step in range(len(layout.shape) - 1)]


def _unfoldings(source: Layout, result: Layout) -> list[tuple[Unfolding, ...]] | None:
    """What each product reads and writes, the last mode first."""
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
    """Those of the same columns in a row: they read the same part of the tensor."""
    rows, columns = (blocks(size, block_of(kind.state)) for size in problem[:2])
    return ((number, row, column) for column in range(columns) for row in range(rows))


def _work(kind: Kind, problem: tuple[int, ...]) -> int:
    """The steps of all tiles."""
    rows, columns = (blocks(size, block_of(kind.state)) for size in problem[:2])
    return rows * columns * (1 if problem[3] else blocks(problem[0], depth_of(kind.vector)))


def products(
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    factors: Sequence[Tensor],
    lr: Tensor,
    weight_decay: Tensor,
    *,
    update: bool,
    programs: int,
) -> None:
    """results[t] <- tensors[t] x_1 A_1 ... x_k A_k, or, with ``update``, their update by it.

    Args:
        tensors: of any dtype and strides.
        results: of the same shapes, any strides; with ``update`` of any dtype, else the factors'.
        factors: the A_i, flat.
        lr: with ``update``, alpha in W <- W - alpha (product + gamma W).
        weight_decay: with ``update``, gamma.
        update: whether results are updated rather than overwritten.
        programs: how many programs the device runs at once.
    """
    device = tensors[0].device
    factors = [a.resolve_neg().contiguous() for a in factors]
    p = plan(layouts(tensors), layouts(results), layouts(factors), device, programs)
    hold(device, p)
    read, written = list(tensors), list(results)
    for t in p.copied:
        read[t], written[t] = read[t].contiguous(), written[t].contiguous()
    addresses = p.addresses.of([*read, *written, *factors])
    scratch = torch.empty(p.scratch, dtype=torch.uint8, device=device)
    for kind, count, tiles in p.launches:
        launch(
            product_kernel,
            count,
            *(tiles, p.problems, addresses, scratch, lr, weight_decay),
            ELEMENT=ELEMENTS[kind.element],
            STATE=ELEMENTS[kind.state],
            RESULT=ELEMENTS[kind.result],
            UPDATE=update and kind.last,
            BLOCK=block_of(kind.state),
            DEPTH=depth_of(kind.vector),
            VECTOR=kind.vector,
            PRECISION=precision(device),
            num_warps=WARPS,
        )
    for t in p.copied:
        if written[t] is not results[t]:
            results[t].copy_(written[t])
