"""The public operators on a GPU's tensors: numbers, held against the definition in float64.

Skipped where there is no CUDA device, but with TNT_TEST_DEVICE=cpu (see device_calls.py).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import (
    DTYPES,
    EMPTY_SHAPES,
    KINDS,
    LAYOUT_SHAPE,
    LAYOUTS,
    SHAPES,
    STATE_DTYPES,
    WRITABLE_LAYOUTS,
    bad_statistics,
    close,
    flat,
    identical,
    unchanged,
)
from device_calls import (
    CUT_TERM,
    DEVICE,
    MANY,
    ROUNDED_ONCE,
    TF32_PRODUCT,
    Call,
    agree,
    call,
    check,
    every_operator,
    mapped,
    on_device,
    usual,
    usual_settings,
)
from tolerances import FLOAT32_OPERATOR, NEWTON_OPERATOR
from torch import Tensor

import tnt_kernels
from tnt_kernels import reference

pytestmark = on_device


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield from usual_settings()


# Numbers.


@every_operator
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_definition(name: str, kind: str, dtype: torch.dtype) -> None:
    """All shapes in one call, those without elements too."""
    check(call(name, [*SHAPES, *EMPTY_SHAPES, *SHAPES[::-1]], kind, dtype))


@every_operator
@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY_SHAPES], ids=str)
def test_alone(name: str, shape: tuple[int, ...]) -> None:
    check(call(name, [shape], "mixed"))


@every_operator
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(name: str, layout: str, dtype: torch.dtype) -> None:
    if layout == "negated" and dtype not in STATE_DTYPES:
        pytest.skip("a view of complex numbers is float32 or float64")
    written = LAYOUTS[layout if layout in WRITABLE_LAYOUTS else "contiguous"]
    check(call(name, [LAYOUT_SHAPE] * 2, "mixed", dtype, LAYOUTS[layout], written))


@pytest.mark.parametrize("name", ["damped_inverse", "inverse_root", "mode_products"])
@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_statistics_are_read_where_they_lie(name: str, layout: str) -> None:
    given = call(name, [(9, 65), (63,)], "mixed")
    position = 1 if name == "mode_products" else 0
    given.arguments[position] = mapped(given.arguments[position], LAYOUTS[layout])
    check(given)


def test_dtypes_in_one_list() -> None:
    # Lists that a call writes or returns, one entry for each tensor.
    results = {"preconditioned_step_": 2, "grafted_directions_": 3}
    for name in ("gram_ema_", "mode_products", *results):
        calls = [call(name, [(65, 9), (9, 3, 5)], "mixed", dtype) for dtype in DTYPES]
        lists = zip(*(c.arguments for c in calls), strict=True)
        there = Call(name, [in_one(entries) for entries in lists]).on(DEVICE)
        apart = [c.on(DEVICE) for c in calls]
        together = there()
        # In the order of the merged lists: those of all calls, argument by argument.
        singles = [c() for c in apart]
        if name == "grafted_directions_":
            scales = torch.cat([r.pop() for r in singles])
            close(together.pop().cpu(), scales.cpu(), FLOAT32_OPERATOR)
        if name in results:
            n = len(singles[0]) // results[name]
            parts = [[r[i : i + n] for r in singles] for i in range(0, len(singles[0]), n)]
            wanted = [t for side in parts for part in side for t in part]
        else:
            wanted = [t for part in singles for t in part]
        for result, value in zip(together, wanted, strict=True):
            least = ROUNDED_ONCE.get(result.dtype, FLOAT32_OPERATOR)
            close(result.cpu(), value.cpu().double(), least)


def in_one(arguments: Sequence[Any]) -> Any:
    """Lists one after the other; tables with a row for each tensor; the first of what is equal."""
    if isinstance(arguments[0], list):
        return sum(arguments, [])
    return torch.cat(list(arguments)) if isinstance(arguments[0], Tensor) else arguments[0]


BIG = [(2100, 9), (9, 70000), (64, 20000), (256, 128, 9), (1, 2049), (2049,), (1000, 784)]


@pytest.mark.parametrize(
    "name", ["gram_ema_", "mode_products", "preconditioned_step_", "grafted_directions_"]
)
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("shape", BIG, ids=str)
def test_big_and_skinny(name: str, precision: str, shape: tuple[int, ...]) -> None:
    torch.set_float32_matmul_precision(precision)
    tolerance = FLOAT32_OPERATOR + max(shape) * CUT_TERM
    if precision == "high":
        tolerance += len(shape) * TF32_PRODUCT
    check(call(name, [shape, (7, 5)]), tolerance)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("d", [31, 32, 33, 128, 129, 257, 1000, 2049])
def test_inverses_of_many_sizes(d: int, precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    tolerance = FLOAT32_OPERATOR + d * CUT_TERM
    if precision == "high":
        tolerance += 10 * TF32_PRODUCT  # times the condition
    check(call("damped_inverse", [(d, 5), (3,), (d,)]), tolerance)


@pytest.mark.parametrize("root", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("d", [33, 129, 513])
def test_roots_of_many_sizes(d: int, root: int) -> None:
    given = call("inverse_root", [(d, 5), (3,)])
    given.arguments[2] = root
    check(given, NEWTON_OPERATOR + FLOAT32_OPERATOR + d * CUT_TERM)


@pytest.mark.parametrize("relative", [False, True])
def test_relative_damping(relative: bool) -> None:
    given = call("damped_inverse", SHAPES, "mixed")
    given.arguments[3] = relative
    check(given)


@every_operator
def test_precision_high_is_close(name: str) -> None:
    torch.set_float32_matmul_precision("high")
    check(call(name, SHAPES, "mixed"), 20 * TF32_PRODUCT)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_decay_zero_and_one(decay: float) -> None:
    given = call("gram_ema_", SHAPES, "mixed")
    given.arguments[2] = decay
    if decay == 0:
        given.arguments[0] = mapped(given.arguments[0], lambda s: torch.full_like(s, torch.nan))
        there = given.on(DEVICE)
        fresh = call("gram_ema_", SHAPES, "mixed")
        fresh.arguments[1:] = given.arguments[1:]
        agree(there(), fresh.in_float64()(reference), there)
    else:
        given.arguments[1] = mapped(given.arguments[1], lambda t: torch.full_like(t, torch.inf))
        there = given.on(DEVICE)
        for result, before in zip(there(), flat(given.arguments[0]), strict=True):
            identical(result.cpu(), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grafting_on_the_momentum_s_length(dtype: torch.dtype) -> None:
    """Without second moments, and to directions of its own."""
    given = call("grafted_directions_", [*SHAPES, *EMPTY_SHAPES], "mixed", dtype)
    given.arguments[4:] = [None, None, None]
    check(given)


def test_counts_on_the_cpu() -> None:
    given = call("grafted_directions_", SHAPES, "mixed")
    there, counts = given.on(DEVICE), given.arguments[5].clone()
    there.arguments[5] = counts
    agree(there(), given.in_float64()(reference), there)


def test_empty_lists() -> None:
    there = torch.tensor(0.5, device=DEVICE)
    assert tnt_kernels.gram_ema_([], [], there) is None
    assert tnt_kernels.mode_products([], []) == []
    assert tnt_kernels.preconditioned_step_([], [], [], [], there, there, there) is None
    directions, scales = tnt_kernels.grafted_directions_([], [], [], there)
    assert directions == [] and scales.shape == (0,) and scales.device.type == DEVICE.type
    for factors, info in (
        tnt_kernels.damped_inverse([], there),
        tnt_kernels.inverse_root([], there, 2),
    ):
        assert factors == [] and info.shape == (0,) and info.device.type == DEVICE.type


@every_operator
def test_what_is_read_is_unchanged(name: str) -> None:
    there = call(name, SHAPES, "mixed").on(DEVICE)
    written: dict[str, tuple[int, ...]] = {
        "gram_ema_": (0,),
        "damped_inverse": (2,),
        "inverse_root": (3,),
        "preconditioned_step_": (0, 1),
        "grafted_directions_": (0, 4, 6),
    }
    read = [a for i, a in enumerate(there.arguments) if i not in written.get(name, ())]
    with unchanged(read):
        there()


@pytest.mark.parametrize("name", ["damped_inverse", "inverse_root"])
@pytest.mark.parametrize("kind", ["full", "diagonal"])
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_failed_factors(name: str, kind: str, dtype: torch.dtype) -> None:
    """Every way to fail in one list: named, its memory as it was, its neighbours good."""
    spoils = [p.values[1:] for p in bad_statistics.args[1] if p.values[0] == kind]
    given = call(name, [(5, 9, 3)] * (2 * len(spoils)), kind, dtype)
    modes = [mode for mode, _ in spoils]
    for n, (mode, spoil) in enumerate(spoils):
        given.arguments[0][2 * n][mode] = spoil(given.arguments[0][2 * n][mode])
    held = given.arguments[2 if name == "damped_inverse" else 3]
    sound = Call(name, [a[1::2] if isinstance(a, list) else a for a in given.arguments])
    wanted = sound.in_float64()(reference)[:-1]
    *factors, info = given.on(DEVICE)()
    codes = [code for mode in modes for code in (mode + 1, 0)]
    assert info.tolist() == codes
    for n in range(len(codes)):
        for i, factor in enumerate(factors[3 * n : 3 * n + 3]):
            if codes[n]:
                identical(factor.cpu(), held[n][i])
            else:
                close(factor.cpu(), wanted[3 * (n // 2) + i], usual(name, dtype))


def test_a_large_matrix_that_fails_midway_keeps_its_memory() -> None:
    given = call("damped_inverse", [(600, 70), (600, 70)])
    given.arguments[0][0][0][550, 550] = -100.0
    held = given.arguments[2][0]
    *factors, info = given.on(DEVICE)()
    assert info.tolist() == [1, 0]
    for factor, before in zip(factors, held, strict=False):
        identical(factor.cpu(), before)


# The same bits twice.


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_to_the_bit(name: str, dtype: torch.dtype) -> None:
    given = call(name, MANY, "mixed", dtype)
    first = given.on(DEVICE)()
    for _ in range(3):
        for again, before in zip(given.on(DEVICE)(), first, strict=True):
            identical(again, before)
