"""mode_products: a tensor multiplied by a symmetric matrix in every mode."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_operators
from cases import (
    DTYPES,
    EMPTY_SHAPES,
    KINDS,
    LAYOUT_DTYPES,
    LAYOUT_SHAPE,
    LAYOUTS,
    SHAPES,
    STATE_DTYPES,
    Arguments,
    Errors,
    Mistake,
    close,
    dense,
    first_only,
    identical,
    instead,
    mistakes,
    mode_statistics,
    normal,
    replaced,
    scalar,
    state_dtype,
    unchanged,
)
from oracle import dense_kron, mode_product, vec
from torch import Tensor

import tnt_kernels
from tnt_kernels import reference

pytestmark = pytest.mark.usefixtures("one_thread")

IMPLEMENTATIONS = {"C++": tnt_kernels.mode_products, "Triton": triton_operators.mode_products_}
ModeProducts = Callable[[list[Tensor], list[list[Tensor]]], list[Tensor]]


@pytest.fixture(params=list(IMPLEMENTATIONS))
def mode_products(request: pytest.FixtureRequest) -> ModeProducts:
    return IMPLEMENTATIONS[request.param]


def expected(tensor: Tensor, factors: list[Tensor]) -> Tensor:
    """The definition in float64, one mode after another."""
    product = tensor.double()
    for i, factor in enumerate(factors):
        product = mode_product(product, dense(factor), i)
    return product


def assert_good(product: Tensor, tensor: Tensor, factors: list[Tensor]) -> None:
    assert product.dtype == state_dtype(tensor.dtype) and product.is_contiguous()
    close(product, expected(tensor, factors))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_definition(
    mode_products: ModeProducts, shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    tensor, factors = normal(shape, dtype), mode_statistics(shape, kind, state_dtype(dtype))
    with unchanged(tensor, factors):
        (product,) = mode_products([tensor], [factors])
    assert_good(product, tensor, factors)


@pytest.mark.parametrize("shape", [s for s in SHAPES if math.prod(s) <= 200], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_kronecker_product(
    mode_products: ModeProducts, shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    """It is the matrix A_1 kron ... kron A_k times vec(G): Ren & Goldfarb 2021, Proposition 1."""
    tensor, factors = normal(shape, dtype), mode_statistics(shape, kind, dtype)
    (product,) = mode_products([tensor], [factors])
    matrix = dense_kron([dense(factor) for factor in factors])
    close(vec(product), matrix @ vec(tensor.double()))


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_is_the_reference(mode_products: ModeProducts, dtype: torch.dtype) -> None:
    rows = [(normal(s, dtype), mode_statistics(s, kind, dtype)) for s in SHAPES for kind in KINDS]
    wanted = reference.mode_products(
        [tensor.double() for tensor, _ in rows],
        [[factor.double() for factor in factors] for _, factors in rows],
    )
    products = mode_products([tensor for tensor, _ in rows], [factors for _, factors in rows])
    assert len(products) == len(wanted)
    for product, value in zip(products, wanted, strict=True):
        close(product, value)


@pytest.mark.parametrize(("layout", "dtype"), LAYOUT_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(mode_products: ModeProducts, layout: str, dtype: torch.dtype, kind: str) -> None:
    tensor = LAYOUTS[layout](normal(LAYOUT_SHAPE, dtype))
    factors = mode_statistics(LAYOUT_SHAPE, kind, state_dtype(dtype))
    with unchanged(tensor):
        (product,) = mode_products([tensor], [factors])
    assert_good(product, tensor, factors)


@pytest.mark.parametrize("layout", ["sliced", "transposed", "negated"])
def test_layouts_of_factors(mode_products: ModeProducts, layout: str) -> None:
    tensor, factors = normal((9, 63, 5)), mode_statistics((9, 63, 5), "mixed")
    (product,) = mode_products([tensor], [[LAYOUTS[layout](factor) for factor in factors]])
    assert_good(product, tensor, factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identity_copies(mode_products: ModeProducts, dtype: torch.dtype) -> None:
    """Also a product that changes nothing is a new tensor, to the bit the old one."""
    for kind in ("full", "diagonal"):
        tensor = normal((9, 5), dtype)
        factors = [torch.eye(d, dtype=state_dtype(dtype)) for d in (9, 5)]
        if kind == "diagonal":
            factors = [factor.diagonal().clone() for factor in factors]
        (product,) = mode_products([tensor], [factors])
        identical(product, tensor.to(state_dtype(dtype)))
        with unchanged(tensor, factors):
            product.fill_(7.0)


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_elements(
    mode_products: ModeProducts, shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    factors = mode_statistics(shape, kind, state_dtype(dtype))
    neighbour, its_factors = normal((9, 5)), mode_statistics((9, 5), kind)
    empty, product = mode_products([normal(shape, dtype), neighbour], [factors, its_factors])
    assert empty.shape == shape and empty.dtype == state_dtype(dtype)
    assert_good(product, neighbour, its_factors)


def test_empty_lists(mode_products: ModeProducts) -> None:
    assert mode_products([], []) == []


def test_list_is_its_entries_one_by_one(mode_products: ModeProducts) -> None:
    dtypes = [DTYPES[n % len(DTYPES)] for n in range(len(SHAPES))]
    tensors = [normal(shape, dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]
    factors = [mode_statistics(t.shape, "mixed", state_dtype(t.dtype)) for t in tensors]
    together = mode_products(tensors, factors)
    for product, tensor, modes in zip(together, tensors, factors, strict=True):
        (alone,) = mode_products([tensor], [modes])
        identical(product, alone)


def test_a_tensor_that_is_not_finite_does_not_disturb_its_neighbours(
    mode_products: ModeProducts,
) -> None:
    tensors = [normal((9, 5)), normal((9, 5)).fill_(float("nan")), normal((9, 5))]
    factors = [mode_statistics((9, 5), "mixed") for _ in tensors]
    products = mode_products(tensors, factors)
    assert products[1].isnan().all()
    for t in (0, 2):
        assert_good(products[t], tensors[t], factors[t])


def test_outside_autograd(mode_products: ModeProducts) -> None:
    tensor = normal((9, 5)).requires_grad_()
    (product,) = mode_products([tensor], [mode_statistics((9, 5), "mixed")])
    assert not product.requires_grad


def arguments() -> Arguments:
    return {
        "tensors": [normal((9, 5)), normal((3,), torch.float64)],
        "factors": [
            mode_statistics((9, 5), "mixed"),
            mode_statistics((3,), "full", torch.float64),
        ],
    }


BAD: list[Mistake] = [
    ("no list", instead(tensors=normal((9, 5))), TypeError, "^tensors .*list"),
    ("number", replaced("tensors", 1, 2.0), TypeError, r"^tensors\[1\] .*float"),
    ("integers", replaced("tensors", 0, torch.ones(9, 5).int()), ValueError, "int32"),
    ("sparse", replaced("tensors", 0, normal((9, 5)).to_sparse()), ValueError, "sparse_coo"),
    ("scalar", replaced("tensors", 1, scalar(1.0)), ValueError, r"^tensors\[1\] .*one mode"),
    ("too few", first_only("factors"), ValueError, r"^factors .*\(2\), got 1"),
    ("too many", first_only("tensors"), ValueError, r"^factors .*\(1\), got 2"),
    ("row is a tensor", replaced("factors", 1, torch.eye(3)), ValueError, r"^factors\[1\] .*one t"),
    ("no modes", replaced("factors", 1, []), ValueError, r"^factors\[1\] .* 1 modes .*got 0"),
    ("factor is None", replaced("factors", 0, None, 1), TypeError, r"^factors\[0\]\[1\] .*None"),
    (
        "wrong size",
        replaced("factors", 0, torch.eye(4), 1),
        ValueError,
        r"^factors\[0\]\[1\] must be \(5, 5\) or \(5,\), got \(4, 4\)",
    ),
    (
        "float64 for float32",
        replaced("factors", 0, torch.ones(9).double(), 0),
        ValueError,
        r"^factors\[0\]\[0\] must be torch.float32 .*got torch.float64",
    ),
    (
        "half",
        lambda a: {
            "tensors": [normal((3,), torch.float16)],
            "factors": [[torch.eye(3).half()]],
        },
        ValueError,
        r"^factors\[0\]\[0\] must be torch.float32 for a torch.float16 tensor, got torch.float16",
    ),
    (
        "elsewhere",
        replaced("factors", 0, torch.eye(5, device="meta"), 1),
        ValueError,
        "^factors .*meta",
    ),
]


@mistakes(BAD)
def test_mistakes(make: Callable[..., Any], error: Errors, message: str) -> None:
    bad = make(arguments())
    with unchanged(bad), pytest.raises(error, match=message):
        tnt_kernels.mode_products(**bad)
