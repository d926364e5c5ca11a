"""``gram_ema_`` in Triton: one launch for all Gram matrices of a dtype.

The kernel computes only the tiles of each statistic's lower triangle; its epilogue blends them into
the old statistic and stores them with their mirror image. Gram matrices with few rows and many
columns are computed by split-K: a second launch adds the partial sums in a fixed order, without
atomics, so results repeat to the bit.

The same kernels multiply the unfoldings of a whitened tensor P and of the tensor G itself. The
scale is known before, because the trace of mat_i(P) mat_i(G)^T is the inner product of P and G.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton import cublas
from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import (
    ELEMENTS,
    VECTOR_BYTES,
    Layout,
    Prepared,
    addresses_of,
    block_of,
    contiguous,
    contiguous_copies,
    is_aligned,
    launch,
    planned,
    precision,
    run,
    scalar_on,
    state_dtype,
    table,
    tile_tables,
)
from tnt_kernels.triton.momentum import BLOCK as SUMMED
from tnt_kernels.triton.momentum import WARPS, Sums, inner_kernel, over_elements, sum_of
from tnt_kernels.triton.tiles import (
    LARGE_BLOCK,
    LARGEST_INDEX,
    PROBLEM,
    STEP,
    TILE_COLUMN,
    TILE_ROW,
    Unfolding,
    blocks,
    cut,
    depth_of,
    enlarge,
    fields,
    lower_tiles,
    merge_small,
    offsets,
    unfolded,
    warps_of,
    waves,
)

# The problem table, int64: the indices of three addresses, an unfolding, and a flag.
TENSOR, SECOND, STAT, ROWS, COLUMNS, ROW_STRIDE = fields(6)
INNER, INNER_STRIDE, OUTER_STRIDE, ROWS_ARE_DENSE = fields(4, start=6)
PROBLEM_FIELDS = tl.constexpr(10)
# More columns of the tile tables; partial sums are offsets in the workspace, -1 without split-K.
FIRST_STEP, LAST_STEP, PARTIAL = fields(3, start=3)
TILE_FIELDS = tl.constexpr(6)
# Of one part of a tile's sums: their offset, stride of rows, number, and stride of partial sums.
FIRST_PARTIAL, WIDTH, PARTIALS, SIZE = fields(4, start=3)
SUM_FIELDS = tl.constexpr(7)
DIAGONAL_FIELDS = tl.constexpr(2)

# A split of fewer steps than this costs more memory traffic than it saves time.
LEAST_STEPS = 16
# Programs for each multiprocessor, so that all of them finish at about the same time.
PARTS = 4
# Whitened tensors exist together as long as they have fewer bytes than this.
WHITENED_BYTES = 256 << 20


@triton.jit
def _blend(
    gram,
    tile,
    problem,
    addresses,
    decay,
    scales,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    WHITENED: tl.constexpr,
):
    """The epilogue of a tile: S <- weight S + (1 - weight) gram, lower triangle and mirror image.

    It loads its own operands, which would otherwise hold registers during the product.
    """
    i, j = tl.load(tile + TILE_ROW), tl.load(tile + TILE_COLUMN)
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(addresses + tl.load(problem + STAT)).to(tl.pointer_type(STATE))
    rows = tl.load(problem + ROWS).to(tl.int32)
    if VECTOR > 1:
        target, rows = tl.multiple_of(target, 16), tl.multiple_of(rows, VECTOR)
    weight = tl.load(decay).to(STATE)
    if WHITENED:
        gram *= tl.load(scales + tl.load(tile + PROBLEM)).to(STATE)
    # At weight 0 the old S is not read, at 1 nothing is written.
    read, written = tl.where(weight != 0, rows, 0), tl.where(weight != 1, rows, 0)
    at = target + (row.to(tl.int64) * rows)[:, None] + column[None, :]
    inside = (column < rows)[None, :]
    old = tl.load(at, mask=(row < read)[:, None] & inside, other=0)
    new = weight * old + (1 - weight) * gram
    mirrored = tl.trans(new)
    # Masks of whole tiles, not of a triangle, keep loads and stores wide.
    if i == j:
        new = tl.where(row[:, None] >= column[None, :], new, mirrored)
    tl.store(at, new, mask=(row < written)[:, None] & inside)
    if i != j:
        at = target + (column.to(tl.int64) * rows)[:, None] + row[None, :]
        tl.store(at, mirrored, mask=(column < written)[:, None] & (row < rows)[None, :])


@triton.jit
def gram_kernel(
    tiles,
    problems,
    addresses,
    partials,
    decay,
    scales,
    ELEMENT: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    WHITENED: tl.constexpr,
):
    """One tile of one statistic, over all columns of the unfolding or one split of them.

    With WHITENED the second operand is another tensor with the same unfolding.

    Grid: one program for each tile of a lower triangle and each split. A program reads two panels,
    BLOCK rows of the unfolding each. It reads and writes the tile and writes its mirror image, or
    writes a partial sum. Bound: matrix units from about 128 rows on, memory below.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    first_row = tl.load(tile + TILE_ROW) * BLOCK
    first_column = tl.load(tile + TILE_COLUMN) * BLOCK
    first, last = tl.load(tile + FIRST_STEP) * STEP, tl.load(tile + LAST_STEP) * STEP
    partial = tl.load(tile + PARTIAL)
    source = tl.load(addresses + tl.load(problem + TENSOR)).to(tl.pointer_type(ELEMENT))
    second = source
    if WHITENED:
        second = tl.load(addresses + tl.load(problem + SECOND)).to(tl.pointer_type(ELEMENT))
    rows, columns = tl.load(problem + ROWS).to(tl.int32), tl.load(problem + COLUMNS).to(tl.int32)
    row_stride, inner = tl.load(problem + ROW_STRIDE), tl.load(problem + INNER).to(tl.int32)
    inner_stride, outer_stride = tl.load(problem + INNER_STRIDE), tl.load(problem + OUTER_STRIDE)
    rows_are_dense = tl.load(problem + ROWS_ARE_DENSE) != 0

    row, column = first_row + tl.arange(0, BLOCK), first_column + tl.arange(0, BLOCK)
    if VECTOR > 1:
        source, second = tl.multiple_of(source, 16), tl.multiple_of(second, 16)
        row_stride = tl.multiple_of(row_stride, VECTOR)
        rows, columns = tl.multiple_of(rows, VECTOR), tl.multiple_of(columns, VECTOR)
        inner_stride = tl.multiple_of(inner_stride, VECTOR)
    if tl.load(decay).to(STATE) == 1:
        last = first  # the tensor is not read
    total = tl.zeros((BLOCK, BLOCK), STATE)
    DEPTH: tl.constexpr = depth_of(STEP, PRECISION, BLOCK > 64 and ELEMENT == tl.float32)
    if rows_are_dense:
        for start in range(first, last, DEPTH):
            c = start + tl.arange(0, DEPTH)
            if VECTOR > 1:
                # One address moves; no offset from it changes.
                moved = tl.cast(start, tl.int64) * inner_stride
                at = (tl.arange(0, DEPTH).to(tl.int64) * inner_stride)[:, None]
            else:
                moved = 0
                at = offsets(c, inner, inner_stride, outer_stride, VECTOR)[:, None]
            left, right = source + moved, second + moved
            inside = (c < columns)[:, None]
            a = tl.load(left + at + row[None, :], mask=inside & (row < rows)[None, :], other=0)
            b = tl.load(
                right + at + column[None, :], mask=inside & (column < rows)[None, :], other=0
            )
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION, out_dtype=STATE)
    else:
        at_row = (row.to(tl.int64) * row_stride)[:, None]
        at_column = (column.to(tl.int64) * row_stride)[:, None]
        for start in range(first, last, DEPTH):
            c = start + tl.arange(0, DEPTH)
            if VECTOR > 1:
                at = c.to(tl.int64)[None, :]
            else:
                at = offsets(c, inner, inner_stride, outer_stride, VECTOR)[None, :]
            inside = (c < columns)[None, :]
            a = tl.load(source + at_row + at, mask=(row < rows)[:, None] & inside, other=0)
            b = tl.load(second + at_column + at, mask=(column < rows)[:, None] & inside, other=0)
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION, out_dtype=STATE)

    if partial < 0:
        _blend(total, tile, problem, addresses, decay, scales, STATE, BLOCK, VECTOR, WHITENED)
    else:
        width = tl.minimum(BLOCK, rows - first_column)
        if VECTOR > 1:
            partial, width = tl.multiple_of(partial, VECTOR), tl.multiple_of(width, VECTOR)
        at = (row - first_row)[:, None] * width + (column - first_column)[None, :]
        kept = (row < rows)[:, None] & (column < rows)[None, :]
        tl.store(partials + partial.to(tl.int64) + at, total, mask=kept)


