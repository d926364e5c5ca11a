"""``damped_inverse`` in Triton: blocked Cholesky inverses of all matrices in the same launches.

A matrix A = U_i + eps I is cut into tiles, padded to whole ones with the identity. With A = L L^T
and T = L^-1, the inverse is T^T T. T and then the inverse replace A in place, one row of tiles, a
panel, after the other. Panel k computes

    C = L_kk^-1,   P_j = C T_kj  for every j, T_kj being A_jk^T for j > k and I for j = k

which completes row k of T: P_j for j <= k. AT_ONCE panels make a group, whose P_j^T are packed into
an operand R, with 0 for j > k in the group. One product then updates the lower triangle:

    T_ij <- T_ij - R_i R_j^T  below the group,   A^-1_ij <- A^-1_ij + R_i R_j^T  to its last row

A tile whose row or column is in the group begins from 0. Panel k first subtracts the products of
the group's earlier panels from its tiles. It reads their P_k from extra rows of R, because R has 0
there. Corners come earlier: each panel subtracts its own products from the later ones.

That is d^3 operations for a matrix, as LAPACK's potrf and potri have, all in products of tiles but
for the corners C. The elimination that multiplies by L_kk^-T L_kk^-1 at once needs no T, but it
squares the condition number: in float32 at condition 1e4 its error was 8, the Cholesky inverse's
4e-4 (d = 200, a tenth of the eigenvalues 1).

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
    Work,
    computed_factors,
    counts_as_zero,
    judge_kernel,
    modes_of,
    nth_root,
    store_lower,
    trace_of,
    waves_of,
    work,
)
from tnt_kernels.triton.launch import (
    ELEMENTS,
    Layout,
    block_of,
    has_tensor_cores,
    launch,
    table,
)
from tnt_kernels.triton.pack import (
    SPLIT,
    TERMS,
    all_steps,
    by_parts,
    form_of,
    packed_product,
    rows_of,
    store_packed,
)
from tnt_kernels.triton.tiles import (
    LARGE_BLOCK,
    blocks,
    cut,
    fields,
    lower_tiles,
    warps_of,
)

# A Cholesky pivot of at most this many roundings of its diagonal entry counts as zero.
PIVOT_ROUNDINGS = tl.constexpr(16)

# A row of the modes, int64: indices of two addresses and of its tensor, rows, whether it is
# diagonal. Of a matrix its panels, the number of the first tile of its lower triangle in the
# workspace (row by row), the first byte of R there, and the numbers in R's rows.
STAT, OUT, TENSOR, ROWS, IS_DIAGONAL, PANELS, TRIANGLE, OPERAND, STRIDE = fields(9)
MODE_FIELDS = tl.constexpr(9)
# What a mode's entries are multiplied by, what is added to the diagonal, and what the inverse is
# multiplied by, float64. The last is a power of two that makes the matrix's entries near 1.
SCALE, DAMPING, UNIT = fields(3)
NUMBER_FIELDS = tl.constexpr(3)

# A row of the strips, int32: a mode, a row of tiles, its columns from the first to before the last.
MODE, TILE_ROW, FIRST, LAST = fields(4)
STRIP_FIELDS = tl.constexpr(4)

# Panels of a group. For one panel an update does 16 operations for each byte of its tile: memory
# bounds it. For eight the matrix units do.
AT_ONCE = 8
# Tiles of a strip, at most: the programs of a panel all compute the same corner.
MOST_TILES = 8
# Pipeline stages of a panel's loads, of which a program has few. With three, the first panel of a
# group, which has no step, would divide by 0 steps.
STAGES = 2


@triton.jit
def rescale_kernel(
    tensors,
    modes,
    addresses,
    numbers,
    damping,
    STATE: tl.constexpr,
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
    trace = trace_of(stat, rows, step)
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
def _number_of(triangle, row, column):
    """The number of a tile of a lower triangle, int64."""
    return triangle + (row * (row + 1) // 2 + column)


@triton.jit
def _tile(tiles, triangle, row, column, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to the first WIDTH columns of a tile of a lower triangle."""
    start = tiles + _number_of(triangle, row, column) * (BLOCK * BLOCK)
    return start + (tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, WIDTH)[None, :])


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
        tl.store(_tile(tiles, triangle, i, j, BLOCK, BLOCK), value)
    tl.atomic_max(failed + number, tl.max(tl.max(bad, axis=1), axis=0))


