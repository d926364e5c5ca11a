"""Shared by ``damped_inverse`` and ``inverse_root``: the operator, its waves, failed modes."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton.launch import (
    Layout,
    Prepared,
    addresses_of,
    contiguous_copies,
    planned,
    run,
    scalar_on,
    table,
)
from tnt_kernels.triton.tiles import fields, waves

SPAN = tl.constexpr(1024)  # entries of a diagonal mode for a program
WARPS = 4
# Tensors share a wave as long as their workspace stays below this, or below the need of the largest
# tensor if that is more. Every wave repeats all launches: for the inverses of GPT-2 small these
# are 204 panels, with half the memory 420.
SCRATCH_BYTES = 512 << 20

# A row of the tensors, int32.
INFO, FIRST_MODE, ORDER = fields(3)
TENSOR_FIELDS = tl.constexpr(3)


@triton.jit
def nth_root(base, root):
    """base**(1 / root) for a positive float64 base, else 0.

    The exponent is split off: the log2 of 1e-300 would lose ten bits of the result.
    """
    is_tiny = base < 1e-300
    bits = tl.where(is_tiny, base * 2.0**100, base).to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - tl.where(is_tiny, 1123, 1023)
    fraction = ((bits & ((1 << 52) - 1)) | (1023 << 52)).to(tl.float64, bitcast=True)
    # Integer division truncates; nothing is negative here.
    whole = (exponent + 2048 * root) // root - 2048
    rest = (exponent - whole * root).to(tl.float64) + tl.log2(fraction)
    result = tl.exp2(whole.to(tl.float64)) * tl.exp2(rest / root.to(tl.float64))
    return tl.where(base > 0, result, 0.0)


@triton.jit
def trace_of(stat, rows, step):
    """The sum of a diagonal, float64; ``step`` from one of its entries to the next."""
    total = tl.zeros((SPAN,), tl.float64)
    for start in range(0, rows, SPAN):
        row = start + tl.arange(0, SPAN)
        total += tl.load(stat + row * step, mask=row < rows, other=0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def counts_as_zero(average, STATE: tl.constexpr):
    """Whether a statistic with this average eigenvalue is damped as if it were zero."""
    LEAST: tl.constexpr = 2.0**-103 if STATE == tl.float32 else 2.0**-970  # tiny / eps
    return tl.abs(average) < LEAST


@triton.jit
def store_lower(target, value, row, column, rows, stride):
    """Stores a tile's lower triangle and its mirror image, and zeros as the rows' padding."""
    at = target + row.to(tl.int64)[:, None] * stride + column[None, :]
    lower = row[:, None] >= column[None, :]
    tl.store(at, value, mask=lower & (row[:, None] < rows))
    at = target + column.to(tl.int64)[:, None] * stride + row[None, :]
    upper = (column[:, None] <= row[None, :]) & (column[:, None] < rows)
    tl.store(at, tl.trans(value), mask=upper & (row[None, :] < stride))


@triton.jit
def judge_kernel(tensors, failed, info, STRIDE: tl.constexpr):
    """info of one tensor: 0, or i + 1 for the first mode i whose ``failed`` is not 0.

    Grid: one program for each tensor, which reads its modes' flags. Bound: the launch.
    """
    tensor = tensors + tl.program_id(0) * TENSOR_FIELDS
    first, order = tl.load(tensor + FIRST_MODE), tl.load(tensor + ORDER)
    verdict = order * 0
    for i in range(0, order):
        mode = order - 1 - i
        verdict = tl.where(tl.load(failed + (first + mode) * STRIDE) != 0, mode + 1, verdict)
    tl.store(info + tl.load(tensor + INFO), verdict)


class Work(NamedTuple):
    """One launch: its table has one row for each program."""

    programs: int
    rows: Tensor


def work(rows: Sequence[Sequence[int]], device: torch.device) -> Work:
    """A launch for rows of a table, int32."""
    return Work(len(rows), table(rows, torch.int32, device))


def modes_of(orders: Sequence[int]) -> list[range]:
    """Each tensor's modes, as indices into flat statistics."""
    ends = itertools.accumulate(orders, initial=0)
    return [range(first, last) for first, last in itertools.pairwise(ends)]


def waves_of(
    stats: Sequence[Layout], modes: Sequence[range], needs: Mapping[int, int]
) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Tensors that share a workspace, and the dtype of their statistics.

    ``modes`` as from ``modes_of``; ``needs`` are the tensors' elements of workspace.
    """
    for state in (torch.float32, torch.float64):
        own = {
            t: needs[t] * state.itemsize
            for t, numbers in enumerate(modes)
            if numbers and stats[numbers[0]].dtype == state
        }
        # Largest first: large tensors are alone anyway, and a wave's last programs should be short.
        in_order = dict(sorted(own.items(), key=lambda need: -need[1]))
        yield from ((state, members) for members in waves(in_order, SCRATCH_BYTES))


def computed_factors(
    plan: Callable[..., Sequence[Any]],
    prepared: Callable[..., Callable[[Tensor], None]],
    out: Sequence[Tensor],
    stats: Sequence[Tensor],
    orders: Sequence[int],
    damping: Tensor,
    relative: bool,
    *rest: Hashable,
) -> Tensor:
    """Computes factors, wave by wave, into ``out``; returns the codes of failures.

    ``plan`` makes the waves from layouts and what is in ``rest``. ``prepared`` takes a wave's
    memory, and returns what launches it in a workspace of ``wave.scratch`` bytes.
    """
    if not stats:
        return torch.zeros(len(orders), dtype=torch.int32, device=damping.device)
    stats, device = contiguous_copies(stats), stats[0].device
    made = planned(plan, stats, rest=(tuple(orders), *rest))
    given = addresses_of(stats, out), scalar_on(device, damping), relative
    info = torch.empty(len(orders), dtype=torch.int32, device=device)
    run(device, [Prepared(wave.scratch, prepared(wave, info, *given)) for wave in made], out)
    return info
