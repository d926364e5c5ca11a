"""Inputs of the operator tests (shapes, layouts, dtypes, kinds of modes) and comparisons."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from tolerances import FLOAT32_OPERATOR, FLOAT64_OPERATOR
from torch import Tensor

# The Triton kernels run here: where there is no GPU, as PTX on the CPU (gpu/conftest.py).
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Odd sizes around the widths of vector registers and tiles, and modes of size 1.
SHAPES = [(1,), (9,), (65,), (1, 9), (63, 65), (65, 1, 9), (9, 65, 3), (2, 3, 5, 4)]
# Tensors with a mode of size 0 have no elements, but their other modes have statistics.
EMPTY_SHAPES = [(0,), (0, 9), (9, 0), (3, 0, 2)]
KINDS = ("full", "diagonal", "mixed")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.float64)


def normal(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, drawn in float64: every dtype gets the same ones, rounded."""
    return torch.randn(tuple(shape), dtype=torch.float64).to(dtype)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, factors and momenta of a tensor of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistic(d: int, *, diagonal: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Positive definite, symmetric to the bit, and well conditioned (below 10)."""
    if d > MOST_DRAWN:  # near the identity, which is cheaper
        if diagonal:
            return (torch.rand(d, dtype=torch.float64) + 0.5).to(dtype)
        noise = normal((d, d), torch.float64).mul_(0.2 / math.sqrt(d))
        gram = noise + torch.eye(d, dtype=torch.float64)
    else:
        x = normal((d, 2 * d), torch.float64)
        gram = x @ x.mT / (2 * max(d, 1)) + 0.5 * torch.eye(d, dtype=torch.float64)
    full = (gram.tril() + gram.tril(-1).mT).to(dtype)
    return full.diagonal().clone() if diagonal else full


# Statistics of longer modes are cheaper; modes longer than MOST_FULL are always diagonal.
MOST_DRAWN, MOST_FULL = 300, 4500


def mode_statistics(
    shape: Sequence[int],
    kind: str | Sequence[bool],
    dtype: torch.dtype = torch.float32,
    first: int = 0,
) -> list[Tensor]:
    """One random statistic for each mode; a mixed kind alternates diagonal and full.

    Or ``kind`` says of each mode whether it is diagonal.
    """
    diagonal = [
        d > MOST_FULL or kind == "diagonal" or (kind == "mixed" and i % 2 == 0)
        for i, d in enumerate(shape, first)
    ]
    chosen = diagonal if isinstance(kind, str) else kind
    return [statistic(d, diagonal=c, dtype=dtype) for d, c in zip(shape, chosen, strict=True)]


def with_spectrum(values: Tensor, *, diagonal: bool = False) -> Tensor:
    """A statistic with these eigenvalues, symmetric to the bit."""
    if diagonal:
        return values
    basis = torch.linalg.qr(normal((len(values), len(values)), torch.float64))[0]
    matrix = (basis * values) @ basis.mT
    return matrix.tril() + matrix.tril(-1).mT


def poisoned_like(modes: Sequence[Tensor]) -> list[Tensor]:
    """NaN in the shapes of ``modes``."""
    return [torch.full_like(stat, float("nan")) for stat in modes]


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A number as a 0-dim tensor."""
    return torch.tensor(value, dtype=dtype)


# Layouts: the same values with other strides.


def _transposed(tensor: Tensor) -> Tensor:
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _sliced(tensor: Tensor) -> Tensor:
    # Every second entry of a larger tensor. NaN fills the gaps, so a wrong read shows.
    shape = [*tensor.shape[:-1], 2 * tensor.shape[-1] + 1]
    view = torch.full(shape, float("nan"), dtype=tensor.dtype)[..., 1::2]
    return view.copy_(tensor)


def _expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last)


