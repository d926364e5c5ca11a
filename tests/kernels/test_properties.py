"""Every operator against the definition in float64, on random lists of tensors.

Each example is one call: up to four tensors of unlike shapes, dtypes, layouts and kinds of modes.
Besides the numbers, every example checks to the bit: which memory is written, symmetry, failed
factors, and that a second run repeats the first.

Hypothesis draws what a failure prints and shrinks: shapes, dtypes, strides, numbers and a seed. A
generator with that seed fills the tensors. The hypothesis profile in conftest.py has the number of
examples.
"""

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from cases import (
    DTYPES,
    STATE_DTYPES,
    bits,
    buffer_of,
    flat,
    identical,
    state_dtype,
    unchanged,
    with_spectrum,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, DrawFn, SearchStrategy
from operators import (
    INVERSES,
    NORMS,
    NUMBERS,
    STRIDED_WRITTEN,
    TABLES,
    VARIANTS,
    WRITTEN,
    Call,
    Results,
    dtype_of,
    everything,
)
from operators import call as random_call
from tolerances import (
    BFLOAT16_OPERATOR,
    inverse_rounding,
    newton_rounding,
    product_rounding,
    sum_rounding,
)
from torch import Tensor

import tnt_kernels
from tnt_kernels import reference
from tnt_kernels.operators import OPERATORS

# Limits for one call: elements of all tensors, and of all full statistics. A mode of 200 fits.
ELEMENTS, AREA = 60_000, 90_000
# Less for the coupled Newton iteration, which multiplies matrices about sixty times.
NEWTON_AREA = 45_000

# PyTorch's precision of float32 products: "medium" rounds to bfloat16 where there are units.
PRECISION = os.environ.get("TNT_FUZZ_PRECISION") or "highest"

# Around the sizes of vector registers, tiles and unrolled loops; 0 appears in one list of fifteen.
_EDGES = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 0]
_SIZES = st.one_of(st.integers(1, 9), st.sampled_from(_EDGES), st.integers(1, 200))
_FLAGS = st.booleans()
_RARELY = st.integers(0, 4).map(lambda n: n == 4)
_OFFSETS = st.integers(0, 3)


# The layout of a tensor in memory.


class Layout(NamedTuple):
    """Strides and offset of a tensor."""

    order: Sequence[int]  # its dimensions, from the slowest to the fastest
    steps: Sequence[int]  # one entry every so many places, for each dimension
    offset: int  # entries before the first one: alignment
    expanded: int | None = None  # a dimension of stride 0
    negated: bool = False  # a lazy negative view

    def place(self, values: Tensor) -> Tensor:
        """A view with these entries (if expanded, the first ones), in a buffer with NaN gaps."""
        if self.negated:
            # The imaginary part of a conjugate is minus the number in memory.
            values = torch.complex(torch.full_like(values, math.nan), -values)
        given = values
        if self.expanded is not None:
            given = values.narrow(self.expanded, 0, min(1, values.shape[self.expanded]))
        extent = [given.shape[i] * self.steps[i] for i in self.order]
        end = self.offset + math.prod(extent)
        nothing = complex(math.nan, math.nan) if values.is_complex() else math.nan
        view = values.new_full((end + 2,), nothing)[self.offset : end].view(extent)
        view = view[tuple(slice(None, None, self.steps[i]) for i in self.order)]
        view = view.permute([self.order.index(i) for i in range(len(self.order))])
        view.copy_(given)
        return (view.conj().imag if self.negated else view).expand(values.shape)


@st.composite
def layouts(draw: DrawFn, dims: int, *, strided: bool, expandable: bool, negatable: bool) -> Layout:
    order, steps, offset = list(range(dims)), [1] * dims, draw(_OFFSETS)
    if strided and draw(_FLAGS):
        order = draw(st.permutations(order))
        steps[draw(st.integers(0, dims - 1))] = draw(st.sampled_from([1, 2, 3]))
    expanded = draw(st.integers(0, dims - 1)) if expandable and draw(_RARELY) else None
    return Layout(order, steps, offset, expanded, negatable and draw(_RARELY))


