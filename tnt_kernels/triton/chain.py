"""The mode products G x_1 A_1 ... x_k A_k of many tensors, and their epilogue.

All operands are packed (see ``pack``). A tensor's full modes are multiplied one after the other,
the fastest first. The first launch packs the factors, and each tensor as a matrix whose rows are
the other modes and whose columns are the mode to multiply; a diagonal factor scales the rows there.
The epilogue of a product stores it as the next product's operand. That of the last stores the
result, or updates a parameter with it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tnt_kernels.lists import walked
from tnt_kernels.triton import cublas
from tnt_kernels.triton.launch import (
    VECTOR_BYTES,
    Layout,
    Prepared,
    addresses_of,
    block_of,
    contiguous,
    contiguous_copies,
    planned,
    precision,
    scalar_on,
    state_dtype,
    table,
    tile_tables,
)
from tnt_kernels.triton.momentum import over_elements, scaled_step_kernel
from tnt_kernels.triton.pack import (
    LEAST_LARGE,
    NONE,
    SCRATCH,
    SHORT,
    SHORT_TILE,
    Operand,
    Packing,
    form_of,
    packing,
)
from tnt_kernels.triton.product import LAST, PACKS, STORES, Multiplying, Scaling
from tnt_kernels.triton.tiles import (
    LARGE_BLOCK,
    LARGEST_INDEX,
    STEP,
    Axis,
    Unfolding,
    axis,
    blocks,
    by_stride,
    dense_strides,
    tile_order,
)

Kind = Packing | Multiplying | Scaling
Tiles = Callable[[int], Iterator[tuple[int, int, int]]]

# Tensors' operands exist together as long as they have fewer bytes than this: with fewer, large
# models leave more of a device idle (tools.launch_counts).
PACKED_BYTES = 512 << 20

_FIRST = -(2**31)  # the stage of what reads nothing of the workspace


class Place(NamedTuple):
    """A tensor: its address's index, or SCRATCH; its first byte there; dtype and strides."""

    address: int
    start: int
    dtype: torch.dtype
    strides: tuple[int, ...]


class Factor(NamedTuple):
    """The factor of a mode: its address's index."""

    address: int
    is_diagonal: bool


class Work(NamedTuple):
    """What one launch does for one tensor."""

    stage: int  # the last one is 0; what one stage does can run at once
    kind: Kind
    row: tuple[int, ...]  # of the problem table
    tiles: Tiles  # given the row's number
    sides: tuple[int, int] = (0, 0)  # rows and columns of a product, whose tiles are still open


def _no_tiles(_: int) -> Iterator[tuple[int, int, int]]:
    return iter(())


class Unmergeable(Exception):
    """Modes that are not one index of a tensor, as it lies in memory."""