@triton.jit
def sum_kernel(
    tiles,
    problems,
    addresses,
    partials,
    decay,
    scales,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHITENED: tl.constexpr,
):
    """One tile of one statistic from its partial sums, added in a fixed order.

    Grid: one program for each tile with partial sums, which it reads; it reads and writes the tile
    and writes its mirror image. Partial sums of large tiles are added in parts. Bound: memory.
    """
    tile = tiles + tl.program_id(0) * SUM_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    first_row = tl.load(tile + TILE_ROW) * BLOCK
    first_column = tl.load(tile + TILE_COLUMN) * BLOCK
    partial, count = tl.load(tile + FIRST_PARTIAL).to(tl.int64), tl.load(tile + PARTIALS)
    rows = tl.load(problem + ROWS).to(tl.int32)
    width, size = tl.load(tile + WIDTH), tl.load(tile + SIZE)

    at = tl.arange(0, BLOCK)[:, None] * width + tl.arange(0, BLOCK)[None, :]
    kept = (tl.arange(0, BLOCK) < rows - first_row)[:, None]
    kept = kept & (tl.arange(0, BLOCK) < rows - first_column)[None, :]
    total = tl.zeros((BLOCK, BLOCK), STATE)
    for index in range(0, count):
        total += tl.load(partials + partial + index * size + at, mask=kept, other=0)
    _blend(total, tile, problem, addresses, decay, scales, STATE, BLOCK, 1, WHITENED)


