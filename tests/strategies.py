"""Random calls of the operators for hypothesis: lists of tensors, and the layout of each.

Hypothesis draws a description only: shapes, dtypes, strides, numbers and a seed. A failure prints
it and shrinks it. A generator with that seed then fills the tensors, which is cheap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from cases import DTYPES, STATE_DTYPES, state_dtype
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

# Limits for one call: elements of all tensors, and of all full statistics. A mode of 200 fits.
ELEMENTS, AREA = 60_000, 90_000
# Less for the coupled Newton iteration, which multiplies matrices about sixty times.
NEWTON_AREA = 45_000

# Around the sizes of vector registers, tiles and unrolled loops; 0 appears in one list of fifteen.
_EDGES = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 0]
_SIZES = st.one_of(st.integers(1, 9), st.sampled_from(_EDGES), st.integers(1, 200))
_SEEDS = st.integers(0, 2**31 - 1)
# Two threads share the work of a call, and must not race. Rarely: every small operation of the
# reference then waits for both.
_THREADS = st.sampled_from([1, 1, 1, 2])
_FLOATS = st.sampled_from(DTYPES)
_STATES = st.sampled_from(STATE_DTYPES)
_FLAGS = st.booleans()
_EIGHTHS = st.integers(0, 7)


# The layout of a tensor in memory.


class Layout(NamedTuple):
    """Strides and offset of a tensor."""

    order: tuple[int, ...]  # its dimensions, from the slowest to the fastest
    steps: tuple[int, ...]  # one entry every so many places, for each dimension
    offset: int = 0  # entries before the first one: alignment
    expanded: int | None = None  # a dimension of stride 0
    negated: bool = False  # a lazy negative view

    def __repr__(self) -> str:
        """Only the fields that differ from a contiguous tensor: a failure prints many layouts."""
        plain = contiguous(len(self.order))._asdict()
        said = {name: value for name, value in self._asdict().items() if value != plain[name]}
        return f"Layout({', '.join(f'{name}={value}' for name, value in said.items())})"


def contiguous(dims: int, offset: int = 0) -> Layout:
    return Layout(tuple(range(dims)), (1,) * dims, offset)


@cache
def _permutations(dims: int) -> SearchStrategy[list[int]]:
    return st.permutations(range(dims))


@cache
def _steps(dims: int) -> SearchStrategy[tuple[int, ...]]:
    """All 1, or one of them 2 or 3."""
    one = [[1 + s * (i == j) for j in range(dims)] for i in range(dims) for s in (1, 2)]
    return st.sampled_from([(1,) * dims, *map(tuple, one)])


_OFFSETS = st.integers(0, 3)


@st.composite
def written_layouts(draw: DrawFn, dims: int) -> Layout:
    """For parameters and momenta: every entry has an address of its own."""
    if draw(_FLAGS):
        return Layout(tuple(draw(_permutations(dims))), draw(_steps(dims)), draw(_OFFSETS))
    return contiguous(dims, draw(_OFFSETS))


@st.composite
def read_layouts(draw: DrawFn, dims: int, dtype: torch.dtype, expandable: bool = True) -> Layout:
    """For arguments that are only read: any layout. Negated views are not of 16 bits."""
    layout = draw(written_layouts(dims))
    if not draw(_FLAGS):
        return layout
    expanded = draw(st.integers(0, dims - 1)) if expandable and draw(_FLAGS) else None
    negated = dtype in STATE_DTYPES and draw(_FLAGS)
    return Layout(layout.order, layout.steps, layout.offset, expanded, negated)


class Memory:
    """All tensors of a call, each in a buffer of its own with NaN in the gaps."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._views: list[Tensor] = []

    def place(self, values: Tensor, layout: Layout) -> Tensor:
        """A view with the entries of ``values`` in a layout (if expanded, the first ones)."""
        if layout.negated:
            # The imaginary part of a conjugate is minus the number in memory.
            nan = torch.full_like(values, math.nan)
            values = torch.complex(nan, -values)
        given = values
        if layout.expanded is not None:
            given = values[(slice(None),) * layout.expanded + (slice(0, 1),)]
        extent = [given.shape[i] * layout.steps[i] for i in layout.order]
        end = layout.offset + math.prod(extent)
        nothing = complex(math.nan, math.nan) if values.is_complex() else math.nan
        buffer = values.new_full((end + 2,), nothing)
        view = buffer[layout.offset : end].view(extent)
        view = view[tuple(slice(None, None, layout.steps[i]) for i in layout.order)]
        view = view.permute([layout.order.index(i) for i in range(len(layout.order))])
        view.copy_(given)
        if layout.negated:
            buffer, view = torch.view_as_real(buffer), view.conj().imag
        view = view.expand(values.shape)
        self._buffers.append(buffer)
        self._views.append(view)
        return view

    def contents(self) -> list[Tensor]:
        """A copy of the bits of every buffer."""
        return [bits(buffer).clone() for buffer in self._buffers]

    def restore(self, contents: Sequence[Tensor]) -> None:
        for buffer, old in zip(self._buffers, contents, strict=True):
            bits(buffer).copy_(old)

    def versions(self, but: Sequence[Tensor]) -> list[int]:
        """Autograd's version counters of all tensors except ``but``."""
        left = {id(tensor) for tensor in but}
        return [view._version for view in self._views if id(view) not in left]


