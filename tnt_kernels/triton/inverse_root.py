"""``inverse_root`` in Triton: the coupled Newton iteration, a few launches each for all matrices.

Nothing waits for the device: it decides itself which matrices are done, whose programs then return
at once. So the launches are always the same, and a graph can capture them.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tnt_kernels.triton import newton
from tnt_kernels.triton.launch import (
    ELEMENTS,
    VECTOR_BYTES,
    Addresses,
    Layout,
    has_tensor_cores,
    hold,
    is_capturing,
    launch,
    layouts,
    mark_written,
    programs_at_once,
    scalar_on,
    table,
)
from tnt_kernels.triton.tiles import blocks, waves

ITERATIONS = 100  # at most: Ren & Goldfarb 2021, appendix
ITERATIONS_PER_LOOK = 4
DEPTH = 32  # terms of a sum in a step
TILE = 32  # rows and columns of one, in launches that multiply nothing
STRIPS = 128  # of TILE rows: how many are added up at a time
SPAN = 1024  # elements of a diagonal mode in a program
WARPS = 4
# Tensors go through the iteration together as long as their scratch memory stays below this or, if
# it is more, what the largest of them needs. Each wave has all the launches of its own: a third of
# a percent of an H100's memory puts all of the MNIST autoencoder's factors into one.
SCRATCH_BYTES = 256 << 20


class Product(NamedTuple):
    """One product of an iteration: its operands and where it goes, by their names in ``newton``."""

    first: int
    second: int
    target: int


@functools.cache
def levels(root: int) -> tuple[tuple[Product, ...], ...]:
    """The products of M <- N^p M and H <- H N, each level's made of those before.

    By squaring: powers of N, N^(2^bit), and the product of M with those that p's bits name.
    """
    m, next_m, h, next_h = (b.value for b in (newton.M, newton.NEXT_M, newton.H, newton.NEXT_H))
    # What is read last must not lie where the last level writes.
    power_buffers = (newton.POWER.value, next_h)
    product_buffers = (next_m, newton.PRODUCT.value)
    result: list[tuple[Product, ...]] = []
    power, product = newton.N.value, m
    powers, products = root.bit_length() - 1, root.bit_count() - 1  # still to come
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
    """How many matrices the iteration holds: up to the last buffer that it names."""
    targets: list[int] = [product.target for level in levels(root) for product in level]
    return max(targets) + 1


class Work(NamedTuple):
    """What one launch does: a row of the table for each program."""

    programs: int
    rows: Tensor


@dataclass
class Wave:
    """Tensors of one dtype that go through all launches together."""

    state: torch.dtype
    block: int  # rows and columns of a product's tile
    scratch: int  # elements
    modes: int
    matrices: Tensor  # one for each mode, also the diagonal ones
    strips: Work
    tiles: Work
    products: list[Work]  # in their order
    spans: Work
    tensors: Work


@dataclass
class Plan:
    """What ``inverse_root`` launches for statistics of given layouts."""

    waves: list[Wave]
    addresses: Addresses = field(default_factory=Addresses)

    @property
    def scratch(self) -> int:
        """Bytes, for one wave after the other."""
        return max((wave.scratch * wave.state.itemsize for wave in self.waves), default=0)


@functools.lru_cache(maxsize=64)
def plan(
    stats: tuple[Layout, ...],
    orders: tuple[int, ...],
    roots: tuple[int, ...],
    device: torch.device,
    programs: int,
) -> Plan:
    """Plans the launches; ``stats`` flat, contiguous."""
    ends = list(itertools.accumulate(orders, initial=0))
    modes = [range(first, last) for first, last in itertools.pairwise(ends)]
    result = []
    for state in (torch.float32, torch.float64):
        needs = {
            t: sum(_scratch_of(stats[n], root) for n in numbers) * state.itemsize
            for t, (numbers, root) in enumerate(zip(modes, roots, strict=True))
            if numbers and stats[numbers[0]].dtype == state
        }
        # The largest first: they are alone anyway, and in a wave the last programs should be short.
        in_order = dict(sorted(needs.items(), key=lambda need: -need[1]))
        for members in waves(in_order, SCRATCH_BYTES):
            result.append(_wave(members, stats, modes, roots, device, programs))
    return Plan(result)


def _stride_of(stat: Layout) -> int:
    """From a buffer's row to the next, elements: a multiple of the widest load."""
    vector = VECTOR_BYTES // stat.dtype.itemsize
    return blocks(stat.shape[0], vector) * vector