@triton.jit
def diagonal_kernel(
    tiles,
    problems,
    addresses,
    decay,
    scales,
    ELEMENT: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHITENED: tl.constexpr,
):
    """BLOCK entries of one diagonal statistic, BLOCK columns in a step; of two tensors half.

    Grid: one program for each BLOCK rows, which it reads once; it reads and writes the entries.
    Bound: memory.
    """
    tile = tiles + tl.program_id(0) * DIAGONAL_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    row = tl.load(tile + TILE_ROW) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(addresses + tl.load(problem + TENSOR)).to(tl.pointer_type(ELEMENT))
    second = source
    if WHITENED:
        second = tl.load(addresses + tl.load(problem + SECOND)).to(tl.pointer_type(ELEMENT))
    target = tl.load(addresses + tl.load(problem + STAT)).to(tl.pointer_type(STATE))
    rows, columns = tl.load(problem + ROWS).to(tl.int32), tl.load(problem + COLUMNS).to(tl.int32)
    row_stride, inner = tl.load(problem + ROW_STRIDE), tl.load(problem + INNER).to(tl.int32)
    inner_stride, outer_stride = tl.load(problem + INNER_STRIDE), tl.load(problem + OUTER_STRIDE)
    rows_are_dense = tl.load(problem + ROWS_ARE_DENSE) != 0
    weight = tl.load(decay).to(STATE)

    last = tl.where(weight != 1, columns, 0)
    DEPTH: tl.constexpr = BLOCK // 2 if WHITENED else BLOCK  # or registers are spilled
    if rows_are_dense:
        sums = tl.zeros((DEPTH, BLOCK), STATE)
        for start in range(0, last, DEPTH):
            c = start + tl.arange(0, DEPTH)
            at = offsets(c, inner, inner_stride, outer_stride, 1)[:, None] + row[None, :]
            inside = (c < columns)[:, None] & (row < rows)[None, :]
            x = tl.load(source + at, mask=inside, other=0).to(STATE)
            y = tl.load(second + at, mask=inside, other=0).to(STATE) if WHITENED else x
            sums += x * y
        gram = tl.sum(sums, axis=0)
    else:
        total = tl.zeros((BLOCK, DEPTH), STATE)
        at_row = (row.to(tl.int64) * row_stride)[:, None]
        for start in range(0, last, DEPTH):
            c = start + tl.arange(0, DEPTH)
            at = at_row + offsets(c, inner, inner_stride, outer_stride, 1)[None, :]
            inside = (row < rows)[:, None] & (c < columns)[None, :]
            x = tl.load(source + at, mask=inside, other=0).to(STATE)
            y = tl.load(second + at, mask=inside, other=0).to(STATE) if WHITENED else x
            total += x * y
        gram = tl.sum(total, axis=1)
    if WHITENED:
        gram *= tl.load(scales + tl.load(tile + PROBLEM)).to(STATE)
    read, written = tl.where(weight != 0, rows, 0), tl.where(weight != 1, rows, 0)
    old = tl.load(target + row, mask=row < read, other=0)
    tl.store(target + row, weight * old + (1 - weight) * gram, mask=row < written)