def lay_out(data: DataObject, call: Call) -> Call:
    """The call on tensors of random layouts; a written tensor may have one of its own."""

    def change(key: str, tensor: Tensor) -> Tensor:
        if key in TABLES or not tensor.dim():
            return tensor
        read = key not in WRITTEN[call.name]
        # An expanded matrix would not be symmetric. Negated views are not of 16 bits.
        layout = layouts(
            tensor.dim(),
            strided=read or key in STRIDED_WRITTEN,
            expandable=read and (key in ("tensors", "grads") or tensor.dim() == 1),
            negatable=read and tensor.dtype in STATE_DTYPES,
        )
        return data.draw(layout, label=key).place(tensor)

    return call.map(change)


# The numbers.


def _some(*usual: float, low: float, high: float) -> SearchStrategy[float]:
    return st.one_of(st.sampled_from(usual), st.floats(low, high))


_VALUES = {
    "decay": _some(0.5, 0.9, 0.0, 1.0, low=2**-10, high=1 - 2**-10),
    "damping": _some(0.1, 1.0, 1e-3, 0.0, low=2**-10, high=1.0),
    "lr": _some(1.0, 1e-3, 0.0, low=0.0, high=2.0),
    "momentum": _some(0.9, 0.0, 1.0, low=0.0, high=1.0),
    "weight_decay": _some(0.1, 0.0, 10.0, low=0.0, high=1.0),
    "second_decay": _some(0.99, 0.0, 0.5, low=0.0, high=0.999),
    "eps": _some(1e-8, 0.0, 1.0, low=1e-10, high=1.0),
}
_FORMS = st.sampled_from([None, torch.float64, torch.float32])
_UPDATES = st.one_of(st.integers(1, 5), st.sampled_from([100, 10**6]))


def draw_number(data: DataObject, key: str, unit: float = 1.0, most: float = math.inf) -> Any:
    """A number in this unit, or a tensor with the number, in float32 the nearest one."""
    value, form = min(data.draw(_VALUES[key], label=key), most) * unit, data.draw(_FORMS)
    return value if form is None else torch.tensor(value, dtype=form)


# The tensors.


