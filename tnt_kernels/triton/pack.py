"""Packed operands: the unfoldings that matrix units multiply, copied into the form they want.

An operand is a matrix of ``rows`` and K columns, K the summed index, row after row. K is padded
with zeros to whole steps, so every row starts at a multiple of 16 bytes and every load of the
product's loop takes 16 bytes, whatever the tensor's sizes and strides are. That is the only form
that the units of Hopper take in TF32.

Numbers in float32 are rounded to TF32 here; the units themselves would drop bits, which makes
statistics too small. At "highest" a row holds the rounded numbers and then what they lack, rounded
too. Three products then have the error of float32: low x high, high x low, high x high.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton.launch import ELEMENTS, launch
from tnt_kernels.triton.tiles import (
    AXIS_FIELDS,
    PROBLEM,
    STEP,
    TILE_COLUMN,
    TILE_ROW,
    Unfolding,
    blocks,
    fields,
    places,
    tile_order,
)

# How an operand holds its numbers: as they are, rounded to TF32, or in two rounded parts.
AS_IS, ROUNDED, SPLIT = (tl.constexpr(n) for n in range(3))

TERMS = tl.constexpr(STEP)  # for kernels

# The problem table, int64: the source (the index of an address, SCRATCH for the workspace, and a
# first byte), a flag, the address of the rows' scales (NONE for 1), which index they have, the
# target's first byte in the workspace and numbers in a row; then the axes of both.
SOURCE, OFFSET, ROWS_ARE_DENSE, SCALE, BY_OUTER, TARGET, TARGET_STRIDE = fields(7)
ROW_AXIS, COLUMN_AXIS = fields(2, start=7, width=AXIS_FIELDS)
PACK_FIELDS = tl.constexpr(15)
TILE_FIELDS = tl.constexpr(3)

SCRATCH = NONE = -1

# Rows of a mode that has tiles of its own: a kernel's 3 x 3 positions, for example.
SHORT = 16
# Rows and columns of a tile, of short modes and of others.
SHORT_TILE, TILE = (SHORT, 256), (64, 64)
# A matrix of fewer rows is mostly padding in large tiles.
LEAST_LARGE = 96


def form_of(dtype: torch.dtype, setting: str) -> tl.constexpr:
    """How operands of a dtype are packed for products of Triton's precision ``setting``."""
    if dtype != torch.float32 or setting == "ieee":
        return AS_IS  # half precision is exact in the units
    return ROUNDED if setting == "tf32" else SPLIT