def _negated(tensor: Tensor) -> Tensor:
    # A lazy negative view: the numbers in memory have the other sign.
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": _transposed,
    "sliced": _sliced,
    "channels_last": _channels_last,
    "expanded": _expanded,
    "negated": _negated,
}
# Layouts of arguments updated in place: an expanded tensor has several entries at one address.
WRITABLE_LAYOUTS = ("contiguous", "transposed", "sliced", "channels_last")
# Four modes of different odd sizes, so that all layouts differ.
LAYOUT_SHAPE = (5, 9, 3, 7)


def buffer_of(view: Tensor) -> Tensor:
    """The whole storage of ``view`` as one tensor, gaps included."""
    return view.new_empty(0).set_(view.untyped_storage())


# Comparing.


def close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Entrywise, relative to the largest expected entry; by default what the dtype can hold."""
    assert actual.shape == expected.shape
    if tolerance is None:
        tolerance = FLOAT64_OPERATOR if actual.dtype == torch.float64 else FLOAT32_OPERATOR
    if expected.numel() == 0:
        return
    expected = expected.double()
    scale = float(expected.abs().max())
    error = float((actual.double() - expected).abs().max())
    assert error <= tolerance * scale, f"{error / scale:.2e} relative, allowed {tolerance:.0e}"


def identical(actual: Tensor, expected: Tensor) -> None:
    """The same shape, dtype and bits (all NaN are equal)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def bits(tensor: Tensor) -> Tensor:
    """The tensor viewed as integers, so that NaN and -0 compare by their bits."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])


def flat(argument: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, list | tuple):
        return list(itertools.chain.from_iterable(flat(entry) for entry in argument))
    return []


@contextmanager
def unchanged(*arguments: object) -> Iterator[None]:
    """Assert that no tensor in ``arguments`` is written: numbers and versions stay."""
    tensors = flat(arguments)
    before = [(tensor.detach().clone(), _version(tensor)) for tensor in tensors]
    yield
    for tensor, (values, version) in zip(tensors, before, strict=True):
        if not tensor.is_meta and tensor.layout == torch.strided:
            identical(tensor.detach(), values)
        assert _version(tensor) == version


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def noticed_by_autograd(written: Tensor, write: Callable[[], object]) -> bool:
    """Whether autograd refuses a backward that needs the values from before ``write``."""
    leaf = torch.ones_like(written, requires_grad=True)
    product = (leaf * written.detach()).sum()
    write()
    try:
        product.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return True
    return False


# Statistics that have no inverse.


def _entry(value: float, row: int, column: int) -> Callable[[Tensor], Tensor]:
    """Put ``value`` at (row, column) and (column, row); in a diagonal statistic at row."""

    def spoil(stat: Tensor) -> Tensor:
        spoiled = stat.clone()
        for index in ((row, column), (column, row)):
            spoiled[index[: stat.dim()]] = value
        return spoiled

    return spoil


def _lone_infinity(stat: Tensor) -> Tensor:
    """Infinity in a row of zeros: no product turns it into NaN."""
    spoiled = stat.clone()
    spoiled[-1] = spoiled[:, -1] = 0
    spoiled[-1, -1] = float("inf")
    return spoiled


SPOILS = {
    "nan": _entry(float("nan"), 1, 1),
    "inf": _entry(float("inf"), 1, 1),
    "lone inf": _lone_infinity,
    "-inf": _entry(float("-inf"), 1, 1),
    "negative": _entry(-100.0, 1, 1),
    "nan off the diagonal": _entry(float("nan"), 2, 1),
    "inf off the diagonal": _entry(float("inf"), 2, 1),
    "indefinite": _entry(100.0, 2, 1),
}


# What ``out`` holds before a call that fails, and must hold after it.


def _symmetric(stat: Tensor) -> Tensor:
    held = torch.rand_like(stat)
    return held + held.mT if held.dim() == 2 else held


def _one_bit_off(stat: Tensor) -> Tensor:
    """Symmetric, but for the sign of one zero."""
    held = _symmetric(stat)
    held.reshape(-1)[1] = 0.0
    held.reshape(-1)[held.shape[0] if held.dim() == 2 else 2] = -0.0
    return held


HELD = [_symmetric, torch.rand_like, _one_bit_off, lambda stat: torch.full_like(stat, math.nan)]
