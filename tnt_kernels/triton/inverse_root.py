"""``inverse_root`` in Triton: the coupled Newton iteration, a few launches for all matrices.

Nothing waits for the device, which decides itself which matrices are done: their programs return at
once. A graph therefore captures always the same launches; an eager call may end early.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tnt_kernels.triton import newton
from tnt_kernels.triton.factors import (
    SPAN,
    WARPS,
    Work,
    computed_factors,
    judge_kernel,
    modes_of,
    waves_of,
    work,
)
from tnt_kernels.triton.launch import (
    ELEMENTS,
    VECTOR_BYTES,
    Layout,
    block_of,
    has_tensor_cores,
    is_capturing,
    launch,
    table,
)
from tnt_kernels.triton.tiles import blocks, lower_tiles

ITERATIONS = 100  # at most: Ren & Goldfarb 2021, appendix
ITERATIONS_PER_LOOK = 4
TILE = 32  # rows and columns of a tile, in launches without products


class Product(NamedTuple):
    """One product of an iteration: its operands and target, as ``newton`` numbers them."""

    first: int
    second: int
    target: int


@functools.cache
def levels(root: int) -> tuple[tuple[Product, ...], ...]:
    """The products of M <- N^p M and H <- H N; each level reads only earlier levels' products.

    By repeated squaring: the powers N^(2^bit), and the product of M with the powers of p's bits.
    """
    m, next_m, h, next_h = (b.value for b in (newton.M, newton.NEXT_M, newton.H, newton.NEXT_H))
    # The last level must not write to a buffer that it reads.
    power_buffers = (newton.POWER.value, next_h)
    product_buffers = (next_m, newton.PRODUCT.value)
    result: list[tuple[Product, ...]] = []
    power, product = newton.N.value, m
    powers, products = root.bit_length() - 1, root.bit_count() - 1  # that remain
    for bit in range(root.bit_length()):
        level = []
        if root >> bit & 1:
            level.append(Product(power, product, product_buffers[products % 2]))
            product = level[-1].target
            products -= 1
        if powers:
            powers -= 1
            level.append(Product(power, power, power_buffers[powers % 2]))
            power = level[-1].target
        else:
            level.append(Product(h, newton.N.value, next_h))
        result.append(tuple(level))
    return tuple(result)


def buffers(root: int) -> int:
    """How many matrices the iteration stores: up to the last buffer that its products write."""
    targets: list[int] = [product.target for level in levels(root) for product in level]
    return max(targets) + 1


@dataclass
class Wave:
    """The launches for tensors of one dtype that share the workspace."""

    state: torch.dtype
    block: int  # rows and columns of a product's tile
    scratch: int  # bytes of the workspace
    modes: int
    matrices: Tensor  # one row for each mode, diagonal ones included
    strips: Work
    tiles: Work
    products: list[Work]  # in their order
    spans: Work
    tensors: Work


def plan(
    stats: tuple[Layout, ...],
    device: torch.device,
    programs: int,
    orders: tuple[int, ...],
    roots: tuple[int, ...],
) -> list[Wave]:
    """Plans the launches; ``stats`` flat, contiguous."""
    modes = modes_of(orders)
    needs = {
        t: sum(_scratch_of(stats[n], root) for n in numbers)
        for t, (numbers, root) in enumerate(zip(modes, roots, strict=True))
    }
    return [
        _wave(members, stats, modes, roots, device, programs)
        for _, members in waves_of(stats, modes, needs)
    ]


def _stride_of(stat: Layout) -> int:
    """The leading dimension of a buffer, elements: a multiple of the widest load."""
    vector = VECTOR_BYTES // stat.dtype.itemsize
    return blocks(stat.shape[0], vector) * vector


def _scratch_of(stat: Layout, root: int) -> int:
    """The workspace of a matrix, elements."""
    return 0 if len(stat.shape) == 1 else buffers(root) * stat.shape[0] * _stride_of(stat)


def _wave(
    members: Sequence[int],
    stats: Sequence[Layout],
    modes: Sequence[range],
    roots: Sequence[int],
    device: torch.device,
    programs: int,
) -> Wave:
    matrices: list[tuple[int, ...]] = []
    tensors: list[tuple[int, ...]] = []
    spans: list[tuple[int, ...]] = []
    full: dict[int, int] = {}  # row of the matrices: root
    free = 0
    for t in members:
        tensors.append((t, len(matrices), len(modes[t])))
        for n in modes[t]:
            rows, stride = stats[n].shape[0], _stride_of(stats[n])
            if len(stats[n].shape) == 1:
                spans += [(len(matrices), span) for span in range(blocks(rows, SPAN.value))]
            else:
                full[len(matrices)] = roots[t]
            step = 1 if len(stats[n].shape) == 1 else rows + 1
            matrices.append((n, len(stats) + n, rows, step, stride, free, roots[t], t))
            free += _scratch_of(stats[n], roots[t])
    state = stats[modes[members[0]][0]].dtype
    sizes = {number: matrices[number][newton.ROWS.value] for number in full}
    block = _block_of(state, list(sizes.values()), programs)
    strips = [(number, i) for number, n in sizes.items() for i in range(blocks(n, TILE))]
    first_strip = {number: row for row, (number, i) in enumerate(strips) if i == 0}
    tiles = [
        (number, i, j, first_strip[number])
        for number, rows in sizes.items()
        for i, j in lower_tiles(rows, TILE)
    ]
    # The last products of all matrices share a launch.
    depth = max((len(levels(root)) for root in full.values()), default=0)
    products: list[list[tuple[int, ...]]] = [[] for _ in range(depth)]
    for number, root in full.items():
        for table_rows, level in zip(reversed(products), reversed(levels(root)), strict=False):
            for product in level:
                at = lower_tiles(sizes[number], block)
                table_rows += [(number, i, j, *product) for i, j in at]

    return Wave(
        state,
        block,
        free * state.itemsize,
        len(matrices),
        table(matrices, torch.int64, device),
        work(strips, device),
        work(tiles, device),
        [work(rows, device) for rows in products],
        work(spans, device),
        work(tensors, device),
    )


def _block_of(state: torch.dtype, sizes: Sequence[int], programs: int) -> int:
    """Rows and columns of a product's tile: smaller if large ones leave programs idle."""
    large = block_of(state)
    tiles = sum(len(list(lower_tiles(rows, large))) for rows in sizes)
    return large if tiles >= programs else large // 2


