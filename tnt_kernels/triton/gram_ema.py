"""``gram_ema_`` in Triton: every Gram matrix of every tensor in one launch a dtype.

Of each statistic only the tiles of the lower triangle are made, blended into the old ones as they
are stored, and mirrored. A Gram matrix with few rows and many columns is cut along its columns into
partial sums, which a second launch adds up in their order: no atomics, so results repeat to the
bit.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton.launch import (
    ELEMENTS,
    Addresses,
    Layout,
    block_of,
    contiguous,
    hold,
    launch,
    layouts,
    mark_written,
    precision,
    programs_at_once,
    scalar_on,
    state_dtype,
    table,
)
from tnt_kernels.triton.tiles import (
    LARGEST_INDEX,
    MERGED_STEPS,
    Unfolding,
    blocks,
    cut,
    merge_small,
    offsets,
    unfolded,
)

DEPTH = 32  # columns a step
WARPS = 4
# A part of fewer columns than this is not worth a partial sum's way through memory.
LEAST_STEPS = 16
# Programs that share the device's multiprocessors evenly, for each of them.
PARTS = 4


@triton.jit
def _blend(gram, row, column, problem, addresses, decay, STATE: tl.constexpr):
    """The lower triangle of a tile: S <- weight S + (1 - weight) gram, and its mirror image.

    What it needs is loaded here, not before the products: it would take registers all the while.
    """
    target = tl.load(addresses + tl.load(problem + 1)).to(tl.pointer_type(STATE))
    rows = tl.load(problem + 2)
    weight = tl.load(decay).to(STATE)
    # At weight 0 nothing is read, at 1 nothing written.
    read = tl.where(weight != 0, rows, 0).to(tl.int32)
    written = tl.where(weight != 1, rows, 0).to(tl.int32)
    at = target + row.to(tl.int64)[:, None] * rows + column[None, :]
    lower = row[:, None] >= column[None, :]
    old = tl.load(at, mask=lower & (row[:, None] < read), other=0)
    new = weight * old + (1 - weight) * gram
    tl.store(at, new, mask=lower & (row[:, None] < written))
    mirrored = (column[:, None] <= row[None, :]) & (row[None, :] < written)
    at = target + column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(at, tl.trans(new), mask=mirrored)


@triton.jit
def gram_kernel(
    tiles,
    problems,
    addresses,
    partials,
    decay,
    ELEMENT: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of one statistic, over all columns of the unfolding or a part of them."""
    tile = tiles + tl.program_id(0) * 6
    problem = problems + tl.load(tile) * 9
    first_row, first_column = tl.load(tile + 1) * BLOCK, tl.load(tile + 2) * BLOCK
    first, last = tl.load(tile + 3) * DEPTH, tl.load(tile + 4) * DEPTH
    part = tl.load(tile + 5)
    source = tl.load(addresses + tl.load(problem)).to(tl.pointer_type(ELEMENT))
    rows, columns = tl.load(problem + 2).to(tl.int32), tl.load(problem + 3).to(tl.int32)
    row_stride, near, far = tl.load(problem + 4), tl.load(problem + 6), tl.load(problem + 7)
    inner = tl.load(problem + 5).to(tl.int32)
    rows_are_dense = tl.load(problem + 8) != 0

    row, column = first_row + tl.arange(0, BLOCK), first_column + tl.arange(0, BLOCK)
    if VECTOR > 1:
        source = tl.multiple_of(source, 16)
        row_stride = tl.multiple_of(row_stride, VECTOR)
        rows, columns = tl.multiple_of(rows, VECTOR), tl.multiple_of(columns, VECTOR)
        near = tl.multiple_of(near, VECTOR)
    if tl.load(decay).to(STATE) == 1:
        last = first  # the tensor is not looked at
    total = tl.zeros((BLOCK, BLOCK), STATE)
    if rows_are_dense:
        for start in range(first, last, DEPTH):
            c = start + tl.arange(0, DEPTH)
            at = offsets(c, inner, near, far, VECTOR)[:, None]
            inside = (c < columns)[:, None]
            a = tl.load(source + at + row[None, :], mask=inside & (row < rows)[None, :], other=0)
            b = tl.load(
                source + at + column[None, :], mask=inside & (column < rows)[None, :], other=0
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
                at = offsets(c, inner, near, far, VECTOR)[None, :]
            inside = (c < columns)[None, :]
            a = tl.load(source + at_row + at, mask=(row < rows)[:, None] & inside, other=0)
            b = tl.load(source + at_column + at, mask=(column < rows)[:, None] & inside, other=0)
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION, out_dtype=STATE)

    if part < 0:
        _blend(total, row, column, problem, addresses, decay, STATE)
    else:
        width = tl.minimum(BLOCK, rows - first_column)
        at = (row - first_row)[:, None] * width + (column - first_column)[None, :]
        kept = (row < rows)[:, None] & (column < rows)[None, :]
        tl.store(partials + part.to(tl.int64) + at, total, mask=kept)


