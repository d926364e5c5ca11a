"""Every operator against the definition in float64, on random lists of tensors.

Each example is one call: up to four tensors of unlike shapes, dtypes, layouts and kinds of modes.
Besides the numbers, every example checks to the bit: which memory is written, symmetry, failed
factors, and that a second run repeats the first.

The number of examples is that of the hypothesis profile in conftest.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import STATE_DTYPES, flat, identical, state_dtype
from hypothesis import given
from strategies import (
    GraftCall,
    GramEmaCall,
    InverseCall,
    Memory,
    ModeProductsCall,
    Numbers,
    StepCall,
    as_given,
    bits,
    contiguous,
    damped_inverse_calls,
    graft_calls,
    gram_ema_calls,
    inverse_root_calls,
    mode_products_calls,
    step_calls,
    with_spectrum,
)
from tolerances import inverse_rounding, newton_rounding, product_rounding, sum_rounding
from torch import Tensor

import tnt_kernels
from tnt_kernels import reference

pytestmark = pytest.mark.usefixtures("one_thread")

Rows = list[list[Tensor]]


# What holds for every operator.


def run(
    operator: Callable[[], Any], memory: Memory, threads: int, written: Sequence[Tensor] = ()
) -> Any:
    """Calls ``operator`` twice from the same memory, and returns the second result.

    Both calls leave the same bits. Outside the entries of ``written`` nothing changes, and
    autograd counts no write.
    """
    before = memory.contents()
    first = [bits(tensor).clone() for tensor in flat(on_threads(operator, threads))]
    after, values = memory.contents(), [tensor.clone() for tensor in written]
    memory.restore(before)
    for tensor, value in zip(written, values, strict=True):
        tensor.copy_(value)
    assert_same(memory.contents(), after, "written outside the entries of updated tensors")

    memory.restore(before)
    versions = memory.versions(but=written)
    result = on_threads(operator, threads)
    assert memory.versions(but=written) == versions
    assert_same(memory.contents(), after, "a second run leaves other bits")
    assert_same([bits(tensor) for tensor in flat(result)], first, "a second run returns other bits")
    return result


def on_threads(operator: Callable[[], Any], threads: int) -> Any:
    torch.set_num_threads(threads)
    try:
        return operator()
    finally:
        torch.set_num_threads(1)


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], message: str) -> None:
    assert all(map(torch.equal, actual, expected)), message


def assert_near(
    actual: Tensor, expected: Tensor, tolerance: float, scale: float | None = None
) -> None:
    """Entrywise, relative to ``scale`` (default: the largest expected entry); NaN must match."""
    assert actual.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    expected = expected.masked_fill(nan, 0.0)
    if expected.numel() == 0:
        return
    error = (actual.double().masked_fill(nan, 0.0) - expected).abs()
    if actual.dtype not in STATE_DTYPES:
        # One rounding is half a spacing.
        exponent = torch.frexp(expected)[1].double()
        error = error - torch.finfo(actual.dtype).eps / 4 * 2.0**exponent
    scale = float(expected.abs().max()) if scale is None else scale
    worst = float(error.max())
    assert worst <= tolerance * scale, f"{worst:.2e} of {scale:.2e}, allowed {tolerance:.2e} of it"


def assert_symmetric(stat: Tensor) -> None:
    if stat.dim() == 2:
        assert torch.equal(bits(stat), bits(stat.mT.contiguous()))


def doubled(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Copies in float64 for the definition."""
    return [[torch.clone(tensor).double() for tensor in row] for row in rows]


def columns(shape: Sequence[int], mode: int) -> int:
    """The number of columns of mat_i(G)."""
    return math.prod(shape[:mode]) * math.prod(shape[mode + 1 :])


def put_nan(tensor: Tensor, numbers: Numbers) -> Tensor:
    """NaN in one place."""
    tensor.view(-1)[numbers.below(tensor.numel())] = math.nan
    return tensor


# The operators.