def bits(tensor: Tensor) -> Tensor:
    """The tensor viewed as integers, so that NaN and -0 compare by their bits."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])


# The entries of a tensor.


@cache
def _orthogonal(d: int) -> Tensor:
    generator = torch.Generator().manual_seed(d)
    return torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]


class Numbers:
    """Random entries from a seeded generator, in float64 or rounded to a dtype."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(tuple(shape), generator=self._generator, dtype=torch.float64).to(dtype)

    def uniform(self, d: int, low: float, high: float) -> Tensor:
        values = torch.rand(d, generator=self._generator, dtype=torch.float64)
        return low + (high - low) * values

    def below(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self._generator))

    def factor(self, d: int, *, diagonal: bool) -> Tensor:
        """Symmetric, with eigenvalues of size 0.5 to 1.5 of either sign, so that products keep
        their size and an error of one mode stays visible."""
        signs = 1 - 2 * torch.randint(2, (d,), generator=self._generator)
        return with_spectrum(self.uniform(d, 0.5, 1.5) * signs, diagonal=diagonal)

    def spectrum(self, d: int, condition: float) -> Tensor:
        """The eigenvalues, with mean 1, of a positive definite matrix of at most ``condition``."""
        values = condition ** -self.uniform(d, 0.0, 1.0)
        return values / values.mean() if d else values


def with_spectrum(values: Tensor, *, diagonal: bool) -> Tensor:
    """A statistic or factor with these eigenvalues, symmetric to the bit."""
    if diagonal:
        return values
    basis = _orthogonal(len(values))
    matrix = (basis * values) @ basis.mT
    return matrix.tril() + matrix.tril(-1).mT


# The modes of one tensor.


