"""Elementwise updates of momenta and parameters, one launch for all of a kind of dtypes."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.lists import mark_written
from tnt_kernels.triton.launch import (
    ELEMENTS,
    Layout,
    addresses_of,
    keep_for_graph,
    launch,
    planned,
    programs_at_once,
    readable,
    scalar_on,
    state_dtype,
    table,
    tile_tables,
)
from tnt_kernels.triton.tiles import (
    LARGEST_INDEX,
    MERGED_STEPS,
    PROBLEM,
    TILE_ROW,
    blocks,
    fields,
    merge_small,
    merged,
)

# The problem table, int64: up to three merged dimensions, the fastest first.
TARGET, SOURCE, COUNT, INNER, MIDDLE, TARGET_STRIDES = fields(6)
SOURCE_STRIDES, DECAYED = tl.constexpr(8), tl.constexpr(11)
PROBLEM_FIELDS = tl.constexpr(12)
TILE_FIELDS = tl.constexpr(2)

SPAN = 4096  # elements of a program
BLOCK = 1024  # elements of a step
WARPS = 4
MOST_DIMENSIONS = 3


@triton.jit
def _elements(
    problem, target, source, count, first, start, BLOCK: tl.constexpr, VECTOR: tl.constexpr
):
    """The addresses of BLOCK elements of both tensors, and which of them exist."""
    # Not `element < count`: `first + start` may exceed a 32-bit index.
    element = first + start + tl.arange(0, BLOCK)
    inside = start + tl.arange(0, BLOCK) < count - first
    if VECTOR > 1:
        return target + element, source + element, inside
    inner = tl.load(problem + INNER).to(tl.int32)
    middle = tl.load(problem + MIDDLE).to(tl.int32)
    x, rest = element % inner, element // inner
    y, z = rest % middle, rest // middle
    t_strides, s_strides = problem + TARGET_STRIDES, problem + SOURCE_STRIDES
    to = target + x * tl.load(t_strides) + y * tl.load(t_strides + 1) + z * tl.load(t_strides + 2)
    at = source + x * tl.load(s_strides) + y * tl.load(s_strides + 1) + z * tl.load(s_strides + 2)
    return to, at, inside


@triton.jit
def momentum_kernel(
    tiles,
    problems,
    addresses,
    momentum,
    ELEMENT: tl.constexpr,
    RESULT: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """m <- momentum m + g on SPAN elements of one tensor.

    Grid: one program for each SPAN elements, of which it reads m and g once and writes m. Bound:
    memory.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    first = tl.load(tile + TILE_ROW) * SPAN
    target = tl.load(addresses + tl.load(problem + TARGET)).to(tl.pointer_type(RESULT))
    source = tl.load(addresses + tl.load(problem + SOURCE)).to(tl.pointer_type(ELEMENT))
    count = tl.load(problem + COUNT).to(tl.int32)
    mu = tl.load(momentum).to(RESULT)
    if VECTOR > 1:
        target, source = tl.multiple_of(target, 16), tl.multiple_of(source, 16)
        count = tl.multiple_of(count, VECTOR)
    for start in range(0, SPAN, BLOCK):
        to, at, inside = _elements(problem, target, source, count, first, start, BLOCK, VECTOR)
        g = tl.load(at, mask=inside, other=0).to(RESULT)
        tl.store(to, mu * tl.load(to, mask=inside, other=0) + g, mask=inside)


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
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALED: tl.constexpr,
):
    """W <- W - lr (s P + weight_decay W) on SPAN elements of one tensor, in the type of P.

    Grid and bound: as of the momenta.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    problem = problems + tl.load(tile + PROBLEM) * PROBLEM_FIELDS
    first = tl.load(tile + TILE_ROW) * SPAN
    number = tl.load(problem + TARGET)
    target = tl.load(addresses + number).to(tl.pointer_type(RESULT))
    source = tl.load(addresses + tl.load(problem + SOURCE)).to(tl.pointer_type(ELEMENT))
    count = tl.load(problem + COUNT).to(tl.int32)
    alpha = tl.load(lr).to(tl.float64)
    gamma = tl.load(weight_decay).to(tl.float64) * tl.load(problem + DECAYED)
    rate, decay = alpha, (alpha * gamma).to(ELEMENT)
    if SCALED:
        rate = alpha * tl.load(scales + number)
    if VECTOR > 1:
        target, source = tl.multiple_of(target, 16), tl.multiple_of(source, 16)
        count = tl.multiple_of(count, VECTOR)
    for start in range(0, SPAN, BLOCK):
        to, at, inside = _elements(problem, target, source, count, first, start, BLOCK, VECTOR)
        w = tl.load(to, mask=inside, other=0).to(ELEMENT)
        shrunk = decay * tl.where(decay == 0, 0, w)  # an infinite W that does not decay stays
        moved = rate.to(ELEMENT) * tl.load(at, mask=inside, other=0) + shrunk
        tl.store(to, (w - moved).to(RESULT), mask=inside)


class Kind(NamedTuple):
    """The tensors of one launch: the dtypes of what is read and written, elements of a load."""

    source: torch.dtype
    target: torch.dtype
    vector: int


@dataclass
class Plan:
    """The launches that update targets of given layouts."""

    problems: Tensor
    launches: list[tuple[Kind, int, Tensor]]
    left_to_torch: tuple[int, ...]  # tensors with too many dimensions that do not merge


def plan(
    targets: tuple[Layout, ...],
    sources: tuple[Layout, ...],
    decayed: tuple[bool, ...],
    device: torch.device,
    programs: int,
) -> Plan:
    """Plans the targets' launches; ``decayed`` has a flag for each of them."""
    problems: list[tuple[int, ...]] = []
    left_to_torch: list[int] = []
    kinds: dict[Kind, list[int]] = defaultdict(list)
    for t, (target, source) in enumerate(zip(targets, sources, strict=True)):
        count = math.prod(target.shape)
        if count == 0:
            continue
        groups = merged(target.shape, target.strides, source.strides)
        if len(groups.sizes) > MOST_DIMENSIONS or count > LARGEST_INDEX:
            left_to_torch.append(t)
            continue
        missing = MOST_DIMENSIONS - len(groups.sizes)
        sizes = [*groups.sizes, *[1] * missing]
        strides = [*groups.strides, *[(0, 0)] * missing]
        vector = min(target.vector, source.vector)
        flat = groups.strides == [(1, 1)] and count % vector == 0
        kinds[Kind(source.dtype, target.dtype, vector if flat else 1)].append(len(problems))
        to, at = zip(*strides, strict=True)
        problems.append((t, len(targets) + t, count, *sizes[:2], *to, *at, decayed[t]))
    merge_small(kinds, lambda kind, n: blocks(problems[n][2], SPAN), MERGED_STEPS * programs)
    tiles = {
        kind: [(n, i) for n in numbers for i in range(blocks(problems[n][2], SPAN))]
        for kind, numbers in kinds.items()
    }
    launches = tile_tables(tiles, device)
    return Plan(table(problems, torch.int64, device), launches, tuple(left_to_torch))


