"""damped_inverse's CUDA code without a GPU: its plan, its kernels thread by thread, and what goes
through PyTorch's linear algebra, on CPU tensors, by the tests of the operator itself.

Only what is between them is missing: launches, streams and the memory of tables. The kernels alone,
under sanitizers and in several orders of their threads: tests/native/test_cuda_damped_inverse.cpp.
"""

import fcntl
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_damped_inverse
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
from test_damped_inverse import (  # noqa: F401, collected here once more
    test_a_long_trace_of_equal_entries_is_exact,
    test_an_inverse_that_overflows_fails,
    test_autograd_notices_the_write,
    test_damping_as_a_tensor,
    test_definition,
    test_empty_lists,
    test_failures,
    test_first_failure_counts,
    test_gram_matrices_of_one_gradient,
    test_ill_conditioned_is_not_singular,
    test_is_the_reference,
    test_layouts,
    test_no_elements,
    test_outside_autograd,
    test_singular_without_damping_fails,
    test_undamped,
    test_units,
    test_zero_statistics,
)
from torch import Tensor
from torch.utils import cpp_extension

from tnt_kernels import reference

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
Modes = Sequence[Sequence[Tensor]]
Call = Callable[..., tuple[Modes, Tensor]]


@pytest.fixture(scope="module")
def on_host() -> Call:
    """The public function's namesake; ``largest`` is the largest matrix with a block of its own."""
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
@pytest.fixture(autouse=True, params=[128, 16, 0])
def served(request: pytest.FixtureRequest, on_host: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Puts it in the place of the operator for the tests imported above."""

    def damped_inverse(*arguments: Any, **named: Any) -> tuple[Modes, Tensor]:
        return on_host(*arguments, **named, largest=request.param)

    monkeypatch.setattr(test_damped_inverse, "damped_inverse", damped_inverse)
    return damped_inverse


only_blocks = pytest.mark.parametrize("served", [128], indirect=True)


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
    """Matrices of unlike sizes in padded batches, beside small and diagonal modes."""
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


@only_blocks
def test_blocks_do_not_depend_on_each_other() -> None:
    """(Padded batches do, by roundings.)"""
    test_damped_inverse.test_list_is_its_entries_one_by_one()


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
    for row, column in ((0, n - 1), (n - 1, 0), (0, 1), (1, 0)):
        stat = statistic(n, diagonal=False)
        stat[row, column] = float("nan")
        _, info = served([[stat]], 0.1)
        assert info.tolist() == [1]


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


@only_blocks
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


# The arguments of the flat operator, of a good statistic, and what is said of them.
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
    "stats must have 2 entries, got 1": lambda s: ([s.clone()], [s], [2], scalar(0.1)),
    "orders must be at least 1, got 0": lambda s: ([s.clone()], [s], [0], scalar(0.1)),
    "out must have 1 entries, got 0": lambda s: ([], [s], [1], scalar(0.1)),
    "damping must be in": lambda s: ([s.clone()], [s], [1], scalar(-0.1)),
    "damping must be a 0-dim": lambda s: ([s.clone()], [s], [1], torch.ones(2)),
}


@only_blocks
@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_memory_safety(message: str, on_host: Call) -> None:
    """Who calls the flat operator directly cannot make it write where it should not."""
    stat = statistic(9, diagonal=False)
    arguments = BAD_ARGUMENTS[message](stat)
    with unchanged([stat]), pytest.raises(ValueError, match=re.escape(message)):
        torch.ops.tnt_cuda_on_host.damped_inverse(*arguments, False, 128, 0)
