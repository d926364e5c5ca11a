"""Plans for one launch over many unlike tensors: who works on which tile of what.

A kernel here never sees a list. Each of its programs reads one row of a *tile table*, which names a
problem (one mode of one tensor) and the part of it that is the program's own; the *problem table*
says how that mode lies in memory, in indices, sizes and strides; a third table holds the addresses.
The first two depend on shapes and strides alone, so they are made once for a set of parameters and
stay on the device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar

import triton
import triton.language as tl

# Indices within a mode are 32-bit in the kernels, as divisions by 64-bit ones are slow there; what
# is multiplied by a stride is 64-bit. A block that begins below the largest must not end beyond it.
LARGEST_INDEX = 2**31 - 2**13

# Fewer steps than this for each multiprocessor are not worth a launch of their own.
MERGED_STEPS = 16


class Unfolding(NamedTuple):
    """A mode's unfolding, (rows, columns), where the tensor lies.

    Entry (l, c) is, in elements from the tensor's first,
    l * row + (c % inner) * near + (c // inner) * far.
    """

    rows: int
    columns: int
    row: int
    inner: int
    near: int
    far: int

    @property
    def rows_are_dense(self) -> bool:
        """Whether neighbours in memory are of one column (else of one row)."""
        return self.row == 1 and (self.near != 1 or self.columns == 1)

    def is_wide(self, vector: int) -> bool:
        """Whether all of it can be read ``vector`` elements at a time, given an aligned start."""
        dense, other = (self.row, self.near) if self.rows_are_dense else (self.near, self.row)
        sizes = (self.rows, self.columns, other)
        return dense == 1 and self.inner == self.columns and all(n % vector == 0 for n in sizes)


class Groups(NamedTuple):
    """Dimensions merged as far as strides allow, the nearest first; strides for each tensor."""

    sizes: list[int]
    strides: list[tuple[int, ...]]


def merged(sizes: Sequence[int], *strides: Sequence[int]) -> Groups:
    """Merges dimensions that can be walked as one in every one of the tensors.

    The order of what is left is by the first tensor's strides; the order of the elements is the
    same for all tensors.
    """
    dimensions = sorted(
        ((tuple(s[i] for s in strides), n) for i, n in reversed(list(enumerate(sizes))) if n != 1),
        key=lambda dimension: dimension[0][0],
    )
    groups = Groups([], [])
    for steps, n in dimensions:
        if groups.sizes and all(
            step == groups.sizes[-1] * last
            for step, last in zip(steps, groups.strides[-1], strict=True)
        ):
            groups.sizes[-1] *= n
        else:
            groups.sizes.append(n)
            groups.strides.append(steps)
    return groups


def unfolded(
    sizes: Sequence[int], mode: int, *strides: Sequence[int]
) -> tuple[Unfolding, ...] | None:
    """One mode's unfolding of tensors of one shape, their columns in one order.

    Returns:
        One for each of ``strides``; None where the other modes do not merge into two dimensions, or
        an index would not fit.
    """
    others = [n for i, n in enumerate(sizes) if i != mode]
    groups = merged(others, *([s for i, s in enumerate(row) if i != mode] for row in strides))
    columns = 1
    for n in others:
        columns *= n
    if len(groups.sizes) > 2 or max(columns, sizes[mode]) > LARGEST_INDEX:
        return None
    inner = groups.sizes[0] if groups.sizes else 1
    result = []
    for tensor, row in enumerate(strides):
        steps = [step[tensor] for step in groups.strides] + [1, 0]
        near, far = (steps[0], steps[1]) if len(groups.sizes) == 2 else (steps[0], 0)
        result.append(Unfolding(sizes[mode], columns, row[mode], inner, near, far))
    return tuple(result)


def waves(needs: Mapping[int, int], most: int) -> list[list[int]]:
    """Splits what takes scratch memory into groups that take turns in it, in the order given.

    Args:
        needs: number -> bytes.
        most: what a group may need, or, if it is more, what the largest of all needs.
    """
    groups: list[list[int]] = []
    most = max([most, *needs.values()])
    free = 0
    for number, need in needs.items():
        if not groups or need > free:
            groups.append([])
            free = most
        groups[-1].append(number)
        free -= need
    return groups


class Wide(Protocol):
    """A kind of work that one launch does: how many elements it reads at a time."""

    @property
    def vector(self) -> int:
        """1, or as many as the widest load has."""

    def _replace(self, *, vector: int) -> Self:
        """The same kind, read otherwise."""


KindT = TypeVar("KindT", bound=Wide)


def merge_small(
    kinds: dict[KindT, list[int]], work: Callable[[KindT, int], int], least: int
) -> None:
    """Puts work that is read wide with what is not, where it is less than ``least`` steps."""
    for kind in [kind for kind in kinds if kind.vector > 1]:
        narrow = kind._replace(vector=1)
        if narrow in kinds and sum(work(kind, n) for n in kinds[kind]) < least:
            kinds[narrow] = sorted(kinds[narrow] + kinds.pop(kind))


@triton.jit
def offsets(column, inner, near, far, VECTOR: tl.constexpr):
    """Where columns of an unfolding begin (see ``Unfolding``); VECTOR > 1 if it is a wide one."""
    if VECTOR > 1:
        return column.to(tl.int64) * near
    return (column % inner).to(tl.int64) * near + (column // inner).to(tl.int64) * far


def blocks(size: int, block: int) -> int:
    """How many blocks cover ``size``."""
    return -(-size // block)


def cut(length: int, most: int) -> list[tuple[int, int]]:
    """Cuts ``length`` steps into parts of at most ``most``, as even as can be: (first, last)."""
    parts = max(blocks(length, most), 1)
    ends = [length * part // parts for part in range(parts + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))
