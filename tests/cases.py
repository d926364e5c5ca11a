"""What the operator tests run on: shapes, layouts, kinds of modes, inputs, and how to compare."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tolerances import FLOAT32_OPERATOR, FLOAT64_OPERATOR
from torch import Tensor

# Where the Triton kernels' tests run (see conftest.py).
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Odd sizes, on both sides of what vector registers and tiles hold, and modes of size 1.
SHAPES = [(1,), (9,), (65,), (1, 9), (63, 65), (65, 1, 9), (9, 65, 3), (2, 3, 5, 4)]
# A mode of size 0, alone and beside others: no numbers, but modes that have statistics.
EMPTY_SHAPES = [(0,), (0, 9), (9, 0), (3, 0, 2)]
KINDS = ("full", "diagonal", "mixed")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.float64)


def normal(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, drawn in float64 so that dtypes see the same ones, rounded."""
    return torch.randn(tuple(shape), dtype=torch.float64).to(dtype)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, factors and momenta of a tensor of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistic(d: int, *, diagonal: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Positive definite and symmetric to the bit; of condition below 10, so that inverses of it
    are as exact as the arithmetic."""
    x = normal((d, 2 * d), torch.float64)
    gram = x @ x.mT / (2 * max(d, 1)) + 0.5 * torch.eye(d, dtype=torch.float64)
    full = (gram.tril() + gram.tril(-1).mT).to(dtype)
    return full.diagonal().clone() if diagonal else full


def mode_statistics(
    shape: Sequence[int], kind: str, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """One random statistic for each mode; a mixed kind alternates diagonal and full."""
    return [
        statistic(d, diagonal=kind == "diagonal" or (kind == "mixed" and i % 2 == 0), dtype=dtype)
        for i, d in enumerate(shape)
    ]


def poisoned_like(modes: Sequence[Tensor]) -> list[Tensor]:
    """NaN in the shapes of ``modes``."""
    return [torch.full_like(stat, float("nan")) for stat in modes]


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A number as a 0-dim tensor."""
    return torch.tensor(value, dtype=dtype)


def dense(stat: Tensor) -> Tensor:
    """A statistic or factor as a float64 matrix, a diagonal one with its zeros."""
    return torch.diag(stat.double()) if stat.dim() == 1 else stat.double()


def like_stat(matrix: Tensor, stat: Tensor) -> Tensor:
    """The part of a dense matrix that a statistic of the kind of ``stat`` keeps."""
    return matrix.diagonal() if stat.dim() == 1 else matrix


def inverse_power(matrix: Tensor, power: float) -> Tensor:
    """A power of a symmetric positive definite matrix, by its eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**power) @ vectors.mT


# Layouts: the same values under other strides.


def _transposed(tensor: Tensor) -> Tensor:
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _sliced(tensor: Tensor) -> Tensor:
    # Every second entry of a larger tensor with NaN between: reading one of them is seen.
    shape = [*tensor.shape[:-1], 2 * tensor.shape[-1] + 1]
    view = torch.full(shape, float("nan"), dtype=tensor.dtype)[..., 1::2]
    return view.copy_(tensor)


def _expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last)


def _negated(tensor: Tensor) -> Tensor:
    # A view that stands for minus what lies in memory.
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": _transposed,
    "sliced": _sliced,
    "channels_last": _channels_last,
    "expanded": _expanded,
    "negated": _negated,
}
# A view of complex numbers is float32 or float64.
LAYOUT_DTYPES = [
    pytest.param(layout, dtype, id=f"{layout}-{dtype}")
    for layout in LAYOUTS
    for dtype in DTYPES
    if layout != "negated" or dtype in STATE_DTYPES
]
# What an argument updated in place may be: an expanded tensor has several entries in one place.
WRITABLE_LAYOUTS = ("contiguous", "transposed", "sliced", "channels_last")
# Four modes of different odd sizes: every layout above is another one.
LAYOUT_SHAPE = (5, 9, 3, 7)


def buffer_of(view: Tensor) -> Tensor:
    """All numbers of the storage that ``view`` lies in, also those beside it."""
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
    """The same shape, dtype and bits (any NaN is any other)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


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
    """No tensor in ``arguments`` is written to: neither its numbers nor its version change."""
    tensors = flat(arguments)
    before = [(tensor.detach().clone(), tensor._version) for tensor in tensors]
    yield
    for tensor, (values, version) in zip(tensors, before, strict=True):
        if not tensor.is_meta and tensor.layout == torch.strided:
            identical(tensor.detach(), values)
        assert tensor._version == version


def noticed_by_autograd(written: Tensor, write: Callable[[], object]) -> bool:
    """Whether a backward that needs the old values of ``written`` refuses after ``write``."""
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
    """Puts ``value`` at (row, column) and (column, row), of a diagonal at row."""

    def spoil(stat: Tensor) -> Tensor:
        spoiled = stat.clone()
        for index in ((row, column), (column, row)):
            spoiled[index[: stat.dim()]] = value
        return spoiled

    return spoil


def _lone_infinity(stat: Tensor) -> Tensor:
    """Where the rest of a row is zero, nothing multiplies infinity into NaN."""
    spoiled = stat.clone()
    spoiled[-1] = spoiled[:, -1] = 0
    spoiled[-1, -1] = float("inf")
    return spoiled


_SPOILS = {
    "nan": _entry(float("nan"), 1, 1),
    "inf": _entry(float("inf"), 1, 1),
    "lone inf": _lone_infinity,
    "-inf": _entry(float("-inf"), 1, 1),
    "negative": _entry(-100.0, 1, 1),
    "nan beside the diagonal": _entry(float("nan"), 2, 1),
    "inf beside the diagonal": _entry(float("inf"), 2, 1),
    "indefinite": _entry(100.0, 2, 1),
}

bad_statistics = pytest.mark.parametrize(
    ("kind", "mode", "spoil"),
    [
        pytest.param(kind, mode, spoil, id=f"{kind}-{mode}-{name}")
        for kind in ("full", "diagonal")
        for mode in range(3)
        for name, spoil in _SPOILS.items()
        if kind == "full" or name in ("nan", "inf", "-inf", "negative")
    ],
)


# Mistakes.

Arguments = dict[str, Any]
# What is wrong, how to make it of good arguments, the error, and a pattern that names the argument
# and what came.
Errors = type[Exception] | tuple[type[Exception], ...]
Mistake = tuple[str, Callable[[Arguments], Arguments], Errors, str]


def replaced(argument: str, t: int, value: object, i: int | None = None) -> Callable[..., Any]:
    """Makes arguments in which argument[t], or argument[t][i], is ``value``."""

    def replace(good: Arguments) -> Arguments:
        entries = [list(row) if isinstance(row, list) else row for row in good[argument]]
        if i is None:
            entries[t] = value
        else:
            entries[t][i] = value
        return {**good, argument: entries}

    return replace


def instead(**wrong: object) -> Callable[..., Any]:
    """Makes arguments in which those named are as given."""
    return lambda good: {**good, **wrong}


def first_only(argument: str) -> Callable[..., Any]:
    """Makes arguments in which a list has lost all but its first entry."""
    return lambda good: {**good, argument: good[argument][:1]}


def bad_numbers(name: str, *, high: float = float("inf")) -> list[Mistake]:
    """What a number in [0, high], or a 0-dim tensor in its place, must not be."""
    above = [] if high == float("inf") else [high + 0.1]
    numbers: list[object] = [-0.1, float("nan"), float("inf"), float("-inf"), *above]
    return [
        *(
            (f"{name} {v}", instead(**{name: v}), ValueError, f"^{name} must be .*got {v}$")
            for v in numbers
        ),
        (
            f"{name} (1,)",
            instead(**{name: torch.ones(1)}),
            ValueError,
            rf"^{name} must be .*got \(1,\)",
        ),
        (
            f"{name} elsewhere",
            instead(**{name: torch.ones((), device="meta")}),
            ValueError,
            f"^{name} must be .*got meta",
        ),
        (f"{name} None", instead(**{name: None}), TypeError, f"^{name} must be .*None"),
        (f"{name} text", instead(**{name: "0.5"}), TypeError, f"^{name} must be .*(str|'0.5')"),
    ]


def mistakes(cases: Sequence[Mistake]) -> pytest.MarkDecorator:
    """Parametrizes a test over ``make``, ``error`` and ``message``."""
    return pytest.mark.parametrize(
        ("make", "error", "message"), [pytest.param(*case[1:], id=case[0]) for case in cases]
    )


def inverse_arguments() -> Arguments:
    """Good statistics, of (9, 5) in float32 and (3,) in float64, and what to write to."""
    stats = [mode_statistics((9, 5), "mixed"), mode_statistics((3,), "full", torch.float64)]
    return {"stats": stats, "out": [[torch.rand_like(stat) for stat in row] for row in stats]}


INVERSE_MISTAKES: list[Mistake] = [
    ("row is a tensor", replaced("stats", 1, torch.eye(3)), ValueError, r"^stats\[1\] .*list.*got"),
    ("no modes", replaced("stats", 1, []), ValueError, r"^stats\[1\] .*got \[\]"),
    ("number", replaced("stats", 0, 1.0, 1), TypeError, r"^stats\[0\]\[1\] .*float"),
    ("scalar", replaced("stats", 0, scalar(1.0), 1), ValueError, r"^stats\[0\]\[1\] .*one mode"),
    ("not square", replaced("stats", 0, torch.ones(5, 4), 1), ValueError, r"got \(5, 4\)"),
    ("cube", replaced("stats", 0, torch.ones(5, 5, 5), 1), ValueError, r"got \(5, 5, 5\)"),
    (
        "half",
        replaced("stats", 1, torch.eye(3).half(), 0),
        ValueError,
        "float32 or float64.*float16",
    ),
    ("integers", replaced("stats", 1, torch.eye(3).int(), 0), ValueError, r"\[1\]\[0\] .*int32"),
    (
        "two dtypes",
        replaced("stats", 0, torch.eye(5).double(), 1),
        ValueError,
        r"^stats\[0\]\[1\] .*one dtype.*float64",
    ),
    ("sparse", replaced("stats", 1, torch.eye(3).to_sparse(), 0), ValueError, "sparse_coo"),
    ("elsewhere", replaced("stats", 0, torch.eye(5, device="meta"), 1), ValueError, "cpu.*meta"),
    ("too little out", first_only("out"), ValueError, r"^out .*stats \(2\), got 1"),
    ("too many out", first_only("stats"), ValueError, r"^out .*stats \(1\), got 2"),
    ("out lacks a mode", replaced("out", 1, []), ValueError, r"^out\[1\] .*\(1\), got 0"),
    ("out is a number", replaced("out", 0, 1.0, 1), TypeError, r"^out\[0\]\[1\] .*float"),
    ("out size", replaced("out", 0, torch.eye(4), 1), ValueError, r"^out\[0\]\[1\] .*\(4, 4\)"),
    ("out kind", replaced("out", 0, torch.ones(5), 1), ValueError, r"^out\[0\]\[1\] .*\(5,\)"),
    ("out dtype", replaced("out", 1, torch.eye(3), 0), ValueError, r"^out\[1\]\[0\] .*float32"),
    (
        "out not contiguous",
        replaced("out", 0, torch.rand(5, 10)[:, ::2], 1),
        ValueError,
        r"^out\[0\]\[1\] must be contiguous, got \(10, 2\)",
    ),
    ("out elsewhere", replaced("out", 0, torch.ones(5, 5, device="meta"), 1), ValueError, "meta"),
]
