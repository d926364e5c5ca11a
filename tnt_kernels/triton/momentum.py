"""Elementwise updates of momenta and parameters, and inner products: a launch for each dtype."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.lists import walked
from tnt_kernels.triton.launch import (
    ELEMENTS,
    Layout,
    Prepared,
    addresses_of,
    launch,
    planned,
    table,
    tile_tables,
)
from tnt_kernels.triton.tiles import (
    PROBLEM,
    TILE_ROW,
    blocks,
    fields,
    merge_small,
    pieces,
)

# The problem table, int64, one row for each piece of a tensor: the tensor's number, elements, sizes
# of the two fastest of three dimensions, a flag, and the number of its first partial sum.
NUMBER, COUNT, INNER, MIDDLE, DECAYED, PARTIAL = fields(6)
# Then a place in each of up to four lists: index of an address, offset, three strides.
PLACES, PLACE_FIELDS = tl.constexpr(6), tl.constexpr(5)
ADDRESS, OFFSET, STRIDES = fields(3)
PROBLEM_FIELDS = tl.constexpr(26)
TILE_FIELDS = tl.constexpr(2)

LEVELS = tl.constexpr(10)
BLOCK = tl.constexpr(2**LEVELS.value)  # elements of a step
SPAN = tl.constexpr(4 * BLOCK.value)  # elements of a program
WARPS = 4


@triton.jit
def span_of(tiles, problems, VECTOR: tl.constexpr):
    """A program's problem, its first element there, and the problem's number of elements."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    count = tl.load(problem + COUNT).to(tl.int32)
    if VECTOR > 1:
        count = tl.multiple_of(count, VECTOR)
    return problem, tl.load(tile + TILE_ROW) * SPAN, count


