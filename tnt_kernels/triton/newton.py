"""The kernels of ``inverse_root``: the coupled Newton iteration on many matrices at once.

    M <- N^p M,  H <- H N,  with N = (1 + 1/p) I - M/p

All iterates are polynomials of one symmetric matrix, so they are symmetric and commute. A product
therefore computes only the tiles of the lower triangle, whose epilogue stores the mirror image too,
and it reads its second operand by rows like the first, (rows, n) by (columns, n).

Each matrix has up to six buffers in a workspace, as many as its root needs. A buffer has n rows,
padded with zeros to a multiple of the widest load. Each matrix also has one row of the *states*,
with which consecutive launches decide on the device, without the host, which work remains.
"""

import triton
import triton.language as tl

from tnt_kernels.triton.factors import SPAN, counts_as_zero, nth_root, store_lower, trace_of
from tnt_kernels.triton.pack import TERMS
from tnt_kernels.triton.tiles import TILE_COLUMN, TILE_ROW, fields

TOLERANCE = tl.constexpr(1e-6)  # of max|M - I|
GROWTH = tl.constexpr(1.2)  # of max|M - I| in one iteration: above it, the previous iterate stands
CONVERGED = tl.constexpr(0.1)  # a larger max|M - I| means that H is not the root
TRACE = tl.constexpr(0.5)  # so does max|M - I| >= this / rows: M may have a negative eigenvalue
STRIPS = tl.constexpr(128)  # strips of rows whose measures begin_kernel adds in one step

# A row of the states, int64, zero at first. Numbers are stored as the bits of a float64; NEXT_ERROR
# as the bits of the statistic's dtype. As integers, non-negative numbers keep their order, NaN is
# above infinity, and an atomic maximum does not depend on the order of the programs.
# CURRENT: which of the two M, and of the two H, is the iterate. ERROR: its max|M - I|; NEXT_ERROR:
# that of the next iterate, not yet accepted. LARGEST: the largest |entry| of S + damping I.
CURRENT, DONE, ERROR, NEXT_ERROR, LARGEST, FAILED, DAMPING = fields(7)
STATE_FIELDS = tl.constexpr(7)

# A row of the matrices, int64: indices of two addresses, rows, the step from one entry of the
# diagonal to the next, and of the buffers in the workspace the stride and the start, elements; the
# root, and an index into info.
STAT, OUT, ROWS, STEP, STRIDE, START, ROOT, TENSOR = fields(8)
MATRIX_FIELDS = tl.constexpr(8)

# Columns of the tile tables, int32, besides TILE_ROW and TILE_COLUMN.
MATRIX = tl.constexpr(0)
STRIP_FIELDS = tl.constexpr(2)
FIRST_STRIP = tl.constexpr(3)
TILE_FIELDS = tl.constexpr(4)
FIRST, SECOND, TARGET = fields(3, start=3)  # of a product: operands and target, as below
PRODUCT_FIELDS = tl.constexpr(6)

# Operands and targets: the current iterates M and H, the next ones, two buffers for powers of N and
# their products, and N, which is not stored.
M, NEXT_M, H, NEXT_H, POWER, PRODUCT, N = fields(7)


@triton.jit
def _load_number(at):
    return tl.load(at).to(tl.float64, bitcast=True)


@triton.jit
def _store_number(at, number):
    tl.store(at, number.to(tl.float64).to(tl.int64, bitcast=True))


@triton.jit
def _largest_bits(tile, STATE: tl.constexpr):
    """The bits of the largest |entry| of a tile, int64; NaN counts as the largest."""
    if STATE == tl.float64:
        bits = tl.abs(tile).to(tl.int64, bitcast=True)
    else:
        bits = tl.abs(tile).to(tl.int32, bitcast=True)
    return tl.max(tl.max(bits, axis=1), axis=0).to(tl.int64)


@triton.jit
def _nan_bits(STATE: tl.constexpr):
    return (1 << (63 if STATE == tl.float64 else 31)) - 1


@triton.jit
def _number_of(bits, STATE: tl.constexpr):
    if STATE == tl.float64:
        number = bits.to(tl.float64, bitcast=True)
    else:
        number = bits.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    return number


