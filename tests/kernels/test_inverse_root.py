"""inverse_root: (S + eps I)^(-1/p), against eigenvalues and against its own p-th power."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    EMPTY_SHAPES,
    INVERSE_MISTAKES,
    KINDS,
    LAYOUTS,
    SHAPES,
    STATE_DTYPES,
    Errors,
    Mistake,
    bad_numbers,
    bad_statistics,
    close,
    dense,
    flat,
    identical,
    instead,
    inverse_arguments,
    inverse_power,
    like_stat,
    mistakes,
    mode_statistics,
    normal,
    noticed_by_autograd,
    poisoned_like,
    scalar,
    unchanged,
)
from oracle import contraction
from tolerances import FLOAT32_OPERATOR, NEWTON_OPERATOR
from torch import Tensor

from tnt_kernels import damped_inverse, inverse_root, reference

pytestmark = pytest.mark.usefixtures("one_thread")

DAMPING = 0.1
ROOTS = [1, 2, 3, 4, 8]


def tolerance(stat: Tensor) -> float:
    return NEWTON_OPERATOR if stat.dtype == torch.float64 else FLOAT32_OPERATOR


def expected(stats: list[Tensor], damping: float, root: int) -> list[Tensor]:
    """The definition in float64, by eigenvalues."""
    damped = [dense(s) + damping * torch.eye(s.shape[0]).double() for s in stats]
    powers = [inverse_power(matrix, -1 / root) for matrix in damped]
    return [like_stat(power, stat) for power, stat in zip(powers, stats, strict=True)]


def assert_good(factors: list[Tensor], stats: list[Tensor], wanted: list[Tensor]) -> None:
    for factor, stat, value in zip(factors, stats, wanted, strict=True):
        assert factor.dtype == stat.dtype and factor.is_contiguous()
        close(factor, value, tolerance(stat))
        identical(factor, factor.mT if factor.dim() == 2 else factor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_definition(shape: tuple[int, ...], kind: str, root: int, dtype: torch.dtype) -> None:
    stats = mode_statistics(shape, kind, dtype)
    wanted = expected(stats, DAMPING, root)
    with unchanged(stats):
        (factors,), info = inverse_root([stats], DAMPING, root)
    assert info.dtype == torch.int32 and info.tolist() == [0]
    assert_good(factors, stats, wanted)

    out = poisoned_like(stats)
    with unchanged(stats):
        (factors,), info = inverse_root([stats], DAMPING, [root], [out])
    assert info.tolist() == [0]
    assert all(factor is target for factor, target in zip(factors, out, strict=True))
    assert_good(out, stats, wanted)


@pytest.mark.parametrize("root", ROOTS)
def test_power_undoes_it(root: int) -> None:
    """A^p (S + eps I) = I."""
    stats = mode_statistics((9, 63), "full", torch.float64)
    (factors,), _ = inverse_root([stats], DAMPING, root)
    for factor, stat in zip(factors, stats, strict=True):
        identity = torch.eye(len(stat)).double()
        product = torch.linalg.matrix_power(factor, root) @ (stat + DAMPING * identity)
        close(product, identity, root * NEWTON_OPERATOR)


def test_first_root_is_the_inverse() -> None:
    """A vector's only U is S: the two operators agree at p = 1."""
    stats = [mode_statistics((65,), kind) for kind in ("full", "diagonal")]
    roots, _ = inverse_root(stats, DAMPING, 1)
    inverses, _ = damped_inverse(stats, DAMPING)
    for root, inverse in zip(flat(roots), flat(inverses), strict=True):
        close(root, inverse)


def test_is_the_reference_with_a_root_for_each_tensor() -> None:
    stats = [mode_statistics(shape, "mixed") for shape in SHAPES]
    roots = [ROOTS[n % len(ROOTS)] for n in range(len(SHAPES))]
    doubled = [[stat.double() for stat in row] for row in stats]
    wanted, codes = reference.inverse_root(doubled, DAMPING, roots)
    factors, info = inverse_root(stats, DAMPING, roots)
    identical(info, codes)
    for factor, value in zip(flat(factors), flat(wanted), strict=True):
        close(factor, value)
    for n, (row, modes) in enumerate(zip(factors, stats, strict=True)):
        assert_good(row, modes, expected(modes, DAMPING, roots[n]))


@pytest.mark.parametrize("shape", [(9,), (65, 9), (9, 63), (65, 3, 9)], ids=str)
@pytest.mark.parametrize("damping", [1e-2, 1.0])
@pytest.mark.parametrize("root", [2, 4])
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_gram_matrices_of_one_gradient(
    shape: tuple[int, ...], damping: float, root: int, dtype: torch.dtype
) -> None:
    """Statistics as training makes them, singular for the larger modes."""
    grams = [contraction(normal(shape).double(), i) for i in range(len(shape))]
    stats = [(g.tril() + g.tril(-1).mT).to(dtype) for g in grams]
    (factors,), info = inverse_root([stats], damping, root)
    assert info.tolist() == [0]
    for factor, value, stat in zip(factors, expected(stats, damping, root), stats, strict=True):
        condition = 1 + float(torch.linalg.eigvalsh(stat.double())[-1]) / damping
        close(factor, value, NEWTON_OPERATOR + 4 * condition * torch.finfo(dtype).eps)