def _scratch_of(stat: Layout, root: int) -> int:
    """The scratch memory of a matrix, elements."""
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
                spans += [(len(matrices), span) for span in range(blocks(rows, SPAN))]
            else:
                full[len(matrices)] = roots[t]
            matrices.append((n, len(stats) + n, rows, stride, free, roots[t], t))
            free += _scratch_of(stats[n], roots[t])
    state = stats[modes[members[0]][0]].dtype
    sizes = {number: matrices[number][newton.ROWS.value] for number in full}
    block = _block_of(state, list(sizes.values()), programs)
    strips = [(number, i) for number, rows in sizes.items() for i in range(blocks(rows, TILE))]
    first_strip = {number: row for row, (number, i) in enumerate(strips) if i == 0}
    tiles = [
        (number, i, j, first_strip[number])
        for number, rows in sizes.items()
        for i, j in _lower_tiles(rows, TILE)
    ]
    # The last products of all matrices are made together.
    depth = max((len(levels(root)) for root in full.values()), default=0)
    products: list[list[tuple[int, ...]]] = [[] for _ in range(depth)]
    for number, root in full.items():
        for level, made in zip(reversed(products), reversed(levels(root)), strict=False):
            for product in made:
                level += [(number, i, j, *product) for i, j in _lower_tiles(sizes[number], block)]

    def work(rows: Sequence[tuple[int, ...]]) -> Work:
        return Work(len(rows), table(rows, torch.int32, device))

    return Wave(
        state,
        block,
        free,
        len(matrices),
        table(matrices, torch.int64, device),
        work(strips),
        work(tiles),
        [work(rows) for rows in products],
        work(spans),
        work(tensors),
    )


def _block_of(state: torch.dtype, sizes: Sequence[int], programs: int) -> int:
    """Rows and columns of a product's tile: small ones where large ones would leave programs idle.

    64 x 64 float32 sums are what four warps hold in registers.
    """
    large = 64 if state == torch.float32 else 32
    tiles = sum(len(list(_lower_tiles(rows, large))) for rows in sizes)
    return large if tiles >= programs else large // 2


def _lower_tiles(rows: int, block: int) -> Iterator[tuple[int, int]]:
    """Row and column of each tile of the lower triangle."""
    return ((i, j) for i in range(blocks(rows, block)) for j in range(i + 1))


class Watch:
    """Sees on the host that a wave is done, later than it is, but without waiting for it.

    The launches that are left do nothing then, but to launch them takes time. A graph has them all.
    """

    def __init__(self, states: Tensor) -> None:
        self._states = self._seen = states
        self._may_look = not is_capturing(states.device)
        if states.is_cuda and self._may_look:
            # Zeros: nobody is done. Fresh ones: a copy from an earlier call may still be under way.
            self._seen = torch.zeros(states.shape, dtype=states.dtype, pin_memory=True)

    def look(self) -> None:
        """Has the device send its states when it gets there."""
        if self._may_look and self._seen is not self._states:
            self._seen.copy_(self._states, non_blocking=True)

    def sees_all_done(self) -> bool:
        """Whether the states that have come so far say so."""
        return self._may_look and bool(self._seen[:, newton.DONE.value].all())


