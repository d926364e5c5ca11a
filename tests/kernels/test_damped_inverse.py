"""damped_inverse: the statistics of equation 13, damped and inverted."""

import math
from collections.abc import Callable
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
    bad_numbers,
    bad_statistics,
    close,
    dense,
    flat,
    identical,
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
from oracle import contraction, covariances
from torch import Tensor

from tnt_kernels import damped_inverse, reference

pytestmark = pytest.mark.usefixtures("one_thread")

DAMPING = 0.1


def expected(stats: list[Tensor], damping: float, relative: bool = False) -> list[Tensor]:
    """The definition in float64: equation 13, then an inverse by eigenvalues."""
    covariance, c = covariances([dense(stat) for stat in stats])
    shift = damping * c if relative else damping
    inverses = [inverse_power(u + shift * torch.eye(len(u)).double(), -1) for u in covariance]
    return [like_stat(a, stat) for a, stat in zip(inverses, stats, strict=True)]


def assert_good(factors: list[Tensor], stats: list[Tensor], wanted: list[Tensor]) -> None:
    for factor, stat, value in zip(factors, stats, wanted, strict=True):
        assert factor.dtype == stat.dtype and factor.is_contiguous()
        close(factor, value)
        identical(factor, factor.mT if factor.dim() == 2 else factor)


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize("shape", [(20, 50), (70, 3, 9)], ids=str)
def test_singular_without_damping_fails(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # One mode is larger than the product of the others: its Gram matrix is rank-deficient by
    # construction, but rounding leaves pivots of either sign.
    singular = max(range(len(shape)), key=lambda i: shape[i])
    for _ in range(20):
        stats = [contraction(normal(shape, dtype), i) for i in range(len(shape))]
        factors, info = damped_inverse([stats], 0.0)
        assert info.tolist() == [singular + 1]
        assert all(bool(factor.isnan().all()) for factor in factors[0])


@pytest.mark.parametrize("condition", [1e2, 1e6])
def test_ill_conditioned_is_not_singular(condition: float) -> None:
    basis, _ = torch.linalg.qr(torch.randn(65, 65, dtype=torch.float64))
    spectrum = torch.logspace(0, -float(torch.tensor(condition).log10()), 65).double()
    stat = (basis * spectrum) @ basis.T
    _, info = damped_inverse([[((stat + stat.T) / 2).float()]], 0.0)
    assert info.tolist() == [0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_definition(shape: tuple[int, ...], kind: str, relative: bool, dtype: torch.dtype) -> None:
    stats = mode_statistics(shape, kind, dtype)
    wanted = expected(stats, DAMPING, relative)
    with unchanged(stats):
        (factors,), info = damped_inverse([stats], DAMPING, relative=relative)
    assert info.dtype == torch.int32 and info.tolist() == [0]
    assert_good(factors, stats, wanted)

    out = poisoned_like(stats)
    with unchanged(stats):
        (factors,), info = damped_inverse([stats], DAMPING, [out], relative)
    assert info.tolist() == [0]
    assert all(factor is target for factor, target in zip(factors, out, strict=True))
    assert_good(out, stats, wanted)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_is_the_reference(dtype: torch.dtype) -> None:
    stats = [mode_statistics(shape, kind, dtype) for shape in SHAPES for kind in KINDS]
    wanted, codes = reference.damped_inverse([[s.double() for s in row] for row in stats], DAMPING)
    factors, info = damped_inverse(stats, DAMPING)
    identical(info, codes)
    for factor, value in zip(flat(factors), flat(wanted), strict=True):
        close(factor, value)


@pytest.mark.parametrize("shape", [(9,), (65, 9), (9, 63), (65, 3, 9)], ids=str)
@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_gram_matrices_of_one_gradient(shape: tuple[int, ...], damping: float) -> None:
    """Statistics as training makes them, singular for the larger modes."""
    grams = [contraction(normal(shape).double(), i) for i in range(len(shape))]
    stats = [(g.tril() + g.tril(-1).mT).float() for g in grams]
    covariance, _ = covariances([stat.double() for stat in stats])
    (factors,), info = damped_inverse([stats], damping)
    assert info.tolist() == [0]
    for factor, value, u in zip(factors, expected(stats, damping), covariance, strict=True):
        condition = 1 + float(torch.linalg.eigvalsh(u)[-1]) / damping
        close(factor, value, 4 * condition * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1e20, 1e35])
@pytest.mark.parametrize("shape", [(9,), (9, 65), (9, 65, 3), (5, 9, 3, 7)], ids=str)
def test_units(scale: float, shape: tuple[int, ...]) -> None:
    """Gradients in small or large units neither under- nor overflow float32 on the way."""
    stats = [scale * stat for stat in mode_statistics(shape, "mixed")]
    (factors,), info = damped_inverse([stats], DAMPING, relative=True)
    assert info.tolist() == [0]
    assert_good(factors, stats, expected(stats, DAMPING, relative=True))


@pytest.mark.parametrize("layout", ["sliced", "transposed", "negated"])
def test_layouts(layout: str) -> None:
    stats = mode_statistics((9, 63, 5), "mixed")
    given = [LAYOUTS[layout](stat) for stat in stats]
    with unchanged(given):
        (factors,), info = damped_inverse([given], DAMPING)
    assert info.tolist() == [0]
    assert_good(factors, stats, expected(stats, DAMPING))


@pytest.mark.parametrize("damping", [0.25, 0.1])
@pytest.mark.parametrize("relative", [False, True])
def test_damping_as_a_tensor(damping: float, relative: bool) -> None:
    """A 0-dim float64 tensor is the number to the bit; a float32 one where it holds it exactly."""
    stats = [mode_statistics(s, "mixed", dtype) for s in SHAPES for dtype in STATE_DTYPES]
    wanted, _ = damped_inverse(stats, damping, relative=relative)
    for dtype in STATE_DTYPES:
        value = scalar(damping, dtype)
        if dtype == torch.float64 or value.item() == damping:
            with unchanged(value):
                factors, info = damped_inverse(stats, value, relative=relative)
            assert not info.any()
            for actual, factor in zip(flat(factors), flat(wanted), strict=True):
                identical(actual, factor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("others", ["zero", "not zero"])
def test_zero_statistics(kind: str, dtype: torch.dtype, others: str) -> None:
    """tr S_1 = 0: every U_i is 0, whatever the other S_i; relative damping gives the identity."""
    for shape in SHAPES:
        stats = mode_statistics(shape, kind, dtype)
        for stat in stats[: 1 if others == "not zero" else None]:
            stat.zero_()
        for relative, wanted in ((False, 1 / DAMPING), (True, 1.0)):
            (factors,), info = damped_inverse([stats], DAMPING, [poisoned_like(stats)], relative)
            assert info.tolist() == [0]
            for factor, d in zip(factors, shape, strict=True):
                close(factor, like_stat(wanted * torch.eye(d).double(), factor))
                if relative:
                    identical(factor, like_stat(torch.eye(d, dtype=dtype), factor))


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relative", [False, True])
def test_no_elements(shape: tuple[int, ...], kind: str, relative: bool) -> None:
    """The statistics of a tensor without elements are zero, and are served as such."""
    stats = [torch.zeros_like(stat) for stat in mode_statistics(shape, kind)]
    (factors,), info = damped_inverse([stats], DAMPING, [poisoned_like(stats)], relative)
    for factor, d in zip(factors, shape, strict=True):
        close(factor, like_stat(torch.eye(d).double() / (1.0 if relative else DAMPING), factor))
    assert info.tolist() == [0]


@pytest.mark.parametrize("damping", [DAMPING, scalar(DAMPING)])
@pytest.mark.parametrize("out", [None, []])
def test_empty_lists(damping: float | Tensor, out: list[list[Tensor]] | None) -> None:
    factors, info = damped_inverse([], damping, out)
    assert factors == [] and info.dtype == torch.int32 and info.shape == (0,)


def test_list_is_its_entries_one_by_one() -> None:
    dtypes = [STATE_DTYPES[n % 2] for n in range(len(SHAPES))]
    stats = [mode_statistics(s, "mixed", dtype) for s, dtype in zip(SHAPES, dtypes, strict=True)]
    together, _ = damped_inverse(stats, DAMPING)
    for row, modes in zip(together, stats, strict=True):
        (alone,), _ = damped_inverse([modes], DAMPING)
        for actual, wanted in zip(row, alone, strict=True):
            identical(actual, wanted)


# What cannot be inverted.


@bad_statistics
def test_failures(kind: str, mode: int, spoil: Callable[[Tensor], Tensor]) -> None:
    """``info`` names the mode, ``out`` keeps what it held, and the neighbours do not notice."""
    shape = (5, 9, 3)
    stats = [mode_statistics(shape, kind) for _ in range(3)]
    stats[1][mode] = spoil(stats[1][mode])
    out = [[torch.rand_like(stat) for stat in row] for row in stats]
    before = [target.clone() for target in out[1]]
    with unchanged(stats):
        factors, info = damped_inverse(stats, DAMPING, out)
    assert info.tolist() == [0, mode + 1, 0]
    for target, old in zip(out[1], before, strict=True):
        identical(target, old)
    for t in (0, 2):
        assert_good(factors[t], stats[t], expected(stats[t], DAMPING))

    fresh, info = damped_inverse(stats, DAMPING)
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
        _, info = damped_inverse([stats], DAMPING, [out])
    assert info.tolist() == [first + 1]


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_undamped(kind: str) -> None:
    """Damping 0 inverts what is regular, and says so where it is not."""
    stats = [mode_statistics((9,), kind) for _ in range(3)]
    stats[1][0].zero_()
    stats[2][0][3] = 0  # full: a zero row; the column follows
    if kind == "full":
        stats[2][0][:, 3] = 0
    (factors, *_), info = damped_inverse(stats, 0.0)
    assert info.tolist() == [0, 1, 1]
    assert_good(factors, stats[0], expected(stats[0], 0.0))


def test_an_inverse_that_overflows_fails() -> None:
    """1e-42 is a float32, 1e42 is not."""
    stats = [torch.tensor([1.0, 1e-42]), torch.diag(torch.tensor([1.0, 1e-42]))]
    out = [[torch.rand_like(stat)] for stat in stats]
    before = [target.clone() for target in flat(out)]
    _, info = damped_inverse([[stat] for stat in stats], 0.0, out)
    assert info.tolist() == [1, 1]
    for target, old in zip(flat(out), before, strict=True):
        identical(target, old)


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_autograd_notices_the_write(kind: str) -> None:
    stats = mode_statistics((9, 5), kind)
    out = [torch.rand_like(stat) for stat in stats]
    for target in out:
        version = target._version
        assert noticed_by_autograd(target, lambda: damped_inverse([stats], DAMPING, [out]))
        assert target._version > version


def test_outside_autograd() -> None:
    stats = [stat.requires_grad_() for stat in mode_statistics((9, 5), "mixed")]
    (factors,), _ = damped_inverse([stats], DAMPING)
    assert not any(factor.requires_grad for factor in factors)


@mistakes([*bad_numbers("damping"), *INVERSE_MISTAKES])
def test_mistakes(make: Callable[..., Any], error: Errors, message: str) -> None:
    bad = make({**inverse_arguments(), "damping": DAMPING})
    with unchanged(bad), pytest.raises(error, match=message):
        damped_inverse(**bad)


def test_a_long_trace_of_equal_entries_is_exact() -> None:
    """Added up one by one, 50,000 equal numbers would all be rounded to the same side."""
    entry, d = 0.7, 50_000
    stats = [torch.full((d,), entry, dtype=torch.float64), torch.full((1,), d * entry).double()]
    (factors, *_), info = damped_inverse([stats], DAMPING)
    assert info.tolist() == [0]
    wanted = torch.full_like(stats[0], 1 / (math.sqrt(entry) + DAMPING))
    close(factors[0], wanted, tolerance=1e-15)