@triton.jit
def _eliminated(half, first, rows, BLOCK: tl.constexpr):
    """Eliminates half of a tile's columns: returns them, C^T above L, and their pivots.

    Column k is eliminated in step k. Before it, earlier columns are final. In the others, the first
    k rows are a part of C^T that later steps complete; the other rows are what is left of A, whose
    lower triangle counts. Each row is in one warp, and every warp has the diagonal: only turning a
    column into a row waits for other warps.
    """
    HALF: tl.constexpr = BLOCK // 2
    index = first + tl.arange(0, HALF)
    down, across = tl.arange(0, BLOCK)[:, None], index[None, :]
    diagonal = tl.sum(tl.where(down == across, half, 0.0), axis=0)[None, :]
    for k in range(first, tl.minimum(rows, first + HALF)):
        pivot = tl.sum(tl.where(across == k, diagonal, 0.0), axis=1)[:, None]
        inverse = 1 / tl.sqrt(pivot)
        column = tl.sum(tl.where(across == k, half, 0.0), axis=1)
        row = tl.where(across > k, tl.gather(column, index, 0)[None, :], 0.0) * inverse
        diagonal -= row * row
        column = tl.where(down == k, 1.0, column[:, None]) * inverse
        rest = tl.where(down == k, 0.0, half) - column * row
        half = tl.where(across == k, column, rest)
    return half, tl.sum(diagonal, axis=0)


@triton.jit
def _check_pivots(
    pivots, first, mode, own, addresses, failed, STATE: tl.constexpr, COUNT: tl.constexpr
):
    """Whether COUNT pivots, of the matrix's rows from ``first`` on, are more than roundings."""
    row, rows = first + tl.arange(0, COUNT), tl.load(mode + ROWS)
    stat = tl.load(addresses + tl.load(mode + STAT)).to(tl.pointer_type(STATE))
    entry = tl.load(stat + row.to(tl.int64) * (rows + 1), mask=row < rows, other=0)
    damped = entry.to(tl.float64) * tl.load(own + SCALE) + tl.load(own + DAMPING)
    ROUNDING: tl.constexpr = 2.0**-52 if STATE == tl.float64 else 2.0**-23
    good = (pivots.to(tl.float64) > PIVOT_ROUNDINGS * ROUNDING * damped) | (row >= rows)
    tl.atomic_max(failed, tl.max(tl.where(good, 0, 1), axis=0))