def inverse_root(
    out: Sequence[Tensor],
    stats: Sequence[Tensor],
    orders: Sequence[int],
    damping: Tensor,
    roots: Sequence[int],
    *,
    programs: int | None = None,
    iterations: int = ITERATIONS,
) -> Tensor:
    """The operator, with ``out`` and ``stats`` flat; see ``tnt_kernels.inverse_root``.

    Args:
        out: what the factors are written to, contiguous.
        stats: the statistics, mode after mode of tensor after tensor.
        orders: how many modes each tensor has.
        damping: eps.
        roots: p for each tensor.
        programs: how many programs the device runs at once; by default asked of it.
        iterations: at most so many.

    Returns:
        info: int32, (number of tensors,), on the device.
    """
    if not stats:
        return torch.zeros(len(orders), dtype=torch.int32, device=damping.device)
    device = stats[0].device
    stats = [s.resolve_neg().contiguous() for s in stats]
    programs = programs or programs_at_once(device)
    p = plan(layouts(stats), tuple(orders), tuple(roots), device, programs)
    hold(device, p)
    addresses, eps = p.addresses.of([*stats, *out]), scalar_on(device, damping)
    info = torch.empty(len(orders), dtype=torch.int32, device=device)
    scratch = torch.empty(p.scratch, dtype=torch.uint8, device=device)
    for wave in p.waves:
        _run(wave, addresses, scratch.view(wave.state), info, eps, iterations)
    mark_written(out)
    return info


def _run(
    wave: Wave, addresses: Tensor, scratch: Tensor, info: Tensor, damping: Tensor, iterations: int
) -> None:
    device, element = info.device, ELEMENTS[wave.state]
    shape = wave.modes, newton.STATE_FIELDS.value
    states = torch.zeros(shape, dtype=torch.int64, device=device)
    if wave.products:
        _iterate(wave, addresses, states, scratch, damping, iterations)
    for check in (True, False):
        launch(
            newton.full_kernel,
            wave.tiles.programs,
            *(wave.tiles.rows, wave.matrices, addresses, states, info, scratch),
            STATE=element,
            BLOCK=TILE,
            CHECK=check,
            num_warps=WARPS,
        )
        launch(
            newton.diagonal_kernel,
            wave.spans.programs,
            *(wave.spans.rows, wave.matrices, addresses, states, info, damping),
            STATE=element,
            SPAN=SPAN,
            CHECK=check,
            num_warps=WARPS,
        )
        if check:
            launch(
                newton.judge_kernel,
                wave.tensors.programs,
                *(wave.tensors.rows, states, info),
                num_warps=1,
            )


def _iterate(
    wave: Wave, addresses: Tensor, states: Tensor, scratch: Tensor, damping: Tensor, iterations: int
) -> None:
    device, element = states.device, ELEMENTS[wave.state]
    measures = torch.empty(wave.strips.programs, 2, dtype=torch.float64, device=device)
    sizes = {"STATE": element, "BLOCK": TILE, "num_warps": WARPS}
    launch(
        newton.measure_kernel,
        wave.strips.programs,
        *(wave.strips.rows, wave.matrices, addresses, measures, damping),
        **sizes,
    )
    launch(
        newton.begin_kernel,
        wave.tiles.programs,
        *(wave.tiles.rows, wave.matrices, addresses, states, measures, scratch, damping),
        STRIPS=STRIPS,
        **sizes,
    )
    launch(newton.decide_kernel, wave.modes, states, STATE=element, MAY_GROW=True, num_warps=1)
    watch = Watch(states)
    for iteration in range(iterations):
        if watch.sees_all_done():
            break
        for level in wave.products:
            launch(
                newton.product_kernel,
                level.programs,
                *(level.rows, wave.matrices, states, scratch),
                STATE=element,
                BLOCK=wave.block,
                DEPTH=DEPTH,
                VECTOR=VECTOR_BYTES // wave.state.itemsize,
                PRECISION=_precision(device),
                LAST=level is wave.products[-1],
                num_warps=WARPS,
            )
        launch(
            newton.decide_kernel,
            *(wave.modes, states),
            STATE=element,
            MAY_GROW=iteration == 0,
            num_warps=1,
        )
        if iteration % ITERATIONS_PER_LOOK == 0:
            watch.look()


def _precision(device: torch.device) -> str:
    """How products are made, whatever PyTorch's switch says.

    TF32's ten bits are too few: max|M - I| would stay above the tolerance that ends the iteration.
    """
    return "tf32x3" if has_tensor_cores(device) else "ieee"