@dataclass(frozen=True)
class Modes:
    """A tensor's shape and dtype, and the layout of each mode's statistic or factor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    diagonal: tuple[bool, ...]
    layouts: tuple[Layout, ...]

    @property
    def state(self) -> torch.dtype:
        return state_dtype(self.dtype)

    def factors(self, numbers: Numbers, memory: Memory) -> list[Tensor]:
        return [
            memory.place(numbers.factor(d, diagonal=diagonal).to(self.state), layout)
            for d, diagonal, layout in zip(self.shape, self.diagonal, self.layouts, strict=True)
        ]


@st.composite
def _mode(draw: DrawFn, dtype: torch.dtype, *, written: bool) -> tuple[int, bool, Layout]:
    size, diagonal = draw(_SIZES), draw(_FLAGS)
    dims = 1 if diagonal else 2
    if written:
        return size, diagonal, contiguous(dims, draw(_OFFSETS))
    # An expanded matrix would not be symmetric.
    return size, diagonal, draw(read_layouts(dims, dtype, expandable=diagonal))


@cache
def _mode_lists(dtype: torch.dtype, *, written: bool) -> SearchStrategy[list[Any]]:
    return st.lists(_mode(dtype, written=written), min_size=1, max_size=5)


def _modes(draw: DrawFn, dtypes: SearchStrategy[torch.dtype], *, written: bool) -> Modes:
    dtype = draw(dtypes)
    shape, diagonal, layouts = zip(
        *draw(_mode_lists(state_dtype(dtype), written=written)), strict=True
    )
    return Modes(shape, dtype, diagonal, layouts)


class _HasModes(Protocol):
    @property
    def modes(self) -> Modes: ...


Entry = TypeVar("Entry", bound=_HasModes)


def _lists(entries: SearchStrategy[Entry], area: int = AREA) -> SearchStrategy[list[Entry]]:
    """Up to four entries, their sizes reduced to stay within ELEMENTS and ``area`` together."""

    def cut(given: list[Entry]) -> list[Entry]:
        elements_left, area_left = ELEMENTS, area
        fitted = []
        for entry in given:
            shape: list[int] = []
            for d in entry.modes.shape:
                room = min(elements_left // max(math.prod(shape), 1), math.isqrt(area_left))
                shape.append(min(d, max(room, 1)))
                area_left = max(area_left - shape[-1] ** 2, 0)
            elements_left = max(elements_left - math.prod(shape), 0)
            fitted.append(replace(entry, modes=replace(entry.modes, shape=tuple(shape))))
        return fitted

    return st.lists(entries, max_size=4).map(cut)


# Numbers, or 0-dim tensors.

_FORMS = st.sampled_from([None, torch.float64, torch.float32])


def as_given(value: float, form: torch.dtype | None) -> float | Tensor:
    """A number, or a tensor that holds it (in float32: the nearest)."""
    return value if form is None else torch.tensor(value, dtype=form)


def _given(values: SearchStrategy[float]) -> SearchStrategy[float | Tensor]:
    return st.builds(as_given, values, _FORMS)


def _some(*usual: float, low: float, high: float) -> SearchStrategy[float]:
    return st.one_of(st.sampled_from(usual), st.floats(low, high))


# The calls.


@dataclass(frozen=True)
class Observed:
    """A tensor of gram_ema_ or mode_products."""

    modes: Modes
    layout: Layout


@dataclass(frozen=True)
class GramEmaCall:
    entries: list[Observed]
    decay: float | Tensor
    magnitude: float  # of the tensors' entries
    lopsided: bool  # the statistics hold NaN above the diagonal
    not_finite: int | None  # the tensor that holds one NaN
    threads: int
    seed: int


@dataclass(frozen=True)
class ModeProductsCall:
    entries: list[Observed]
    not_finite: int | None
    threads: int
    seed: int


@st.composite
def _observed(draw: DrawFn, *, written: bool) -> Observed:
    modes = _modes(draw, _FLOATS, written=written)
    return Observed(modes, draw(read_layouts(len(modes.shape), modes.dtype)))


def _rarely(draw: DrawFn) -> bool:
    return draw(_EIGHTHS) == 7


def _not_finite(draw: DrawFn, entries: Sequence[_HasModes]) -> int | None:
    """None, or rarely the index of a tensor that has elements."""
    candidates = [t for t, entry in enumerate(entries) if math.prod(entry.modes.shape)]
    return draw(st.sampled_from(candidates)) if candidates and _rarely(draw) else None


@st.composite
def gram_ema_calls(draw: DrawFn) -> GramEmaCall:
    entries = draw(_lists(_observed(written=True)))
    return GramEmaCall(
        entries,
        decay=draw(_given(_some(0.5, 0.9, 0.0, 1.0, low=2**-10, high=1 - 2**-10))),
        # float16 holds 2^8 but not its square.
        magnitude=draw(st.sampled_from([1.0, 2.0**8, 2.0**-8])),
        lopsided=draw(_FLAGS),
        not_finite=_not_finite(draw, entries),
        threads=draw(_THREADS),
        seed=draw(_SEEDS),
    )


@st.composite
def mode_products_calls(draw: DrawFn) -> ModeProductsCall:
    entries = draw(_lists(_observed(written=False)))
    return ModeProductsCall(
        entries,
        not_finite=_not_finite(draw, entries),
        threads=draw(_THREADS),
        seed=draw(_SEEDS),
    )


@dataclass(frozen=True)
class Moved:
    """A parameter of preconditioned_step_, with its momentum and its gradient."""

    modes: Modes
    param: Layout
    momentum: Layout
    grad: Layout
    grad_dtype: torch.dtype


@dataclass(frozen=True)
class StepCall:
    entries: list[Moved]
    lr: float | Tensor
    momentum: float | Tensor
    weight_decay: float | Tensor
    not_finite: int | None  # the gradient that holds one NaN
    threads: int
    seed: int


@st.composite
def _moved(draw: DrawFn) -> Moved:
    modes, grad_dtype = _modes(draw, _FLOATS, written=False), draw(_FLOATS)
    dims = len(modes.shape)
    return Moved(
        modes,
        param=draw(written_layouts(dims)),
        momentum=draw(written_layouts(dims)),
        grad=draw(read_layouts(dims, grad_dtype)),
        grad_dtype=grad_dtype,
    )


@st.composite
def step_calls(draw: DrawFn) -> StepCall:
    entries = draw(_lists(_moved()))
    return StepCall(
        entries,
        lr=draw(_given(_some(1.0, 1e-3, 0.0, low=0.0, high=2.0))),
        momentum=draw(_given(_some(0.9, 0.0, 1.0, low=0.0, high=1.0))),
        weight_decay=draw(_given(_some(0.1, 0.0, 10.0, low=0.0, high=1.0))),
        not_finite=_not_finite(draw, entries),
        threads=draw(_THREADS),
        seed=draw(_SEEDS),
    )


@dataclass(frozen=True)
class Grafted:
    """A momentum of grafted_directions_, with its second moment and its gradient."""

    modes: Modes
    momentum: Layout
    second_moment: Layout
    grad: Layout
    grad_dtype: torch.dtype
    out_offset: int  # as in Layout
    counts: tuple[int, int]


@dataclass(frozen=True)
class GraftCall:
    entries: list[Grafted]
    adam: bool  # with second moments
    out: bool  # given
    momentum: float | Tensor
    second_decay: float
    eps: float
    not_finite: int | None  # the gradient that holds one NaN
    threads: int
    seed: int


_UPDATES = st.one_of(st.integers(1, 5), st.sampled_from([100, 10**6]))


@st.composite
def _grafted(draw: DrawFn) -> Grafted:
    modes, grad_dtype = _modes(draw, _STATES, written=False), draw(_FLOATS)
    dims = len(modes.shape)
    return Grafted(
        modes,
        momentum=draw(written_layouts(dims)),
        second_moment=draw(written_layouts(dims)),
        grad=draw(read_layouts(dims, grad_dtype)),
        grad_dtype=grad_dtype,
        out_offset=draw(_OFFSETS),
        counts=(draw(_UPDATES), draw(_UPDATES)),
    )


@st.composite
def graft_calls(draw: DrawFn) -> GraftCall:
    entries, adam = draw(_lists(_grafted())), draw(_FLAGS)
    return GraftCall(
        entries,
        adam,
        out=draw(_FLAGS),
        # Adam's length is of an average, which needs a momentum below 1.
        momentum=draw(_given(_some(0.9, 0.0, 0.5 if adam else 1.0, low=0.0, high=0.99))),
        second_decay=draw(_some(0.99, 0.0, 0.5, low=0.0, high=0.999)),
        eps=draw(_some(1e-8, 0.0, 1.0, low=1e-10, high=1.0)),
        not_finite=_not_finite(draw, entries),
        threads=draw(_THREADS),
        seed=draw(_SEEDS),
    )


@dataclass(frozen=True)
class Inverted:
    """A tensor's statistics in damped_inverse or inverse_root."""

    modes: Modes
    out_offset: int  # as in Layout
    condition: float  # upper bound for each statistic, without damping
    zero: bool  # the first statistic is zero
    root: int


