"""damped_inverse's CUDA code without a GPU: its plan, its kernels thread by thread, on CPU tensors.

Launches, streams and the memory of tables are missing. tests/native/test_factors.cpp
runs the kernels alone, under sanitizers and in several orders of their threads.
"""

import fcntl
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import (
    STATE_DTYPES,
    close,
    flat,
    identical,
    mode_statistics,
    poisoned_like,
    scalar,
    statistic,
    unchanged,
)
from contract import DampedInverse, EveryOperator, Inverses
from torch import Tensor
from torch.utils import cpp_extension

from tnt_kernels import reference

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
Modes = Sequence[Sequence[Tensor]]
Call = Callable[..., tuple[Modes, Tensor]]


@pytest.fixture(scope="module")
def on_host() -> Call:
    """Builds the code; ``largest`` is the largest matrix that one block inverts."""
    folder = ROOT / "build" / "cuda-on-host"
    folder.mkdir(parents=True, exist_ok=True)
    plain = ("factor_plan", "large_inverse", "damped_inverse_call")
    with (folder / "in_use").open("w") as in_use:
        # PyTorch's own lock file outlives a build that is interrupted, and is then waited for.
        fcntl.flock(in_use, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        cpp_extension.load(
            "cuda_on_host",
            [
                str(ROOT / "tests" / "native" / "cuda_on_host.cpp"),
                *(str(ROOT / "csrc" / "cuda" / f"{name}.cpp") for name in plain),
            ],
            extra_cflags=["-O2", "-std=c++20"],
            extra_include_paths=[str(ROOT / "csrc"), str(ROOT / "tests" / "native")],
            build_directory=str(folder),
            is_python_module=False,
        )

    def damped_inverse(
        stats: Modes,
        damping: float | Tensor,
        out: Modes | None = None,
        relative: bool = False,
        largest: int = 128,
        seed: int = 2,
    ) -> tuple[Modes, Tensor]:
        target = (
            [[t.contiguous() for t in poisoned_like(row)] for row in stats] if out is None else out
        )
        eps = damping if isinstance(damping, Tensor) else scalar(damping)
        orders = [len(row) for row in stats]
        with torch.no_grad():
            info = torch.ops.tnt_cuda_on_host.damped_inverse(
                flat(target), flat(stats), orders, eps, relative, largest, seed
            )
        return target, info

    return damped_inverse


# 128: a block for each matrix; 0: PyTorch's linear algebra for each; 16: some of both.
@pytest.fixture(params=[128, 16, 0])
def served(request: pytest.FixtureRequest, on_host: Call) -> Call:
    """The operator with ``largest`` set."""

    def damped_inverse(*arguments: Any, **named: Any) -> tuple[Modes, Tensor]:
        return on_host(*arguments, **named, largest=request.param)

    return damped_inverse


class TestContract(EveryOperator, Inverses, DampedInverse):
    """The contract of the operators."""

    operators = ("damped_inverse",)

    @pytest.fixture(autouse=True)
    def _serve(self, served: Call, request: pytest.FixtureRequest) -> None:
        self.functions = SimpleNamespace(damped_inverse=served)
        # Padded batches change the roundings of a list's entries.
        self.alone_to_the_bit = request.node.callspec.params["served"] == 128


def check(stats: Modes, call: Call, relative: bool = False) -> None:
    """Against the reference in float64."""
    doubles = [[stat.double() for stat in row] for row in stats]
    wanted, codes = reference.damped_inverse(doubles, 0.1, relative=relative)
    with unchanged(stats):
        factors, info = call(stats, 0.1, relative=relative)
    identical(info, codes)
    for factor, value in zip(flat(factors), flat(wanted), strict=True):
        close(factor, value)
        identical(factor, factor.mT if factor.dim() == 2 else factor)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("relative", [False, True])
def test_large(served: Call, dtype: torch.dtype, relative: bool) -> None:
    """Matrices of unlike sizes in padded batches, together with small and diagonal modes."""
    shapes = [(129, 5), (130,), (200, 140), (9, 9), (145, 3, 131), (300, 2)]
    stats = [
        mode_statistics(shape, kind, dtype)
        for shape, kind in zip(
            shapes, ("full", "full", "full", "mixed", "full", "mixed"), strict=True
        )
    ]
    check(stats, served, relative)


def test_both_dtypes_of_one_size(served: Call) -> None:
    check([mode_statistics((140, 20), "full", dtype) for dtype in STATE_DTYPES * 2], served)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("n", [9, 140])
def test_pivots_of_rounding_size(served: Call, n: int, dtype: torch.dtype) -> None:
    """16 roundings of a diagonal entry are no pivot; neighbours in a batch do not notice."""
    stats = [[torch.eye(n, dtype=dtype)] for _ in range(3)]
    for (stat,), roundings in zip(stats, (64, 4, 64), strict=True):
        stat[-2:, -2:] = 1
        stat[-1, -1] += roundings * torch.finfo(dtype).eps
    factors, info = served(stats, 0.0)
    assert info.tolist() == [0, 1, 0]
    assert factors[1][0].isnan().all() and not factors[0][0].isnan().any()


@pytest.mark.parametrize("n", [9, 140])
def test_not_finite_on_one_side_of_the_diagonal(served: Call, n: int) -> None:
    """Only the lower triangle is read."""
    for row, column in ((0, n - 1), (n - 1, 0), (0, 1), (1, 0)):
        stat = statistic(n, diagonal=False)
        (wanted,), _ = served([[stat]], 0.1)
        stat[row, column] = float("nan")
        (found,), info = served([[stat]], 0.1)
        assert info.tolist() == [int(row > column)]
        if row < column:
            identical(found[0], wanted[0])


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_a_bad_mode_of_a_tensor_with_large_ones(served: Call, bad: int) -> None:
    """Large modes wait for small ones and the other way round; neighbours do not notice."""
    stats = [mode_statistics((140, 5, 131, 3), "full") for _ in range(3)]
    stats[1][bad][-1, -1] = -1e6
    out = [[torch.rand_like(stat) for stat in row] for row in stats]
    before = [target.clone() for target in out[1]]
    _, info = served(stats, 0.1, out)
    assert info.tolist() == [0, bad + 1, 0]
    for target, old in zip(out[1], before, strict=True):
        identical(target, old)
    wanted, _ = reference.damped_inverse([[s.double() for s in row] for row in stats], 0.1)
    for t in (0, 2):
        for factor, value in zip(out[t], wanted[t], strict=True):
            close(factor, value)


def test_more_than_may_wait(on_host: Call) -> None:
    """The large modes of several waves: 5 tensors of 6.3 MB each, 16 MB at a time."""
    stats = [mode_statistics((1030, 720), "full") for _ in range(5)]
    stats[3][1][0, 0] = float("nan")
    out = [[torch.rand_like(stat) for stat in row] for row in stats]
    before = [target.clone() for target in out[3]]
    _, info = on_host(stats, 0.1, out)
    assert info.tolist() == [0, 0, 0, 2, 0]
    for target, old in zip(out[3], before, strict=True):
        identical(target, old)
    for t in (0, 1, 2, 4):
        (wanted,), _ = reference.damped_inverse([[s.double() for s in stats[t]]], 0.1)
        for factor, value in zip(out[t], wanted, strict=True):
            close(factor, value)


# Bad arguments of the flat operator, made of a good statistic, by the error's message.
BAD_ARGUMENTS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "must not share memory with": lambda s: ([s], [s], [1], scalar(0.1)),
    "out[0] must be like stats[0]": lambda s: ([s[0].clone()], [s], [1], scalar(0.1)),
    "stats[0] must be (d, d) or (d,)": lambda s: ([s[1:].clone()], [s[1:]], [1], scalar(0.1)),
    "out[0] must be contiguous": lambda s: ([s.repeat(1, 2)[:, ::2]], [s], [1], scalar(0.1)),
    "must be float32 or float64": lambda s: ([s.half()], [s.half()], [1], scalar(0.1)),
    "one dtype for each tensor": lambda s: (
        [s.clone(), s.double()],
        [s, s.double()],
        [2],
        scalar(0.1),
    ),
    "orders must sum to the length of stats, 1, got": lambda s: (
        [s.clone()],
        [s],
        [2],
        scalar(0.1),
    ),
    "orders must be at least 1, got 0": lambda s: ([s.clone()], [s], [0], scalar(0.1)),
    "out must have 1 entries, got 0": lambda s: ([], [s], [1], scalar(0.1)),
    "damping must be in": lambda s: ([s.clone()], [s], [1], scalar(-0.1)),
    "damping must be a 0-dim": lambda s: ([s.clone()], [s], [1], torch.ones(2)),
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_memory_safety(message: str, on_host: Call) -> None:
    """The flat operator checks what it writes to."""
    stat = statistic(9, diagonal=False)
    arguments = BAD_ARGUMENTS[message](stat)
    with unchanged([stat]), pytest.raises(ValueError, match=re.escape(message)):
        torch.ops.tnt_cuda_on_host.damped_inverse(*arguments, False, 128, 0)