@given(gram_ema_calls())
def test_gram_ema_(call: GramEmaCall) -> None:
    numbers, memory = Numbers(call.seed), Memory()
    decay = float(call.decay)
    stats, tensors = [], []
    for t, entry in enumerate(call.entries):
        modes = entry.modes
        values = call.magnitude * numbers.normal(modes.shape)
        if decay == 1:
            values.fill_(math.nan)  # must not be read
        elif call.not_finite == t:
            put_nan(values, numbers)
        tensors.append(memory.place(values.to(modes.dtype), entry.layout))
        row = []
        for i, (d, diagonal) in enumerate(zip(modes.shape, modes.diagonal, strict=True)):
            # As large as the Gram matrix, so that an error of either shows in the sum.
            size = call.magnitude**2 * columns(modes.shape, i)
            stat = with_spectrum(size * numbers.uniform(d, 0.5, 1.5), diagonal=diagonal)
            if decay == 0:
                stat.fill_(math.nan)  # must not be read
            elif call.lopsided and decay < 1 and not diagonal:
                stat += torch.full_like(stat, math.nan).triu(1)
            row.append(memory.place(stat.to(modes.state), modes.layouts[i]))
        stats.append(row)
    wanted = doubled(stats)
    if decay < 1:
        reference.gram_ema_(wanted, [tensor.double() for tensor in tensors], decay)

    def operator() -> None:
        assert tnt_kernels.gram_ema_(stats, tensors, call.decay) is None

    run(operator, memory, call.threads, flat(stats))
    for entry, row, values in zip(call.entries, stats, wanted, strict=True):
        shape, expanded = entry.modes.shape, entry.layout.expanded
        repeats = 1 if expanded is None else shape[expanded]
        for i, (stat, value) in enumerate(zip(row, values, strict=True)):
            if decay == 1:
                assert torch.equal(stat.double(), value)
            assert_near(stat, value, sum_rounding(stat.dtype, columns(shape, i), repeats))
            assert_symmetric(stat)


@given(mode_products_calls())
def test_mode_products(call: ModeProductsCall) -> None:
    numbers, memory = Numbers(call.seed), Memory()
    tensors, factors = [], []
    for t, entry in enumerate(call.entries):
        values = numbers.normal(entry.modes.shape, entry.modes.dtype)
        if call.not_finite == t:
            put_nan(values, numbers)
        tensors.append(memory.place(values, entry.layout))
        factors.append(entry.modes.factors(numbers, memory))
    wanted = reference.mode_products([tensor.double() for tensor in tensors], doubled(factors))

    products = run(lambda: tnt_kernels.mode_products(tensors, factors), memory, call.threads)
    assert isinstance(products, list)
    given_memory = {tensor.untyped_storage().data_ptr() for tensor in [*tensors, *flat(factors)]}
    for product, value, tensor in zip(products, wanted, tensors, strict=True):
        assert product.dtype == state_dtype(tensor.dtype) and product.is_contiguous()
        assert not product.numel() or product.untyped_storage().data_ptr() not in given_memory
        assert_near(product, value, product_rounding(product.dtype, product.shape))


@given(step_calls())
def test_preconditioned_step_(call: StepCall) -> None:
    numbers, memory = Numbers(call.seed), Memory()
    lr, momentum, weight_decay = map(float, (call.lr, call.momentum, call.weight_decay))
    params, momenta, grads, factors = [], [], [], []
    for t, entry in enumerate(call.entries):
        modes = entry.modes
        params.append(memory.place(numbers.normal(modes.shape, modes.dtype), entry.param))
        momenta.append(memory.place(numbers.normal(modes.shape, modes.state), entry.momentum))
        grad = numbers.normal(modes.shape, entry.grad_dtype)
        if call.not_finite == t and lr != 0:
            put_nan(grad, numbers)
        grads.append(memory.place(grad, entry.grad))
        factors.append(modes.factors(numbers, memory))
    old_params, old_momenta, gradients = doubled([params, momenta, grads])
    new_params, new_momenta = doubled([params, momenta])
    reference.preconditioned_step_(
        new_params, new_momenta, gradients, doubled(factors), lr, momentum, weight_decay
    )

    def operator() -> None:
        arguments = (params, momenta, grads, factors)
        scalars = (call.lr, call.momentum, call.weight_decay)
        assert tnt_kernels.preconditioned_step_(*arguments, *scalars) is None

    run(operator, memory, call.threads, [*params, *momenta])
    for t, (param, m) in enumerate(zip(params, momenta, strict=True)):
        if not param.numel():
            continue
        # Terms may cancel, their roundings do not: tolerances are relative to the terms.
        weight, grad = old_params[t], gradients[t].nan_to_num()
        moment_size = float((momentum * old_momenta[t].abs() + grad.abs()).max())
        direction = (1 - lr * weight_decay) * weight - new_params[t]  # times alpha
        size = float(((1 + lr * weight_decay) * weight.abs() + direction.nan_to_num().abs()).max())
        assert_near(m, new_momenta[t], sum_rounding(m.dtype, 1), moment_size)
        tolerance = product_rounding(m.dtype, m.shape)
        assert_near(param, new_params[t], tolerance, size + lr * moment_size)
        if lr == 0:
            assert torch.equal(param.double(), weight)
        if momentum == 0:
            identical(m, grads[t].to(m.dtype))