@triton.jit
def _rows_of(tiles, mode, row, BLOCK: tl.constexpr, STATE: tl.constexpr):
    """The addresses of a row of tiles of R."""
    index = row * BLOCK + tl.arange(0, BLOCK)
    return rows_of(tiles, mode + OPERAND, mode + STRIDE, index, STATE)


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
    FORM: tl.constexpr,
):
    """Panel k: the corner's C, then P_j^T = T_kj^T C^T for each tile of a strip, packed.

    A program also subtracts its products from the corners of the group's later panels. Every
    program computes the corner itself: this repeats work, but it saves a launch.

    C^T is made in two halves, of 32 columns in float32: a step then has half the instructions.

    Grid: one program for each strip of tiles of a matrix. It reads the corner, its tiles of the
    panel and rows of R, and writes its rows of R and the corners of later panels. Bound: the
    latency of BLOCK dependent steps, which each wait for all warps twice.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    number, first = tl.load(strip + MODE), tl.load(strip + FIRST)
    mode, own = modes + number * MODE_FIELDS, numbers + number * NUMBER_FIELDS
    triangle, panels = tl.load(mode + TRIANGLE), tl.load(mode + PANELS).to(tl.int32)
    rows, apart = tl.load(mode + ROWS).to(tl.int32) - k * BLOCK, _apart(mode, FORM)
    HALF: tl.constexpr = BLOCK // 2
    PRECISION: tl.constexpr = "tf32x3" if FORM == SPLIT else "ieee"
    index, column = tl.arange(0, BLOCK), tl.arange(0, HALF)[None, :]

    at = _tile(tiles, triangle, k, k, BLOCK, HALF)
    c_left, pivots = _eliminated(tl.load(at), 0, rows, BLOCK)
    if first == 0:
        _check_pivots(pivots, k * BLOCK, mode, own, addresses, failed + number, STATE, HALF)
    products = tl.dot(c_left, tl.trans(c_left), input_precision=PRECISION, out_dtype=STATE)
    _, products = tl.split(tl.permute(tl.reshape(products, (BLOCK, 2, HALF)), (0, 2, 1)))
    rest = tl.load(at + HALF, mask=index[:, None] >= HALF, other=0) - products
    c_right, pivots = _eliminated(rest, HALF, rows, BLOCK)
    if first == 0:
        _check_pivots(pivots, k * BLOCK + HALF, mode, own, addresses, failed + number, STATE, HALF)
    c_left = tl.where(index[:, None] <= column, c_left, 0.0)
    c_right = tl.where(index[:, None] <= HALF + column, c_right, 0.0)

    earlier, steps = k % AT_ONCE, BLOCK // TERMS
    begin, end = k - earlier, k - earlier + AT_ONCE
    every = index[:, None] >= 0
    at_k = _rows_of(tiles, mode, panels + earlier, BLOCK, STATE)
    # Both parts of C in 3xTF32, held for all tiles, would spill registers.
    SPLITS: tl.constexpr = FORM == SPLIT
    for j in tl.range(first, tl.load(strip + LAST), disable_licm=SPLITS):
        is_later = (j > k) & (j < end)
        at_j = _rows_of(tiles, mode, tl.where(is_later, panels + j - begin, j), BLOCK, STATE)
        if j == k:
            left, right = c_left, c_right
        else:
            if j < k:
                unfinished = _tile(tiles, triangle, k, j, BLOCK, BLOCK)
                operand = tl.trans(tl.load(unfinished, mask=j < begin, other=0))
            else:
                operand = tl.load(_tile(tiles, triangle, j, k, BLOCK, BLOCK))
            operand -= packed_product(
                *(at_j, at_k, every, every, 0, all_steps(earlier * steps, FORM), earlier * steps),
                *(apart, STATE, FORM, BLOCK, BLOCK),
            )
            left = tl.dot(operand, c_left, input_precision=PRECISION, out_dtype=STATE)
            right = tl.dot(operand, c_right, input_precision=PRECISION, out_dtype=STATE)
        at_own = at_j + earlier * BLOCK
        store_packed(at_own + column, apart * TERMS, left, every, FORM)
        store_packed(at_own + (column + HALF), apart * TERMS, right, every, FORM)
        if is_later:
            zero = tl.zeros((BLOCK, BLOCK), STATE)
            in_group = _rows_of(tiles, mode, j, BLOCK, STATE) + (earlier * BLOCK + index[None, :])
            store_packed(in_group, apart * TERMS, zero, every, FORM)
            tl.debug_barrier()  # each thread now reads what others have stored
            corner = _tile(tiles, triangle, j, j, BLOCK, BLOCK)
            left_over = tl.load(corner) - packed_product(
                *(at_own, at_own, every, every, 0, all_steps(steps, FORM), steps),
                *(apart, STATE, FORM, BLOCK, BLOCK),
            )
            tl.store(corner, left_over)


@triton.jit
def _apart(mode, FORM: tl.constexpr):
    """The steps from the first part of R's rows to the second."""
    return tl.load(mode + STRIDE).to(tl.int32) // (2 * TERMS)


