"""The momenta's launch, which ``preconditioned_step_`` and ``grafted_directions_`` share."""

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
)
from tnt_kernels.triton.tiles import LARGEST_INDEX, MERGED_STEPS, blocks, merge_small, merged

SPAN = 4096  # elements of a program
BLOCK = 1024  # of one of its steps
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
    """m <- momentum m + g on a span of one tensor."""
    tile = tiles + tl.program_id(0) * 2
    problem = problems + tl.load(tile) * 11
    first = tl.load(tile + 1) * SPAN
    target = tl.load(addresses + tl.load(problem)).to(tl.pointer_type(STATE))
    source = tl.load(addresses + tl.load(problem + 1)).to(tl.pointer_type(ELEMENT))
    count = tl.load(problem + 2).to(tl.int32)
    inner, middle = tl.load(problem + 3).to(tl.int32), tl.load(problem + 4).to(tl.int32)
    mu = tl.load(momentum).to(STATE)
    if VECTOR > 1:
        target, source = tl.multiple_of(target, 16), tl.multiple_of(source, 16)
        count = tl.multiple_of(count, VECTOR)
    for start in range(0, SPAN, BLOCK):
        # Compared as a remainder: `first + start` may exceed a 32-bit index.
        element = first + start + tl.arange(0, BLOCK)
        inside = start + tl.arange(0, BLOCK) < count - first
        if VECTOR > 1:
            to, at = target + element, source + element
        else:
            x, rest = element % inner, element // inner
            y, z = rest % middle, rest // middle
            to = target + x * tl.load(problem + 5) + y * tl.load(problem + 6)
            to += z * tl.load(problem + 7)
            at = source + x * tl.load(problem + 8) + y * tl.load(problem + 9)
            at += z * tl.load(problem + 10)
        g = tl.load(at, mask=inside, other=0).to(STATE)
        tl.store(to, mu * tl.load(to, mask=inside, other=0) + g, mask=inside)


class Kind(NamedTuple):
    """Momenta that one launch updates: the gradients' and their own dtype, and how wide."""

    element: torch.dtype
    state: torch.dtype
    vector: int


@dataclass
class Plan:
    """How momenta and gradients of given layouts are added."""

    problems: Tensor
    launches: list[tuple[Kind, int, Tensor]]
    apart: tuple[int, ...]  # left to PyTorch: too many dimensions that do not merge
    addresses: Addresses = field(default_factory=Addresses)


@functools.lru_cache(maxsize=64)
def plan(
    momenta: tuple[Layout, ...], grads: tuple[Layout, ...], device: torch.device, programs: int
) -> Plan:
    """Plans the momenta's launches."""
    problems: list[tuple[int, ...]] = []
    apart: list[int] = []
    kinds: dict[Kind, list[int]] = defaultdict(list)
    for t, (m, g) in enumerate(zip(momenta, grads, strict=True)):
        count = math.prod(m.shape)
        if count == 0:
            continue
        groups = merged(m.shape, m.strides, g.strides)
        if len(groups.sizes) > MOST_DIMENSIONS or count > LARGEST_INDEX:
            apart.append(t)
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
    launches = []
    for kind, numbers in kinds.items():
        tiles = [(n, i) for n in numbers for i in range(blocks(problems[n][2], SPAN))]
        launches.append((kind, len(tiles), table(tiles, torch.int32, device)))
    return Plan(table(problems, torch.int64, device), launches, tuple(apart))


def move_momenta(
    momenta: Sequence[Tensor], grads: Sequence[Tensor], momentum: Tensor, programs: int
) -> None:
    """m <- momentum m + g.

    Args:
        momenta: the m, at least one.
        grads: the g.
        momentum: mu.
        programs: how many programs the device runs at once.
    """
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
    for t in p.apart:
        momenta[t].mul_(mu.to(momenta[t].dtype)).add_(grads[t])