@dataclass(frozen=True)
class Spoiled:
    """The statistic without an inverse, by its entries (row, column) and (column, row)."""

    tensor: int
    mode: int
    row: int
    column: int
    value: float  # in units of the average eigenvalue


@dataclass(frozen=True)
class InverseCall:
    entries: list[Inverted]
    unit: float  # of the statistics: the square of a gradient's entry
    damping: float  # in units of the average eigenvalue
    form: torch.dtype | None  # of the damping, as in as_given
    relative: bool
    out: str | None  # contents of ``out`` before the call: "nan" or "numbers"
    spoiled: Spoiled | None
    threads: int
    seed: int


_ON_DIAGONAL = st.sampled_from([-100.0, math.nan, math.inf, -math.inf])
_BESIDE_DIAGONAL = st.sampled_from([100.0, math.nan, math.inf, -math.inf])


def _spoiled(draw: DrawFn, entries: Sequence[Inverted]) -> Spoiled | None:
    # If the first statistic is zero, damped_inverse ignores the others.
    candidates = [
        (t, i)
        for t, entry in enumerate(entries)
        for i, d in enumerate(entry.modes.shape)
        if d and not entry.zero
    ]
    if not candidates or not draw(_FLAGS):
        return None
    t, i = draw(st.sampled_from(candidates))
    modes = entries[t].modes
    # Only the first entry of an expanded diagonal is in memory.
    last = 0 if modes.layouts[i].expanded is not None else modes.shape[i] - 1
    row = draw(st.integers(0, last))
    if row and not modes.diagonal[i] and draw(_FLAGS):
        return Spoiled(t, i, row, draw(st.integers(0, row - 1)), draw(_BESIDE_DIAGONAL))
    return Spoiled(t, i, row, row, draw(_ON_DIAGONAL))