@triton.jit
def _update_columns(
    product,
    first_column,
    arguments,
    CONSTANTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Adds a product of the group to columns of a tile of A^-1, or takes it from one of T."""
    tiles, mode, first_row, begin, end = arguments
    BLOCK: tl.constexpr = CONSTANTS
    row, column = first_row + tl.arange(0, HEIGHT), first_column + tl.arange(0, WIDTH)
    i, j = row // BLOCK, column // BLOCK
    panels = tl.load(mode + PANELS).to(tl.int32)
    tile = _number_of(tl.load(mode + TRIANGLE), i[:, None], j[None, :])
    at = tiles + tile * (BLOCK * BLOCK) + (row % BLOCK * BLOCK)[:, None] + (column % BLOCK)[None, :]
    kept = (i[:, None] >= j[None, :]) & (i < panels)[:, None]
    is_old = ((i < begin) | (i >= end))[:, None] & ((j < begin) | (j >= end))[None, :]
    old = tl.load(at, mask=kept & is_old, other=0)
    value = tl.where((i >= end)[:, None], old - product, old + product)
    tl.store(at, value, mask=kept)


@triton.jit(do_not_specialize=["begin"])
def update_kernel(
    strips,
    modes,
    tiles,
    begin,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FORM: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """A tile of A^-1 and T after the group that begins with panel ``begin``.

    Grid: one program for each tile of a lower triangle. It reads two rows of tiles of R, and reads
    and writes the tile. Bound: matrix units.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    mode = modes + tl.load(strip + MODE) * MODE_FIELDS
    row = tl.load(strip + TILE_ROW) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.load(strip + FIRST) * HEIGHT + tl.arange(0, HEIGHT)
    panels = tl.load(mode + PANELS).to(tl.int32)
    steps = (tl.minimum(begin + AT_ONCE, panels) - begin) * (BLOCK // TERMS)
    product = packed_product(
        rows_of(tiles, mode + OPERAND, mode + STRIDE, row, STATE),
        rows_of(tiles, mode + OPERAND, mode + STRIDE, column, STATE),
        (row < panels * BLOCK)[:, None],
        (column < panels * BLOCK)[:, None],
        0,
        all_steps(steps, FORM),
        steps,
        _apart(mode, FORM),
        STATE,
        FORM,
        HEIGHT,
        HEIGHT,
    )
    # Loaded here: the product would otherwise hold these in registers.
    mode = modes + tl.load(strip + MODE) * MODE_FIELDS
    end = begin + AT_ONCE
    first_row, first_column = tl.load(strip + TILE_ROW) * HEIGHT, tl.load(strip + FIRST) * HEIGHT
    arguments = tiles, mode, first_row, begin, end
    LEAST: tl.constexpr = HEIGHT if HEIGHT <= 32 else HEIGHT // 8
    by_parts(_update_columns, product, first_column, arguments, BLOCK, HEIGHT, HEIGHT, LEAST)


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
    """Whether BLOCK entries of the inverse's diagonal are finite: then its other entries are.

    Grid: one program for each row of tiles of a matrix, which reads a diagonal. Bound: the launch.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    number, i = tl.load(strip + MODE), tl.load(strip + TILE_ROW)
    triangle = tl.load(modes + number * MODE_FIELDS + TRIANGLE)
    first = tiles + _number_of(triangle, i, i) * (BLOCK * BLOCK)
    entry = tl.load(first + tl.arange(0, BLOCK) * (BLOCK + 1)).to(tl.float64)
    entry = (entry * tl.load(numbers + number * NUMBER_FIELDS + UNIT)).to(STATE)
    tl.atomic_max(failed + number, tl.max(tl.where(entry < float("inf"), 0, 1), axis=0))


@triton.jit
def end_kernel(
    strips,
    modes,
    addresses,
    numbers,
    tiles,
    info,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of tiles of the inverse, and their mirror images, unless the tensor failed.

    Grid: one program for each strip of a lower triangle, which it reads; it writes the tiles and
    their mirror images. Bound: memory.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    number, i = tl.load(strip + MODE), tl.load(strip + TILE_ROW)
    mode = modes + number * MODE_FIELDS
    kept = tl.load(info + tl.load(mode + TENSOR)) == 0
    rows, triangle = tl.load(mode + ROWS).to(tl.int32), tl.load(mode + TRIANGLE)
    unit = tl.load(numbers + number * NUMBER_FIELDS + UNIT)
    out = tl.load(addresses + tl.load(mode + OUT)).to(tl.pointer_type(STATE))
    row = i * BLOCK + tl.arange(0, BLOCK)
    for j in range(tl.load(strip + FIRST), tl.where(kept, tl.load(strip + LAST), 0)):
        column = j * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(_tile(tiles, triangle, i, j, BLOCK, BLOCK))
        value = (value.to(tl.float64) * unit).to(STATE)
        store_lower(out, value, row, column, rows, rows)


@dataclass
class Wave:
    """The launches for tensors of one dtype that share the workspace."""

    state: torch.dtype
    scratch: int  # bytes of the workspace
    modes: Tensor
    tensors: Work
    spans: Work
    rows: Work  # of tiles, in strips
    panels: list[Work]  # of each k
    height: int  # of the tiles of updates
    updates: list[Work]  # of each group
    diagonals: Work


def plan(
    stats: tuple[Layout, ...], device: torch.device, programs: int, orders: tuple[int, ...]
) -> list[Wave]:
    """Plans the launches; ``stats`` flat, contiguous."""
    modes = modes_of(orders)
    needs = {
        t: sum(_tiles_of(stats[n], device) * block_of(stats[n].dtype) ** 2 for n in numbers)
        for t, numbers in enumerate(modes)
    }
    return [
        _wave(state, members, stats, modes, device, programs)
        for state, members in waves_of(stats, modes, needs)
    ]


def _panels_of(stat: Layout) -> int:
    """Rows of tiles of a matrix, 0 for a diagonal mode."""
    return blocks(stat.shape[0], block_of(stat.dtype)) if len(stat.shape) == 2 else 0


def _form(state: torch.dtype, device: torch.device) -> tl.constexpr:
    """How operands are packed."""
    return form_of(state, "tf32x3" if has_tensor_cores(device) else "ieee")


def _width_of(stat: Layout, device: torch.device) -> int:
    """Tiles in a row of R."""
    return min(AT_ONCE, _panels_of(stat)) * (2 if _form(stat.dtype, device) is SPLIT else 1)


def _tiles_of(stat: Layout, device: torch.device) -> int:
    """Tiles of the workspace of a matrix: a triangle, and R with its rows for later panels."""
    panels = _panels_of(stat)
    rows = panels + min(AT_ONCE, panels)
    return panels * (panels + 1) // 2 + rows * _width_of(stat, device)


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
    block, free = block_of(state), 0
    for t in members:
        tensors.append((t, len(modes), len(numbers[t])))
        for n in numbers[t]:
            stat, number, panels = stats[n], len(modes), _panels_of(stats[n])
            if panels:
                full.append((number, panels))
            elif len(stat.shape) == 1:
                spans += [(number, i, 0, 0) for i in range(blocks(stat.shape[0], SPAN.value))]
            operand = (free + panels * (panels + 1) // 2) * block**2 * state.itemsize
            places = panels, free, operand, _width_of(stat, device) * block
            modes.append((n, len(stats) + n, t, stat.shape[0], len(stat.shape) == 1, *places))
            free += _tiles_of(stat, device)

    # Sorted so that the programs that still have work at panel k come first.
    full.sort(key=lambda matrix: -matrix[1])
    most = full[0][1] if full else 0
    length = _length(sum(count for _, count in full), programs)
    in_panels = [(m, 0, *ends) for m, count in full for ends in cut(count, length)]
    length = _length(sum(count * (count + 1) // 2 for _, count in full), programs)
    in_rows = [
        (m, i, *ends) for m, count in full for i in range(count) for ends in cut(i + 1, length)
    ]
    height = _height(state, [count for _, count in full], programs)
    in_updates = [(m, i, j, 0) for m, count in full for i, j in lower_tiles(count * block, height)]
    counts = dict(full)
    panels_of, updates_of = work(in_panels, device), work(in_updates, device)
    return Wave(
        state,
        free * block**2 * state.itemsize,
        table(modes, torch.int64, device),
        work(tensors, device),
        work(spans, device),
        work(in_rows, device),
        [Work(sum(counts[m] > k for m, *_ in in_panels), panels_of.rows) for k in range(most)],
        height,
        [
            Work(sum(counts[m] > k for m, *_ in in_updates), updates_of.rows)
            for k in range(0, most, AT_ONCE)
        ],
        work([(m, i, 0, 0) for m, count in full for i in range(count)], device),
    )


def _height(state: torch.dtype, panels: Sequence[int], programs: int) -> int:
    """Rows and columns of an update's tiles: large ones unless they leave programs idle."""
    sides = [blocks(count, 2) for count in panels if count > 1]
    large = sum(side * (side + 1) // 2 for side in sides)
    return LARGE_BLOCK if state == torch.float32 and large >= programs else block_of(state)


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
    return computed_factors(plan, _prepared, out, stats, orders, damping, relative)


def _prepared(
    wave: Wave, info: Tensor, addresses: Tensor, damping: Tensor, relative: bool
) -> Callable[[Tensor], None]:
    """Takes a wave's memory; returns what launches it in a workspace."""
    device, modes = info.device, len(wave.modes) // MODE_FIELDS.value
    numbers = torch.empty(modes, NUMBER_FIELDS.value, dtype=torch.float64, device=device)
    failed = torch.zeros(modes, dtype=torch.int32, device=device)
    state = {"STATE": ELEMENTS[wave.state], "num_warps": WARPS}
    tile = {**state, "BLOCK": block_of(wave.state)}
    group = {**tile, "AT_ONCE": AT_ONCE, "FORM": _form(wave.state, device).value}
    panel = {**group, "num_stages": STAGES}
    update = {**group, "HEIGHT": wave.height, "num_warps": warps_of(wave.height)}
    scaled = wave.modes, addresses, numbers

    def start(scratch: Tensor) -> None:
        tiles = scratch.view(wave.state)
        launch(rescale_kernel, *wave.tensors, *scaled, damping, **state, RELATIVE=relative)
        launch(diagonal_kernel, *wave.spans, *scaled, failed, info, **state, CHECK=True)
        # Its float64 numbers want twice the registers.
        launch(begin_kernel, *wave.rows, *scaled, tiles, failed, **tile | {"num_warps": 2 * WARPS})
        for k, programs in enumerate(wave.panels):
            launch(panel_kernel, *programs, *scaled, tiles, failed, k, **panel)
            if (k + 1) % AT_ONCE == 0 or k + 1 == len(wave.panels):
                which = k // AT_ONCE
                read = *wave.updates[which], wave.modes, tiles
                launch(update_kernel, *read, which * AT_ONCE, **update)
        launch(check_kernel, *wave.diagonals, wave.modes, numbers, tiles, failed, **tile)
        launch(judge_kernel, *wave.tensors, failed, info, STRIDE=1, num_warps=1)
        launch(end_kernel, *wave.rows, *scaled, tiles, info, **tile | {"num_warps": 2 * WARPS})
        launch(diagonal_kernel, *wave.spans, *scaled, failed, info, **state, CHECK=False)

    return start
