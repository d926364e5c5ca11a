"""``damped_inverse`` in Triton: blocked Cholesky inverses of all matrices in the same launches.

A matrix A = U_i + eps I is cut into tiles, padded to whole ones with the identity, and is replaced
from the first panel (a row of tiles) to the last by T = L^-1 with A = L L^T:

    C = L_kk^-1,   P_j = C T_kj  for every j, T_kj being A_jk^T for j > k and I for j = k
    T_kj <- P_j  for j <= k,   T_ij <- T_ij - P_i^T P_j  for i > k, j <= i, from T_ik = 0

The last step waits for AT_ONCE panels, which reads and writes each tile once for all of them. A
panel first catches up on the tiles that it needs: its own row and column.

At last A^-1 = T^T T. That is d^3 operations for a matrix, as LAPACK's potrf and potri have, all in
products of tiles but for the corners C. The elimination that multiplies by L_kk^-T L_kk^-1 at once
needs one launch a panel, not two, but it squares the condition number: in float32 at condition 1e4
its error was 8, the Cholesky inverse's 4e-4 (d = 200, a tenth of the eigenvalues 1).

Corners, panels and products are in 3xTF32 at every precision setting of PyTorch: TF32's ten bits
would make an inverse of condition 1000 noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton.factors import (
    FIRST_MODE,
    ORDER,
    SPAN,
    TENSOR_FIELDS,
    WARPS,
    Plan,
    Work,
    counts_as_zero,
    judge_kernel,
    modes_of,
    nth_root,
    trace_of,
    waves_of,
    work,
)
from tnt_kernels.triton.launch import (
    ELEMENTS,
    Layout,
    Prepared,
    addresses_of,
    block_of,
    contiguous_copies,
    has_tensor_cores,
    launch,
    planned,
    run,
    scalar_on,
    table,
)
from tnt_kernels.triton.tiles import blocks, cut, depth_of, fields, lower_tiles

# A Cholesky pivot of at most this many roundings of its diagonal entry counts as zero.
PIVOT_ROUNDINGS = tl.constexpr(16)

# A row of the modes, int64: indices of two addresses and of its tensor, rows, whether it is
# diagonal, and of a matrix its panels and its tiles in the workspace: the first of a lower
# triangle, row by row; the first P_j^T of AT_ONCE panels, panel after panel; the first A_kk.
STAT, OUT, TENSOR, ROWS, IS_DIAGONAL, PANELS, TRIANGLE, PANEL, CORNER = fields(9)
MODE_FIELDS = tl.constexpr(9)
# What a mode's entries are multiplied by, what is added to the diagonal, and what the inverse is
# multiplied by, float64. The last is a power of two that makes the matrix's entries near 1.
SCALE, DAMPING, UNIT = fields(3)
NUMBER_FIELDS = tl.constexpr(3)

# A row of the strips, int32: a mode, a row of tiles, its columns from the first to before the last.
MODE, TILE_ROW, FIRST, LAST = fields(4)
STRIP_FIELDS = tl.constexpr(4)

# Panels whose updates are made together. For one panel an update does eight operations for each
# byte of its tile: memory bounds it. For eight panels the matrix units bound it.
AT_ONCE = 8
# Tiles of a strip, at most: the programs of a panel all compute the same corner.
MOST_TILES = 8
# Pipeline stages of the loads. A third needs 16 KB more for each operand, so fewer programs fit.
STAGES = 2


@triton.jit
def rescale_kernel(
    tensors,
    modes,
    addresses,
    numbers,
    damping,
    STATE: tl.constexpr,
    SPAN: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    """The numbers of one tensor's modes: U_i = scale S_i, the damping, and the unit.

    With c = (tr S_1 / prod d)^(1/k), the scale is c d_i / tr S_1, which neither overflows nor
    underflows.

    Grid: one program for each tensor, which reads a diagonal. Bound: the launch.
    """
    tensor = tensors + tl.program_id(0) * TENSOR_FIELDS
    first, order = tl.load(tensor + FIRST_MODE), tl.load(tensor + ORDER)
    mode = modes + first * MODE_FIELDS
    rows = tl.load(mode + ROWS)
    step = tl.where(tl.load(mode + IS_DIAGONAL) != 0, 1, rows + 1)
    stat = tl.load(addresses + tl.load(mode + STAT)).to(tl.pointer_type(STATE))
    trace = trace_of(stat, rows, step, SPAN)
    size = tl.full((), 1, tl.float64)
    for i in range(0, order):
        size *= tl.load(modes + (first + i) * MODE_FIELDS + ROWS).to(tl.float64)
    c = nth_root(trace, order) / tl.where(size == 0, 1.0, nth_root(size, order))
    average = trace / tl.maximum(rows, 1).to(tl.float64)
    nothing = counts_as_zero(average, STATE) | (size == 0)
    # Any other number that is not positive makes all entries NaN, and so the first mode fail.
    c = tl.where((trace > 0) & (trace < float("inf")), c, float("nan"))
    c = tl.where(nothing, 0.0, c)
    eps = tl.load(damping)
    if RELATIVE:
        eps = tl.where(nothing, 1.0, eps * c)
    most = c + eps
    bits = (2046 << 52) - (most.to(tl.int64, bitcast=True) & (2047 << 52))
    unit = bits.to(tl.float64, bitcast=True)
    unit = tl.where((most > 1e-290) & (most < 1e290), unit, 1.0)
    for i in range(0, order):
        d = tl.load(modes + (first + i) * MODE_FIELDS + ROWS).to(tl.float64)
        number = numbers + (first + i) * NUMBER_FIELDS
        tl.store(number + SCALE, tl.where(nothing, 0.0, c / trace * d) * unit)
        tl.store(number + DAMPING, eps * unit)
        tl.store(number + UNIT, unit)


@triton.jit
def diagonal_kernel(
    spans,
    modes,
    addresses,
    numbers,
    failed,
    info,
    STATE: tl.constexpr,
    SPAN: tl.constexpr,
    CHECK: tl.constexpr,
):
    """SPAN entries of a diagonal mode's inverse: checks them, or stores them unless it failed.

    Grid: one program for each SPAN entries, which it reads; it writes a flag, or the inverse.
    Bound: memory.
    """
    span = spans + tl.program_id(0) * STRIP_FIELDS
    number = tl.load(span + MODE)
    index = tl.load(span + TILE_ROW) * SPAN + tl.arange(0, SPAN)
    mode, own = modes + number * MODE_FIELDS, numbers + number * NUMBER_FIELDS
    rows = tl.load(mode + ROWS).to(tl.int32)
    stat = tl.load(addresses + tl.load(mode + STAT)).to(tl.pointer_type(STATE))
    entry = tl.load(stat + index, mask=index < rows, other=1).to(tl.float64)
    entry *= tl.load(own + SCALE)
    damped = entry + tl.load(own + DAMPING)
    result = (tl.load(own + UNIT) / damped).to(STATE)
    if CHECK:
        good = (damped > 0) & (entry < float("inf")) & (result < float("inf"))
        bad = tl.where(good | (index >= rows), 0, 1)
        tl.atomic_max(failed + number, tl.max(bad, axis=0))
    else:
        kept = tl.where(tl.load(info + tl.load(mode + TENSOR)) == 0, rows, 0)
        out = tl.load(addresses + tl.load(mode + OUT)).to(tl.pointer_type(STATE))
        tl.store(out + index, result, mask=index < kept)


@triton.jit
def _tile(tiles, number, BLOCK: tl.constexpr):
    """Pointers to the entries of a tile of the workspace."""
    return _columns(tiles, number, 0, BLOCK, BLOCK)


@triton.jit
def _columns(tiles, number, first, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Pointers to DEPTH columns of a tile."""
    row, column = tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    start = tiles + number.to(tl.int64) * (BLOCK * BLOCK) + first
    return start + (row[:, None] * BLOCK + column[None, :])


