"""The contract of the operators, over the C++ kernels and over the reference.

The reference in float64 is the definition that everything else is compared with; here the
reference itself is compared with the independent oracle.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from cases import (
    HELD,
    KINDS,
    STATE_DTYPES,
    bits,
    close,
    flat,
    identical,
    normal,
    with_spectrum,
)
from contract import DampedInverse, EveryOperator, Gram, InverseRoot, Inverses, Steps, over
from operators import NORMS, STEPS, VARIANTS, agree, by_oracle, call
from tolerances import FLOAT32_OPERATOR
from torch import Tensor

import tnt_kernels
from tnt_kernels import reference
from tnt_kernels.operators import OPERATORS

# The oracle is slow: it loops over the entries of a matrix.
ORACLE_SHAPES = [(1,), (9,), (1, 9), (9, 5), (5, 1, 9), (9, 7, 3), (2, 3, 5, 4)]


class TestCpp(EveryOperator, Gram, Inverses, DampedInverse, InverseRoot, Steps):
    """The C++ kernels, through the public functions."""

    functions = tnt_kernels

    def test_serves(self) -> None:
        assert {row["cpu"] for row in tnt_kernels.backends().ops.values()} == {"C++"}

    @over("gram_ema_", "mode_products", *STEPS)
    def test_subnormal_numbers(self, variant: str) -> None:
        """A call may take them for zero, and must leave them as they are."""
        moved = ("tensors", "momenta", "grads", "params")
        given = call(variant, [(9, 33), (65,)]).map(
            lambda key, t: t.mul_(1e-39) if key in moved else t
        )
        wanted = given.double()(reference)
        results = given()
        for key, entries in results.items():
            for actual, value in zip(flat(entries), flat(wanted[key]), strict=True):
                if key not in NORMS:
                    # A sum of at most 65 products of numbers that are each off by 2^-126.
                    error = (actual.double() - value).abs().max()
                    assert error <= max(65 * 16 * 2.0**-126, 1e-5 * float(value.abs().max()))
        tiny = torch.tensor([1e-40, 2e-40])
        assert torch.equal(tiny + tiny, 2 * tiny) and bool((tiny + tiny > 0).all())


class TestReference(EveryOperator, Gram, Inverses, DampedInverse, InverseRoot, Steps):
    """The reference, which serves where there is no kernel."""

    functions = SimpleNamespace(
        **{name: torch.no_grad()(getattr(reference, name)) for name in OPERATORS}
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_oracle(variant: str, kind: str) -> None:
    given = call(variant, ORACLE_SHAPES, kind, torch.float64)
    wanted = by_oracle(given)
    agree(given(TestReference.functions), wanted, given)


def rooted(stat: Tensor, damping: float, root: int) -> Tensor:
    """The root of a statistic that succeeds, in float64."""
    ((factor,),), info = tnt_kernels.inverse_root([[stat]], damping, root)
    assert info.tolist() == [0]
    return factor.double()


def exact_root(stat: Tensor, damping: float, root: int) -> Tensor:
    values, vectors = torch.linalg.eigh(stat.double())
    return (vectors * (values.clamp_min(0) + damping) ** (-1 / root)) @ vectors.mT


@pytest.mark.parametrize("d", [2, 9, 65, 300])
def test_small_eigenvalues_of_float32(d: int) -> None:
    """A steep spectrum, one large eigenvalue, and a small one that only float64 resolves."""
    steep = torch.arange(1, d + 1, dtype=torch.float64) ** -1.5
    lone, flat_one = torch.full((2, d), 1e-6, dtype=torch.float64)
    lone[0], flat_one[1:] = 1, 1
    for spectrum in (steep, lone, flat_one):
        stat = with_spectrum(spectrum).float()
        close(rooted(stat, 0.0, 4), exact_root(stat, 0.0, 4), FLOAT32_OPERATOR)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("damping", [1e-2, 1e-5, 1e-9])
def test_rounded_zero_eigenvalues_are_zero(damping: float, dtype: torch.dtype) -> None:
    """Of a rank of 20, many of the others negative; a dead unit has a row of zeros."""
    x = normal((130, 20), torch.float64)
    x[::3] = 0
    x /= torch.linalg.matrix_norm(x, 2)
    stat = (x @ x.mT).to(dtype)
    tolerance = {1e-2: 1e-6, 1e-5: 1e-3, 1e-9: FLOAT32_OPERATOR}[damping]
    close(rooted(stat, damping, 2), exact_root(stat, damping, 2), tolerance)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("variant", ["damped_inverse", "inverse_root"])
def test_a_large_matrix_that_fails_restores_out(
    variant: str, held: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """The last of three modes fails; and the first, in the middle of its matrix."""
    sizes = (600, 70, 33) if variant == "damped_inverse" else (140, 70, 33)
    given = call(variant, [sizes] * 2, dtype=dtype)
    for key in ("stats", "out"):
        make = held if key == "out" else lambda stat: torch.eye(len(stat), dtype=dtype) + 0.5
        given.arguments[key] = [[make(torch.empty(d, d, dtype=dtype)) for d in sizes] for _ in "12"]
    for t, mode, place in ((0, 2, 20), (1, 0, sizes[0] - 50)):
        given.arguments["stats"][t][mode][place, place] = -100.0  # far below what damping lifts
    before = given.copy().written
    assert given()["info"].tolist() == [3, 1]
    for target, old in zip(given.written, before, strict=True):
        identical(bits(target), bits(old))