class Watch:
    """Reads on the host, late but without waiting, whether a wave is done.

    The remaining launches would do nothing, but each takes time. A graph records all of them.
    """

    def __init__(self, states: Tensor) -> None:
        self._states = self._seen = states
        self._may_look = not is_capturing(states.device)
        if states.is_cuda and self._may_look:
            # Zeros: none is done. Newly allocated: an earlier call's copy may still be running.
            self._seen = torch.zeros(states.shape, dtype=states.dtype, pin_memory=True)
        self._done = self._seen[:, newton.DONE.value]
        self._least = torch.zeros((), dtype=states.dtype, device=self._seen.device)

    def look(self) -> None:
        """Starts an asynchronous copy of the states."""
        if self._may_look and self._seen is not self._states:
            self._seen.copy_(self._states, non_blocking=True)

    def sees_all_done(self) -> bool:
        """Whether all matrices are done in the last copy that has arrived."""
        # Not all(), which takes memory: an earlier wave may already have written its factors.
        return self._may_look and bool(torch.amin(self._done, 0, out=self._least))


def inverse_root(
    out: Sequence[Tensor],
    stats: Sequence[Tensor],
    orders: Sequence[int],
    damping: Tensor,
    roots: Sequence[int],
    relative: bool,
) -> Tensor:
    """The operator with ``out`` and ``stats`` flat."""
    return computed_factors(plan, _prepared, out, stats, orders, damping, relative, tuple(roots))


def _prepared(
    wave: Wave, info: Tensor, addresses: Tensor, damping: Tensor, relative: bool
) -> Callable[[Tensor], None]:
    """Takes a wave's memory; returns what launches it in a workspace."""
    device, element = info.device, ELEMENTS[wave.state]
    shape = wave.modes, newton.STATE_FIELDS.value
    states = torch.zeros(shape, dtype=torch.int64, device=device)
    measures = torch.empty(wave.strips.programs, 2, dtype=torch.float64, device=device)
    failed, watch = states[:, newton.FAILED.value], Watch(states)
    read = wave.matrices, addresses, states
    tables, sizes = (*read, info), {"STATE": element, "num_warps": WARPS}

    def start(scratch: Tensor) -> None:
        scratch = scratch.view(wave.state)
        launch(newton.damping_kernel, wave.modes, *read, damping, **sizes, RELATIVE=relative)
        if wave.products:
            _iterate(wave, addresses, states, measures, scratch, watch)
        for check in (True, False):
            named = {**sizes, "CHECK": check}
            launch(newton.full_kernel, *wave.tiles, *tables, scratch, **named, BLOCK=TILE)
            launch(newton.diagonal_kernel, *wave.spans, *tables, **named)
            if check:
                stride = newton.STATE_FIELDS.value
                launch(judge_kernel, *wave.tensors, failed, info, STRIDE=stride, num_warps=1)

    return start


def _iterate(
    wave: Wave,
    addresses: Tensor,
    states: Tensor,
    measures: Tensor,
    scratch: Tensor,
    watch: Watch,
) -> None:
    device, element = states.device, ELEMENTS[wave.state]
    sizes = {"STATE": element, "BLOCK": TILE, "num_warps": WARPS}
    read = wave.matrices, addresses, states, measures
    launch(newton.measure_kernel, *wave.strips, *read, **sizes)
    launch(newton.begin_kernel, *wave.tiles, *read, scratch, **sizes)
    launch(newton.decide_kernel, wave.modes, states, STATE=element, MAY_GROW=True, num_warps=1)
    for iteration in range(ITERATIONS):
        if watch.sees_all_done():
            break
        for level in wave.products:
            launch(
                newton.product_kernel,
                *(*level, wave.matrices, states, scratch),
                STATE=element,
                BLOCK=wave.block,
                VECTOR=VECTOR_BYTES // wave.state.itemsize,
                # Not PyTorch's switch: with TF32's ten bits max|M - I| would stay above TOLERANCE.
                PRECISION="tf32x3" if has_tensor_cores(device) else "ieee",
                LAST=level is wave.products[-1],
                num_warps=WARPS,
            )
        first = iteration == 0
        launch(newton.decide_kernel, wave.modes, states, STATE=element, MAY_GROW=first, num_warps=1)
        if iteration % ITERATIONS_PER_LOOK == 0:
            watch.look()