@triton.jit
def scale_kernel(scales, squares, squares_firsts, traces, traces_firsts, BLOCK: tl.constexpr):
    """|G|^2 / tr H of one whitened Gram matrix H, 0 if the trace is not positive.

    Grid: one program for each matrix, which reads its partial sums. Bound: the launch.
    """
    t = tl.program_id(0)
    square = sum_of(squares, squares_firsts, t, BLOCK)
    trace = sum_of(traces, traces_firsts, t, BLOCK)
    tl.store(scales + t, tl.where(trace <= 0, 0.0, square / trace))


class Kind(NamedTuple):
    """The statistics of one launch: the tensors' dtype, the tile, and elements of a load."""

    element: torch.dtype
    block: int
    vector: int

    @property
    def state(self) -> torch.dtype:
        """The statistics' dtype."""
        return state_dtype(self.element)


@dataclass
class Plan:
    """The launches of ``gram_ema_`` for tensors and statistics of given layouts."""

    problems: Tensor
    tiles: list[tuple[Kind, int, Tensor]]
    sums: list[tuple[torch.dtype, int, Tensor]]
    diagonals: list[tuple[Kind, int, Tensor]]
    partials: dict[torch.dtype, int]  # elements of their workspace
    copied: frozenset[int]  # tensors to copy first: their modes do not merge
    # (statistic, tensor, mode), and the tiles that blend what cuBLAS has multiplied
    by_cublas: list[tuple[tuple[int, int, int], int, Tensor]]