@triton.jit
def _of_triangle(triangle, row, column):
    """The number of a tile of a lower triangle."""
    return triangle + row * (row + 1) // 2 + column


@triton.jit
def begin_kernel(
    strips,
    modes,
    addresses,
    numbers,
    tiles,
    failed,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of tiles of A = scale S + damping I, padded with the identity.

    Grid: one program for each strip of a lower triangle, which it reads and writes. Bound: memory.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    number, i = tl.load(strip + MODE), tl.load(strip + TILE_ROW)
    mode, own = modes + number * MODE_FIELDS, numbers + number * NUMBER_FIELDS
    rows, triangle = tl.load(mode + ROWS).to(tl.int32), tl.load(mode + TRIANGLE)
    stat = tl.load(addresses + tl.load(mode + STAT)).to(tl.pointer_type(STATE))
    scale, damping = tl.load(own + SCALE), tl.load(own + DAMPING)
    row = i * BLOCK + tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK, BLOCK), tl.int32)
    for j in range(tl.load(strip + FIRST), tl.load(strip + LAST)):
        column = j * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (row[:, None] >= column[None, :])
        at = stat + row.to(tl.int64)[:, None] * rows + column[None, :]
        entry = tl.load(at, mask=inside, other=0).to(tl.float64) * scale
        bad = tl.where(tl.abs(entry) < float("inf"), bad, 1)
        diagonal = tl.where((row < rows)[:, None], entry + damping, 1.0)
        value = tl.where(row[:, None] == column[None, :], diagonal, entry).to(STATE)
        to = tl.where(i == j, tl.load(mode + CORNER) + i, _of_triangle(triangle, i, j))
        tl.store(_tile(tiles, to, BLOCK), value)
    tl.atomic_max(failed + number, tl.max(tl.max(bad, axis=1), axis=0))