def test_limits_of_the_iteration_stand_alike_in_cpp() -> None:
    header = (Path(__file__).parents[2] / "csrc" / "cpu" / "inverse_root.h").read_text()
    found = dict(re.findall(r"constexpr \w+ kNewton(\w+) = ([\d.e-]+);", header))
    names = ["ITERATIONS", "TOLERANCE", "GROWTH", "CONVERGED", "TRACE"]
    wanted = {name.capitalize(): getattr(reference, f"NEWTON_{name}") for name in names}
    assert {name: float(value) for name, value in found.items()} == wanted


@pytest.mark.parametrize("d", [2, 9, 65])
@pytest.mark.parametrize("root", [1, 2, 4, 6])
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_near_rank_one(d: int, root: int, dtype: torch.dtype) -> None:
    """Small entries hide the large eigenvalue, and max|M - I| grows before it falls."""
    x = 1 + 0.1 * normal((d, 1)).double()
    stats = [(x @ x.T).to(dtype)]
    ((factor,),), info = inverse_root([stats], DAMPING, root)
    assert info.tolist() == [0]
    (wanted,) = expected(stats, DAMPING, root)
    close(factor, wanted, tolerance(stats[0]))


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
@pytest.mark.parametrize("root", [1, 4])
def test_units(scale: float, root: int) -> None:
    stats = [scale * stat for stat in mode_statistics((9, 65), "mixed")]
    (factors,), info = inverse_root([stats], DAMPING * scale, root)
    assert info.tolist() == [0]
    assert_good(factors, stats, expected(stats, DAMPING * scale, root))


@pytest.mark.parametrize("layout", ["sliced", "transposed", "negated"])
def test_layouts(layout: str) -> None:
    stats = mode_statistics((9, 63, 5), "mixed")
    given = [LAYOUTS[layout](stat) for stat in stats]
    with unchanged(given):
        (factors,), info = inverse_root([given], DAMPING, 4)
    assert info.tolist() == [0]
    assert_good(factors, stats, expected(stats, DAMPING, 4))


@pytest.mark.parametrize("damping", [0.25, 0.1])
def test_damping_as_a_tensor(damping: float) -> None:
    """A 0-dim float64 tensor is the number to the bit; a float32 one where it holds it exactly."""
    stats = [mode_statistics(s, "mixed", dtype) for s in SHAPES for dtype in STATE_DTYPES]
    wanted, _ = inverse_root(stats, damping, 4)
    for dtype in STATE_DTYPES:
        value = scalar(damping, dtype)
        if dtype == torch.float64 or value.item() == damping:
            with unchanged(value):
                factors, info = inverse_root(stats, value, 4)
            assert not info.any()
            for actual, factor in zip(flat(factors), flat(wanted), strict=True):
                identical(actual, factor)


@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY_SHAPES], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("root", [1, 4])
def test_zero_statistics(shape: tuple[int, ...], kind: str, root: int) -> None:
    """eps^(-1/p) I, also where a mode, or the tensor, has no elements."""
    stats = [torch.zeros_like(stat) for stat in mode_statistics(shape, kind)]
    (factors,), info = inverse_root([stats], DAMPING, root, [poisoned_like(stats)])
    assert info.tolist() == [0]
    for factor, d in zip(factors, shape, strict=True):
        close(factor, like_stat(DAMPING ** (-1 / root) * torch.eye(d).double(), factor))


@pytest.mark.parametrize("damping", [DAMPING, scalar(DAMPING)])
@pytest.mark.parametrize("root", [2, []])
@pytest.mark.parametrize("out", [None, []])
def test_empty_lists(
    damping: float | Tensor, root: int | list[int], out: list[list[Tensor]] | None
) -> None:
    factors, info = inverse_root([], damping, root, out)
    assert factors == [] and info.dtype == torch.int32 and info.shape == (0,)


def test_list_is_its_entries_one_by_one() -> None:
    dtypes = [STATE_DTYPES[n % 2] for n in range(len(SHAPES))]
    roots = [ROOTS[n % len(ROOTS)] for n in range(len(SHAPES))]
    stats = [mode_statistics(s, "mixed", dtype) for s, dtype in zip(SHAPES, dtypes, strict=True)]
    together, _ = inverse_root(stats, DAMPING, roots)
    for row, modes, root in zip(together, stats, roots, strict=True):
        (alone,), _ = inverse_root([modes], DAMPING, root)
        for actual, wanted in zip(row, alone, strict=True):
            identical(actual, wanted)


# What has no root.