def plan(
    tensors: tuple[Layout, ...],
    stats: tuple[Layout, ...],
    device: torch.device,
    programs: int,
    whitened: tuple[tuple[int, bool], ...] = (),
    setting: str = "ieee",
) -> Plan:
    """Plans the launches; ``stats`` mode by mode, contiguous, a diagonal one of one dimension.

    Of ``whitened`` tensors each has one statistic: its mode, and whether the tensor G is aligned
    for the widest load. ``setting`` is Triton's precision.
    """
    unfoldings: list[Unfolding] = []  # of each statistic
    problems: list[tuple[int, ...]] = []
    full: dict[Kind, list[int]] = defaultdict(list)
    diagonals: dict[Kind, list[tuple[int, ...]]] = defaultdict(list)
    copied = set()
    by_cublas: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
    for t, layout in enumerate(tensors):
        modes = _modes_of(layout)
        if modes is None:
            copied.add(t)
            layout = contiguous(layout)
            modes = _checked_modes(t, layout)
        large = cublas.choose("gram", device, setting, layout)
        own, aligned = whitened[t] if whitened else (None, True)
        for mode, u in enumerate(modes):
            if own not in (None, mode):
                continue
            n = len(problems)
            unfoldings.append(u)
            problems.append(
                (t, len(tensors) + len(stats) + t, len(tensors) + n, *u, u.rows_are_dense)
            )
            block = block_of(state_dtype(layout.dtype))
            if len(stats[n].shape) == 1:
                kind = Kind(layout.dtype, block, 1)
                diagonals[kind] += [(n, i) for i in range(blocks(u.rows, block))]
            elif large and u.rows**2 <= LARGEST_INDEX:
                by_cublas[n, t, mode] = [
                    (n, i, j, (i * u.rows + j) * block, u.rows, 1, 0)
                    for i, j in lower_tiles(u.rows, block)
                ]
            else:
                is_wide = aligned and stats[n].aligned and u.is_wide(layout.vector)
                full[Kind(layout.dtype, block, layout.vector if is_wide else 1)].append(n)
    enlarge(full, lambda kind, n: _most_large(unfoldings[n]), programs)
    merge_small(full, lambda kind, n: _work(kind, unfoldings[n]), programs)
    sums: dict[torch.dtype, list[tuple[int, ...]]] = defaultdict(list)
    partials = {kind.state: 0 for kind in full}
    tiles = {
        kind: _tiles(kind, {n: unfoldings[n] for n in own}, programs, sums[kind.state], partials)
        for kind, own in full.items()
    }
    return Plan(
        table(problems, torch.int64, device),
        *(tile_tables(tiles, device), tile_tables(sums, device), tile_tables(diagonals, device)),
        partials,
        frozenset(copied),
        tile_tables(by_cublas, device),
    )


def _modes_of(layout: Layout) -> list[Unfolding] | None:
    modes = [unfolded(layout.shape, i, layout.strides) for i in range(len(layout.shape))]
    return [unfoldings[0] for unfoldings in modes if unfoldings] if all(modes) else None


def _checked_modes(t: int, layout: Layout) -> list[Unfolding]:
    modes = _modes_of(layout)
    if modes is None:
        raise ValueError(
            f"tensors[{t}] must have unfoldings of at most {LARGEST_INDEX} rows and columns, "
            f"got {tuple(layout.shape)}"
        )
    return modes


def _most_large(unfolding: Unfolding) -> int:
    """The most programs with large tiles that a statistic can have; none for too few rows."""
    side = blocks(unfolding.rows, LARGE_BLOCK) if unfolding.rows >= LARGE_BLOCK else 0
    return side * (side + 1) // 2 * blocks(unfolding.columns, STEP * LEAST_STEPS)


def _work(kind: Kind, unfolding: Unfolding) -> int:
    """The steps of all tiles of a statistic."""
    side = blocks(unfolding.rows, kind.block)
    return side * (side + 1) // 2 * blocks(unfolding.columns, STEP)


def _tiles(
    kind: Kind,
    unfoldings: Mapping[int, Unfolding],
    programs: int,
    sums: list[tuple[int, ...]],
    partials: dict[torch.dtype, int],
) -> list[tuple[int, ...]]:
    """The tiles of one launch; adds its tiles of partial sums to ``sums`` and ``partials``."""
    work = sum(_work(kind, u) for u in unfoldings.values())
    most = max(LEAST_STEPS, blocks(work, PARTS * programs))
    block, least = kind.block, block_of(kind.state)
    tiles: list[tuple[int, ...]] = []
    for n, u in unfoldings.items():
        parts = cut(blocks(u.columns, STEP), most)
        for i, j in lower_tiles(u.rows, block):
            if len(parts) == 1:
                tiles.append((n, i, j, *parts[0], -1))
                continue
            height, width = min(block, u.rows - i * block), min(block, u.rows - j * block)
            size = blocks(height * width, VECTOR_BYTES) * VECTOR_BYTES  # so that all are aligned
            first = partials[kind.state]
            partials[kind.state] += size * len(parts)
            tiles += [(n, i, j, *part, first + k * size) for k, part in enumerate(parts)]
            for y, x in itertools.product(*(range(blocks(d, least)) for d in (height, width))):
                at = i * block // least + y, j * block // least + x
                if at[0] >= at[1]:
                    start = first + (y * width + x) * least
                    sums.append((n, *at, start, width, len(parts), size))
    return tiles


