"""Momentum updates, one launch for all tensors of a kind of dtypes."""

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton.launch import (
    ELEMENTS,
    Addresses,
    Layout,
    hold,
    launch,
    layouts,
    scalar_on,
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
MOMENTUM, GRAD, COUNT, INNER, MIDDLE, MOMENTUM_STRIDES = fields(6)
GRAD_STRIDES = tl.constexpr(8)
PROBLEM_FIELDS = tl.constexpr(11)
TILE_FIELDS = tl.constexpr(2)

SPAN = 4096  # elements of a program
BLOCK = 1024  # elements of a step
WARPS = 4
MOST_DIMENSIONS = 3


@triton.jit
def momentum_kernel(
    tiles,
    problems,
    addresses,
    momentum,
    ELEMENT: tl.constexpr,
    STATE: tl.constexpr,
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
    target = tl.load(addresses + tl.load(problem + MOMENTUM)).to(tl.pointer_type(STATE))
    source = tl.load(addresses + tl.load(problem + GRAD)).to(tl.pointer_type(ELEMENT))
    count = tl.load(problem + COUNT).to(tl.int32)
    inner = tl.load(problem + INNER).to(tl.int32)
    middle = tl.load(problem + MIDDLE).to(tl.int32)
    mu = tl.load(momentum).to(STATE)
    if VECTOR > 1:
        target, source = tl.multiple_of(target, 16), tl.multiple_of(source, 16)
        count = tl.multiple_of(count, VECTOR)
    for start in range(0, SPAN, BLOCK):
        # Not `element < count`: `first + start` may exceed a 32-bit index.
        element = first + start + tl.arange(0, BLOCK)
        inside = start + tl.arange(0, BLOCK) < count - first
        if VECTOR > 1:
            to, at = target + element, source + element
        else:
            x, rest = element % inner, element // inner
            y, z = rest % middle, rest // middle
            m_strides, g_strides = problem + MOMENTUM_STRIDES, problem + GRAD_STRIDES
            to = target + x * tl.load(m_strides) + y * tl.load(m_strides + 1)
            to += z * tl.load(m_strides + 2)
            at = source + x * tl.load(g_strides) + y * tl.load(g_strides + 1)
            at += z * tl.load(g_strides + 2)
        g = tl.load(at, mask=inside, other=0).to(STATE)
        tl.store(to, mu * tl.load(to, mask=inside, other=0) + g, mask=inside)


class Kind(NamedTuple):
    """The momenta of one launch: the gradients' dtype, their own, and elements of a load."""

    element: torch.dtype
    state: torch.dtype
    vector: int


@dataclass
class Plan:
    """The launches that add gradients to momenta of given layouts."""

    problems: Tensor
    launches: list[tuple[Kind, int, Tensor]]
    left_to_torch: tuple[int, ...]  # tensors with too many dimensions that do not merge
    addresses: Addresses = field(default_factory=Addresses)


@functools.lru_cache(maxsize=64)
def plan(
    momenta: tuple[Layout, ...], grads: tuple[Layout, ...], device: torch.device, programs: int
) -> Plan:
    """Plans the momenta's launches."""
    problems: list[tuple[int, ...]] = []
    left_to_torch: list[int] = []
    kinds: dict[Kind, list[int]] = defaultdict(list)
    for t, (m, g) in enumerate(zip(momenta, grads, strict=True)):
        count = math.prod(m.shape)
        if count == 0:
            continue
        groups = merged(m.shape, m.strides, g.strides)
        if len(groups.sizes) > MOST_DIMENSIONS or count > LARGEST_INDEX:
            left_to_torch.append(t)
            continue
        missing = MOST_DIMENSIONS - len(groups.sizes)
        sizes = [*groups.sizes, *[1] * missing]
        strides = [*groups.strides, *[(0, 0)] * missing]
        vector = min(m.vector, g.vector)
        flat = groups.strides == [(1, 1)] and count % vector == 0
        kinds[Kind(g.dtype, m.dtype, vector if flat else 1)].append(len(problems))
        to, at = zip(*strides, strict=True)
        problems.append((t, len(momenta) + t, count, *sizes[:2], *to, *at))
    merge_small(kinds, lambda kind, n: blocks(problems[n][2], SPAN), MERGED_STEPS * programs)
    tiles = {
        kind: [(n, i) for n in numbers for i in range(blocks(problems[n][2], SPAN))]
        for kind, numbers in kinds.items()
    }
    launches = tile_tables(tiles, device)
    return Plan(table(problems, torch.int64, device), launches, tuple(left_to_torch))


def update_momenta(
    momenta: Sequence[Tensor], grads: Sequence[Tensor], momentum: Tensor, programs: int
) -> None:
    """m <- momentum m + g, for at least one momentum."""
    device = momenta[0].device
    grads = [g.resolve_neg() for g in grads]
    p = plan(layouts(momenta), layouts(grads), device, programs)
    hold(device, p)
    mu = scalar_on(device, momentum)
    addresses = p.addresses.of([*momenta, *grads])
    for kind, count, tiles in p.launches:
        launch(
            momentum_kernel,
            count,
            *(tiles, p.problems, addresses, mu),
            ELEMENT=ELEMENTS[kind.element],
            STATE=ELEMENTS[kind.state],
            SPAN=SPAN,
            BLOCK=BLOCK,
            VECTOR=kind.vector,
            num_warps=WARPS,
        )
    for t in p.left_to_torch:
        momenta[t].mul_(mu.to(momenta[t].dtype)).add_(grads[t])