@triton.jit
def _identity(row, column, rows, STATE: tl.constexpr):
    on_diagonal = (row[:, None] == column[None, :]) & (row[:, None] < rows)
    return tl.where(on_diagonal, 1.0, 0.0).to(STATE)


@triton.jit
def _buffer(matrix, state, name):
    """The start of an operand's or target's buffer in the workspace, elements."""
    rows, stride = tl.load(matrix + ROWS), tl.load(matrix + STRIDE)
    index = tl.where(name < POWER, name ^ tl.load(state + CURRENT).to(tl.int32), name)
    return tl.load(matrix + START) + index.to(tl.int64) * rows * stride


@triton.jit
def damping_kernel(
    matrices,
    addresses,
    states,
    damping,
    STATE: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    """The damping of one mode; RELATIVE: times the average eigenvalue, or 1 if that counts as zero.

    Grid: one program for each mode, which reads a diagonal. Bound: the launch.
    """
    matrix = matrices + tl.program_id(0) * MATRIX_FIELDS
    eps = tl.load(damping)
    if RELATIVE:
        rows = tl.load(matrix + ROWS)
        stat = tl.load(addresses + tl.load(matrix + STAT)).to(tl.pointer_type(STATE))
        trace = trace_of(stat, rows, tl.load(matrix + STEP))
        average = trace / tl.maximum(rows, 1).to(tl.float64)
        eps = tl.where(counts_as_zero(average, STATE), 1.0, eps * average)
    _store_number(states + tl.program_id(0) * STATE_FIELDS + DAMPING, eps)


@triton.jit
def measure_kernel(
    strips, matrices, addresses, states, measures, STATE: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest |entry| of BLOCK rows of S + damping I, and the sum of (entry / largest)^2.

    Of the lower triangle; the sum counts entries below the diagonal twice, as mirror images.
    The entries' squares would leave float32's range, so they are divided by the largest first.

    Grid: one program for each BLOCK rows of a matrix, which it reads twice; it writes two numbers.
    Bound: memory.
    """
    strip = strips + tl.program_id(0) * STRIP_FIELDS
    matrix = matrices + tl.load(strip + MATRIX) * MATRIX_FIELDS
    row = tl.load(strip + TILE_ROW) * BLOCK + tl.arange(0, BLOCK)
    stat = tl.load(addresses + tl.load(matrix + STAT)).to(tl.pointer_type(STATE))
    rows = tl.load(matrix + ROWS).to(tl.int32)
    at = stat + row.to(tl.int64)[:, None] * rows
    eps = _load_number(states + tl.load(strip + MATRIX) * STATE_FIELDS + DAMPING).to(STATE)

    bits = tl.program_id(0).to(tl.int64) * 0
    for start in range(0, rows, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (row[:, None] >= column[None, :])
        entry = tl.load(at + column[None, :], mask=inside, other=0)
        damped = entry + eps * _identity(row, column, rows, STATE)
        bits = tl.maximum(bits, _largest_bits(damped, STATE))
    # NaN becomes infinity, so that no NaN is stored.
    largest = _number_of(bits, STATE)
    finite = largest < float("inf")
    largest = tl.where(finite, largest, float("inf"))
    divisor = tl.where((largest > 0) & finite, largest, 1.0).to(STATE)
    squares = tl.zeros((BLOCK, BLOCK), STATE)
    for start in range(0, tl.where(finite, rows, 0), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (row[:, None] >= column[None, :])
        entry = tl.load(at + column[None, :], mask=inside, other=0)
        scaled = (entry + eps * _identity(row, column, rows, STATE)) / divisor
        twice = tl.where(row[:, None] > column[None, :], 2.0, 1.0).to(STATE)
        squares += twice * scaled * scaled
    measure = measures + tl.program_id(0) * 2
    tl.store(measure, largest)
    tl.store(measure + 1, tl.sum(tl.sum(squares, axis=1), axis=0).to(tl.float64))


@triton.jit
def begin_kernel(
    tiles,
    matrices,
    addresses,
    states,
    measures,
    scratch,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of M = z (S + damping I) / largest and of H = z^(1/p) I, as the next iterates.

    Grid: one program for each tile of a lower triangle. It reads the tile and the matrix's measures
    and writes two tiles with their mirror images. Bound: memory.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    matrix = matrices + tl.load(tile + MATRIX) * MATRIX_FIELDS
    state = states + tl.load(tile + MATRIX) * STATE_FIELDS
    row = tl.load(tile + TILE_ROW) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + TILE_COLUMN) * BLOCK + tl.arange(0, BLOCK)
    measure = measures + tl.load(tile + FIRST_STRIP) * 2
    rows, stride = tl.load(matrix + ROWS).to(tl.int32), tl.load(matrix + STRIDE).to(tl.int32)

    # In a fixed order, so that all programs of a matrix, and all runs, compute the same z.
    strips = tl.cdiv(rows, BLOCK)
    most = tl.zeros((STRIPS,), tl.float64)
    for start in range(0, strips, STRIPS):
        strip = start + tl.arange(0, STRIPS)
        most = tl.maximum(most, tl.load(measure + 2 * strip, mask=strip < strips, other=0))
    largest = tl.max(most, axis=0)
    good = (largest > 0) & (largest < float("inf"))
    divisor = tl.where(good, largest, 1.0)
    squares = tl.zeros((STRIPS,), tl.float64)
    strips = tl.where(good, strips, 0)
    for start in range(0, strips, STRIPS):
        strip = start + tl.arange(0, STRIPS)
        ratio = tl.load(measure + 2 * strip, mask=strip < strips, other=0) / divisor
        squares += tl.load(measure + 2 * strip + 1, mask=strip < strips, other=0) * ratio * ratio
    norm = tl.sqrt(tl.sum(squares, axis=0))
    root = tl.load(matrix + ROOT).to(tl.float64)
    z = (1 + root) / (2 * tl.where(good, norm, 1.0))

    # If the largest entry is 0 or infinite, the error is NaN and M is not written.
    rows = tl.where(good, rows, 0)
    stat = tl.load(addresses + tl.load(matrix + STAT)).to(tl.pointer_type(STATE))
    at = stat + row.to(tl.int64)[:, None] * tl.load(matrix + ROWS) + column[None, :]
    inside = (row[:, None] < rows) & (row[:, None] >= column[None, :])
    entry = tl.load(at, mask=inside, other=0)
    identity = _identity(row, column, rows, STATE)
    damped = entry + _load_number(state + DAMPING).to(STATE) * identity
    coupled = z.to(STATE) * (damped / divisor.to(STATE))
    store_lower(scratch + _buffer(matrix, state, NEXT_M), coupled, row, column, rows, stride)
    result = nth_root(z, tl.load(matrix + ROOT)).to(STATE) * identity
    store_lower(scratch + _buffer(matrix, state, NEXT_H), result, row, column, rows, stride)
    # Above the diagonal, both are zero in the tile.
    error = _largest_bits(coupled - identity, STATE)
    tl.atomic_max(state + NEXT_ERROR, tl.where(good, error, _nan_bits(STATE)))
    _store_number(state + LARGEST, largest)


@triton.jit
def product_kernel(
    tiles,
    matrices,
    states,
    scratch,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    LAST: tl.constexpr,
):
    """One tile of a product of two iterates, for matrices that are not done.

    N is neither stored nor formed while M is read, which would delay the matrix units in every
    step. The epilogue computes N X = (1 + 1/p) X - (M X) / p, and likewise N N, from the product
    with M. This is not less exact: emulated in 3xTF32 with the roundings of the matrix units, n =
    384, condition 1e5, it took the same 16 to 23 iterations and halved the roots' error.

    Grid: one program for each tile of a lower triangle. It reads two panels, BLOCK rows each, and
    with N a tile, and writes the tile and its mirror image. Bound: matrix units from about 128 rows
    on, memory below.
    """
    tile = tiles + tl.program_id(0) * PRODUCT_FIELDS
    matrix = matrices + tl.load(tile + MATRIX) * MATRIX_FIELDS
    state = states + tl.load(tile + MATRIX) * STATE_FIELDS
    if tl.load(state + DONE) != 0:
        return
    row = tl.load(tile + TILE_ROW) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + TILE_COLUMN) * BLOCK + tl.arange(0, BLOCK)
    first, second = tl.load(tile + FIRST), tl.load(tile + SECOND)
    rows, stride = tl.load(matrix + ROWS).to(tl.int32), tl.load(matrix + STRIDE).to(tl.int32)
    stride = tl.multiple_of(stride, VECTOR)
    a = scratch + _buffer(matrix, state, tl.where(first == N, M, first))
    b = scratch + _buffer(matrix, state, tl.where(second == N, M, second))
    a, b = tl.multiple_of(a, 16), tl.multiple_of(b, 16)
    at_row = a + row.to(tl.int64)[:, None] * stride
    at_column = b + column.to(tl.int64)[:, None] * stride
    total = tl.zeros((BLOCK, BLOCK), STATE)
    for start in range(0, stride, TERMS):
        term = start + tl.arange(0, TERMS)
        inside = (term < stride)[None, :]
        x = tl.load(at_row + term[None, :], mask=(row < rows)[:, None] & inside, other=0)
        y = tl.load(at_column + term[None, :], mask=(column < rows)[:, None] & inside, other=0)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION, out_dtype=STATE)

    # The epilogue loads its operands, some of them again: during the product they would spill
    # registers. With operands u I + v X, the result is a sum of three terms: in I, in the other
    # operand (for N N in M), and in the product.
    row = tl.load(tile + TILE_ROW) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + TILE_COLUMN) * BLOCK + tl.arange(0, BLOCK)
    rows, stride = tl.load(matrix + ROWS).to(tl.int32), tl.load(matrix + STRIDE).to(tl.int32)
    first, second, target = tl.load(tile + FIRST), tl.load(tile + SECOND), tl.load(tile + TARGET)
    root = tl.load(matrix + ROOT).to(tl.float64)
    u, v = 1 + 1 / root, -1 / root
    u_first, v_first = tl.where(first == N, u, 0.0), tl.where(first == N, v, 1.0)
    u_second, v_second = tl.where(second == N, u, 0.0), tl.where(second == N, v, 1.0)
    in_other = (u_first * v_second + u_second * v_first).to(STATE)
    in_identity, in_total = (u_first * u_second).to(STATE), (v_first * v_second).to(STATE)
    other = tl.where(first == N, tl.where(second == N, M, second), first)
    at = scratch + _buffer(matrix, state, other) + row.to(tl.int64)[:, None] * stride
    inside = (row[:, None] < tl.where(in_other != 0, rows, 0)) & (column[None, :] < rows)
    operand = tl.load(at + column[None, :], mask=inside, other=0)
    identity = _identity(row, column, rows, STATE)
    total = in_total * total + in_other * operand + in_identity * identity
    store_lower(scratch + _buffer(matrix, state, target), total, row, column, rows, stride)
    if LAST:
        error = _largest_bits(total - identity, STATE)
        tl.atomic_max(state + NEXT_ERROR, error, mask=target == NEXT_M)


@triton.jit
def decide_kernel(states, STATE: tl.constexpr, MAY_GROW: tl.constexpr):
    """Decides whether one matrix's next iterate is accepted, and whether its iteration is done.

    MAY_GROW: at the start and in the first iteration, which brings eigenvalues above 1 below it.
    Later growth of max|M - I| means rounding or a negative eigenvalue.

    Grid: one program for each matrix, which reads and writes its state. Bound: the launch.
    """
    state = states + tl.program_id(0) * STATE_FIELDS
    if tl.load(state + DONE) != 0:
        return
    error = _load_number(state + ERROR)
    following = _number_of(tl.load(state + NEXT_ERROR), STATE)
    # NaN is accepted: it ends the iteration, and full_kernel rejects it.
    rejected = following > tl.where(MAY_GROW, float("inf"), GROWTH * error)
    error = tl.where(rejected, error, following)
    current = tl.load(state + CURRENT)
    tl.store(state + CURRENT, tl.where(rejected, current, 1 - current))
    tl.store(state + DONE, tl.where(rejected, 1, tl.where(error > TOLERANCE, 0, 1)))
    tl.store(state + NEXT_ERROR, tl.zeros((), tl.int64))
    _store_number(state + ERROR, error)


@triton.jit
def full_kernel(
    tiles,
    matrices,
    addresses,
    states,
    info,
    scratch,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):
    """A tile of the root, largest^(-1/p) H: checks it, or stores it unless the tensor failed.

    Grid: one program for each tile of a lower triangle, which it reads; it writes a flag, or the
    tile and its mirror image. Bound: memory.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    matrix = matrices + tl.load(tile + MATRIX) * MATRIX_FIELDS
    state = states + tl.load(tile + MATRIX) * STATE_FIELDS
    row = tl.load(tile + TILE_ROW) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + TILE_COLUMN) * BLOCK + tl.arange(0, BLOCK)
    rows, stride = tl.load(matrix + ROWS).to(tl.int32), tl.load(matrix + STRIDE).to(tl.int32)
    if CHECK:
        # Without a root, its buffer may never have been written.
        error = _load_number(state + ERROR)
        converged = (error < CONVERGED) & (error * rows.to(tl.float64) < TRACE)
        kept = tl.where(converged, rows, 0)
    else:
        kept = tl.where(tl.load(info + tl.load(matrix + TENSOR)) == 0, rows, 0)
    at = scratch + _buffer(matrix, state, H) + row.to(tl.int64)[:, None] * stride
    inside = (row[:, None] < kept) & (row[:, None] >= column[None, :])
    result = tl.load(at + column[None, :], mask=inside, other=0)
    scale = 1 / nth_root(_load_number(state + LARGEST), tl.load(matrix + ROOT))
    if CHECK:
        scale = tl.where(converged, scale, 0.0)
        most = _number_of(_largest_bits(scale.to(STATE) * result, STATE), STATE)
        good = converged & (most < float("inf"))
        tl.atomic_max(state + FAILED, tl.where(good, 0, 1).to(tl.int64))
    else:
        scale = tl.where(kept > 0, scale, 0.0)
        out = tl.load(addresses + tl.load(matrix + OUT)).to(tl.pointer_type(STATE))
        store_lower(out, scale.to(STATE) * result, row, column, kept, rows)


@triton.jit
def diagonal_kernel(
    spans,
    matrices,
    addresses,
    states,
    info,
    STATE: tl.constexpr,
    CHECK: tl.constexpr,
):
    """SPAN entries of a diagonal root: checks them, or stores them unless the tensor failed.

    Grid: one program for each SPAN entries, which it reads; it writes a flag, or the root. Bound:
    memory.
    """
    span = spans + tl.program_id(0) * STRIP_FIELDS
    matrix = matrices + tl.load(span + MATRIX) * MATRIX_FIELDS
    index = tl.load(span + TILE_ROW) * SPAN + tl.arange(0, SPAN)
    stat = tl.load(addresses + tl.load(matrix + STAT)).to(tl.pointer_type(STATE))
    rows = tl.load(matrix + ROWS).to(tl.int32)
    state = states + tl.load(span + MATRIX) * STATE_FIELDS
    eps = _load_number(state + DAMPING).to(STATE)
    damped = tl.load(stat + index, mask=index < rows, other=1) + eps
    result = (1 / nth_root(damped.to(tl.float64), tl.load(matrix + ROOT))).to(STATE)
    if CHECK:
        # The root of an entry that is not positive is 0, and the result infinite.
        good = (damped < float("inf")) & (result < float("inf"))
        bad = tl.where(good | (index >= rows), 0, 1)
        tl.atomic_max(state + FAILED, tl.max(bad, axis=0).to(tl.int64))
    else:
        kept = tl.where(tl.load(info + tl.load(matrix + TENSOR)) == 0, rows, 0)
        out = tl.load(addresses + tl.load(matrix + OUT)).to(tl.pointer_type(STATE))
        tl.store(out + index, result, mask=index < kept)
