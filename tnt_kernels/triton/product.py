"""Kernels of one mode's product with a factor, full or diagonal, and what their epilogues write."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton.launch import ELEMENTS, block_of, launch
from tnt_kernels.triton.pack import (
    TILE_FIELDS,
    address_at,
    all_steps,
    by_parts,
    packed_product,
    rows_of,
    store_packed,
)
from tnt_kernels.triton.tiles import (
    AXIS_FIELDS,
    LARGE_BLOCK,
    PROBLEM,
    TILE_COLUMN,
    TILE_ROW,
    fields,
    places,
)

# The problem table, int64. Where to write: the index of an address or SCRATCH, a first byte, the
# numbers between the parts of a packed target, and the axes of rows and columns there.
TARGET, OFFSET, LENGTH = fields(3)
ROW_AXIS, COLUMN_AXIS = fields(2, start=3, width=AXIS_FIELDS)
# Of a product: the first bytes of both operands, the steps of its sum, the numbers in their rows.
LEFT, RIGHT, STEPS, STRIDE = fields(4, start=11)
# Of a scaling: where to read, the factor's address, whether it has an entry a row, the axes there.
SOURCE, SOURCE_OFFSET, FACTOR, BY_ROW = fields(4, start=11)
SOURCE_ROW_AXIS, SOURCE_COLUMN_AXIS = fields(2, start=15, width=AXIS_FIELDS)
PROBLEM_FIELDS = tl.constexpr(23)

# What an epilogue does: stores the next operand, or a tensor, or updates W.
PACKS, STORES, UPDATES = (tl.constexpr(n) for n in range(3))
LAST = -1  # to a launch: it updates W in a step, and else stores a tensor


@triton.jit
def _write(
    value,
    first_column,
    arguments,
    CONSTANTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes columns of a tile P, or updates W <- W - lr (P + weight_decay W) with them."""
    problem, target, first_row, lr, weight_decay = arguments
    WRITES: tl.constexpr = CONSTANTS[0]
    FORM: tl.constexpr = CONSTANTS[1]
    row, column = first_row + tl.arange(0, HEIGHT), first_column + tl.arange(0, WIDTH)
    in_row = row < tl.load(problem + ROW_AXIS).to(tl.int32)
    in_column = column < tl.load(problem + COLUMN_AXIS).to(tl.int32)
    inside = in_row[:, None] & in_column[None, :]
    at_row, at_column = places(row, problem + ROW_AXIS), places(column, problem + COLUMN_AXIS)
    at = target + at_row[:, None] + at_column[None, :]
    if WRITES == PACKS:
        store_packed(at, tl.load(problem + LENGTH), value, inside, FORM)
    else:
        if WRITES == UPDATES:
            alpha, gamma = tl.load(lr).to(value.dtype), tl.load(weight_decay).to(value.dtype)
            weight = tl.load(at, mask=inside, other=0).to(value.dtype)
            decay = alpha * gamma
            # An infinite W that does not decay stays.
            shrunk = decay * tl.where(decay == 0, 0, weight)
            value = weight - (alpha * value + shrunk)
        tl.store(at, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def product_kernel(
    tiles,
    problems,
    addresses,
    scratch,
    lr,
    weight_decay,
    STATE: tl.constexpr,
    RESULT: tl.constexpr,
    WRITES: tl.constexpr,
    FORM: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of the product L R^T of two packed operands.

    Grid: one program for each tile, HEIGHT x WIDTH. A program reads HEIGHT rows of L and WIDTH rows
    of R, and writes the tile; to update it reads the tile too. Bound: matrix units from about 128
    columns of L on, memory below.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    first_row = tl.load(tile + TILE_ROW) * HEIGHT
    first_column = tl.load(tile + TILE_COLUMN) * WIDTH
    row, column = first_row + tl.arange(0, HEIGHT), first_column + tl.arange(0, WIDTH)
    steps = tl.load(problem + STEPS).to(tl.int32)
    total = packed_product(
        rows_of(scratch, problem + LEFT, problem + STRIDE, row, STATE),
        rows_of(scratch, problem + RIGHT, problem + STRIDE, column, STATE),
        (row < tl.load(problem + ROW_AXIS).to(tl.int32))[:, None],
        (column < tl.load(problem + COLUMN_AXIS).to(tl.int32))[:, None],
        0,
        all_steps(steps, FORM),
        steps,
        steps,
        STATE,
        FORM,
        HEIGHT,
        WIDTH,
    )
    # Loaded here: the product would otherwise hold these in registers.
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    target = address_at(addresses, scratch, problem + TARGET).to(tl.pointer_type(RESULT))
    arguments = problem, target, tl.load(tile + TILE_ROW) * HEIGHT, lr, weight_decay
    CONSTANTS: tl.constexpr = (WRITES, FORM)
    LEAST: tl.constexpr = WIDTH if WIDTH <= 32 else WIDTH // (16 if WRITES == PACKS else 8)
    first_column = tl.load(tile + TILE_COLUMN) * WIDTH
    by_parts(_write, total, first_column, arguments, CONSTANTS, HEIGHT, WIDTH, LEAST)


@triton.jit
def scaling_kernel(
    tiles,
    problems,
    addresses,
    scratch,
    lr,
    weight_decay,
    ELEMENT: tl.constexpr,
    STATE: tl.constexpr,
    RESULT: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of a product with a diagonal factor.

    Grid: one program for each tile, BLOCK x BLOCK, which it reads once and writes once; to update
    it reads the target's tile too. Bound: memory.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    first_row = tl.load(tile + TILE_ROW) * BLOCK
    first_column = tl.load(tile + TILE_COLUMN) * BLOCK
    row, column = first_row + tl.arange(0, BLOCK), first_column + tl.arange(0, BLOCK)
    in_row = row < tl.load(problem + ROW_AXIS).to(tl.int32)
    in_column = column < tl.load(problem + COLUMN_AXIS).to(tl.int32)
    inside = in_row[:, None] & in_column[None, :]
    source = address_at(addresses, scratch, problem + SOURCE).to(tl.pointer_type(ELEMENT))
    at_row = places(row, problem + SOURCE_ROW_AXIS)
    at_column = places(column, problem + SOURCE_COLUMN_AXIS)
    x = tl.load(source + at_row[:, None] + at_column[None, :], mask=inside, other=0)
    factor = tl.load(addresses + tl.load(problem + FACTOR)).to(tl.pointer_type(STATE))
    entry = tl.where(tl.load(problem + BY_ROW) != 0, row[:, None], column[None, :])
    product = x.to(STATE) * tl.load(factor + entry, mask=inside, other=0)
    target = address_at(addresses, scratch, problem + TARGET).to(tl.pointer_type(RESULT))
    arguments = problem, target, first_row, lr, weight_decay
    CONSTANTS: tl.constexpr = (WRITES, 0)
    _write(product, first_column, arguments, CONSTANTS, BLOCK, BLOCK)


class Multiplying(NamedTuple):
    """The products of one launch: dtypes, what it writes, operands' form, a tile's sides.

    ``writes`` and ``form`` are numbers: a table of launches has this as a key.
    """

    state: torch.dtype
    result: torch.dtype
    writes: int
    form: int
    height: int = 0
    width: int = 0

    def launch(self, programs: int, *tables: Tensor, updates: bool) -> None:
        """Starts the launch: tiles, problems, addresses, workspace, lr and weight decay."""
        launch(
            product_kernel,
            programs,
            *tables,
            STATE=ELEMENTS[self.state],
            RESULT=ELEMENTS[self.result],
            WRITES=_writes(self.writes, updates),
            FORM=self.form,
            HEIGHT=self.height,
            WIDTH=self.width,
            num_warps=8 if self.height == LARGE_BLOCK else 4,
        )


class Scaling(NamedTuple):
    """The products of one launch with diagonal factors: dtypes, and what it writes."""

    element: torch.dtype
    state: torch.dtype
    result: torch.dtype
    writes: int

    def launch(self, programs: int, *tables: Tensor, updates: bool) -> None:
        """Starts the launch: tiles, problems, addresses, workspace, lr and weight decay."""
        block = block_of(self.state)
        launch(
            scaling_kernel,
            programs,
            *tables,
            ELEMENT=ELEMENTS[self.element],
            STATE=ELEMENTS[self.state],
            RESULT=ELEMENTS[self.result],
            WRITES=_writes(self.writes, updates),
            BLOCK=block,
            num_warps=8,  # with four, addresses of 64 x 64 spill
        )


def _writes(writes: int, updates: bool) -> int:
    if writes != LAST:
        return writes
    return int((UPDATES if updates else STORES).value)