@st.composite
def _inverted(draw: DrawFn, decades: int) -> Inverted:
    modes = _modes(draw, _STATES, written=False)
    most = 2 * decades if modes.dtype == torch.float64 else decades
    return Inverted(
        modes,
        out_offset=draw(_OFFSETS),
        condition=10.0 ** draw(st.integers(0, most)),
        zero=math.prod(modes.shape) == 0 or _rarely(draw),
        root=draw(st.integers(1, 10)),
    )


def _inverse_call(
    draw: DrawFn, *, area: int, decades: int, unit: float, relative: bool
) -> InverseCall:
    """``decades`` of the condition in float32; twice as many in float64."""
    entries = draw(_lists(_inverted(decades), area))
    return InverseCall(
        entries,
        unit,
        damping=draw(_some(0.1, 1.0, 1e-3, 0.0, low=2**-10, high=1.0)),
        form=draw(_FORMS),
        relative=relative,
        out=draw(st.sampled_from([None, "nan", "numbers"])),
        spoiled=_spoiled(draw, entries),
        threads=draw(_THREADS),
        seed=draw(_SEEDS),
    )


@st.composite
def damped_inverse_calls(draw: DrawFn) -> InverseCall:
    relative = draw(_FLAGS)
    # Absolute damping is in units of c, which is near 1 for every order k only if the unit is 1.
    unit = draw(st.sampled_from([1.0, 1e-30, 1e30])) if relative else 1.0
    return _inverse_call(draw, area=AREA, decades=3, unit=unit, relative=relative)


@st.composite
def inverse_root_calls(draw: DrawFn) -> InverseCall:
    unit = draw(st.sampled_from([1.0, 1e-15, 1e15]))
    return _inverse_call(draw, area=NEWTON_AREA, decades=2, unit=unit, relative=False)