@bad_statistics
@pytest.mark.parametrize("root", [1, 2, 3])
def test_failures(kind: str, mode: int, spoil: Callable[[Tensor], Tensor], root: int) -> None:
    """``info`` names the mode, ``out`` keeps what it held, and the neighbours do not notice."""
    stats = [mode_statistics((5, 9, 3), kind) for _ in range(3)]
    stats[1][mode] = spoil(stats[1][mode])
    out = [[torch.rand_like(stat) for stat in row] for row in stats]
    before = [target.clone() for target in out[1]]
    with unchanged(stats):
        factors, info = inverse_root(stats, DAMPING, root, out)
    assert info.tolist() == [0, mode + 1, 0]
    for target, old in zip(out[1], before, strict=True):
        identical(target, old)
    for t in (0, 2):
        assert_good(factors[t], stats[t], expected(stats[t], DAMPING, root))

    fresh, info = inverse_root(stats, DAMPING, root)
    assert info.tolist() == [0, mode + 1, 0]
    assert all(factor.isnan().all() for factor in fresh[1])
    for t in (0, 2):
        for factor, kept in zip(fresh[t], factors[t], strict=True):
            identical(factor, kept)


@pytest.mark.parametrize(("spoiled", "first"), [([0, 2], 0), ([1, 2], 1), ([2], 2)])
def test_first_failure_counts(spoiled: list[int], first: int) -> None:
    stats = mode_statistics((5, 9, 3), "mixed")
    for mode in spoiled:
        stats[mode] = stats[mode] * -1
    out = [torch.rand_like(stat) for stat in stats]
    with unchanged(stats):
        _, info = inverse_root([stats], DAMPING, 2, [out])
    assert info.tolist() == [first + 1]


@pytest.mark.parametrize("root", [1, 2, 3, 4])
@pytest.mark.parametrize("eigenvalue", [-1e-3, -0.3, -2.0])
def test_one_negative_eigenvalue(root: int, eigenvalue: float) -> None:
    """However small, it is no root of anything: the iteration must not end on one that looks it."""
    vectors = torch.linalg.qr(normal((9, 9), torch.float64))[0]
    values = torch.linspace(0.5, 2, 9).double()
    values[0] = eigenvalue - DAMPING
    matrix = vectors @ torch.diag(values) @ vectors.mT
    stat = matrix.tril() + matrix.tril(-1).mT
    for dtype in STATE_DTYPES:
        assert inverse_root([[stat.to(dtype)]], DAMPING, root)[1].tolist() == [1]


@pytest.mark.parametrize("d", [2, 9, 65, 512])
@pytest.mark.parametrize("root", [1, 2, 4, 6])
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_one_negative_eigenvalue_along_a_flat_vector(d: int, root: int, dtype: torch.dtype) -> None:
    """It adds only 1 / d of itself to any entry of |M - I|, which must not look like converging."""
    flat_part = torch.full((d, d), 1 / d, dtype=dtype)
    for eigenvalue in (-1e-3, -0.3, -2.0):
        indefinite = 2 * (torch.eye(d, dtype=dtype) - flat_part) + eigenvalue * flat_part
        out = [[torch.full((d, d), 7.0, dtype=dtype)]]
        assert inverse_root([[indefinite]], 0.0, root, out)[1].tolist() == [1]
        assert torch.equal(out[0][0], torch.full((d, d), 7.0, dtype=dtype))


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_undamped(kind: str) -> None:
    """Damping 0 takes the root of what is regular, and says so where it is zero."""
    stats = [mode_statistics((9,), kind), mode_statistics((9,), kind)]
    stats[1][0].zero_()
    (factors, _), info = inverse_root(stats, 0.0, 2)
    assert info.tolist() == [0, 1]
    assert_good(factors, stats[0], expected(stats[0], 0.0, 2))


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_autograd_notices_the_write(kind: str) -> None:
    stats = mode_statistics((9, 5), kind)
    out = [torch.rand_like(stat) for stat in stats]
    for target in out:
        version = target._version
        assert noticed_by_autograd(target, lambda: inverse_root([stats], DAMPING, 2, [out]))
        assert target._version > version


def test_outside_autograd() -> None:
    stats = [stat.requires_grad_() for stat in mode_statistics((9, 5), "mixed")]
    (factors,), _ = inverse_root([stats], DAMPING, 2)
    assert not any(factor.requires_grad for factor in factors)


BAD_ROOTS: list[Mistake] = [
    *(
        (f"root {root}", instead(root=root), ValueError, r"^root must be .*positive integer.*got")
        for root in (0, -2, True, [2, 0], [2, 2.0], [2, None])
    ),
    ("too few roots", instead(root=[2]), ValueError, r"^root must have .*\(2\), got 1"),
    ("too many roots", instead(root=[2, 2, 2]), ValueError, r"^root must have .*\(2\), got 3"),
    *(
        (f"root {root!r}", instead(root=root), (TypeError, ValueError), "^root must")
        for root in (2.0, 0.5, None, "2")
    ),
]


@mistakes([*bad_numbers("damping"), *INVERSE_MISTAKES, *BAD_ROOTS])
def test_mistakes(make: Callable[..., Any], error: Errors, message: str) -> None:
    bad = make({**inverse_arguments(), "damping": DAMPING, "root": 2})
    with unchanged(bad), pytest.raises(error, match=message):
        inverse_root(**bad)
