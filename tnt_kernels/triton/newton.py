"""The kernels of ``inverse_root``: the coupled Newton iteration on many matrices at once.

    M <- N^p M,  H <- H N,  with N = (1 + 1/p) I - M/p

All iterates are polynomials of one symmetric matrix: they are symmetric and commute. So of a
product only the tiles of the lower triangle are made, and mirrored as they are stored; and a
product's second operand is read by its rows like the first, (rows, n) by (columns, n).

Each matrix has six buffers in scratch memory (fewer where its root needs fewer), n rows whose ends
are filled up with zeros to a multiple of the widest load, and one row of the *states*, by which
launches that follow each other on the device decide, without the host, what is left to do.
"""

import triton
import triton.language as tl

TOLERANCE = tl.constexpr(1e-6)  # of max|M - I|
GROWTH = tl.constexpr(1.2)  # of it in an iteration: the previous iterate is the best there is
CONVERGED = tl.constexpr(0.1)  # M farther from I than this: H is no root, whatever it holds
TRACE = tl.constexpr(0.5)  # nor with an entry of this / rows: M may have a negative eigenvalue

# A row of the states, int64 and zero at first. Numbers are the bits of a float64, but NEXT_ERROR's
# of the statistic's dtype: as integers, non-negative numbers are ordered like themselves, NaN comes
# above infinity, and a maximum does not depend on who comes first.
STATE_FIELDS = tl.constexpr(6)
CURRENT = tl.constexpr(0)  # which of the two M, and of the two H, is the iterate
DONE = tl.constexpr(1)
ERROR = tl.constexpr(2)  # max|M - I|
NEXT_ERROR = tl.constexpr(3)  # that of the next iterate, which is not accepted yet
LARGEST = tl.constexpr(4)  # entry of S + damping I
FAILED = tl.constexpr(5)

# A row of the matrices, int64.
MATRIX_FIELDS = tl.constexpr(7)
STAT = tl.constexpr(0)  # index of its address
OUT = tl.constexpr(1)  # likewise
ROWS = tl.constexpr(2)
STRIDE = tl.constexpr(3)  # of the buffers, elements
START = tl.constexpr(4)  # of the first buffer in the scratch memory, elements
ROOT = tl.constexpr(5)
TENSOR = tl.constexpr(6)  # index into info

# Operands and targets: a buffer for whichever M and H are the iterates, buffers for the others, two
# for powers of N and products of them, and N, which is not stored.
M = tl.constexpr(0)
NEXT_M = tl.constexpr(1)
H = tl.constexpr(2)
NEXT_H = tl.constexpr(3)
POWER = tl.constexpr(4)
PRODUCT = tl.constexpr(5)
N = tl.constexpr(6)


@triton.jit
def _power(base, exponent):
    """base**exponent for a float64 base; infinity unless the base is positive."""
    # Not in float32: log2 of 1e30 has lost seven bits of the root there.
    positive = base > 0
    root = tl.exp2(exponent * tl.log2(tl.where(positive, base, 1.0)))
    return tl.where(positive, root, float("inf"))


@triton.jit
def _load_number(at):
    return tl.load(at).to(tl.float64, bitcast=True)


@triton.jit
def _store_number(at, number):
    tl.store(at, number.to(tl.float64).to(tl.int64, bitcast=True))


@triton.jit
def _largest_bits(tile, STATE: tl.constexpr):
    """The bits of the largest |entry| of a tile, int64, NaN's if there is one."""
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
def _store_lower(target, value, row, column, rows, stride):
    """Stores the lower triangle of a tile and its mirror image; zeros right of the matrix."""
    at = target + row.to(tl.int64)[:, None] * stride + column[None, :]
    lower = row[:, None] >= column[None, :]
    tl.store(at, value, mask=lower & (row[:, None] < rows))
    at = target + column.to(tl.int64)[:, None] * stride + row[None, :]
    upper = (column[:, None] <= row[None, :]) & (column[:, None] < rows)
    tl.store(at, tl.trans(value), mask=upper & (row[None, :] < stride))


@triton.jit
def _identity(row, column, rows, STATE: tl.constexpr):
    on_diagonal = (row[:, None] == column[None, :]) & (row[:, None] < rows)
    return tl.where(on_diagonal, 1.0, 0.0).to(STATE)