def adams(call: GraftCall, m: Tensor, v: Tensor, counts: tuple[int, int]) -> Tensor:
    """Adam's direction with these moments, in float64."""
    mu = float(call.momentum)
    first = (1 - mu) / (1 - mu ** counts[0])
    return (
        first * m.double() / ((v.double() / (1 - call.second_decay ** counts[1])).sqrt() + call.eps)
    )


@given(graft_calls())
def test_grafted_directions_(call: GraftCall) -> None:
    numbers, memory = Numbers(call.seed), Memory()
    momentum, decay = float(call.momentum), call.second_decay
    momenta, second_moments, out, grads, factors = [], [], [], [], []
    for t, entry in enumerate(call.entries):
        modes = entry.modes
        momenta.append(memory.place(numbers.normal(modes.shape, modes.dtype), entry.momentum))
        squares = numbers.normal(modes.shape, modes.dtype).square()
        second_moments.append(memory.place(squares, entry.second_moment))
        grad = numbers.normal(modes.shape, entry.grad_dtype)
        if call.not_finite == t:
            put_nan(grad, numbers)
        grads.append(memory.place(grad, entry.grad))
        factors.append(modes.factors(numbers, memory))
        if call.out:
            held = torch.full(modes.shape, math.nan, dtype=modes.dtype)
            out.append(memory.place(held, contiguous(held.dim(), entry.out_offset)))
    counts = torch.tensor([e.counts for e in call.entries], dtype=torch.float64).view(-1, 2)
    old_momenta, old_seconds, gradients = doubled([momenta, second_moments, grads])
    adam = (second_moments, counts) if call.adam else (None, None)

    def operator() -> tuple[list[Tensor], Tensor]:
        return tnt_kernels.grafted_directions_(
            *(momenta, grads, factors, call.momentum, *adam, out if call.out else None),
            second_decay=decay,
            eps=call.eps,
        )

    written = [*momenta, *(second_moments if call.adam else []), *out]
    directions, scales = run(operator, memory, call.threads, written)
    assert scales.dtype == torch.float64 and scales.shape == (len(momenta),)
    if call.out:
        assert all(d is target for d, target in zip(directions, out, strict=True))
    # Directions are compared with those of the written momenta, whose terms may cancel.
    wanted = reference.mode_products([m.double() for m in momenta], doubled(factors))
    for t, (m, v, direction) in enumerate(zip(momenta, second_moments, directions, strict=True)):
        assert direction.dtype == m.dtype and direction.is_contiguous()
        if not m.numel():
            assert direction.shape == m.shape and scales[t] == 0
            continue
        old, grad = momentum * old_momenta[t], gradients[t]
        size = float((old.abs() + grad.nan_to_num().abs()).max())
        assert_near(m, old + grad, sum_rounding(m.dtype, 1), size)
        if momentum == 0:
            identical(m, grads[t].to(m.dtype))
        if call.adam:
            second = decay * old_seconds[t] + (1 - decay) * grad.square()
            assert_near(v, second, sum_rounding(v.dtype, 1))
        assert_near(direction, wanted[t], product_rounding(m.dtype, m.shape))
        other = adams(call, m, v, call.entries[t].counts) if call.adam else m.double()
        length = float(other.norm() / direction.double().norm())
        if math.isfinite(length):
            # Entries have the momentum's dtype; their squares are summed in float64.
            tolerance = sum_rounding(m.dtype, 1) + sum_rounding(torch.float64, m.numel())
            assert abs(float(scales[t]) / length - 1) <= tolerance
        else:
            identical(scales[t], torch.tensor(length, dtype=torch.float64))


# The two inverses.


