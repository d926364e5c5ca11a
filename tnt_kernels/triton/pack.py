"""Packed operands: the unfoldings that matrix units multiply, copied into the form they want.

An operand is a matrix of ``rows`` and K columns, K the summed index, row after row. K is padded
with zeros to whole steps, so every row starts at a multiple of 16 bytes and every load of the
product's loop takes 16 bytes, whatever the tensor's sizes and strides are. That is the only form
that the units of Hopper take in TF32.

Numbers in float32 are rounded to TF32 here; the units themselves would drop bits, which makes
statistics too small. At "highest" a row holds the rounded numbers and then what they lack, rounded
too. Three products then have the error of float32: low x high, high x low, high x high.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tnt_kernels.triton.tiles import (
    PROBLEM,
    STEP,
    TILE_COLUMN,
    TILE_ROW,
    Unfolding,
    blocks,
    fields,
    tile_order,
)

# How an operand holds its numbers: as they are, rounded to TF32, or in two rounded parts.
AS_IS, ROUNDED, SPLIT = (tl.constexpr(n) for n in range(3))

_STEP = tl.constexpr(STEP)

# The problem table, int64: the source's address, an unfolding, a flag, and the target's first byte
# in the workspace and numbers in a row.
SOURCE, ROWS, COLUMNS, ROW_STRIDE, INNER, INNER_STRIDE, OUTER_STRIDE, ROWS_ARE_DENSE = fields(8)
TARGET, TARGET_STRIDE = fields(2, start=8)
PACK_FIELDS = tl.constexpr(10)
TILE_FIELDS = tl.constexpr(3)

# Rows of a mode that has tiles of its own: a kernel's 3 x 3 positions, for example.
SHORT = 16
# Rows and columns of a tile, of short modes and of others.
SHORT_TILE, TILE = (SHORT, 256), (64, 64)


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

    def problem(self, address: int, unfolding: Unfolding) -> tuple[int, ...]:
        """Its row of the table, from the unfolding of the tensor with this address."""
        return (address, *unfolding, unfolding.rows_are_dense, self.start, self.stride)

    def tiles(self, problem: int) -> Iterator[tuple[int, int, int]]:
        """Its tiles, padding included."""
        height, width = tile_of(self.rows)
        across = blocks(self.steps * STEP, width)
        return ((problem, i, j) for i, j in tile_order(blocks(self.rows, height), across))


def tile_of(rows: int) -> tuple[int, int]:
    """Rows and columns of the tiles that pack a matrix."""
    return SHORT_TILE if rows <= SHORT else TILE


@triton.jit
def _rounded(x):
    """x in TF32, rounded half away from zero; above the largest number of TF32 as it is."""
    bits = x.to(tl.int32, bitcast=True)
    high = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 3.389e38, high, x)


@triton.jit
def pack_kernel(
    tiles,
    problems,
    addresses,
    scratch,
    ELEMENT: tl.constexpr,
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
    rows, columns = tl.load(problem + ROWS).to(tl.int32), tl.load(problem + COLUMNS).to(tl.int32)
    inner = tl.load(problem + INNER).to(tl.int32)
    source = tl.load(addresses + tl.load(problem + SOURCE)).to(tl.pointer_type(ELEMENT))
    at = (column % inner).to(tl.int64) * tl.load(problem + INNER_STRIDE)
    at += (column // inner).to(tl.int64) * tl.load(problem + OUTER_STRIDE)
    in_row, in_column = row < rows, column < columns
    if tl.load(problem + ROWS_ARE_DENSE) != 0:
        across = in_column[:, None] & in_row[None, :]
        x = tl.trans(tl.load(source + at[:, None] + row[None, :], mask=across, other=0))
    else:
        first = row.to(tl.int64) * tl.load(problem + ROW_STRIDE)
        inside = in_row[:, None] & in_column[None, :]
        x = tl.load(source + first[:, None] + at[None, :], mask=inside, other=0)

    stride = tl.multiple_of(tl.load(problem + TARGET_STRIDE), _STEP)
    target = (scratch.to(tl.int64) + tl.load(problem + TARGET)).to(tl.pointer_type(ELEMENT))
    target = tl.multiple_of(target, 16) + (row.to(tl.int64) * stride)[:, None] + column[None, :]
    length = stride // 2 if FORM == SPLIT else stride
    kept = in_row[:, None] & (column < length)[None, :]
    if FORM == AS_IS:
        tl.store(target, x, mask=kept)
    else:
        high = _rounded(x)
        tl.store(target, high, mask=kept)
        if FORM == SPLIT:
            # Infinity has no rest: inf - inf is NaN.
            rest = tl.where(tl.abs(x) < float("inf"), x - high, 0.0)
            tl.store(target + tl.multiple_of(length, _STEP), _rounded(rest), mask=kept)


@triton.jit
def packed_product(
    left,
    right,
    in_row,
    in_column,
    first,
    last,
    steps,
    STATE: tl.constexpr,
    FORM: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Steps ``first`` to ``last`` of the sum over K of L R^T, for HEIGHT rows and WIDTH columns.

    ``left`` and ``right`` hold the addresses of the rows, (HEIGHT, 1) and (WIDTH, 1). A sum has
    ``steps`` steps, three times as many for operands of two parts.
    """
    term = tl.arange(0, _STEP)[None, :]
    at_left, at_right = left + term, right + term
    total = tl.zeros((HEIGHT, WIDTH), STATE)
    for step in range(first, last):
        if FORM == SPLIT:
            part = step // steps
            start = step - part * steps
            # low x high, high x low, high x high
            l_start = (start + tl.where(part == 0, steps, 0)).to(tl.int64) * _STEP
            r_start = (start + tl.where(part == 1, steps, 0)).to(tl.int64) * _STEP
        else:
            l_start, r_start = step * _STEP, step * _STEP
        a = tl.load(at_left + l_start, mask=in_row, other=0)
        b = tl.load(at_right + r_start, mask=in_column, other=0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION, out_dtype=STATE)
    return total


def dot_precision(form: tl.constexpr) -> str:
    """Triton's precision for products of packed numbers."""
    return "ieee" if form is AS_IS else "tf32"


def tables(
    operands: Sequence[tuple[Operand, int]],
) -> dict[tuple[torch.dtype, int, tuple[int, int]], list[tuple[int, int, int]]]:
    """Tiles of the launches that pack operands, each with its row of the problem table."""
    tiles: dict[tuple[torch.dtype, int, tuple[int, int]], list[tuple[int, int, int]]] = {}
    for operand, problem in operands:
        kind = operand.element, operand.form.value, tile_of(operand.rows)
        tiles.setdefault(kind, []).extend(operand.tiles(problem))
    return tiles