def _launch(
    kernel: "triton.JITFunction",
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    decayed: Sequence[bool],
    numbers: Sequence[Tensor],
    programs: int,
    **constants: bool,
) -> tuple[int, ...]:
    """Launches a kernel for all tensors; returns those that are left to torch."""
    device = targets[0].device
    p = planned(plan, targets, sources, rest=(tuple(decayed), device, programs))
    keep_for_graph(device, p)
    addresses = addresses_of([*targets, *sources])
    for kind, count, tiles in p.launches:
        launch(
            kernel,
            count,
            *(tiles, p.problems, addresses, *numbers),
            ELEMENT=ELEMENTS[kind.source],
            RESULT=ELEMENTS[kind.target],
            SPAN=SPAN,
            BLOCK=BLOCK,
            VECTOR=kind.vector,
            num_warps=WARPS,
            **constants,
        )
    return p.left_to_torch


def update_momenta(
    momenta: Sequence[Tensor], grads: Sequence[Tensor], momentum: Tensor, programs: int
) -> None:
    """m <- momentum m + g, for at least one momentum."""
    grads = readable(grads)
    mu = scalar_on(momenta[0].device, momentum)
    flags = [False] * len(momenta)
    for t in _launch(momentum_kernel, momenta, grads, flags, [mu], programs):
        momenta[t].mul_(mu.to(momenta[t].dtype)).add_(grads[t])


def scaled_step_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    lr: Tensor,
    weight_decay: Tensor,
    decayed: Sequence[bool],
    scales: Tensor,
    *,
    programs: int | None = None,
) -> None:
    """The operator, with ``scales`` empty for 1; ``programs`` defaults to the device's."""
    if not params:
        return
    device = params[0].device
    directions = readable(directions)
    alpha, gamma = scalar_on(device, lr), scalar_on(device, weight_decay)
    factors = scales.to(device, non_blocking=True).contiguous()
    numbers = [alpha, gamma, factors if len(factors) else alpha]
    for t in _launch(
        *(scaled_step_kernel, params, directions, decayed, numbers),
        programs or programs_at_once(device),
        SCALED=len(factors) > 0,
    ):
        state = state_dtype(params[t].dtype)
        rate = alpha.double() * factors[t] if len(factors) else alpha
        decay = alpha * gamma * decayed[t]
        wide = params[t].to(state)
        shrunk = torch.where(decay == 0, 0, decay.to(state) * wide)
        params[t].copy_(wide - (rate.to(state) * directions[t] + shrunk))
    mark_written(params)