class Route:
    """The launches that multiply one tensor, and what they need of the workspace.

    With ``direct`` a product stores the next operand. Else it stores a tensor, which is packed
    again: that serves modes of which too many are not next to each other.

    Raises:
        Unmergeable: Tensors that lie so in memory must be copied.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        source: Place,
        result: Place,
        factors: Mapping[int, Factor],
        setting: str,
        start: int,
        *,
        direct: bool,
    ) -> None:
        self.end = start  # of the workspace, in bytes
        self._works: list[Work] = []
        self._sizes, self._factors, self._direct = sizes, factors, direct
        self._modes = by_stride(result.strides)
        self._state = state_dtype(source.dtype)
        self._form = form_of(self._state, setting)
        self._stage = 0
        full = [m for m in self._modes if m in factors and not factors[m].is_diagonal]
        scaled = [m for m in self._modes if m in factors and factors[m].is_diagonal]
        if full:
            self._multiply(source, result, full[::-1], scaled)
        else:
            for mode in scaled[:-1]:
                source = self._scale(mode, source)
            self._scale(scaled[-1], source, result)

    @property
    def works(self) -> list[Work]:
        """Its work in order."""
        return [
            work if work.stage == _FIRST else work._replace(stage=work.stage - self._stage)
            for work in self._works
        ]

    def _multiply(
        self, source: Place, result: Place, full: Sequence[int], scaled: Sequence[int]
    ) -> None:
        orders = [self._order(*pair) for pair in zip(full, [*full[1:], None], strict=True)]
        # The first operand's rows are scaled by one factor, if they count its mode by itself.
        strides = source.strides if len(scaled) < 2 else dense_strides(self._sizes, self._modes)
        packed = [m for m in scaled if axis(self._sizes, strides, orders[0], m)][:1]
        for mode in scaled:
            if mode not in packed:
                source = self._scale(mode, source)
        operand = self._packed(source, orders[0], full[0], *packed)
        for n, (mode, order) in enumerate(zip(full, orders, strict=True), start=1):
            if n == len(full):
                self._product(mode, order, operand, result, LAST)
            elif self._direct:
                operand = self._product_packed(mode, order, operand, orders[n], full[n])
            else:
                tensor = self._tensor()
                self._product(mode, order, operand, tensor, STORES.value)
                operand = self._packed(tensor, orders[n], full[n])

    def _order(self, mode: int, after: int | None) -> list[int]:
        """The rows of an operand, in an order in which its product can be written.

        The mode to multiply next comes last, because the next operand is dense in it.
        """
        if after is None or not self._direct:
            return [m for m in self._modes if m != mode]
        at = self._modes.index(mode)
        return [m for m in self._modes[at + 1 :] + self._modes[:at] if m != after] + [after]

    def _packed(self, source: Place, order: Sequence[int], mode: int, *scaled: int) -> Operand:
        """An operand made of a tensor, its rows scaled by the factor of one of their modes."""
        operand = self._operand(self._count(order), self._sizes[mode])
        scale = NONE, False
        if scaled:
            counted = [m for m in order if self._sizes[m] > 1 or m in scaled]
            scale = self._factors[scaled[0]].address, counted[-1] not in scaled
        matrix = Unfolding(self._axis(source, order, *scaled), self._axis(source, [mode]))
        row = operand.problem((source.address, source.start), matrix, scale)
        add = self._then if source.address == SCRATCH else self._first
        add(packing(operand, source.dtype), row, operand.tiles)
        return operand

    def _factor(self, mode: int) -> Operand:
        size = self._sizes[mode]
        operand = self._operand(size, size)
        matrix = Unfolding(Axis(size, size, size, 0), Axis(size, size, 1, 0))
        row = operand.problem((self._factors[mode].address, 0), matrix)
        self._first(packing(operand, self._state), row, operand.tiles)
        return operand

    def _product(
        self,
        mode: int,
        order: Sequence[int],
        operand: Operand,
        target: Place,
        writes: int,
        length: int = 0,
    ) -> None:
        """A mode's product with its full factor; ``order`` are the modes of the operand's rows."""
        left, right = self._factor(mode), operand
        matrix = Unfolding(self._axis(target, [mode]), self._axis(target, order))
        # Columns should be dense in the target.
        if matrix.rows_are_dense or (matrix.rows.inner_stride == 1 and right.rows <= SHORT):
            left, right, matrix = right, left, Unfolding(matrix.columns, matrix.rows)
        row: tuple[int, ...] = target.address, target.start, length, *matrix.rows, *matrix.columns
        operands = left.start, right.start, left.steps, left.stride
        kind = Multiplying(self._state, target.dtype, writes, self._form.value)
        row = (*row, *operands, *[0] * 8)  # as long as the row of a scaling
        self._then(kind, row, sides=(left.rows, right.rows))

    def _product_packed(
        self, mode: int, order: Sequence[int], operand: Operand, rows: Sequence[int], after: int
    ) -> Operand:
        """The product of a mode as the operand for mode ``after``, whose rows are ``rows``."""
        to = self._operand(self._count(rows), self._sizes[after])
        strides = dense_strides(self._sizes, [*rows, after], gap=to.stride)
        target = Place(SCRATCH, to.start, self._state, strides)
        self._product(mode, order, operand, target, PACKS.value, to.steps * STEP)
        nothing = Unfolding(Axis(to.rows, 1, 0, 0), Axis(0, 1, 0, 0))
        self._first(packing(to, self._state), to.problem((SCRATCH, 0), nothing), to.padding)
        return to

    def _scale(self, mode: int, source: Place, result: Place | None = None) -> Place:
        """A mode's product with its diagonal factor."""
        target = result or self._tensor()
        others = [m for m in self._modes if m != mode]
        faster = self._modes[self._modes.index(mode) + 1 :]
        by_row = any(self._sizes[m] > 1 for m in faster)  # else the mode is dense
        sides = ([mode], others) if by_row else (others, [mode])
        written, read = (
            [number for modes in sides for number in self._axis(place, modes)]
            for place in (target, source)
        )
        places = target.address, target.start, 0, *written, source.address, source.start
        kind = Scaling(
            *(source.dtype, self._state, target.dtype), STORES.value if result is None else LAST
        )
        block = block_of(self._state)
        tiles = _tiles(self._count(sides[0]), self._count(sides[1]), block, block)
        self._then(kind, (*places, self._factors[mode].address, by_row, *read), tiles)
        return target

    def _tensor(self) -> Place:
        """A contiguous tensor in the workspace."""
        start = self._take(self._count(self._modes) * self._state.itemsize)
        return Place(SCRATCH, start, self._state, dense_strides(self._sizes, self._modes))

    def _operand(self, rows: int, columns: int) -> Operand:
        operand = Operand(rows, columns, self._state, self._form, self.end)
        self._take(operand.nbytes)
        return operand

    def _take(self, size: int) -> int:
        start = self.end
        self.end += blocks(size, VECTOR_BYTES) * VECTOR_BYTES
        return start

    def _count(self, modes: Sequence[int]) -> int:
        return math.prod(self._sizes[m] for m in modes)

    def _axis(self, tensor: Place, modes: Sequence[int], *alone: int) -> Axis:
        found = axis(self._sizes, tensor.strides, modes, *alone)
        if found is None:
            raise Unmergeable
        return found

    def _first(self, kind: Packing, row: tuple[int, ...], tiles: Tiles) -> None:
        """Adds work that reads nothing of the workspace."""
        self._works.append(Work(_FIRST, kind, row, tiles))

    def _then(
        self,
        kind: Kind,
        row: tuple[int, ...],
        tiles: Tiles = _no_tiles,
        sides: tuple[int, int] = (0, 0),
    ) -> None:
        """Adds work that reads what the work before it wrote."""
        self._stage += 1
        self._works.append(Work(self._stage, kind, row, tiles, sides))