def gram_ema_(
    stats: Sequence[Tensor],
    tensors: Sequence[Tensor],
    decay: Tensor,
    factors: Sequence[Tensor] = (),
) -> None:
    """The operator with ``stats`` and ``factors`` flat."""
    if not stats:
        return
    if factors:
        prepared = _whitened(stats, tensors, decay, factors)
    else:
        prepared = [_update(stats, tensors, decay)]
    run(stats[0].device, prepared, stats)


class Whitened(NamedTuple):
    """A whitened tensor P, which has one statistic: that of one mode of a tensor G."""

    stat: int
    tensor: int
    mode: int
    factors: list[int]  # of all modes of G; of its own mode, ones
    start: int  # in the workspace, bytes


class WhitenedPlan(NamedTuple):
    """What whitens tensors of given layouts."""

    parts: list[list[Whitened]]  # each has the P that exist together
    workspace: int  # bytes, which the parts use in turn
    ones: list[Tensor]  # factors that change nothing; numbered after the factors


def plan_whitened(tensors: tuple[Layout, ...], device: torch.device, _: int) -> WhitenedPlan:
    """Plans the whitened tensors, of which each tensor has one for every mode."""
    for t, layout in enumerate(tensors):
        _checked_modes(t, layout)  # before any of them is written
    modes = [(t, mode) for t, layout in enumerate(tensors) for mode in range(len(layout.shape))]
    sizes = [
        blocks(math.prod(x.shape), VECTOR_BYTES) * VECTOR_BYTES * x.dtype.itemsize for x in tensors
    ]
    ones: dict[tuple[int, torch.dtype], int] = {}
    parts: list[list[Whitened]] = []
    workspace = 0
    for numbers in waves({n: sizes[t] for n, (t, _) in enumerate(modes)}, WHITENED_BYTES):
        part: list[Whitened] = []
        free = 0
        for n in numbers:
            t, mode = modes[n]
            shape, dtype = tensors[t].shape, tensors[t].dtype
            row = [*range(n - mode, n - mode + len(shape))]
            row[mode] = len(modes) + ones.setdefault((shape[mode], dtype), len(ones))
            part.append(Whitened(n, t, mode, row, free))
            free += sizes[t]
        parts.append(part)
        workspace = max(workspace, free)
    tables = [table([[1] * d], dtype, device) for d, dtype in ones]
    return WhitenedPlan(parts, workspace, tables)