def inverse_arguments(
    call: InverseCall, memory: Memory, *, rescaled: bool
) -> tuple[Rows, Rows, Rows | None]:
    """The statistics, their eigenvalues (before one is spoiled), and ``out``."""
    numbers = Numbers(call.seed)
    stats: Rows = []
    spectra: Rows = []
    out: Rows = []
    for t, entry in enumerate(call.entries):
        modes = entry.modes
        for rows in (stats, spectra, out):
            rows.append([])
        for i, (d, diagonal) in enumerate(zip(modes.shape, modes.diagonal, strict=True)):
            # Rescaled: similar traces (those of one tensor's Gram matrices are equal), so that the
            # average eigenvalue of every U_i is near 1 (to the power of the unit).
            size = call.unit * (max(columns(modes.shape, i), 1) if rescaled else 1)
            size *= float(numbers.uniform(1, 0.5, 2.0))
            spectrum = size * numbers.spectrum(d, entry.condition)
            if entry.zero and i == 0:
                spectrum.zero_()
            if modes.layouts[i].expanded is not None:
                spectrum = spectrum[:1].expand(d)
            stat = with_spectrum(spectrum, diagonal=diagonal).clone()
            spoiled = call.spoiled
            if spoiled is not None and (spoiled.tensor, spoiled.mode) == (t, i):
                place = (spoiled.row, spoiled.column)
                for index in (place, place[::-1]):
                    stat[index[: stat.dim()]] = spoiled.value * size
            spectra[t].append(spectrum)
            stats[t].append(memory.place(stat.to(modes.dtype), modes.layouts[i]))
            if call.out is not None:
                held = numbers.normal(stat.shape, modes.dtype)
                if call.out == "nan":
                    held.fill_(math.nan)
                out[t].append(memory.place(held, contiguous(held.dim(), entry.out_offset)))
    return stats, spectra, None if call.out is None else out


def condition(eigenvalues: Tensor) -> float:
    """The condition number; 1 for a matrix without an inverse, which is not compared."""
    if len(eigenvalues) == 0 or float(eigenvalues.min()) <= 0:
        return 1.0
    return float(eigenvalues.max() / eigenvalues.min())


def assert_inverse(
    call: InverseCall,
    memory: Memory,
    operator: Callable[[], tuple[Rows, Tensor]],
    out: Rows | None,
    expected: tuple[Sequence[Sequence[Tensor]], Tensor],
    tolerance: Callable[[int, int], float],
) -> None:
    held = [tensor.clone() for tensor in flat(out)]
    factors, info = run(operator, memory, call.threads, flat(out))
    wanted, codes = expected
    assert info.dtype == torch.int32 and torch.equal(info, codes)
    if call.spoiled is not None:
        assert info[call.spoiled.tensor] == call.spoiled.mode + 1

    assert len(factors) == len(call.entries)
    if out is not None:
        assert all(
            factor is target for factor, target in zip(flat(factors), flat(out), strict=True)
        )
    kept = iter(held)
    for t, (row, values) in enumerate(zip(factors, wanted, strict=True)):
        for i, (factor, value) in enumerate(zip(row, values, strict=True)):
            old = next(kept, None)
            assert factor.dtype == call.entries[t].modes.dtype and factor.is_contiguous()
            if not info[t]:
                assert_near(factor, value, tolerance(t, i))
                assert_symmetric(factor)
            elif old is not None:
                assert torch.equal(bits(factor), bits(old))
            else:
                assert factor.shape == value.shape and factor.isnan().all()


@given(damped_inverse_calls())
def test_damped_inverse(call: InverseCall) -> None:
    memory = Memory()
    stats, spectra, out = inverse_arguments(call, memory, rescaled=True)
    damping = as_given(call.damping, call.form)
    eps = float(damping)

    def tolerance(t: int, i: int) -> float:
        if stats[t][i].dim() == 1:
            return inverse_rounding(stats[t][i].dtype, 1.0)
        shape, trace = call.entries[t].modes.shape, float(spectra[t][0].sum())
        c = (trace / max(math.prod(shape), 1)) ** (1 / len(shape))
        rescaled = spectra[t][i] * (c * shape[i] / trace if c else 0.0)
        damped = rescaled + (eps * (c or 1.0) if call.relative else eps)
        return inverse_rounding(stats[t][i].dtype, condition(damped))

    assert_inverse(
        call,
        memory,
        lambda: tnt_kernels.damped_inverse(stats, damping, out, call.relative),
        out,
        reference.damped_inverse(doubled(stats), eps, None, call.relative),
        tolerance,
    )


@given(inverse_root_calls())
def test_inverse_root(call: InverseCall) -> None:
    memory = Memory()
    stats, spectra, out = inverse_arguments(call, memory, rescaled=False)
    damping = as_given(call.damping * call.unit, call.form)
    roots = [entry.root for entry in call.entries]

    def tolerance(t: int, i: int) -> float:
        if stats[t][i].dim() == 1:  # no iteration
            return inverse_rounding(stats[t][i].dtype, 1.0)
        damped = spectra[t][i] + float(damping)
        return newton_rounding(stats[t][i].dtype, condition(damped))

    assert_inverse(
        call,
        memory,
        lambda: tnt_kernels.inverse_root(stats, damping, roots, out),
        out,
        reference.inverse_root(doubled(stats), float(damping), roots),
        tolerance,
    )