@triton.jit
def _buffer(matrix, state, name):
    """Where the buffer begins that an operand or target names, elements."""
    rows, stride = tl.load(matrix + ROWS), tl.load(matrix + STRIDE)
    index = tl.where(name < POWER, name ^ tl.load(state + CURRENT).to(tl.int32), name)
    return tl.load(matrix + START) + index.to(tl.int64) * rows * stride


@triton.jit
def measure_kernel(
    strips,
    matrices,
    addresses,
    measures,
    damping,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of some rows of S + damping I the largest |entry| and the sum of (entry / largest)^2.

    The largest first: the entries' squares would leave float32's range.
    """
    strip = strips + tl.program_id(0) * 2
    matrix = matrices + tl.load(strip) * MATRIX_FIELDS
    row = tl.load(strip + 1) * BLOCK + tl.arange(0, BLOCK)
    stat = tl.load(addresses + tl.load(matrix + STAT)).to(tl.pointer_type(STATE))
    rows = tl.load(matrix + ROWS).to(tl.int32)
    at = stat + row.to(tl.int64)[:, None] * rows
    eps = tl.load(damping).to(STATE)

    bits = tl.program_id(0).to(tl.int64) * 0
    for start in range(0, rows, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < rows)[None, :]
        entry = tl.load(at + column[None, :], mask=inside, other=0)
        damped = entry + eps * _identity(row, column, rows, STATE)
        bits = tl.maximum(bits, _largest_bits(damped, STATE))
    # What is not finite counts as infinite, so that no NaN gets further than here.
    largest = _number_of(bits, STATE)
    finite = largest < float("inf")
    largest = tl.where(finite, largest, float("inf"))
    divisor = tl.where((largest > 0) & finite, largest, 1.0).to(STATE)
    squares = tl.zeros((BLOCK, BLOCK), STATE)
    for start in range(0, tl.where(finite, rows, 0), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < rows)[None, :]
        entry = tl.load(at + column[None, :], mask=inside, other=0)
        scaled = (entry + eps * _identity(row, column, rows, STATE)) / divisor
        squares += scaled * scaled
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
    damping,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """A tile of M = z (S + damping I) / largest and of H = z^(1/p) I, as the next iterates."""
    tile = tiles + tl.program_id(0) * 4
    matrix = matrices + tl.load(tile) * MATRIX_FIELDS
    state = states + tl.load(tile) * STATE_FIELDS
    row = tl.load(tile + 1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + 2) * BLOCK + tl.arange(0, BLOCK)
    measure = measures + tl.load(tile + 3) * 2
    rows, stride = tl.load(matrix + ROWS).to(tl.int32), tl.load(matrix + STRIDE).to(tl.int32)

    # Always in the same order: no two programs, and no two runs, get another z.
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
        share = tl.load(measure + 2 * strip, mask=strip < strips, other=0) / divisor
        squares += tl.load(measure + 2 * strip + 1, mask=strip < strips, other=0) * share * share
    norm = tl.sqrt(tl.sum(squares, axis=0))
    root = tl.load(matrix + ROOT).to(tl.float64)
    z = (1 + root) / (2 * tl.where(good, norm, 1.0))

    # Without a largest entry there is nothing to iterate on: the error is NaN, and M stays unmade.
    rows = tl.where(good, rows, 0)
    stat = tl.load(addresses + tl.load(matrix + STAT)).to(tl.pointer_type(STATE))
    at = stat + row.to(tl.int64)[:, None] * tl.load(matrix + ROWS) + column[None, :]
    inside = (row[:, None] < rows) & (row[:, None] >= column[None, :])
    entry = tl.load(at, mask=inside, other=0)
    identity = _identity(row, column, rows, STATE)
    damped = entry + tl.load(damping).to(STATE) * identity
    coupled = z.to(STATE) * (damped / divisor.to(STATE))
    _store_lower(scratch + _buffer(matrix, state, NEXT_M), coupled, row, column, rows, stride)
    result = _power(z, 1 / root).to(STATE) * identity
    _store_lower(scratch + _buffer(matrix, state, NEXT_H), result, row, column, rows, stride)
    # Above the diagonal there are only zeros, of both.
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
    DEPTH: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    LAST: tl.constexpr,
):
    """One tile of a product of two iterates, for matrices that are not done.

    N is never stored, nor formed as M is read: that would stand between memory and the matrix units
    in every step. Instead N X = (1 + 1/p) X - (M X) / p, and N N likewise, is made of the product
    with M when that is there. (Nor is it less exact: emulated in 3xTF32 with the roundings of the
    matrix units, n = 384, condition 1e5, it took the same 16 to 23 iterations, to roots of half the
    error.)
    """
    tile = tiles + tl.program_id(0) * 6
    matrix = matrices + tl.load(tile) * MATRIX_FIELDS
    state = states + tl.load(tile) * STATE_FIELDS
    if tl.load(state + DONE) != 0:
        return
    row = tl.load(tile + 1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + 2) * BLOCK + tl.arange(0, BLOCK)
    first, second = tl.load(tile + 3), tl.load(tile + 4)
    rows, stride = tl.load(matrix + ROWS).to(tl.int32), tl.load(matrix + STRIDE).to(tl.int32)
    stride = tl.multiple_of(stride, VECTOR)
    a = scratch + _buffer(matrix, state, tl.where(first == N, M, first))
    b = scratch + _buffer(matrix, state, tl.where(second == N, M, second))
    a, b = tl.multiple_of(a, 16), tl.multiple_of(b, 16)
    at_row = a + row.to(tl.int64)[:, None] * stride
    at_column = b + column.to(tl.int64)[:, None] * stride
    total = tl.zeros((BLOCK, BLOCK), STATE)
    for start in range(0, stride, DEPTH):
        term = start + tl.arange(0, DEPTH)
        inside = (term < stride)[None, :]
        x = tl.load(at_row + term[None, :], mask=(row < rows)[:, None] & inside, other=0)
        y = tl.load(at_column + term[None, :], mask=(column < rows)[:, None] & inside, other=0)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION, out_dtype=STATE)

    # The rest is loaded here, some of it again: over the product it would take registers, and more
    # than there are. With u I + v X for an operand: the product's terms in I, in the other operand
    # (or in M, for N N), and in the product so far.
    row = tl.load(tile + 1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + 2) * BLOCK + tl.arange(0, BLOCK)
    rows, stride = tl.load(matrix + ROWS).to(tl.int32), tl.load(matrix + STRIDE).to(tl.int32)
    first, second, target = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    root = tl.load(matrix + ROOT).to(tl.float64)
    u, v = 1 + 1 / root, -1 / root
    u_first, v_first = tl.where(first == N, u, 0.0), tl.where(first == N, v, 1.0)
    u_second, v_second = tl.where(second == N, u, 0.0), tl.where(second == N, v, 1.0)
    in_other = (u_first * v_second + u_second * v_first).to(STATE)
    in_identity, in_total = (u_first * u_second).to(STATE), (v_first * v_second).to(STATE)
    other = tl.where(first == N, tl.where(second == N, M, second), first)
    at = scratch + _buffer(matrix, state, other) + row.to(tl.int64)[:, None] * stride
    inside = (row[:, None] < tl.where(in_other != 0, rows, 0)) & (column[None, :] < rows)
    beside = tl.load(at + column[None, :], mask=inside, other=0)
    identity = _identity(row, column, rows, STATE)
    total = in_total * total + in_other * beside + in_identity * identity
    _store_lower(scratch + _buffer(matrix, state, target), total, row, column, rows, stride)
    if LAST:
        error = _largest_bits(total - identity, STATE)
        tl.atomic_max(state + NEXT_ERROR, error, mask=target == NEXT_M)


@triton.jit
def decide_kernel(states, STATE: tl.constexpr, MAY_GROW: tl.constexpr):
    """Whether one matrix's next iterate is accepted, and whether the iteration is done.

    MAY_GROW: of the start and the first iteration, which brings eigenvalues above 1 below it. After
    it growth of max|M - I| is rounding, or a negative eigenvalue.
    """
    state = states + tl.program_id(0) * STATE_FIELDS
    if tl.load(state + DONE) != 0:
        return
    error = _load_number(state + ERROR)
    following = _number_of(tl.load(state + NEXT_ERROR), STATE)
    # NaN is accepted: it ends the iteration, and is no root.
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
    """A tile of the root, largest^(-1/p) H: checks it, or stores it unless the tensor failed."""
    tile = tiles + tl.program_id(0) * 4
    matrix = matrices + tl.load(tile) * MATRIX_FIELDS
    state = states + tl.load(tile) * STATE_FIELDS
    row = tl.load(tile + 1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(tile + 2) * BLOCK + tl.arange(0, BLOCK)
    rows, stride = tl.load(matrix + ROWS).to(tl.int32), tl.load(matrix + STRIDE).to(tl.int32)
    if CHECK:
        # Where there is no root, its buffer may never have been written.
        error = _load_number(state + ERROR)
        converged = (error < CONVERGED) & (error * rows.to(tl.float64) < TRACE)
        kept = tl.where(converged, rows, 0)
    else:
        kept = tl.where(tl.load(info + tl.load(matrix + TENSOR)) == 0, rows, 0)
    at = scratch + _buffer(matrix, state, H) + row.to(tl.int64)[:, None] * stride
    inside = (row[:, None] < kept) & (row[:, None] >= column[None, :])
    result = tl.load(at + column[None, :], mask=inside, other=0)
    scale = _power(_load_number(state + LARGEST), -1 / tl.load(matrix + ROOT).to(tl.float64))
    if CHECK:
        scale = tl.where(converged, scale, 0.0)
        most = _number_of(_largest_bits(scale.to(STATE) * result, STATE), STATE)
        good = converged & (most < float("inf"))
        tl.atomic_max(state + FAILED, tl.where(good, 0, 1).to(tl.int64))
    else:
        scale = tl.where(kept > 0, scale, 0.0)
        out = tl.load(addresses + tl.load(matrix + OUT)).to(tl.pointer_type(STATE))
        _store_lower(out, scale.to(STATE) * result, row, column, kept, rows)


@triton.jit
def diagonal_kernel(
    spans,
    matrices,
    addresses,
    states,
    info,
    damping,
    STATE: tl.constexpr,
    SPAN: tl.constexpr,
    CHECK: tl.constexpr,
):
    """A span of a diagonal mode's root: checks it, or stores it unless the tensor failed."""
    span = spans + tl.program_id(0) * 2
    matrix = matrices + tl.load(span) * MATRIX_FIELDS
    index = tl.load(span + 1) * SPAN + tl.arange(0, SPAN)
    stat = tl.load(addresses + tl.load(matrix + STAT)).to(tl.pointer_type(STATE))
    rows = tl.load(matrix + ROWS).to(tl.int32)
    damped = tl.load(stat + index, mask=index < rows, other=1) + tl.load(damping).to(STATE)
    exponent = -1 / tl.load(matrix + ROOT).to(tl.float64)
    result = _power(damped.to(tl.float64), exponent).to(STATE)
    if CHECK:
        state = states + tl.load(span) * STATE_FIELDS
        # Of what is not positive the root is infinite.
        good = (damped < float("inf")) & (result < float("inf"))
        bad = tl.where(good | (index >= rows), 0, 1)
        tl.atomic_max(state + FAILED, tl.max(bad, axis=0).to(tl.int64))
    else:
        kept = tl.where(tl.load(info + tl.load(matrix + TENSOR)) == 0, rows, 0)
        out = tl.load(addresses + tl.load(matrix + OUT)).to(tl.pointer_type(STATE))
        tl.store(out + index, result, mask=index < kept)


@triton.jit
def judge_kernel(tensors, states, info):
    """info of one tensor: 0, or i + 1 for the first mode i that failed."""
    tensor = tensors + tl.program_id(0) * 3
    first, order = tl.load(tensor + 1), tl.load(tensor + 2)
    failed = order * 0
    for i in range(0, order):
        mode = order - 1 - i
        bad = tl.load(states + (first + mode) * STATE_FIELDS + FAILED) != 0
        failed = tl.where(bad, mode + 1, failed)
    tl.store(info + tl.load(tensor), failed)