@triton.jit
def _inverse_of_root(corner, rows, BLOCK: tl.constexpr):
    """C^T of a symmetric tile A = L L^T, C = L^-1, and A's pivots; the first ``rows`` of both.

    Column k is eliminated in step k. Before it, the first k columns of the tile are final. In the
    others, the first k rows are a part of C^T that later steps complete; the other rows are what is
    left of A, both triangles. Each row of the tile is in one warp, and every warp has the diagonal:
    only turning a column into a row waits for other warps.
    """
    index = tl.arange(0, BLOCK)
    across, down = index[None, :], index[:, None]
    diagonal = tl.sum(tl.where(down == across, corner, 0.0), axis=0)[None, :]
    for k in range(0, rows):
        pivot = tl.sum(tl.where(across == k, diagonal, 0.0), axis=1)[:, None]
        inverse = 1 / tl.sqrt(pivot)
        column = tl.sum(tl.where(across == k, corner, 0.0), axis=1)
        row = tl.where(across > k, column[None, :], 0.0) * inverse  # A is symmetric
        diagonal -= row * row
        column = tl.where(down == k, 1.0, column[:, None]) * inverse
        rest = tl.where(down == k, 0.0, corner) - column * row
        corner = tl.where(across == k, column, rest)
    return tl.where(down <= across, corner, 0.0), tl.sum(diagonal, axis=0)