class Operand(NamedTuple):
    """A packed matrix in the workspace."""

    rows: int
    columns: int  # K
    element: torch.dtype
    form: tl.constexpr
    start: int  # bytes

    @property
    def steps(self) -> int:
        """Steps of one product over K."""
        return blocks(self.columns, STEP)

    @property
    def products(self) -> int:
        """How many products of parts make one of the matrix."""
        return 3 if self.form is SPLIT else 1

    @property
    def stride(self) -> int:
        """Numbers in a row."""
        return self.steps * STEP * (2 if self.form is SPLIT else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace, a multiple of 16."""
        return self.rows * self.stride * self.element.itemsize

    def problem(
        self,
        source: tuple[int, int],
        matrix: Unfolding,
        scale: tuple[int, bool] = (NONE, False),
    ) -> tuple[int, ...]:
        """Its row of the table, which packs a matrix of the tensor at ``source``.

        ``scale`` are the address of factors of the rows, and whether the outer or the inner of the
        rows' two dimensions counts them.
        """
        flags = matrix.rows_are_dense, *scale
        return (*source, *flags, self.start, self.stride, *matrix.rows, *matrix.columns)

    def tiles(self, problem: int) -> Iterator[tuple[int, int, int]]:
        """Its tiles, padding included."""
        height, width = tile_of(self.rows)
        across = blocks(self.steps * STEP, width)
        return ((problem, i, j) for i, j in tile_order(blocks(self.rows, height), across))

    def padding(self, problem: int) -> Iterator[tuple[int, int, int]]:
        """The tiles with padding of rows, for a problem without columns."""
        height, width = tile_of(self.rows)
        first, last = self.columns // width, blocks(self.steps * STEP, width)
        within = self.columns % STEP != 0
        rows = blocks(self.rows, height)
        return ((problem, i, j) for i in range(rows if within else 0) for j in range(first, last))


def tile_of(rows: int) -> tuple[int, int]:
    """Rows and columns of the tiles that pack a matrix."""
    return SHORT_TILE if rows <= SHORT else TILE


@triton.jit
def _rounded(x):
    """x in TF32, rounded half away from zero, near the largest numbers towards zero."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits + tl.where(tl.abs(x) < 3.389e38, 0x1000, 0)) & -0x2000
    return tl.where(tl.abs(x) < float("inf"), high.to(tl.float32, bitcast=True), x)


@triton.jit
def address_at(addresses, scratch, place):
    """The address that an index, SCRATCH or not, and a first byte in a table give."""
    index = tl.load(place)
    listed = tl.load(addresses + tl.maximum(index, 0))
    return tl.where(index < 0, scratch.to(tl.int64), listed) + tl.load(place + 1)


@triton.jit
def pack_kernel(
    tiles,
    problems,
    addresses,
    scratch,
    ELEMENT: tl.constexpr,
    PACKED: tl.constexpr,
    FORM: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of a packed operand.

    Grid: one program for each tile, HEIGHT x WIDTH, which it reads once and writes once, or twice
    with a second part. Bound: memory.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PACK_FIELDS
    row = tl.load(tile + TILE_ROW) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.load(tile + TILE_COLUMN) * WIDTH + tl.arange(0, WIDTH)
    in_row = row < tl.load(problem + ROW_AXIS).to(tl.int32)
    in_column = column < tl.load(problem + COLUMN_AXIS).to(tl.int32)
    source = address_at(addresses, scratch, problem + SOURCE).to(tl.pointer_type(ELEMENT))
    at_row, at_column = places(row, problem + ROW_AXIS), places(column, problem + COLUMN_AXIS)
    if tl.load(problem + ROWS_ARE_DENSE) != 0:
        across = in_column[:, None] & in_row[None, :]
        x = tl.trans(tl.load(source + at_column[:, None] + at_row[None, :], mask=across, other=0))
    else:
        inside = in_row[:, None] & in_column[None, :]
        x = tl.load(source + at_row[:, None] + at_column[None, :], mask=inside, other=0)
    x = x.to(PACKED)
    if PACKED == tl.float32 or PACKED == tl.float64:  # half precision is never scaled
        scale = tl.load(problem + SCALE)
        scales = tl.load(addresses + tl.maximum(scale, 0)).to(tl.pointer_type(PACKED))
        inner = tl.load(problem + ROW_AXIS + 1).to(tl.int32)
        entry = tl.where(tl.load(problem + BY_OUTER) != 0, row // inner, row % inner)
        x *= tl.load(scales + entry, mask=in_row & (scale >= 0), other=1)[:, None]

    stride = tl.multiple_of(tl.load(problem + TARGET_STRIDE), TERMS)
    target = (scratch.to(tl.int64) + tl.load(problem + TARGET)).to(tl.pointer_type(PACKED))
    target = tl.multiple_of(target, 16) + (row.to(tl.int64) * stride)[:, None] + column[None, :]
    length = stride // 2 if FORM == SPLIT else stride
    kept = in_row[:, None] & (column < length)[None, :]
    store_packed(target, tl.multiple_of(length, TERMS), x, kept, FORM)


@triton.jit
def store_packed(at, length, x, kept, FORM: tl.constexpr):
    """Stores numbers of an operand, whose second part begins ``length`` numbers after the first."""
    if FORM == AS_IS:
        tl.store(at, x, mask=kept)
    else:
        high = _rounded(x)
        tl.store(at, high, mask=kept)
        if FORM == SPLIT:
            # inf - inf would be NaN; a product with infinity is, since low x high has 0 x infinity.
            rest = tl.where(tl.abs(x) < float("inf"), x - high, 0.0)
            tl.store(at + length, _rounded(rest), mask=kept)


@triton.jit
def rows_of(scratch, start, stride, row, ELEMENT: tl.constexpr):
    """The addresses of rows of an operand, (rows, 1).

    ``start`` and ``stride`` are where a table has its first byte in the workspace and the numbers
    of a row. Loaded here, because a hint on an argument is lost.
    """
    operand = (scratch.to(tl.int64) + tl.load(start)).to(tl.pointer_type(ELEMENT))
    step = tl.multiple_of(tl.load(stride), TERMS)
    return tl.multiple_of(operand, 16) + (row.to(tl.int64) * step)[:, None]


@triton.jit
def all_steps(steps, FORM: tl.constexpr):
    """The steps of a packed product, whose sum over K has ``steps`` for each pair of parts."""
    return 3 * steps if FORM == SPLIT else steps


@triton.jit
def packed_product(
    left,
    right,
    in_row,
    in_column,
    first,
    last,
    steps,
    apart,
    STATE: tl.constexpr,
    FORM: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Steps ``first`` to ``last`` of ``all_steps`` of L R^T, for HEIGHT rows and WIDTH columns.

    ``left`` and ``right`` hold the addresses of the rows, (HEIGHT, 1) and (WIDTH, 1). The second
    part of a row begins ``apart`` steps after the first.
    """
    SETTING: tl.constexpr = "ieee" if FORM == AS_IS else "tf32"
    term = tl.arange(0, TERMS)[None, :]
    at_left, at_right = left + term, right + term
    total = tl.zeros((HEIGHT, WIDTH), STATE)
    for step in range(first, last):
        if FORM == SPLIT:
            part = step // steps
            start = step - part * steps
            # low x high, high x low, high x high
            l_start = (start + tl.where(part == 0, apart, 0)).to(tl.int64) * TERMS
            r_start = (start + tl.where(part == 1, apart, 0)).to(tl.int64) * TERMS
        else:
            l_start, r_start = step * TERMS, step * TERMS
        a = tl.load(at_left + l_start, mask=in_row, other=0)
        b = tl.load(at_right + r_start, mask=in_column, other=0)
        total = tl.dot(a, tl.trans(b), total, input_precision=SETTING, out_dtype=STATE)
    return total


@triton.jit
def by_parts(
    PART: tl.constexpr,
    value,
    first_column,
    arguments,
    CONSTANTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Calls PART with LEAST columns of a tile at a time, their first column, and what it needs.

    Addresses of a whole tile of 128 x 128 take 255 registers, of an eighth 128: two programs then
    run at once.
    """
    if WIDTH <= LEAST:
        PART(value, first_column, arguments, CONSTANTS, HEIGHT, WIDTH)
    else:
        HALF: tl.constexpr = WIDTH // 2
        halves = tl.permute(tl.reshape(value, (HEIGHT, 2, HALF)), (0, 2, 1))
        left, right = tl.split(halves)
        by_parts(PART, left, first_column, arguments, CONSTANTS, HEIGHT, HALF, LEAST)
        by_parts(PART, right, first_column + HALF, arguments, CONSTANTS, HEIGHT, HALF, LEAST)


class Packing(NamedTuple):
    """The operands that one launch packs: dtype before and after, form, rows and columns of a tile.

    ``form`` is a number: a table of launches has it as a key.
    """

    source: torch.dtype
    packed: torch.dtype
    form: int
    height: int
    width: int

    def launch(self, programs: int, *tables: Tensor) -> None:
        """Starts the launch: tiles, problems, addresses, workspace."""
        launch(
            pack_kernel,
            programs,
            *tables,
            ELEMENT=ELEMENTS[self.source],
            PACKED=ELEMENTS[self.packed],
            FORM=self.form,
            HEIGHT=self.height,
            WIDTH=self.width,
            num_warps=4,
        )


def packing(operand: Operand, source: torch.dtype) -> Packing:
    """The launch that packs an operand from a tensor of dtype ``source``."""
    return Packing(source, operand.element, operand.form.value, *tile_of(operand.rows))
