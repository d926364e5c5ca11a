"""``gram_ema_`` in Triton: one launch packs the unfoldings, one multiplies all of a dtype.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.lists import walked
from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import (
    ELEMENTS,
    VECTOR_BYTES,
    Layout,
    Prepared,
    addresses_of,
    block_of,
    contiguous,
    launch,
    planned,
    precision,
    run,
    scalar_on,
    state_dtype,
    table,
    tile_tables,
)
from tnt_kernels.triton.momentum import WARPS, Sums, inner_kernel, over_elements, sum_of
from tnt_kernels.triton.pack import (
    LEAST_LARGE,
    SHORT,
    Operand,
    Packing,
    by_parts,
    form_of,
    packed_product,
    packing,
    rows_of,
)
from tnt_kernels.triton.tiles import (
    LARGE_BLOCK,
    LARGEST_INDEX,
    PROBLEM,
    TILE_COLUMN,
    TILE_ROW,
    Unfolding,
    blocks,
    cut,
    fields,
    lower_tiles,
    places,
    unfolded,
    warps_of,
    waves,
)

# The problem table of full statistics, int64: the statistic's address, its rows, the steps of a
# product, the numbers in a packed row, the first bytes of both operands, the index of the scale.
STAT, ROWS, STEPS, STRIDE, LEFT, RIGHT, SCALE = fields(7)
PROBLEM_FIELDS = tl.constexpr(7)
# More columns of the tile tables; partial sums are offsets in the workspace, -1 without split-K.
FIRST_STEP, LAST_STEP, PARTIAL = fields(3, start=3)
TILE_FIELDS = tl.constexpr(6)
# A part of a tile's partial sums: their offset, stride of rows, count, and stride.
FIRST_PARTIAL, WIDTH, PARTIALS, SIZE = fields(4, start=3)
SUM_FIELDS = tl.constexpr(7)
# The problem table of diagonal statistics, int64: three addresses, the rows and their stride, a
# flag, the scale, and the axis of the columns.
DIAGONAL, TENSOR, SECOND, D_ROWS, ROW_STRIDE, ROWS_ARE_DENSE, D_SCALE, COLUMN_AXIS = fields(8)
DIAGONAL_FIELDS = tl.constexpr(11)
DIAGONAL_TILE_FIELDS = tl.constexpr(2)

# A split of fewer steps than this costs more memory traffic than it saves time.
LEAST_STEPS = 16
# Programs for each multiprocessor, so that all of them finish at about the same time.
PARTS = 4
# Packed operands, and whitened tensors, exist together as long as they have fewer bytes than this.
PACKED_BYTES = WHITENED_BYTES = 256 << 20


@triton.jit
def _blend(
    gram,
    first_column,
    arguments,
    CONSTANTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """S <- weight S + (1 - weight) gram, for columns of a tile of the lower triangle, and mirrored.

    At weight 0 the old S is not read, at 1 nothing is written.
    """
    target, rows, weight, first_row = arguments
    row, column = first_row + tl.arange(0, HEIGHT), first_column + tl.arange(0, WIDTH)
    lower = row[:, None] >= column[None, :]
    at = target + (row.to(tl.int64) * rows)[:, None] + column[None, :]
    read, written = tl.where(weight != 0, rows, 0), tl.where(weight != 1, rows, 0)
    old = tl.load(at, mask=lower & (row < read)[:, None] & (column < rows)[None, :], other=0)
    new = weight * old + (1 - weight) * gram
    tl.store(at, new, mask=lower & (row < written)[:, None] & (column < rows)[None, :])
    upper = (column[:, None] < row[None, :]) & (column < written)[:, None] & (row < rows)[None, :]
    at = target + (column.to(tl.int64) * rows)[:, None] + row[None, :]
    tl.store(at, tl.trans(new), mask=upper)


@triton.jit
def _epilogue(
    gram,
    tile,
    problems,
    addresses,
    decay,
    scales,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blends a tile into its statistic.

    It loads its own operands, which would otherwise hold registers during the product.
    """
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    row, column = tl.load(tile + TILE_ROW) * BLOCK, tl.load(tile + TILE_COLUMN) * BLOCK
    target = tl.load(addresses + tl.load(problem + STAT)).to(tl.pointer_type(STATE))
    rows = tl.load(problem + ROWS).to(tl.int32)
    weight = tl.load(decay).to(STATE)
    gram *= tl.load(scales + tl.load(problem + SCALE)).to(STATE)
    LEAST: tl.constexpr = BLOCK if BLOCK <= 32 else BLOCK // 8
    by_parts(_blend, gram, column, (target, rows, weight, row), 0, BLOCK, BLOCK, LEAST)


