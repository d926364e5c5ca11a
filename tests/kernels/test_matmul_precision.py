"""PyTorch's setting of the precision of float32 products, on the CPU.

Where no units multiply bfloat16 numbers, all is as at "highest". The C++ tests put loops in their
place on any machine.
"""

from collections.abc import Iterator

import pytest
import torch
from device_calls import check, usual_settings
from operators import INVERSES, VARIANTS, call, everything, same
from tolerances import BFLOAT16_OPERATOR

import tnt_kernels

# Rounded: all modes of both, one of two, none. The last two have strides of their own.
SHAPES = [(300, 200), (64, 90), (70, 9), (40, 30), (64, 65, 3)]
HAS_UNITS = "bfloat16 units" in tnt_kernels.backends().versions["BLAS"]
CPU = torch.device("cpu")

usual = pytest.fixture(autouse=True)(usual_settings)


@pytest.fixture
def medium(usual: None) -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield


@pytest.mark.parametrize("variant", VARIANTS)
def test_close_to_float64(variant: str, medium: None) -> None:
    check(call(variant, SHAPES, "full"), BFLOAT16_OPERATOR, CPU)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("setting", ["high", "medium"])
def test_only_products_at_medium_are_rounded(variant: str, setting: str) -> None:
    given = call(variant, SHAPES, "full")
    exact = given.copy()()
    torch.set_float32_matmul_precision(setting)
    if HAS_UNITS and setting == "medium" and variant not in (*INVERSES, "scaled_step_"):
        pairs = zip(everything(given.copy()()), everything(exact), strict=True)
        assert not all(torch.equal(rounded, full) for rounded, full in pairs)
    else:
        same(given.copy()(), exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_gradients(dtype: torch.dtype, medium: None) -> None:
    """Statistics of bfloat16 gradients are exact in their products; the others are not rounded."""
    check(call("gram_ema_", SHAPES, "full", dtype), None, CPU)