@triton.jit
def _less_products(
    value,
    tiles,
    left,
    right,
    panels,
    first,
    last,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """value - the sum of P_i^T P_j over panels ``first`` to ``last`` of those in the workspace.

    ``left`` and ``right`` are the tiles P_i^T and P_j^T of the first of these.
    """
    for start in range(first * BLOCK, last * BLOCK, DEPTH):
        skipped, term = start // BLOCK * panels, tl.multiple_of(start % BLOCK, DEPTH)
        a = -tl.load(_columns(tiles, left + skipped, term, BLOCK, DEPTH))
        b = tl.load(_columns(tiles, right + skipped, term, BLOCK, DEPTH))
        value = tl.dot(a, tl.trans(b), value, input_precision=PRECISION, out_dtype=value.dtype)
    return value


@triton.jit(do_not_specialize=["k"])
def panel_kernel(
    strips,
    modes,
    addresses,
    numbers,
    tiles,
    failed,
    k,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Panel k: the corner's C, then P_j^T = T_kj^T C^T for each tile of a strip.

    Both after the updates by earlier panels that wait. All strips of a panel compute the corner,
    which takes longer than their products: one launch less, and nothing waits for one program.

    Grid: one program for each strip of tiles of a matrix. It reads and writes its tiles of the
    panel. Bound: the latency of BLOCK dependent steps, which each wait for all warps twice.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    number, first = tl.load(strip + MODE), tl.load(strip + FIRST)
    mode, own = modes + number * MODE_FIELDS, numbers + number * NUMBER_FIELDS
    triangle, panel = tl.load(mode + TRIANGLE), tl.load(mode + PANEL)
    rows = tl.minimum(tl.load(mode + ROWS).to(tl.int32) - k * BLOCK, BLOCK)
    panels, waiting = tl.load(mode + PANELS).to(tl.int32), k % AT_ONCE
    DEPTH: tl.constexpr = 16  # with more it spills registers
    corner = tl.load(_tile(tiles, tl.load(mode + CORNER) + k, BLOCK))
    corner = _less_products(
        *(corner, tiles, panel + k, panel + k, panels, 0, waiting, BLOCK, DEPTH, PRECISION)
    )
    index = tl.arange(0, BLOCK)
    # The two triangles of a product in 3xTF32 may differ by a rounding.
    corner = tl.where(index[:, None] >= index[None, :], corner, tl.trans(corner))
    c, pivots = _inverse_of_root(corner, rows, BLOCK)
    if first == 0:
        stat = tl.load(addresses + tl.load(mode + STAT)).to(tl.pointer_type(STATE))
        row = k * BLOCK + index
        at = stat + row.to(tl.int64) * (tl.load(mode + ROWS) + 1)
        entry = tl.load(at, mask=index < rows, other=0).to(tl.float64) * tl.load(own + SCALE)
        ROUNDING: tl.constexpr = 2.0**-52 if STATE == tl.float64 else 2.0**-23
        least = PIVOT_ROUNDINGS * ROUNDING * (entry + tl.load(own + DAMPING))
        good = (pivots.to(tl.float64) > least) | (index >= rows)
        tl.atomic_max(failed + number, tl.max(tl.where(good, 0, 1), axis=0))
    # Both parts of C in 3xTF32, held for all tiles, would spill registers.
    SPLITS: tl.constexpr = STATE == tl.float32
    for j in tl.range(first, tl.load(strip + LAST), disable_licm=SPLITS):
        if j == k:
            value = c
        else:
            # A tile of a panel that waits starts from 0, with that panel.
            since = tl.maximum(j - (k - waiting), 0)
            if j < k:
                at = _tile(tiles, _of_triangle(triangle, k, j), BLOCK)
                operand = tl.trans(tl.load(at, mask=j < k - waiting, other=0))
            else:
                operand = tl.load(_tile(tiles, _of_triangle(triangle, j, k), BLOCK))
                since = 0
            operand = _less_products(
                *(operand, tiles, panel + j, panel + k, panels),
                *(since, waiting, BLOCK, DEPTH, PRECISION),
            )
            value = tl.dot(operand, c, input_precision=PRECISION, out_dtype=STATE)
        tl.store(_tile(tiles, panel + waiting * panels + j, BLOCK), value)
        if j <= k:
            # Transposed, because the last product sums over rows.
            tl.store(_tile(tiles, _of_triangle(triangle, k, j), BLOCK), value)


@triton.jit(do_not_specialize=["k"])
def update_kernel(
    strips,
    modes,
    tiles,
    k,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """T_ij <- T_ij - P_i^T P_j for the tiles of a strip below panel k, by AT_ONCE panels up to k.

    Grid: one program for each strip of a lower triangle. It reads a row of tiles of the panels, and
    for each tile another, and reads and writes the tile. Bound: matrix units.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    mode, i = modes + tl.load(strip + MODE) * MODE_FIELDS, tl.load(strip + TILE_ROW)
    triangle, panel = tl.load(mode + TRIANGLE), tl.load(mode + PANEL)
    panels, before = tl.load(mode + PANELS).to(tl.int32), k + 1 - AT_ONCE
    DEPTH: tl.constexpr = depth_of(STEP, PRECISION)
    for j in range(tl.load(strip + FIRST), tl.load(strip + LAST)):
        to = tl.where(i == j, tl.load(mode + CORNER) + i, _of_triangle(triangle, i, j))
        is_old = (j < before) | (j > k)
        value = tl.load(_tile(tiles, to, BLOCK), mask=is_old, other=0)
        since = tl.where(is_old, 0, j - before)
        value = _less_products(
            *(value, tiles, panel + i, panel + j, panels),
            *(since, AT_ONCE, BLOCK, DEPTH, PRECISION),
        )
        tl.store(_tile(tiles, to, BLOCK), value)


@triton.jit
def check_kernel(
    strips,
    modes,
    numbers,
    tiles,
    failed,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whether the diagonal of T^T T is finite, for one column of tiles; its other entries are less.

    Grid: one program for each column of tiles of a matrix, which it reads. Bound: memory.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    number, j = tl.load(strip + MODE), tl.load(strip + TILE_ROW)
    mode = modes + number * MODE_FIELDS
    triangle, panels = tl.load(mode + TRIANGLE), tl.load(mode + PANELS).to(tl.int32)
    total = tl.zeros((BLOCK, BLOCK), tl.float64)
    for i in range(j, panels):
        value = tl.load(_tile(tiles, _of_triangle(triangle, i, j), BLOCK)).to(tl.float64)
        total += value * value
    # T's tiles are stored transposed.
    entry = (tl.sum(total, axis=1) * tl.load(numbers + number * NUMBER_FIELDS + UNIT)).to(STATE)
    bad = tl.where(entry < float("inf"), 0, 1)
    tl.atomic_max(failed + number, tl.max(bad, axis=0))


@triton.jit
def product_kernel(
    strips,
    modes,
    addresses,
    numbers,
    tiles,
    info,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of the inverse T^T T, and its mirror image, unless the tensor failed.

    Grid: one program for each tile of a lower triangle. It reads two columns of tiles from its row
    on, and writes the tile and its mirror image. Bound: matrix units.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    number, i, j = tl.load(strip + MODE), tl.load(strip + TILE_ROW), tl.load(strip + FIRST)
    mode = modes + number * MODE_FIELDS
    if tl.load(info + tl.load(mode + TENSOR)) != 0:
        return
    triangle, panels = tl.load(mode + TRIANGLE), tl.load(mode + PANELS).to(tl.int32)
    total = tl.zeros((BLOCK, BLOCK), STATE)
    DEPTH: tl.constexpr = depth_of(STEP, PRECISION)
    for start in range(i * BLOCK, panels * BLOCK, DEPTH):
        first, term = _of_triangle(triangle, start // BLOCK, 0), start % BLOCK
        term = tl.multiple_of(term, DEPTH)
        left = tl.load(_columns(tiles, first + i, term, BLOCK, DEPTH))
        right = tl.load(_columns(tiles, first + j, term, BLOCK, DEPTH))
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION, out_dtype=STATE)
    unit = tl.load(numbers + number * NUMBER_FIELDS + UNIT)
    value = (total.to(tl.float64) * unit).to(STATE)
    mirrored = tl.trans(value)
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(mode + ROWS).to(tl.int32)
    out = tl.load(addresses + tl.load(mode + OUT)).to(tl.pointer_type(STATE))
    if i == j:
        value = tl.where(row[:, None] >= column[None, :], value, mirrored)
    at = out + row.to(tl.int64)[:, None] * rows + column[None, :]
    tl.store(at, value, mask=(row < rows)[:, None] & (column < rows)[None, :])
    if i != j:
        at = out + column.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(at, mirrored, mask=(column < rows)[:, None] & (row < rows)[None, :])


@dataclass
class Wave:
    """The launches for tensors of one dtype that share the workspace."""

    state: torch.dtype
    tiles: int  # of the workspace
    modes: Tensor
    tensors: Work
    spans: Work
    rows: Work  # of tiles, in strips
    panels: list[Work]  # of each k
    updates: list[Work]  # after each AT_ONCE panels
    columns: Work
    products: Work


def plan(
    stats: tuple[Layout, ...], device: torch.device, programs: int, orders: tuple[int, ...]
) -> Plan[Wave]:
    """Plans the launches; ``stats`` flat, contiguous."""
    modes = modes_of(orders)
    needs = {
        t: sum(_tiles_of(stats[n]) * block_of(stats[n].dtype) ** 2 for n in numbers)
        for t, numbers in enumerate(modes)
    }
    result = [
        _wave(state, members, stats, modes, device, programs)
        for state, members in waves_of(stats, modes, needs)
    ]
    sizes = [w.tiles * block_of(w.state) ** 2 * w.state.itemsize for w in result]
    return Plan(result, max(sizes, default=0))


def _panels_of(stat: Layout) -> int:
    """Rows of tiles of a matrix, 0 for a diagonal mode."""
    return blocks(stat.shape[0], block_of(stat.dtype)) if len(stat.shape) == 2 else 0


def _tiles_of(stat: Layout) -> int:
    """Tiles of the workspace of a matrix: a triangle, panels, corners."""
    panels = _panels_of(stat)
    return panels * (panels + 1) // 2 + (min(AT_ONCE, panels) + 1) * panels


def _wave(
    state: torch.dtype,
    members: Sequence[int],
    stats: Sequence[Layout],
    numbers: Sequence[range],
    device: torch.device,
    programs: int,
) -> Wave:
    modes: list[tuple[int, ...]] = []
    tensors: list[tuple[int, ...]] = []
    spans: list[tuple[int, ...]] = []
    full: list[tuple[int, int]] = []  # mode and panels
    free = 0
    for t in members:
        tensors.append((t, len(modes), len(numbers[t])))
        for n in numbers[t]:
            stat, number, panels = stats[n], len(modes), _panels_of(stats[n])
            if panels:
                full.append((number, panels))
            elif len(stat.shape) == 1:
                spans += [(number, i, 0, 0) for i in range(blocks(stat.shape[0], SPAN))]
            is_diagonal, panel = len(stat.shape) == 1, free + panels * (panels + 1) // 2
            places = panels, free, panel, panel + min(AT_ONCE, panels) * panels
            modes.append((n, len(stats) + n, t, stat.shape[0], is_diagonal, *places))
            free += _tiles_of(stat)

    # Sorted so that the programs that still have work at panel k come first.
    full.sort(key=lambda matrix: -matrix[1])
    most = full[0][1] if full else 0
    length = _length(sum(count for _, count in full), programs)
    in_panels = [(m, 0, *ends) for m, count in full for ends in cut(count, length)]
    length = _length(sum(count * (count + 1) // 2 for _, count in full), programs)
    in_rows = [
        (m, i, *ends)
        for i in reversed(range(most))
        for m, count in full
        if i < count
        for ends in cut(i + 1, length)
    ]
    counts = dict(full)
    panels_of, rows = work(in_panels, device), work(in_rows, device)
    return Wave(
        state,
        free,
        table(modes, torch.int64, device),
        work(tensors, device),
        work(spans, device),
        rows,
        [Work(sum(counts[m] > k for m, *_ in in_panels), panels_of.rows) for k in range(most)],
        [
            Work(sum(i > k for _, i, *_ in in_rows), rows.rows)
            for k in range(AT_ONCE - 1, most, AT_ONCE)
        ],
        work([(m, j, 0, 0) for m, count in full for j in range(count)], device),
        work([(m, i, j, 0) for m, count in full for i, j in lower_tiles(count, 1)], device),
    )


def _length(tiles: int, programs: int) -> int:
    """Tiles of a strip: several if there are more tiles than programs at once."""
    return max(1, min(tiles // programs, MOST_TILES))


def damped_inverse(
    out: Sequence[Tensor],
    stats: Sequence[Tensor],
    orders: Sequence[int],
    damping: Tensor,
    relative: bool,
) -> Tensor:
    """The operator with ``out`` and ``stats`` flat."""
    if not stats:
        return torch.zeros(len(orders), dtype=torch.int32, device=damping.device)
    device = stats[0].device
    stats = contiguous_copies(stats)
    p = planned(plan, stats, rest=(tuple(orders),))
    addresses, eps = addresses_of(stats, out), scalar_on(device, damping)
    info = torch.empty(len(orders), dtype=torch.int32, device=device)
    waves = [
        Prepared(p.scratch, _prepared(wave, addresses, info, eps, relative)) for wave in p.waves
    ]
    run(device, waves, out)
    return info


def _prepared(
    wave: Wave, addresses: Tensor, info: Tensor, damping: Tensor, relative: bool
) -> Callable[[Tensor], None]:
    """Takes a wave's memory; returns what launches it in a workspace."""
    device, modes = info.device, len(wave.modes) // MODE_FIELDS.value
    numbers = torch.empty(modes, NUMBER_FIELDS.value, dtype=torch.float64, device=device)
    failed = torch.zeros(modes, dtype=torch.int32, device=device)
    state = {"STATE": ELEMENTS[wave.state], "num_warps": WARPS}
    span, tile = {**state, "SPAN": SPAN}, {**state, "BLOCK": block_of(wave.state)}
    single = wave.state == torch.float32
    precision = "tf32x3" if single and has_tensor_cores(device) else "ieee"
    product = {**tile, "PRECISION": precision, "num_stages": STAGES if single else 1}
    step = 32 if single else 16

    scaled = wave.modes, addresses, numbers

    def start(scratch: Tensor) -> None:
        tiles = scratch.view(wave.state)
        launch(rescale_kernel, *wave.tensors, *scaled, damping, **span, RELATIVE=relative)
        launch(diagonal_kernel, *wave.spans, *scaled, failed, info, **span, CHECK=True)
        # Its float64 numbers want twice the registers.
        launch(begin_kernel, *wave.rows, *scaled, tiles, failed, **tile | {"num_warps": 2 * WARPS})
        for k, panel in enumerate(wave.panels):
            launch(panel_kernel, *panel, *scaled, tiles, failed, k, **product, AT_ONCE=AT_ONCE)
            if (k + 1) % AT_ONCE == 0:
                update = wave.updates[k // AT_ONCE]
                steps = {"STEP": step, "AT_ONCE": AT_ONCE}
                launch(update_kernel, *update, wave.modes, tiles, k, **product, **steps)
        launch(check_kernel, *wave.columns, wave.modes, numbers, tiles, failed, **tile)
        launch(judge_kernel, *wave.tensors, failed, info, STRIDE=1, num_warps=1)
        launch(product_kernel, *wave.products, *scaled, tiles, info, **product, STEP=step)
        launch(diagonal_kernel, *wave.spans, *scaled, failed, info, **span, CHECK=False)

    return start