@triton.jit
def gram_kernel(
    tiles,
    problems,
    addresses,
    scratch,
    decay,
    scales,
    ELEMENT: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
):
    """One tile of one statistic, over all steps of the sum or one split of them.

    Grid: one program for each tile of a lower triangle and each split. A program reads two packed
    panels, BLOCK rows each. It reads and writes the tile and writes its mirror image, or writes a
    partial sum. Bound: matrix units from about 128 rows on, memory below.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    first_row = tl.load(tile + TILE_ROW) * BLOCK
    first_column = tl.load(tile + TILE_COLUMN) * BLOCK
    first, last = tl.load(tile + FIRST_STEP), tl.load(tile + LAST_STEP)
    partial = tl.load(tile + PARTIAL)
    rows, steps = tl.load(problem + ROWS).to(tl.int32), tl.load(problem + STEPS).to(tl.int32)
    row, column = first_row + tl.arange(0, BLOCK), first_column + tl.arange(0, BLOCK)
    if tl.load(decay).to(STATE) == 1:
        last = first  # nothing is written
    total = packed_product(
        rows_of(scratch, problem + LEFT, problem + STRIDE, row, ELEMENT),
        rows_of(scratch, problem + RIGHT, problem + STRIDE, column, ELEMENT),
        (row < rows)[:, None],
        (column < rows)[:, None],
        first,
        last,
        steps,
        steps,
        STATE,
        FORM,
        BLOCK,
        BLOCK,
    )
    if partial < 0:
        _epilogue(total, tile, problems, addresses, decay, scales, STATE, BLOCK)
    else:
        width = tl.minimum(BLOCK, rows - first_column)
        at = (row - first_row)[:, None] * width + (column - first_column)[None, :]
        kept = (row < rows)[:, None] & (column < rows)[None, :]
        target = scratch.to(tl.pointer_type(STATE)) + partial.to(tl.int64)
        tl.store(target + at, total, mask=kept)


@triton.jit
def sum_kernel(
    tiles,
    problems,
    addresses,
    scratch,
    decay,
    scales,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
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
    partials = scratch.to(tl.pointer_type(STATE)) + partial
    for index in range(0, count):
        total += tl.load(partials + index * size + at, mask=kept, other=0)
    _epilogue(total, tile, problems, addresses, decay, scales, STATE, BLOCK)


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
    """BLOCK entries of one diagonal statistic, BLOCK columns in a step; of two tensors a quarter.

    Grid: one program for each BLOCK rows, which it reads once; it reads and writes the entries.
    Bound: memory.
    """
    tile = tiles + tl.program_id(0) * DIAGONAL_TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * DIAGONAL_FIELDS
    row = tl.load(tile + TILE_ROW) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(addresses + tl.load(problem + TENSOR)).to(tl.pointer_type(ELEMENT))
    second = source
    if WHITENED:
        second = tl.load(addresses + tl.load(problem + SECOND)).to(tl.pointer_type(ELEMENT))
    target = tl.load(addresses + tl.load(problem + DIAGONAL)).to(tl.pointer_type(STATE))
    rows = tl.load(problem + D_ROWS).to(tl.int32)
    columns = tl.load(problem + COLUMN_AXIS).to(tl.int32)
    row_stride = tl.load(problem + ROW_STRIDE)
    rows_are_dense = tl.load(problem + ROWS_ARE_DENSE) != 0
    weight = tl.load(decay).to(STATE)

    last = tl.where(weight != 1, columns, 0)
    DEPTH: tl.constexpr = BLOCK // 4 if WHITENED else BLOCK  # or registers are spilled
    if rows_are_dense:
        sums = tl.zeros((DEPTH, BLOCK), STATE)
        for start in range(0, last, DEPTH):
            c = start + tl.arange(0, DEPTH)
            at = places(c, problem + COLUMN_AXIS)[:, None] + row[None, :]
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
            at = at_row + places(c, problem + COLUMN_AXIS)[None, :]
            inside = (row < rows)[:, None] & (c < columns)[None, :]
            x = tl.load(source + at, mask=inside, other=0).to(STATE)
            y = tl.load(second + at, mask=inside, other=0).to(STATE) if WHITENED else x
            total += x * y
        gram = tl.sum(total, axis=1)
    gram *= tl.load(scales + tl.load(problem + D_SCALE)).to(STATE)
    read, written = tl.where(weight != 0, rows, 0), tl.where(weight != 1, rows, 0)
    old = tl.load(target + row, mask=row < read, other=0)
    tl.store(target + row, weight * old + (1 - weight) * gram, mask=row < written)


@triton.jit
def scale_kernel(scales, sums, firsts):
    """|G|^2 / tr H of one whitened Gram matrix H, 0 if the trace is not positive.

    Grid: one program for each matrix, which reads its partial sums. Bound: the launch.
    """
    t = tl.program_id(0)
    trace = sum_of(sums, firsts, t, EACH=2)
    square = sum_of(sums + 1, firsts, t, EACH=2)
    tl.store(scales + t, tl.where(trace <= 0, 0.0, square / trace))


class Kind(NamedTuple):
    """The statistics of one launch: the tensors' dtype, and rows and columns of a tile."""

    element: torch.dtype
    block: int

    @property
    def state(self) -> torch.dtype:
        """The statistics' dtype."""
        return state_dtype(self.element)