def _whitened(
    stats: Sequence[Tensor],
    tensors: Sequence[Tensor],
    decay: Tensor,
    factors: Sequence[Tensor],
) -> list[Prepared]:
    device = stats[0].device
    tensors = contiguous_copies([t.to(state_dtype(t.dtype)) for t in tensors])
    p = planned(plan_whitened, tensors)
    every = [*factors, *p.ones]
    workspace = torch.empty(p.workspace, dtype=torch.uint8, device=device)
    views = {state: workspace.view(state) for state in (torch.float32, torch.float64)}
    prepared: list[Prepared] = []
    for part in p.parts:
        own = [tensors[one.tensor] for one in part]
        whitened = [
            views[t.dtype].as_strided(t.shape, t.stride(), one.start // t.itemsize)
            for t, one in zip(own, part, strict=True)
        ]
        multiply = products(own, whitened, [every[n] for one in part for n in one.factors])
        square, squares = over_elements(inner_kernel, [own], (), sums=True, TWO=False)
        trace, traces = over_elements(inner_kernel, [whitened, own], (), sums=True, TWO=True)
        scales = torch.empty(len(own), dtype=torch.float64, device=device)
        modes = [one.mode for one in part]
        blend = _update([stats[one.stat] for one in part], whitened, decay, modes, own, scales)
        prepared += [*multiply, square, trace, _divided(scales, squares, traces), blend]
    return prepared


def _divided(scales: Tensor, squares: Sums, traces: Sums) -> Prepared:
    def start(_: Tensor) -> None:
        launch(scale_kernel, len(scales), scales, *squares, *traces, BLOCK=SUMMED, num_warps=WARPS)

    return Prepared(0, start)


def _update(
    stats: Sequence[Tensor],
    tensors: Sequence[Tensor],
    decay: Tensor,
    modes: Sequence[int] = (),
    second: Sequence[Tensor] = (),
    scales: Tensor | None = None,
) -> Prepared:
    """The statistics of all modes of the tensors, or of one mode each of whitened tensors.

    Of whitened tensors ``second`` are the G, contiguous, and ``scales`` those of mat(P) mat(G)^T.
    """
    device = stats[0].device
    tensors = list(tensors)
    weight = scalar_on(device, decay)
    own = tuple(zip(modes, map(is_aligned, second), strict=True))
    is_whitened, setting = scales is not None, precision(device)
    scales = weight if scales is None else scales  # which the kernels then do not read
    p = planned(plan, tensors, stats, rest=(own, setting))
    for t in p.copied:
        tensors[t] = tensors[t].contiguous()
    addresses = addresses_of([*tensors, *stats, *second])
    sizes = [count * state.itemsize for state, count in p.partials.items()]
    ends = list(itertools.accumulate(sizes, initial=0))
    # The products of cuBLAS come after the partial sums, one after the other.
    need = max([ends[-1], *(stats[n].nbytes for (n, _, _), _, _ in p.by_cublas)])
    for dtype in {tensors[t].dtype for (_, t, _), _, _ in p.by_cublas}:
        cublas.check(device, dtype)

    def blend(count: int, tiles: Tensor, sums: Tensor) -> None:
        block = block_of(sums.dtype)
        launch(
            sum_kernel,
            *(count, tiles, p.problems, addresses, sums, weight, scales),
            STATE=ELEMENTS[sums.dtype],
            BLOCK=block,
            WHITENED=is_whitened,
            num_warps=warps_of(block),
        )

    def start(scratch: Tensor) -> None:
        partials = {
            state: scratch[first:last].view(state)
            for state, (first, last) in zip(p.partials, itertools.pairwise(ends), strict=True)
        }
        for kind, count, tiles in p.tiles:
            launch(
                gram_kernel,
                *(count, tiles, p.problems, addresses, partials[kind.state], weight, scales),
                ELEMENT=ELEMENTS[kind.element],
                STATE=ELEMENTS[kind.state],
                BLOCK=kind.block,
                STEP=STEP,
                VECTOR=kind.vector,
                PRECISION=setting,
                WHITENED=is_whitened,
                num_warps=warps_of(kind.block),
            )
        for state, count, tiles in p.sums:
            blend(count, tiles, partials[state])
        for (n, t, mode), count, tiles in p.by_cublas:
            product = scratch[: stats[n].nbytes].view(stats[n].dtype).view(stats[n].shape)
            cublas.gram(tensors[t], (second or tensors)[t], mode, product)
            blend(count, tiles, product)
        for kind, count, tiles in p.diagonals:
            launch(
                diagonal_kernel,
                *(count, tiles, p.problems, addresses, weight, scales),
                ELEMENT=ELEMENTS[kind.element],
                STATE=ELEMENTS[kind.state],
                BLOCK=kind.block,
                WHITENED=is_whitened,
                num_warps=warps_of(kind.block),
            )

    return Prepared(need, start)
