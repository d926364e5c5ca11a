"""A mode that fails leaves all factors of its tensor as they were, to the bit."""

import math
from collections.abc import Callable

import pytest
import torch
from cases import bad_statistics, mode_statistics
from torch import Tensor

from tnt_kernels import damped_inverse, inverse_root

DAMPING = 0.1


def symmetric(stat: Tensor) -> Tensor:
    held = torch.rand_like(stat)
    return held + held.mT if held.dim() == 2 else held


def general(stat: Tensor) -> Tensor:
    return torch.rand_like(stat)


def one_bit_off(stat: Tensor) -> Tensor:
    """Symmetric, but for the sign of one zero."""
    held = symmetric(stat)
    held.reshape(-1)[1] = 0.0
    held.reshape(-1)[held.shape[0] if held.dim() == 2 else 2] = -0.0
    return held


def poisoned(stat: Tensor) -> Tensor:
    return torch.full_like(stat, math.nan)


HELD = [symmetric, general, one_bit_off, poisoned]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int64)


def call(op: str, stats: list[list[Tensor]], out: list[list[Tensor]]) -> list[int]:
    made = damped_inverse(stats, DAMPING, out) if op == "inverse" else inverse_root(
        stats, DAMPING, 2, out
    )  # fmt: skip
    return [int(code) for code in made[1]]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("op", ["inverse", "root"])
@bad_statistics
def test_small(
    op: str, held: Callable[[Tensor], Tensor], kind: str, mode: int, spoil: Callable[..., Tensor]
) -> None:
    stats = mode_statistics((5, 9, 3), kind)
    stats[mode] = spoil(stats[mode])
    out = [held(stat) for stat in stats]
    before = [target.clone() for target in out]
    assert call(op, [stats], [out]) == [mode + 1]
    for target, old in zip(out, before, strict=True):
        assert torch.equal(bits(target), bits(old))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("op", ["inverse", "root"])
def test_large(op: str, held: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """The last of three modes fails; and the first, in the middle of its matrix."""
    sizes = (600, 70, 33) if op == "inverse" else (140, 70, 33)
    rows = []
    for spoiled, place in ((2, 20), (0, sizes[0] - 50)):
        rows.append([torch.eye(d, dtype=dtype) + 0.5 for d in sizes])
        rows[-1][spoiled][place, place] = -100.0  # far below what damping lifts
    out = [[held(stat) for stat in row] for row in rows]
    before = [[target.clone() for target in row] for row in out]
    assert call(op, rows, out) == [3, 1]
    for row, old_row in zip(out, before, strict=True):
        for target, old in zip(row, old_row, strict=True):
            assert torch.equal(bits(target), bits(old))