@triton.jit
def sum_kernel(
    tiles, problems, addresses, partials, decay, STATE: tl.constexpr, BLOCK: tl.constexpr
):
    """One tile of one statistic, from its partial sums in their order."""
    tile = tiles + tl.program_id(0) * 5
    problem = problems + tl.load(tile) * 9
    first_row, first_column = tl.load(tile + 1) * BLOCK, tl.load(tile + 2) * BLOCK
    part, count = tl.load(tile + 3).to(tl.int64), tl.load(tile + 4)
    rows = tl.load(problem + 2).to(tl.int32)

    row, column = first_row + tl.arange(0, BLOCK), first_column + tl.arange(0, BLOCK)
    height = tl.minimum(BLOCK, rows - first_row)
    width = tl.minimum(BLOCK, rows - first_column)
    at = (row - first_row)[:, None] * width + (column - first_column)[None, :]
    kept = (row < rows)[:, None] & (column < rows)[None, :]
    total = tl.zeros((BLOCK, BLOCK), STATE)
    for index in range(0, count):
        start = partials + part + index * (height * width)
        total += tl.load(start + at, mask=kept, other=0)
    _blend(total, row, column, problem, addresses, decay, STATE)


@triton.jit
def diagonal_kernel(
    tiles,
    problems,
    addresses,
    decay,
    ELEMENT: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one diagonal statistic, as many columns a step as it has rows."""
    tile = tiles + tl.program_id(0) * 2
    problem = problems + tl.load(tile) * 9
    row = tl.load(tile + 1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(addresses + tl.load(problem)).to(tl.pointer_type(ELEMENT))
    target = tl.load(addresses + tl.load(problem + 1)).to(tl.pointer_type(STATE))
    rows, columns = tl.load(problem + 2).to(tl.int32), tl.load(problem + 3).to(tl.int32)
    row_stride, near, far = tl.load(problem + 4), tl.load(problem + 6), tl.load(problem + 7)
    inner = tl.load(problem + 5).to(tl.int32)
    rows_are_dense = tl.load(problem + 8) != 0
    weight = tl.load(decay).to(STATE)

    last = tl.where(weight != 1, columns, 0)
    if rows_are_dense:
        total = tl.zeros((BLOCK, BLOCK), STATE)
        for start in range(0, last, BLOCK):
            c = start + tl.arange(0, BLOCK)
            at = offsets(c, inner, near, far, 1)[:, None] + row[None, :]
            inside = (c < columns)[:, None] & (row < rows)[None, :]
            x = tl.load(source + at, mask=inside, other=0).to(STATE)
            total += x * x
        gram = tl.sum(total, axis=0)
    else:
        total = tl.zeros((BLOCK, BLOCK), STATE)
        at_row = (row.to(tl.int64) * row_stride)[:, None]
        for start in range(0, last, BLOCK):
            c = start + tl.arange(0, BLOCK)
            at = at_row + offsets(c, inner, near, far, 1)[None, :]
            inside = (row < rows)[:, None] & (c < columns)[None, :]
            x = tl.load(source + at, mask=inside, other=0).to(STATE)
            total += x * x
        gram = tl.sum(total, axis=1)
    read, written = tl.where(weight != 0, rows, 0), tl.where(weight != 1, rows, 0)
    old = tl.load(target + row, mask=row < read, other=0)
    tl.store(target + row, weight * old + (1 - weight) * gram, mask=row < written)


class Problem(NamedTuple):
    """One statistic, as the kernels read it."""

    tensor: int  # of the addresses
    stat: int  # of the addresses
    rows: int
    columns: int
    row: int
    inner: int
    near: int
    far: int
    rows_are_dense: int

    def lower_tiles(self, block: int) -> Iterator[tuple[int, int]]:
        """Row and column of each tile of the lower triangle."""
        return ((i, j) for i in range(blocks(self.rows, block)) for j in range(i + 1))

    def work(self, kind: "Kind") -> int:
        """The steps of all tiles."""
        side = blocks(self.rows, block_of(kind.state))
        return side * (side + 1) // 2 * blocks(self.columns, DEPTH)


class Kind(NamedTuple):
    """Statistics that one launch serves: the tensors' dtype, and how wide they are read."""

    element: torch.dtype
    vector: int

    @property
    def state(self) -> torch.dtype:
        """The statistics' dtype."""
        return state_dtype(self.element)


@dataclass
class Plan:
    """What ``gram_ema_`` launches for tensors and statistics of given layouts."""

    problems: Tensor
    tiles: list[tuple[Kind, int, Tensor]]
    sums: list[tuple[torch.dtype, int, Tensor]]
    diagonals: list[tuple[Kind, int, Tensor]]
    partials: dict[torch.dtype, int]  # how many numbers the partial sums take
    copied: frozenset[int]  # tensors whose modes do not merge where they lie
    addresses: Addresses = field(default_factory=Addresses)


@functools.lru_cache(maxsize=64)
def plan(
    tensors: tuple[Layout, ...], diagonal: tuple[bool, ...], device: torch.device, programs: int
) -> Plan:
    """Plans the launches; ``diagonal`` says which statistics are, mode after mode.

    Raises:
        ValueError: where an unfolding has more columns than a 32-bit index can count.
    """
    problems: list[Problem] = []
    full: dict[Kind, list[int]] = defaultdict(list)
    diagonals: dict[Kind, list[tuple[int, ...]]] = defaultdict(list)
    copied = set()
    for t, layout in enumerate(tensors):
        modes = _modes_of(layout)
        if modes is None:
            copied.add(t)
            layout = contiguous(layout)
            modes = _modes_of(layout)
        if modes is None:
            raise ValueError(
                f"tensors[{t}] must have unfoldings of at most {LARGEST_INDEX} rows and columns, "
                f"got {tuple(layout.shape)}"
            )
        for u in modes:
            n = len(problems)
            problems.append(Problem(t, len(tensors) + n, *u, int(u.rows_are_dense)))
            if diagonal[n]:
                kind = Kind(layout.dtype, 1)
                diagonals[kind] += [(n, i) for i in range(blocks(u.rows, block_of(kind.state)))]
            else:
                full[Kind(layout.dtype, layout.vector if u.is_wide(layout.vector) else 1)].append(n)
    merge_small(full, lambda kind, n: problems[n].work(kind), MERGED_STEPS * programs)
    sums: dict[torch.dtype, list[tuple[int, ...]]] = defaultdict(list)
    partials: dict[torch.dtype, int] = defaultdict(int)
    tiles = []
    for kind, numbers in full.items():
        rows = _tiles(kind, {n: problems[n] for n in numbers}, programs, sums[kind.state], partials)
        tiles.append((kind, len(rows), table(rows, torch.int32, device)))
    return Plan(
        table(problems, torch.int64, device),
        tiles,
        [(s, len(rows), table(rows, torch.int32, device)) for s, rows in sums.items() if rows],
        [(k, len(rows), table(rows, torch.int32, device)) for k, rows in diagonals.items()],
        dict(partials),
        frozenset(copied),
    )


def _modes_of(layout: Layout) -> list[Unfolding] | None:
    modes = [unfolded(layout.shape, i, layout.strides) for i in range(len(layout.shape))]
    return [unfoldings[0] for unfoldings in modes if unfoldings] if all(modes) else None


def _tiles(
    kind: Kind,
    problems: Mapping[int, Problem],
    programs: int,
    sums: list[tuple[int, ...]],
    partials: dict[torch.dtype, int],
) -> list[tuple[int, ...]]:
    """The tiles of one launch. Adds to ``sums`` what is to be summed, to ``partials`` its room."""
    work = sum(problem.work(kind) for problem in problems.values())
    share = max(LEAST_STEPS, blocks(work, PARTS * programs))
    block = block_of(kind.state)
    tiles: list[tuple[int, ...]] = []
    for n, problem in problems.items():
        parts = cut(blocks(problem.columns, DEPTH), share)
        for i, j in problem.lower_tiles(block):
            if len(parts) == 1:
                tiles.append((n, i, j, *parts[0], -1))
                continue
            size = min(block, problem.rows - i * block) * min(block, problem.rows - j * block)
            sums.append((n, i, j, partials[kind.state], len(parts)))
            for part in parts:
                tiles.append((n, i, j, *part, partials[kind.state]))
                partials[kind.state] += size
    return tiles


def gram_ema_(
    stats: Sequence[Tensor],
    tensors: Sequence[Tensor],
    decay: Tensor,
    *,
    programs: int | None = None,
) -> None:
    """The operator, with ``stats`` flat; see ``tnt_kernels.gram_ema_``.

    Args:
        stats: the moving averages, mode after mode of tensor after tensor.
        tensors: the tensors.
        decay: in [0, 1].
        programs: how many programs the device runs at once; by default asked of it.
    """
    if not stats:
        return
    device = stats[0].device
    tensors = [t.resolve_neg() for t in tensors]
    p = plan(
        layouts(tensors),
        tuple([s.dim() == 1 for s in stats]),
        device,
        programs or programs_at_once(device),
    )
    hold(device, p)
    for t in p.copied:
        tensors[t] = tensors[t].contiguous()
    addresses, weight = p.addresses.of([*tensors, *stats]), scalar_on(device, decay)
    partials = {
        state: torch.empty(p.partials.get(state, 0), dtype=state, device=device)
        for state in {kind.state for kind, _, _ in p.tiles}
    }
    for kind, count, tiles in p.tiles:
        launch(
            gram_kernel,
            count,
            *(tiles, p.problems, addresses, partials[kind.state], weight),
            ELEMENT=ELEMENTS[kind.element],
            STATE=ELEMENTS[kind.state],
            BLOCK=block_of(kind.state),
            DEPTH=DEPTH,
            VECTOR=kind.vector,
            PRECISION=precision(device),
            num_warps=WARPS,
        )
    for state, count, tiles in p.sums:
        launch(
            sum_kernel,
            count,
            *(tiles, p.problems, addresses, partials[state], weight),
            STATE=ELEMENTS[state],
            BLOCK=block_of(state),
            num_warps=WARPS,
        )
    for kind, count, tiles in p.diagonals:
        launch(
            diagonal_kernel,
            count,
            *(tiles, p.problems, addresses, weight),
            ELEMENT=ELEMENTS[kind.element],
            STATE=ELEMENTS[kind.state],
            BLOCK=block_of(kind.state),
            num_warps=WARPS,
        )
    mark_written(stats)