@triton.jit
def start_of(problem, LIST: tl.constexpr, addresses, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """The address of a problem's first element in one of the lists."""
    place = problem + PLACES + LIST * PLACE_FIELDS
    tensor = tl.load(addresses + tl.load(place + ADDRESS)).to(tl.pointer_type(TYPE))
    start = tensor + tl.load(place + OFFSET)
    if VECTOR > 1:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def indices_of(problem, first, count, start, VECTOR: tl.constexpr):
    """Which of BLOCK elements exist, and their indices in the three dimensions."""
    # Not `element < count`: `first + start` may exceed a 32-bit index.
    element = first + start + tl.arange(0, BLOCK)
    inside = start + tl.arange(0, BLOCK) < count - first
    if VECTOR > 1:
        return inside, element, element, element
    inner = tl.load(problem + INNER).to(tl.int32)
    middle = tl.load(problem + MIDDLE).to(tl.int32)
    rest = element // inner
    return inside, element % inner, rest % middle, rest // middle


@triton.jit
def addresses_at(problem, LIST: tl.constexpr, start, x, y, z, VECTOR: tl.constexpr):
    """The addresses of the elements with these indices in one of the lists."""
    if VECTOR > 1:
        return start + x
    strides = problem + PLACES + LIST * PLACE_FIELDS + STRIDES
    return start + x * tl.load(strides) + y * tl.load(strides + 1) + z * tl.load(strides + 2)


@triton.jit
def store_sum(partials, problem, first, total, EACH: tl.constexpr = 1):
    """Stores a program's partial sum, of 2**LEVELS terms; a program has EACH sums.

    Neighbours are added in pairs: tl.sum's own order follows the width of loads, which also depends
    on a list's other tensors.
    """
    for level in tl.static_range(1, LEVELS + 1):
        total = tl.sum(tl.reshape(total, (1 << (LEVELS - level), 2)), axis=1)
    number = tl.load(problem + PARTIAL) + first // SPAN
    tl.store(partials + number * EACH + tl.arange(0, 1), total)


@triton.jit
def sum_of(partials, firsts, t, EACH: tl.constexpr = 1):
    """The sum of a tensor's partial sums, which are added in a fixed order."""
    first, last = tl.load(firsts + t), tl.load(firsts + t + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(first, last, BLOCK):
        number = start + tl.arange(0, BLOCK)
        total += tl.load(partials + number * EACH, mask=number < last, other=0)
    return tl.sum(total, axis=0)


@triton.jit
def inner_kernel(
    tiles,
    problems,
    addresses,
    partials,
    ELEMENT: tl.constexpr,
    RESULT: tl.constexpr,
    VECTOR: tl.constexpr,
    TWO: tl.constexpr,
):
    """The sum of squares of SPAN elements of a tensor.

    With TWO it stores two sums instead: the inner product with a second tensor, and the sum of
    squares of the second.

    Grid: one program for each SPAN elements, which it reads once. Bound: memory.
    """
    problem, first, count = span_of(tiles, problems, VECTOR)
    left_start = start_of(problem, 0, addresses, RESULT, VECTOR)
    if TWO:
        right_start = start_of(problem, 1, addresses, ELEMENT, VECTOR)
    total = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, SPAN, BLOCK):
        inside, x, y, z = indices_of(problem, first, count, start, VECTOR)
        left_at = addresses_at(problem, 0, left_start, x, y, z, VECTOR)
        left = tl.load(left_at, mask=inside, other=0).to(tl.float64)
        right = left
        if TWO:
            right_at = addresses_at(problem, 1, right_start, x, y, z, VECTOR)
            right = tl.load(right_at, mask=inside, other=0).to(tl.float64)
            squares = tl.fma(right, right, squares)
        total = tl.fma(left, right, total)
    store_sum(partials, problem, first, total, EACH=1 + TWO)
    if TWO:
        store_sum(partials + 1, problem, first, squares, EACH=2)


@triton.jit
def correction(decay, updates):
    """1 - decay**updates, by which Adam divides an average: exact to some roundings of 1."""
    return 1 - tl.exp2(updates * tl.log2(decay))


@triton.jit
def momentum_kernel(
    tiles,
    problems,
    addresses,
    partials,
    momentum,
    counts,
    second_decay: tl.float64,
    eps: tl.float64,
    ELEMENT: tl.constexpr,
    RESULT: tl.constexpr,
    VECTOR: tl.constexpr,
    SUMS: tl.constexpr,
    ADAM: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """m <- momentum m + g on SPAN elements of one tensor; with SUMS also the sum of squares of n.

    n is m or, with AHEAD, momentum m + g, which it stores. With ADAM also v <- second_decay v +
    (1 - second_decay) g^2, and the sum is that of the squares of n / (sqrt(v) + eps sqrt(d)), with
    v's bias correction d.

    Grid: one program for each SPAN elements, of which it reads m, v and g once and writes m, v and
    n. Bound: memory.
    """
    problem, first, count = span_of(tiles, problems, VECTOR)
    N: tl.constexpr = 2 if ADAM else 1
    GRAD: tl.constexpr = N + 1 if AHEAD else N
    m_start = start_of(problem, 0, addresses, RESULT, VECTOR)
    g_start = start_of(problem, GRAD, addresses, ELEMENT, VECTOR)
    mu = tl.load(momentum).to(RESULT)
    if AHEAD:
        n_start = start_of(problem, N, addresses, RESULT, VECTOR)
    if ADAM:
        v_start = start_of(problem, 1, addresses, RESULT, VECTOR)
        decay, weight = second_decay.to(RESULT), (1 - second_decay).to(RESULT)
        updates = tl.load(counts + 2 * tl.load(problem + NUMBER) + 1)
        floor = (eps * tl.sqrt(correction(second_decay, updates))).to(RESULT)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, SPAN, BLOCK):
        inside, x, y, z = indices_of(problem, first, count, start, VECTOR)
        m_at = addresses_at(problem, 0, m_start, x, y, z, VECTOR)
        g_at = addresses_at(problem, GRAD, g_start, x, y, z, VECTOR)
        g = tl.load(g_at, mask=inside, other=0).to(RESULT)
        m = mu * tl.load(m_at, mask=inside, other=0) + g
        length = m
        if AHEAD:
            # In the other case last: else ptxas spills a register (sm_100 here, sm_80 there).
            tl.store(m_at, m, mask=inside)
            length = mu * m + g
            n_at = addresses_at(problem, N, n_start, x, y, z, VECTOR)
            tl.store(n_at, length, mask=inside)
        if ADAM:
            v_at = addresses_at(problem, 1, v_start, x, y, z, VECTOR)
            v = decay * tl.load(v_at, mask=inside, other=0) + weight * g * g
            tl.store(v_at, v, mask=inside)
            if RESULT == tl.float32:
                # `/` and tl.sqrt of float32 are approximate, and take subnormal numbers for 0.
                length = tl.div_rn(length, tl.sqrt_rn(v) + floor)
            else:
                length = length / (tl.sqrt(v) + floor)
            length = tl.where(inside, length, 0)
        if not AHEAD:
            tl.store(m_at, m, mask=inside)
        if SUMS:
            # In float64: float32 squares overflow and underflow early.
            total = tl.fma(length.to(tl.float64), length.to(tl.float64), total)
    if SUMS:
        store_sum(partials, problem, first, total)


@triton.jit
def scaled_step_kernel(
    tiles,
    problems,
    addresses,
    lr,
    weight_decay,
    scales,
    ELEMENT: tl.constexpr,
    RESULT: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALED: tl.constexpr,
):
    """W <- W - lr (s P + weight_decay W) on SPAN elements of one tensor, in the type of P.

    Grid and bound: as of the momenta.
    """
    problem, first, count = span_of(tiles, problems, VECTOR)
    w_start = start_of(problem, 0, addresses, RESULT, VECTOR)
    p_start = start_of(problem, 1, addresses, ELEMENT, VECTOR)
    alpha = tl.load(lr).to(tl.float64)
    gamma = tl.load(weight_decay).to(tl.float64) * tl.load(problem + DECAYED)
    rate, decay = alpha, (alpha * gamma).to(ELEMENT)
    if SCALED:
        rate = alpha * tl.load(scales + tl.load(problem + NUMBER))
    for start in range(0, SPAN, BLOCK):
        inside, x, y, z = indices_of(problem, first, count, start, VECTOR)
        w_at = addresses_at(problem, 0, w_start, x, y, z, VECTOR)
        p_at = addresses_at(problem, 1, p_start, x, y, z, VECTOR)
        w = tl.load(w_at, mask=inside, other=0).to(ELEMENT)
        shrunk = decay * tl.where(decay == 0, 0, w)  # an infinite W that does not decay stays
        moved = rate.to(ELEMENT) * tl.load(p_at, mask=inside, other=0) + shrunk
        tl.store(w_at, (w - moved).to(RESULT), mask=inside)


class Kind(NamedTuple):
    """The tensors of one launch: dtypes of the last and of the first list, elements of a load."""

    source: torch.dtype
    target: torch.dtype
    vector: int


@dataclass
class Plan:
    """The launches over all elements of lists of tensors of given layouts."""

    problems: Tensor
    launches: list[tuple[Kind, int, Tensor]]
    partials: int  # how many partial sums there are
    firsts: Tensor  # the number of each tensor's first one, and of one beyond the last tensor's


def plan(*arguments: Any) -> Plan:
    """Plans the launches over lists of layouts, which come before device, programs and flags.

    A flag for each tensor of a list says whether it decays.
    """
    *groups, device, programs, decayed = arguments
    tensors: list[Layout] = list(itertools.chain(*groups))
    problems: list[tuple[int, ...]] = []
    kinds: dict[Kind, list[int]] = defaultdict(list)
    firsts = [0]
    partials = 0
    for t, flag in enumerate(decayed):
        row = tensors[t :: len(decayed)]
        indices = range(t, len(tensors), len(decayed))
        widest = min(layout.vector for layout in row)
        for piece in pieces(row[0].shape, *[layout.strides for layout in row]):
            count = math.prod(piece.sizes)
            flat = piece.sizes[0] == count and set(piece.strides[0]) == {1}
            flat = flat and all(n % widest == 0 for n in (count, *piece.starts))
            kinds[Kind(row[-1].dtype, row[0].dtype, widest if flat else 1)].append(len(problems))
            places = zip(indices, piece.starts, *piece.strides, strict=True)
            own = [t, count, *piece.sizes[:2], flag, partials, *[n for p in places for n in p]]
            problems.append((*own, *[0] * (PROBLEM_FIELDS.value - len(own))))
            partials += blocks(count, SPAN.value)
        firsts.append(partials)
    merge_small(kinds, lambda kind, n: blocks(problems[n][1], SPAN.value), programs)
    tiles = {
        kind: [(n, i) for n in numbers for i in range(blocks(problems[n][1], SPAN.value))]
        for kind, numbers in kinds.items()
    }
    launches = tile_tables(tiles, device)
    problem_table = table(problems, torch.int64, device)
    return Plan(problem_table, launches, partials, table([firsts], torch.int64, device))


class Sums(NamedTuple):
    """Partial sums, float64, and the number of each tensor's first one."""

    partials: Tensor
    firsts: Tensor


def over_elements(
    kernel: "triton.JITFunction",
    lists: Sequence[Sequence[Tensor]],
    numbers: Sequence[Tensor | float],
    *,
    decayed: Sequence[bool] = (),
    sums: int = 0,
    **constants: bool,
) -> tuple[Prepared, Sums]:
    """Prepares a kernel over all elements of lists of at least one tensor each.

    With ``sums`` it stores as many partial sums for each SPAN elements; they come before its
    numbers. Else they are not to be read.
    """
    lists = [walked(tensors) for tensors in lists]
    device = lists[0][0].device
    flags = tuple(decayed) or (False,) * len(lists[0])
    p = planned(plan, *lists, rest=(flags,))
    kept = sums * p.partials
    partials = torch.empty(kept, dtype=torch.float64, device=device) if sums else p.firsts
    addresses = addresses_of(*lists)

    def start(_: Tensor) -> None:
        for kind, count, tiles in p.launches:
            launch(
                *(kernel, count, tiles, p.problems, addresses),
                *([partials] if sums else []),
                *numbers,
                ELEMENT=ELEMENTS[kind.source],
                RESULT=ELEMENTS[kind.target],
                VECTOR=kind.vector,
                num_warps=WARPS,
                **constants,
            )

    return Prepared(0, start), Sums(partials, p.firsts)