def draw_call(data: DataObject, name: str) -> Call:
    """A call of the operator; every choice but the tensors' entries is hypothesis's."""
    variant = data.draw(st.sampled_from([v for v in VARIANTS if v.split()[0] == name]))
    modes = data.draw(
        st.lists(st.lists(st.tuples(_SIZES, _FLAGS), min_size=1, max_size=5), max_size=4)
    )
    shapes = fit(
        [[d for d, _ in row] for row in modes], NEWTON_AREA if name == "inverse_root" else AREA
    )
    kinds = [[diagonal for _, diagonal in row] for row in modes]
    served = STATE_DTYPES if name in ("grafted_directions_", *INVERSES) else DTYPES
    dtypes = [data.draw(st.sampled_from(served)) for _ in shapes]
    grad_dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    torch.manual_seed(data.draw(st.integers(0, 2**31 - 1), label="seed"))
    call = random_call(variant, shapes, kinds, dtypes, grad_dtypes)
    if name in INVERSES:
        return draw_statistics(data, call)
    # Adam's length is that of an average, which needs a momentum below 1.
    most = 0.99 if "Adam" in variant else math.inf
    numbers: dict[str, Any] = {key: draw_number(data, key, most=most) for key in NUMBERS[name]}
    if "Adam" in variant:
        numbers |= {key: data.draw(_VALUES[key], label=key) for key in ("second_decay", "eps")}
        counts = [[data.draw(_UPDATES) for _ in range(2)] for _ in shapes]
        numbers["counts"] = torch.tensor(counts, dtype=torch.float64).view(-1, 2)
    if name == "grafted_directions_" and data.draw(_FLAGS, label="no out"):
        numbers["out"] = None
    call = call.with_arguments(**numbers)
    if name == "gram_ema_":
        draw_magnitudes(data, call.arguments)
    call = lay_out(data, call)
    a = call.arguments
    for momentum, grad in zip(a.get("momenta", []), a.get("grads", []), strict=True):
        momentum.copy_(momentum.abs().copysign(grad))  # sums of the two do not cancel
    # With lr = 0 a parameter does not read its direction.
    given = a.get("tensors", a.get("grads", a.get("directions")))
    candidates = [x for x in given if x.numel() and a.get("lr") != 0]
    if candidates and data.draw(_RARELY, label="NaN"):
        spoiled = data.draw(st.sampled_from(range(len(candidates))))
        candidates[spoiled][tuple(d // 2 for d in candidates[spoiled].shape)] = math.nan
    return call


def fit(shapes: Sequence[Sequence[int]], area_left: int) -> list[list[int]]:
    """The shapes with sizes reduced to stay within ELEMENTS and the area together."""
    elements_left, fitted = ELEMENTS, []
    for given_shape in shapes:
        shape: list[int] = []
        for d in given_shape:
            room = min(elements_left // max(math.prod(shape), 1), math.isqrt(area_left))
            shape.append(min(d, max(room, 1)))
            area_left = max(area_left - shape[-1] ** 2, 0)
        elements_left = max(elements_left - math.prod(shape), 0)
        fitted.append(shape)
    return fitted


def columns(shape: Sequence[int], mode: int) -> int:
    """The number of columns of mat_i(G)."""
    return math.prod(shape[:mode]) * math.prod(shape[mode + 1 :])


def draw_magnitudes(data: DataObject, a: dict[str, Any]) -> None:
    """Statistics as large as the Gram matrices; NaN in what gram_ema_ must not read."""
    # float16 holds 2^8 but not its square.
    magnitude = data.draw(st.sampled_from([1.0, 2.0**8, 2.0**-8]), label="magnitude")
    lopsided, decay = data.draw(_FLAGS, label="NaN above the diagonal"), float(a["decay"])
    for row, tensor in zip(a["stats"], a["tensors"], strict=True):
        tensor.copy_(math.nan * tensor if decay == 1 else magnitude * tensor)
        for i, stat in enumerate(row):
            stat.mul_(magnitude**2 * max(columns(tensor.shape, i), 1))
            if decay == 0:
                stat.fill_(math.nan)
            elif lopsided and decay < 1 and stat.dim() == 2:
                stat.add_(torch.full_like(stat, math.nan).triu(1))


_ON_DIAGONAL = st.sampled_from([-100.0, math.nan, math.inf, -math.inf])
_OFF_DIAGONAL = st.sampled_from([100.0, math.nan, math.inf, -math.inf])


def draw_statistics(data: DataObject, call: Call) -> Call:
    """An inverse's call: statistics of a random unit and condition, zero, or without an inverse."""
    a, root = call.arguments, call.name == "inverse_root"
    if root:
        a["root"] = [data.draw(st.integers(1, 10)) for _ in a["stats"]]
    # Absolute damping of damped_inverse is in units of c, which is near 1 for every order k only if
    # the unit is 1.
    units = [1.0, 1e-15, 1e15] if root else [1.0, 1e-25, 1e25] if a["relative"] else [1.0]
    unit = data.draw(st.sampled_from(units), label="unit")
    a["damping"] = draw_number(data, "damping", unit if root and not a["relative"] else 1.0)
    contents = data.draw(st.sampled_from([None, "nan", "numbers"]), label="out")
    if contents is None:
        a["out"] = None
    elif contents == "numbers":
        a["out"] = [[torch.randn_like(stat) for stat in row] for row in a["out"]]
    sound = []
    for t, row in enumerate(a["stats"]):
        shape = [len(stat) for stat in row]
        zero = math.prod(shape) == 0 or data.draw(_RARELY, label="zero")
        decades = (2 if root else 3) * (1 if row[0].dtype == torch.float32 else 2)
        condition = 10.0 ** data.draw(st.integers(0, decades), label="decades")
        for i, stat in enumerate(row):
            # For damped_inverse of similar traces (those of one tensor's Gram matrices are equal),
            # so that the average eigenvalue of every U_i is near 1.
            size = unit * (1 if root else max(columns(shape, i), 1))
            spectrum = condition ** -torch.rand(len(stat), dtype=torch.float64)
            spectrum *= size * float(0.5 + 1.5 * torch.rand(())) / spectrum.mean()
            if zero and i == 0:
                spectrum.zero_()
            row[i] = with_spectrum(spectrum, diagonal=stat.dim() == 1).to(stat.dtype)
            # If the first statistic is zero, damped_inverse ignores the others.
            sound += [(t, i, size)] * bool(len(stat) and not zero)
    call = lay_out(data, call)
    if sound and data.draw(_FLAGS, label="spoiled"):
        t, i, size = data.draw(st.sampled_from(sound))
        stat = call.arguments["stats"][t][i]
        r, c = sorted(data.draw(st.integers(0, len(stat) - 1)) for _ in range(2))
        if stat.dim() == 1 or r == c:
            stat[(r,) * stat.dim()] = size * data.draw(_ON_DIAGONAL)
        else:
            stat[r, c] = stat[c, r] = size * data.draw(_OFF_DIAGONAL)
    return call


# What holds for every operator.


def run(call: Call, threads: int, functions: Any) -> Results:
    """The same call twice, on copies: both leave and return the same bits.

    Outside the entries of updated tensors nothing changes, and autograd counts no write.
    """
    calls, results = [call.copy(), call.copy()], []
    torch.set_num_threads(threads)
    try:
        for one in calls:
            with unchanged(one.read):
                results.append(one(functions))
    finally:
        torch.set_num_threads(1)
    untouched = call.copy()
    for target, value in zip(untouched.written, calls[0].written, strict=True):
        target.copy_(value)
    after = buffers(calls[0])
    assert_same(buffers(untouched), after, "written outside the entries of updated tensors")
    assert_same(buffers(calls[1]), after, "a second run leaves other bits")
    first, second = (list(map(bits, everything(result))) for result in results)
    assert_same(first, second, "a second run returns other bits")
    addresses = {tensor.untyped_storage().data_ptr() for tensor in calls[0].read}
    for result in everything(results[0]):
        assert not result.numel() or result.untyped_storage().data_ptr() not in addresses
    return results[0]


def buffers(call: Call) -> list[Tensor]:
    """The memory of every argument, gaps included."""
    return [bits(buffer_of(tensor)) for tensor in flat(call.arguments)]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], message: str) -> None:
    assert all(map(torch.equal, actual, expected)), message


def assert_near(
    actual: Tensor, expected: Tensor, tolerance: float, scale: float | None = None
) -> None:
    """Entrywise, relative to ``scale`` (default: the largest expected entry); NaN must match."""
    assert actual.shape == expected.shape
    finite = expected.isfinite()
    identical(actual[~finite].double(), expected[~finite])
    actual, expected = actual[finite], expected[finite]
    if expected.numel() == 0:
        return
    error = (actual.double() - expected).abs()
    if actual.dtype not in STATE_DTYPES:
        # One rounding is half a spacing.
        exponent = torch.frexp(expected)[1].double()
        error = error - torch.finfo(actual.dtype).eps / 4 * 2.0**exponent
    scale = float(expected.abs().max()) if scale is None else scale
    worst = float(error.max())
    assert worst <= tolerance * scale, f"{worst:.2e} of {scale:.2e}, allowed {tolerance:.2e} of it"


def tolerance_of(
    call: Call, key: str, t: int, i: int, expected: Tensor, dtype: torch.dtype
) -> float:
    """Of the result's entry [t] or [t][i]."""
    rounded = 0.0
    if PRECISION == "medium" and dtype_of("momenta", t, call) == torch.float32:
        rounded = BFLOAT16_OPERATOR
    if key == "stats":
        tensor = call.arguments["tensors"][t]
        repeats = math.prod(d for d, s in zip(tensor.shape, tensor.stride(), strict=True) if not s)
        rounding = sum_rounding(dtype, columns(tensor.shape, i), repeats) + rounded
        if "factors" not in call.arguments:
            return rounding
        # Products with the other factors may cancel, in the result and in its trace.
        others = [a for j, a in enumerate(call.arguments["factors"][t]) if j != i]
        condition = math.prod(map(condition_of, others))
        return condition * (rounding + product_rounding(state_dtype(dtype), tensor.shape))
    if key == "factors":
        root = call.arguments.get("root")
        condition = condition_of(expected) if expected.dim() == 2 else 1.0
        if root is None or expected.dim() == 1:  # no iteration
            return inverse_rounding(dtype, condition)
        return newton_rounding(dtype, condition ** root[t])
    if key in ("products", "directions", "params"):
        return product_rounding(state_dtype(dtype), expected.shape) + rounded
    momentum = call.arguments["momenta"][t]
    rounding = sum_rounding(momentum.dtype, 1)
    if key in NORMS:  # of entries of the momentum's dtype; their squares are summed in float64
        rounding += sum_rounding(torch.float64, momentum.numel()) + rounded
    return rounding


def condition_of(matrix: Tensor) -> float:
    """Of a positive definite matrix or diagonal."""
    if not matrix.numel():
        return 1.0
    values = matrix.double() if matrix.dim() == 1 else torch.linalg.eigvalsh(matrix.double())
    return float(values.max() / values.min())


def terms_of_params(call: Call, wanted: Results, t: int) -> float:
    """The size of the terms of w - lr (p + decay w): they may cancel, their roundings do not."""
    a = call.arguments
    lr, shrunk = float(a["lr"]), float(a["lr"]) * float(a["weight_decay"])
    old = a["params"][t].double().abs()
    direction = ((1 - shrunk) * a["params"][t].double() - wanted["params"][t]).abs()  # times lr
    size = float(((1 + shrunk) * old + direction.nan_to_num()).max())
    moved = wanted.get("momenta", a.get("directions"))
    return size + lr * float(moved[t].nan_to_num().abs().max())


def check_failed(call: Call, results: Results, t: int) -> None:
    """``out`` keeps what it held; new factors are NaN."""
    out = call.arguments["out"]
    if out is None:
        assert all(factor.isnan().all() for factor in results["factors"][t])
    else:
        assert_same(*(list(map(bits, rows[t])) for rows in (results["factors"], out)), "written")


@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
def test_definition(name: str, data: DataObject) -> None:
    check_definition(name, data, tnt_kernels)


def check_definition(name: str, data: DataObject, functions: Any) -> None:
    """Compares one random call of a function with the definition."""
    call = draw_call(data, name)
    wanted = call.double()(reference)
    # Two threads must not race. Rarely: the small operations of the reference wait for both.
    threads = 1 + data.draw(_RARELY, label="two threads")
    torch.set_float32_matmul_precision(PRECISION)
    try:
        results = run(call, threads, functions)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert results.keys() == wanted.keys()
    for key, entries in results.items():
        for t, entry in enumerate(entries):
            if key == "info":
                assert entry == wanted["info"][t] and entry.dtype == torch.int32
                continue
            if key == "factors" and results["info"][t]:
                check_failed(call, results, t)
                continue
            for i, (result, value) in enumerate(
                zip(flat([entry]), flat([wanted[key][t]]), strict=True)
            ):
                assert result.dtype == dtype_of(key, t, call)
                assert key not in ("factors", "products", "directions") or result.is_contiguous()
                if key in ("factors", "stats") and result.dim() == 2:
                    assert torch.equal(bits(result), bits(result.mT.contiguous()))
                scale = None
                if key == "params" and value.numel():
                    scale = terms_of_params(call, wanted, t)
                assert_near(
                    result, value, tolerance_of(call, key, t, i, value, result.dtype), scale
                )
