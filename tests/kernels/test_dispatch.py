"""How the operators are registered: opcheck, shapes without data, and the table of backends.

Compilers and other processes: tests/system/test_registration.py.
"""

from pathlib import Path

import pytest
import torch
from cases import DTYPES
from operators import TABLES, VARIANTS, Call, call, everything, flat_arguments
from torch._subclasses.fake_tensor import FakeTensorMode

import tnt_kernels
from tnt_kernels import triton
from tnt_kernels.operators import OPERATORS

ROOT = Path(__file__).parents[2]
EXTENSION_KERNELS = {path.stem for path in (ROOT / "csrc" / "cpu").glob("*.cpp")}


def with_numbers(given: Call) -> Call:
    """``out`` without NaN, which opcheck cannot compare."""
    return given.map(lambda key, tensor: torch.rand_like(tensor) if key == "out" else tensor)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "shapes", [[], [(9,), (9, 5), (5, 9, 3), (3, 0, 2)]], ids=["empty", "four"]
)
def test_opcheck(variant: str, shapes: list[tuple[int, ...]]) -> None:
    given = with_numbers(call(variant, shapes, dtype=DTYPES))
    operator = getattr(torch.ops.tnt_kernels, given.name).default
    torch.library.opcheck(operator, flat_arguments(given))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_without_data(variant: str) -> None:
    """On meta tensors an operator gives shapes, dtypes and layouts, as tracing wants them."""
    given = call(variant, [(9,), (9, 5), (65, 3), (3, 0, 2)], dtype=DTYPES)
    on_meta = given.map(lambda key, tensor: tensor if key in TABLES else tensor.to("meta"))
    real, shapes = everything(given()), everything(on_meta())
    assert [(t.shape, t.dtype, t.is_contiguous()) for t in shapes] == [
        (t.shape, t.dtype, t.is_contiguous()) for t in real
    ]
    assert all(tensor.is_meta for tensor in shapes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fake_tensors_of_a_gpu(variant: str) -> None:
    """As memory estimators use them, without a GPU."""
    given = call(variant, [(9,), (9, 5)])
    with FakeTensorMode():
        fake = given.map(lambda key, t: torch.empty(t.shape, dtype=t.dtype, device="cuda"))
        results = everything(fake())
    assert all(tensor.is_cuda for tensor in results)
    wanted = [(tensor.shape, tensor.dtype) for tensor in everything(given())]
    assert [(tensor.shape, tensor.dtype) for tensor in results] == wanted


def test_backends() -> None:
    """Each operator with a file in csrc/cpu is served by it, and each by Triton on a GPU."""
    table = tnt_kernels.backends()
    assert list(table.ops) == list(OPERATORS)
    gpu = "Triton" if triton.missing() is None else "reference"
    for name, served in table.ops.items():
        written = name.rstrip("_") in EXTENSION_KERNELS
        assert served["cpu"] == ("C++" if written else "reference"), name
        assert list(served) == ["cpu", "cuda"] and served["cuda"] == gpu
    versions = table.versions
    assert versions["torch"] == torch.__version__
    assert versions["extension"].startswith("built for torch ")
    assert all(versions[key] not in ("", "none") for key in ("tnt_kernels", "compiler", "BLAS"))
