"""The public operators on a GPU, beyond their contract: large sizes, precision, repetition.

tests/gpu/test_contract.py has what they share with every other implementation.
TNT_TEST_DEVICE=cpu runs these tests on the CPU's tensors, which tests the tests.
"""

from collections.abc import Sequence

import pytest
import torch
from cases import SHAPES, identical
from device_calls import CUT_TERM, DEVICE, MANY, TF32_PRODUCT, check, on_device, usual_settings
from operators import GRAFTS, TABLES, VARIANTS, call, same
from tolerances import FLOAT32_OPERATOR, NEWTON_OPERATOR

import tnt_kernels
from tnt_kernels import reference

pytestmark = on_device

every_variant = pytest.mark.parametrize("variant", VARIANTS)
usual = pytest.fixture(autouse=True)(usual_settings)
BIG = [(2100, 9), (9, 70000), (64, 20000), (256, 128, 9), (1, 2049), (2049,), (1000, 784)]


@pytest.mark.parametrize(
    "variant", ["gram_ema_", "mode_products", "preconditioned_step_", "grafted_directions_ Adam"]
)
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("shape", BIG, ids=str)
def test_big_and_skinny(variant: str, precision: str, shape: Sequence[int]) -> None:
    torch.set_float32_matmul_precision(precision)
    tolerance = FLOAT32_OPERATOR + max(shape) * CUT_TERM
    if precision == "high":
        tolerance += len(shape) * TF32_PRODUCT
    check(call(variant, [shape, (7, 5)], "full"), tolerance)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("d", [31, 32, 33, 128, 129, 257, 1000, 2049])
def test_inverses_of_many_sizes(d: int, precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    tolerance = FLOAT32_OPERATOR + d * CUT_TERM
    if precision == "high":
        tolerance += 10 * TF32_PRODUCT  # times the condition
    check(call("damped_inverse", [(d, 5), (3,), (d,)], "full"), tolerance)


@pytest.mark.parametrize("root", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("d", [33, 129, 513])
def test_roots_of_many_sizes(d: int, root: int) -> None:
    given = call("inverse_root", [(d, 5), (3,)], "full").with_arguments(root=[root] * 2)
    check(given, NEWTON_OPERATOR + FLOAT32_OPERATOR + d * CUT_TERM)


@every_variant
def test_precision_high_is_close(variant: str) -> None:
    torch.set_float32_matmul_precision("high")
    check(call(variant, SHAPES), 20 * TF32_PRODUCT)


@every_variant
def test_numbers_and_counts_on_the_cpu(variant: str) -> None:
    """Next to tensors on the device."""
    given = call(variant, SHAPES)
    there = given.copy(DEVICE)
    for key in set(TABLES) & set(given.arguments):
        there.arguments[key] = given.arguments[key].clone()
    same(there(), given.copy(DEVICE)())


def test_empty_lists() -> None:
    """Results of empty lists are on the numbers' device."""
    there = torch.tensor(0.5, device=DEVICE)
    assert tnt_kernels.gram_ema_([], [], there) is None
    assert tnt_kernels.preconditioned_step_([], [], [], [], there, there, there) is None
    results = (
        tnt_kernels.grafted_directions_([], [], [], there),
        tnt_kernels.damped_inverse([], there),
        tnt_kernels.inverse_root([], there, 2),
    )
    for entries, numbers in results:
        assert entries == [] and len(numbers) == 0 and numbers.device.type == DEVICE.type


def test_a_large_matrix_that_fails_midway_keeps_its_memory() -> None:
    given = call("damped_inverse", [(600, 70), (600, 70)], "full")
    given = given.map(lambda key, tensor: torch.rand_like(tensor) if key == "out" else tensor)
    given.arguments["stats"][0][0][550, 550] = -100.0
    results = given.copy(DEVICE)()
    assert results["info"].tolist() == [1, 0]
    for factor, held in zip(results["factors"][0], given.arguments["out"][0], strict=True):
        identical(factor.cpu(), held)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_to_the_bit(variant: str, dtype: torch.dtype) -> None:
    given = call(variant, MANY, dtype=dtype)
    first = given.copy(DEVICE)()
    for _ in range(3):
        same(given.copy(DEVICE)(), first)


@pytest.mark.parametrize("variant", GRAFTS)
def test_the_reference_on_the_device(variant: str) -> None:
    """Serves where a kernel is missing."""
    given = call(variant, SHAPES)
    check(given, functions=reference)