class Statistic(NamedTuple):
    """A full statistic, and the tensors whose unfoldings are its packed operands."""

    address: int
    unfolding: Unfolding
    sources: list[int]  # addresses of one tensor, or of a whitened one and of G
    scale: int  # the index of the scale
    element: torch.dtype
    form: tl.constexpr

    def operand(self, start: int = 0) -> Operand:
        """One of its operands in the workspace."""
        u = self.unfolding
        return Operand(u.rows.size, u.columns.size, self.element, self.form, start)


class Wave(NamedTuple):
    """The launches for statistics whose operands exist together."""

    packs: list[tuple[Packing, int, Tensor]]
    grams: list[tuple[Kind, int, Tensor]]
    sums: list[tuple[tuple[torch.dtype, int], int, Tensor]]


@dataclass
class Plan:
    """The launches of ``gram_ema_`` for tensors and statistics of given layouts."""

    packed: Tensor  # the problem tables: of operands,
    problems: Tensor  # of full statistics,
    diagonals: Tensor  # and of diagonal ones
    waves: list[Wave]
    diagonal_tiles: list[tuple[tuple[torch.dtype, int], int, Tensor]]
    scratch: int  # bytes
    copied: frozenset[int]  # tensors to copy first: their modes do not merge


def plan(
    tensors: tuple[Layout, ...],
    stats: tuple[Layout, ...],
    device: torch.device,
    programs: int,
    modes: tuple[int, ...] = (),
    setting: str = "ieee",
) -> Plan:
    """Plans the launches; ``stats`` mode by mode, contiguous, a diagonal one of one dimension.

    A tensor has a statistic for every mode, or with ``modes``, for whitened tensors, for one of
    them. ``setting`` is Triton's precision.
    """
    full: list[Statistic] = []
    diagonals: list[tuple[int, ...]] = []
    diagonal_tiles: dict[tuple[torch.dtype, int], list[tuple[int, ...]]] = defaultdict(list)
    copied = set()
    n = 0  # the statistic
    for t, layout in enumerate(tensors):
        unfoldings = _modes_of(layout)
        if unfoldings is None:
            copied.add(t)
            layout = contiguous(layout)
            unfoldings = _checked_modes(t, layout)
        chosen = unfoldings[modes[t] : modes[t] + 1] if modes else unfoldings
        sources = [t, len(tensors) + len(stats) + t] if modes else [t]
        for u in chosen:
            if len(stats[n].shape) == 2:
                scale, form = n if modes else 0, form_of(layout.dtype, setting)
                full.append(Statistic(len(tensors) + n, u, sources, scale, layout.dtype, form))
            else:
                block = block_of(state_dtype(layout.dtype))
                diagonal_tiles[layout.dtype, block] += [
                    (len(diagonals), i) for i in range(blocks(u.rows.size, block))
                ]
                row = len(tensors) + n, sources[0], sources[-1], u.rows.size, u.rows.inner_stride
                diagonals.append((*row, u.rows_are_dense, n if modes else 0, *u.columns))
            n += 1
    packed, problems = list[tuple[int, ...]](), list[tuple[int, ...]]()
    scratch, made = 0, list[Wave]()
    needs = {n: s.operand().nbytes * len(s.sources) for n, s in enumerate(full)}
    for numbers in waves(needs, PACKED_BYTES):
        wave, size = _wave([full[n] for n in numbers], packed, problems, device, programs)
        made.append(wave)
        scratch = max(scratch, size)
    return Plan(
        table(packed, torch.int64, device),
        table(problems, torch.int64, device),
        table(diagonals, torch.int64, device),
        made,
        tile_tables(diagonal_tiles, device),
        scratch,
        frozenset(copied),
    )