@dataclass
class Plan:
    """The launches, in order, that multiply tensors of given layouts."""

    packed: Tensor  # the problem tables: of operands,
    problems: Tensor  # and of products
    launches: list[tuple[Kind, int, Tensor]]
    scratch: int  # bytes
    copied: frozenset[int]  # tensors to copy first, with their results: some modes do not merge
    by_cublas: dict[int, int]  # tensors that cuBLAS multiplies, and their first factors


def plan(
    tensors: tuple[Layout, ...],
    results: tuple[Layout, ...],
    factors: tuple[Layout, ...],
    device: torch.device,
    programs: int,
    setting: str = "ieee",
    skipped: tuple[int, ...] = (),
) -> Plan:
    """Plans the products; ``factors`` flat, contiguous; ``setting`` is Triton's precision.

    ``skipped``: a mode of each tensor that has no factor.
    """
    copied, by_cublas = set[int](), dict[int, int]()
    waves = [list[Work]()]
    scratch = end = first = 0
    for t, (source, result) in enumerate(zip(tensors, results, strict=True)):
        modes = [m for m in range(len(source.shape)) if not skipped or m != skipped[t]]
        own = factors[first : first + len(modes)]
        if cublas.is_faster(source, own, setting):
            by_cublas[t] = first
        elif 0 not in source.shape:
            addresses = t, len(tensors) + t, 2 * len(tensors) + first
            given = dict(zip(modes, own, strict=True))
            route, is_copied = _route(source, result, given, addresses, setting, end)
            if route.end > PACKED_BYTES and end > 0:
                waves.append([])
                route, is_copied = _route(source, result, given, addresses, setting, 0)
            waves[-1] += route.works
            end = route.end
            scratch = max(scratch, end)
            if is_copied:
                copied.add(t)
        first += len(modes)
    packed, problems = list[tuple[int, ...]](), list[tuple[int, ...]]()
    launches = list[tuple[Kind, int, Tensor]]()
    for wave in waves:
        stages = defaultdict[int, list[Work]](list)
        for work in wave:
            stages[work.stage].append(work)
        for stage in sorted(stages):
            tiles = defaultdict[Kind, list[tuple[int, int, int]]](list)
            for work in _sized(stages[stage], programs):
                rows = packed if isinstance(work.kind, Packing) else problems
                tiles[work.kind] += work.tiles(len(rows))
                rows.append(work.row)
            launches += tile_tables(tiles, device)
    return Plan(
        table(packed, torch.int64, device),
        table(problems, torch.int64, device),
        launches,
        scratch,
        frozenset(copied),
        by_cublas,
    )


def _route(
    source: Layout,
    result: Layout,
    factors: Mapping[int, Layout],
    addresses: tuple[int, int, int],
    setting: str,
    start: int,
) -> tuple[Route, bool]:
    """The launches of one tensor, and whether they need copies of it and of its result."""
    first, second, third = addresses
    given = {m: Factor(third + n, len(f.shape) == 1) for n, (m, f) in enumerate(factors.items())}
    for is_copied in (False, True):
        if is_copied:
            source, result = contiguous(source), contiguous(result)
        places = (
            Place(first, 0, source.dtype, source.strides),
            Place(second, 0, result.dtype, result.strides),
        )
        for direct in (True, False):
            try:
                route = Route(source.shape, *places, given, setting, start, direct=direct)
            except Unmergeable:
                continue
            return route, is_copied
    raise ValueError(
        f"tensor {first} must have unfoldings of at most {LARGEST_INDEX} rows and columns, "
        f"got {tuple(source.shape)}"
    )