def _wave(
    members: Sequence[Statistic],
    packed: list[tuple[int, ...]],
    problems: list[tuple[int, ...]],
    device: torch.device,
    programs: int,
) -> tuple[Wave, int]:
    """The launches of some statistics, whose problems are added, and the bytes they need."""
    large = sum(map(_large_tiles, members)) >= programs
    kinds: dict[Kind, list[tuple[int, Operand]]] = defaultdict(list)
    for n, s in enumerate(members, start=len(problems)):
        kinds[_kind(s, large=large)].append((n, s.operand()))
    grams, end = {}, 0
    sums: dict[tuple[torch.dtype, int], list[tuple[int, ...]]] = {}
    for kind, own in kinds.items():
        grams[kind], end = _tiles(kind, own, programs, sums, end)
    packs: dict[Packing, list[tuple[int, ...]]] = defaultdict(list)
    for s in members:
        starts = []
        for source in s.sources:
            operand = s.operand(end)
            packs[packing(operand, s.element)] += operand.tiles(len(packed))
            packed.append(operand.problem((source, 0), s.unfolding))
            starts.append(end)
            end += operand.nbytes
        sizes = operand.rows, operand.steps, operand.stride
        problems.append((s.address, *sizes, starts[0], starts[-1], s.scale))
    return Wave(*(tile_tables(tiles, device) for tiles in (packs, grams, sums))), end


def _large_tiles(s: Statistic) -> int:
    """The most programs with large tiles that a statistic can have."""
    operand = s.operand()
    if state_dtype(s.element) != torch.float32 or operand.rows < LEAST_LARGE:
        return 0
    side, steps = blocks(operand.rows, LARGE_BLOCK), operand.steps * operand.products
    return side * (side + 1) // 2 * blocks(steps, LEAST_STEPS)


def _kind(s: Statistic, *, large: bool) -> Kind:
    """The launch of a statistic; ``large`` tiles where it has the rows."""
    block, rows = block_of(state_dtype(s.element)), s.unfolding.rows.size
    if rows <= SHORT:
        return Kind(s.element, SHORT)
    is_large = large and rows >= LEAST_LARGE and 2 * block == LARGE_BLOCK
    return Kind(s.element, LARGE_BLOCK if is_large else block)


def _modes_of(layout: Layout) -> list[Unfolding] | None:
    modes = [unfolded(layout.shape, i, layout.strides) for i in range(len(layout.shape))]
    return [unfolding for unfolding in modes if unfolding] if all(modes) else None


def _checked_modes(t: int, layout: Layout) -> list[Unfolding]:
    modes = _modes_of(layout)
    if modes is None:
        raise ValueError(
            f"tensors[{t}] must have unfoldings of at most {LARGEST_INDEX} rows and columns, "
            f"got {tuple(layout.shape)}"
        )
    return modes