def _sized(works: Sequence[Work], programs: int) -> list[Work]:
    """Works of one stage, products with tiles: large ones where these fill the device."""
    large = sum(_large_tiles(work) for work in works) >= programs
    sized = list[Work]()
    for work in works:
        if isinstance(work.kind, Multiplying):
            small = block_of(work.kind.state)
            height, width = small, small
            if work.kind.state == torch.float32 and work.sides[0] <= SHORT:
                height, width = SHORT_TILE
            elif large and _large_tiles(work):
                height, width = LARGE_BLOCK, LARGE_BLOCK
            kind = work.kind._replace(height=height, width=width)
            work = work._replace(kind=kind, tiles=_tiles(*work.sides, height, width))
        sized.append(work)
    return sized


def _large_tiles(work: Work) -> int:
    """The large tiles of a product; none if they were mostly padding."""
    is_single = isinstance(work.kind, Multiplying) and work.kind.state == torch.float32
    if not is_single or min(work.sides) < LEAST_LARGE:
        return 0
    rows, columns = work.sides
    return blocks(rows, LARGE_BLOCK) * blocks(columns, LARGE_BLOCK)


def _tiles(rows: int, columns: int, height: int, width: int) -> Tiles:
    """The tiles of a matrix, for a problem of this number."""

    def of(problem: int) -> Iterator[tuple[int, int, int]]:
        order = tile_order(blocks(rows, height), blocks(columns, width))
        return ((problem, i, j) for i, j in order)

    return of


def _with_copies(tensors: Sequence[Tensor], copied: Collection[int]) -> Sequence[Tensor]:
    """The tensors, with new memory for some of them."""
    if not copied:
        return tensors
    dense = torch.contiguous_format
    return [
        torch.empty_like(x, memory_format=dense) if t in copied else x
        for t, x in enumerate(tensors)
    ]


def products(
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    factors: Sequence[Tensor],
    step: tuple[Tensor, Tensor] | None = None,
    skipped: Sequence[int] = (),
) -> list[Prepared]:
    """Prepares results[t] <- P = tensors[t] x_1 A_1 ... x_k A_k.

    With ``step``, (lr, weight_decay), the results W, of any dtype, become W - lr (P + weight_decay
    W); else they have the factors' dtype. The numbers of a step may be on the host. ``factors`` are
    the A_i, flat; ``skipped`` is a mode of each tensor that has none. ``results`` may be the list
    ``tensors`` itself.
    """
    device = tensors[0].device
    tensors, results, factors = walked(tensors), walked(results), contiguous_copies(factors)
    setting = precision(device)
    p = planned(plan, tensors, results, factors, rest=(setting, tuple(skipped)))
    read, written = _with_copies(tensors, p.copied), _with_copies(results, p.copied)
    addresses = addresses_of(read, written, factors)
    lr, weight_decay = addresses, addresses  # not read without a step
    if step is not None:
        lr, weight_decay = scalar_on(device, step[0]), scalar_on(device, step[1])

    def start(scratch: Tensor) -> None:
        with torch.inference_mode():  # the only place where tensors made in it may be written
            for t in p.copied:
                read[t].copy_(tensors[t])
                if step is not None:
                    written[t].copy_(results[t])
        for kind, count, tiles in p.launches:
            if isinstance(kind, Packing):
                kind.launch(count, tiles, p.packed, addresses, scratch)
            else:
                tables = tiles, p.problems, addresses, scratch, lr, weight_decay
                kind.launch(count, *tables, updates=step is not None)
        with torch.inference_mode():
            for t in p.copied:
                results[t].copy_(written[t])

    prepared = [Prepared(p.scratch, start, (read, written, factors))]
    if not p.by_cublas:
        return prepared
    cublas.check(device)
    # A step's products P use this memory one after the other.
    most = 0 if step is None else max(tensors[t].numel() for t in p.by_cublas)
    buffer = torch.empty(most, dtype=torch.float32, device=device)
    for t, first in p.by_cublas.items():
        target, pair = results[t], factors[first : first + 2]
        if step is None:
            prepared.append(cublas.chain(tensors[t], pair, target))
            continue
        product = buffer[: target.numel()].view(target.shape)
        lists, numbers = [[target], [product]], (lr, weight_decay, lr)
        update, _ = over_elements(scaled_step_kernel, lists, numbers, decayed=(True,), SCALED=False)
        prepared += [cublas.chain(tensors[t], pair, product), update]
    return prepared