def _tiles(
    kind: Kind,
    problems: Sequence[tuple[int, Operand]],
    programs: int,
    sums: dict[tuple[torch.dtype, int], list[tuple[int, ...]]],
    end: int,
) -> tuple[list[tuple[int, ...]], int]:
    """The tiles of one launch, and the byte of the workspace where its partial sums end.

    Its partial sums begin at byte ``end``; they come before the operands, because their offsets
    are 32-bit. ``sums`` gets the tiles that add them up.
    """
    steps = {n: operand.steps * operand.products for n, operand in problems}
    work = sum(_side(kind, o) * (_side(kind, o) + 1) // 2 * steps[n] for n, o in problems)
    most = max(LEAST_STEPS, blocks(work, PARTS * programs))
    block, least = kind.block, min(kind.block, block_of(kind.state))
    bytes_each = kind.state.itemsize
    tiles: list[tuple[int, ...]] = []
    for n, operand in problems:
        rows, parts = operand.rows, cut(steps[n], most)
        for i, j in lower_tiles(rows, block):
            if len(parts) == 1:
                tiles.append((n, i, j, *parts[0], -1))
                continue
            height, width = min(block, rows - i * block), min(block, rows - j * block)
            size = blocks(height * width, VECTOR_BYTES) * VECTOR_BYTES  # so that all are aligned
            first = end // bytes_each
            end += size * len(parts) * bytes_each
            tiles += [(n, i, j, *part, first + k * size) for k, part in enumerate(parts)]
            for y, x in itertools.product(*(range(blocks(d, least)) for d in (height, width))):
                at = i * block // least + y, j * block // least + x
                if at[0] >= at[1]:
                    start = first + (y * width + x) * least
                    row = (n, *at, start, width, len(parts), size)
                    sums.setdefault((kind.state, least), []).append(row)
    return tiles, end


def _side(kind: Kind, operand: Operand) -> int:
    return blocks(operand.rows, kind.block)


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

    tensor: int
    mode: int
    stat: int  # in the list of statistics
    factors: list[int]  # of the other modes of G
    start: int  # in the workspace, bytes
    copy: int  # of G, in the workspace too; -1 if it is read in place


class WhitenedPlan(NamedTuple):
    """What whitens tensors of given layouts."""

    parts: list[list[Whitened]]  # each has the P that exist together
    workspace: int  # bytes, which the parts use in turn


def plan_whitened(tensors: tuple[Layout, ...], device: torch.device, _: int) -> WhitenedPlan:
    """Plans the whitened tensors, of which each tensor has one for every mode."""
    for t, layout in enumerate(tensors):
        _checked_modes(t, contiguous(layout))  # before any of them is written
    modes = [(t, mode) for t, layout in enumerate(tensors) for mode in range(len(layout.shape))]
    states = [state_dtype(layout.dtype) for layout in tensors]
    sizes = [
        blocks(math.prod(x.shape), VECTOR_BYTES) * VECTOR_BYTES * state.itemsize
        for x, state in zip(tensors, states, strict=True)
    ]
    is_copied = [
        state != x.dtype or x.strides != contiguous(x).strides
        for x, state in zip(tensors, states, strict=True)
    ]
    needs = {n: sizes[t] * (1 + is_copied[t]) for n, (t, _) in enumerate(modes)}
    parts: list[list[Whitened]] = []
    workspace = 0
    for numbers in waves(needs, WHITENED_BYTES):
        part: list[Whitened] = []
        free = 0
        for n in numbers:
            t, mode = modes[n]
            first = n - mode
            others = [*range(first, n), *range(n + 1, first + len(tensors[t].shape))]
            copy = free + sizes[t] if is_copied[t] else -1
            part.append(Whitened(t, mode, n, others, free, copy))
            free += needs[n]
        parts.append(part)
        workspace = max(workspace, free)
    return WhitenedPlan(parts, workspace)


def _whitened(
    stats: Sequence[Tensor],
    tensors: Sequence[Tensor],
    decay: Tensor,
    factors: Sequence[Tensor],
) -> list[Prepared]:
    device = stats[0].device
    p = planned(plan_whitened, tensors)
    workspace = torch.empty(p.workspace, dtype=torch.uint8, device=device)
    prepared: list[Prepared] = []
    for part in p.parts:
        given = [tensors[one.tensor] for one in part]
        own = [
            t if one.copy < 0 else _in_workspace(workspace, one.copy, t)
            for t, one in zip(given, part, strict=True)
        ]
        if any(one.copy >= 0 for one in part):
            prepared.append(_copying(given, own))
        # A vector has no other mode: its P is G.
        whitened = [
            _in_workspace(workspace, one.start, t) if one.factors else t
            for t, one in zip(own, part, strict=True)
        ]
        made = [n for n, one in enumerate(part) if one.factors]
        if made:
            groups = [own[n] for n in made], [whitened[n] for n in made]
            others = [factors[f] for n in made for f in part[n].factors]
            prepared += products(*groups, others, skipped=[part[n].mode for n in made])
        add, sums = over_elements(inner_kernel, [whitened, own], (), sums=2, TWO=True)
        scales = torch.empty(len(own), dtype=torch.float64, device=device)
        modes = [one.mode for one in part]
        blend = _update([stats[one.stat] for one in part], whitened, decay, modes, own, scales)
        prepared += [add, _divided(scales, sums), blend]
    return prepared


def _in_workspace(workspace: Tensor, start: int, like: Tensor) -> Tensor:
    """A contiguous tensor at a byte of the workspace, of the shape of ``like``."""
    state = state_dtype(like.dtype)
    end = start + like.numel() * state.itemsize
    return workspace[start:end].view(state).view(like.shape)


def _copying(given: Sequence[Tensor], own: Sequence[Tensor]) -> Prepared:
    """Copies tensors that are not read in place."""
    made = [n for n, new in enumerate(own) if new is not given[n]]

    def start(_: Tensor) -> None:
        torch._foreach_copy_([own[n] for n in made], [given[n] for n in made])

    return Prepared(0, start)


def _divided(scales: Tensor, sums: Sums) -> Prepared:
    def start(_: Tensor) -> None:
        launch(scale_kernel, len(scales), scales, *sums, num_warps=WARPS)

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

    Whitened tensors come with the ``second`` ones, G, contiguous too, and the ``scales`` of
    mat(P) mat(G)^T.
    """
    device = stats[0].device
    tensors, stats = walked(tensors), walked(stats)
    weight, setting, is_whitened = scalar_on(device, decay), precision(device), scales is not None
    factor = scalar_on(device, _ONE) if scales is None else scales
    p = planned(plan, tensors, stats, rest=(tuple(modes), setting))
    if p.copied:
        tensors = [x.contiguous() if t in p.copied else x for t, x in enumerate(tensors)]
    addresses = addresses_of(tensors, stats, *([second] if second else []))

    def start(scratch: Tensor) -> None:
        for wave in p.waves:
            for pack, count, tiles in wave.packs:
                pack.launch(count, tiles, p.packed, addresses, scratch)
            for kind, count, tiles in wave.grams:
                form = form_of(kind.element, setting)
                launch(
                    gram_kernel,
                    *(count, tiles, p.problems, addresses, scratch, weight, factor),
                    ELEMENT=ELEMENTS[kind.element],
                    STATE=ELEMENTS[kind.state],
                    BLOCK=kind.block,
                    FORM=form.value,
                    num_warps=warps_of(kind.block),
                )
            for (state, block), count, tiles in wave.sums:
                launch(
                    sum_kernel,
                    *(count, tiles, p.problems, addresses, scratch, weight, factor),
                    STATE=ELEMENTS[state],
                    BLOCK=block,
                    num_warps=warps_of(block),
                )
        for (element, block), count, tiles in p.diagonal_tiles:
            launch(
                diagonal_kernel,
                *(count, tiles, p.diagonals, addresses, weight, factor),
                ELEMENT=ELEMENTS[element],
                STATE=ELEMENTS[state_dtype(element)],
                BLOCK=block,
                WHITENED=is_whitened,
                num_warps=warps_of(block),
            )

    return Prepared(p.scratch, start, (tensors, stats, second))


_ONE = torch.ones((), dtype=torch.float64)  # the scale of statistics that are not whitened
