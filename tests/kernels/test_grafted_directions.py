"""grafted_directions_: momentum, product with the factors, and another direction's length."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    WRITABLE_LAYOUTS,
    Arguments,
    Errors,
    Mistake,
    bad_numbers,
    buffer_of,
    close,
    dense,
    first_only,
    identical,
    instead,
    mistakes,
    mode_statistics,
    normal,
    noticed_by_autograd,
    replaced,
    scalar,
    unchanged,
)
from oracle import mode_product
from tolerances import FLOAT32_OPERATOR, FLOAT64_OPERATOR
from torch import Tensor

from tnt_kernels import grafted_directions_, reference

pytestmark = pytest.mark.usefixtures("one_thread")

Result = tuple[list[Tensor], Tensor]
Graft = Callable[..., Result]

NUMBERS = {"momentum": 0.9, "second_decay": 0.95, "eps": 1e-8}


@dataclass
class Expected:
    """The definition in float64."""

    momentum: Tensor
    second_moment: Tensor
    direction: Tensor
    scale: float


@dataclass
class Case:
    """One momentum with what moves it, and how often it and the second moment have been."""

    momentum: Tensor
    second_moment: Tensor
    grad: Tensor
    factors: list[Tensor]
    counts: tuple[int, int]

    def expected(
        self, *, adam: bool, momentum: float = 0.9, second_decay: float = 0.95, eps: float = 1e-8
    ) -> Expected:
        """After an update; without ``adam`` the length is the momentum's."""
        grad = self.grad.double()
        m, v = momentum * self.momentum.double() + grad, self.second_moment.double()
        direction = other = m
        for i, factor in enumerate(self.factors if m.numel() else []):
            direction = mode_product(direction, dense(factor), i)
        if adam:
            v = second_decay * v + (1 - second_decay) * grad * grad
            first, second = self.counts
            # An average of gradients, as Adam's is: the momentum is their sum.
            mean = (1 - momentum) * m / (1 - momentum**first)
            other = mean / ((v / (1 - second_decay**second)).sqrt() + eps)
        length, wanted = math.sqrt(float(direction.square().sum())), other.square().sum()
        return Expected(m, v, direction, math.sqrt(float(wanted)) / length if length else 0.0)

    def assert_became(self, direction: Tensor, scale: Tensor, wanted: Expected) -> None:
        close(self.momentum, wanted.momentum)
        close(self.second_moment, wanted.second_moment)
        assert direction.dtype == self.momentum.dtype and direction.is_contiguous()
        close(direction, wanted.direction)
        exact = self.momentum.dtype == torch.float64
        tolerance = FLOAT64_OPERATOR if exact else FLOAT32_OPERATOR
        assert abs(float(scale) - wanted.scale) <= tolerance * wanted.scale


def case(
    shape: tuple[int, ...],
    kind: str = "mixed",
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    counts: tuple[int, int] = (3, 7),
) -> Case:
    return Case(
        normal(shape, dtype),
        normal(shape, dtype).square(),
        normal(shape, grad_dtype or dtype),
        mode_statistics(shape, kind, dtype),
        counts,
    )


def many(shapes: Sequence[tuple[int, ...]], kinds: Sequence[str] = KINDS) -> list[Case]:
    """Cases of all dtypes, with counts that differ."""
    return [
        case(
            shape,
            kinds[n % len(kinds)],
            STATE_DTYPES[n % 2],
            DTYPES[n // 2 % 4],
            (1 + n, 1 + (5 * n) % 7),
        )
        for n, shape in enumerate(shapes)
    ]


def table(cases: Sequence[Case]) -> Tensor:
    return torch.tensor([c.counts for c in cases], dtype=torch.float64).view(-1, 2)


IMPLEMENTATIONS: dict[str, Graft] = {
    "C++": grafted_directions_,
    "Triton": triton_operators.grafted_directions_,
}


@pytest.fixture(params=list(IMPLEMENTATIONS))
def graft(request: pytest.FixtureRequest) -> Graft:
    """The operator on given cases; it must leave gradients, factors and counts alone, and without
    ``adam`` the second moments."""

    def graft(
        cases: list[Case],
        *,
        adam: bool,
        out: list[Tensor] | None = None,
        **numbers: float | Tensor,
    ) -> Result:
        grads, factors, counts = [c.grad for c in cases], [c.factors for c in cases], table(cases)
        moments = [c.second_moment for c in cases]
        with unchanged(grads, factors, counts, numbers, [] if adam else moments):
            directions, scales = IMPLEMENTATIONS[request.param](
                [c.momentum for c in cases],
                grads,
                factors,
                second_moments=moments if adam else None,
                counts=counts if adam else None,
                out=out,
                **{**NUMBERS, **numbers},
            )
        assert isinstance(directions, list) and len(directions) == len(cases)
        assert scales.shape == (len(cases),) and scales.dtype == torch.float64
        return directions, scales

    return graft


@pytest.fixture(params=["momentum", "adam"])
def adam(request: pytest.FixtureRequest) -> bool:
    """Whose length it is."""
    return bool(request.param == "adam")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many there are, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def check(graft: Graft, cases: list[Case], *, adam: bool, **numbers: float) -> Result:
    """All became what the definition says."""
    wanted = [c.expected(adam=adam, **numbers) for c in cases]
    result = graft(cases, adam=adam, **numbers)
    for c, direction, scale, values in zip(cases, *result, wanted, strict=True):
        c.assert_became(direction, scale, values)
    return result


def copied(cases: list[Case]) -> list[Case]:
    return [
        Case(c.momentum.clone(), c.second_moment.clone(), c.grad, c.factors, c.counts)
        for c in cases
    ]


def assert_identical(cases: list[Case], others: list[Case]) -> None:
    for c, other in zip(cases, others, strict=True):
        identical(c.momentum, other.momentum)
        identical(c.second_moment, other.second_moment)


def assert_same(result: Result, other: Result) -> None:
    for direction, value in zip(result[0], other[0], strict=True):
        identical(direction, value)
    identical(result[1], other[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_definition(
    graft: Graft, adam: bool, shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    check(graft, [case(shape, kind, dtype)], adam=adam)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_dtypes(graft: Graft, adam: bool, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """A gradient may have another dtype than its momentum, as in bfloat16 over float32 state."""
    check(graft, [case(shape, "mixed", dtype, grad_dtype) for shape in SHAPES], adam=adam)


def test_counts_of_each(graft: Graft) -> None:
    """Bias corrections are a tensor's own, those of both moments differ, and many updates none."""
    counts = [(1, 1), (1, 50), (50, 1), (3, 7), (10**6, 10**7)]
    cases = [case((9, 5), dtype=torch.float64) for _ in counts]
    for c in cases[1:]:
        c.momentum, c.second_moment = cases[0].momentum.clone(), cases[0].second_moment.clone()
        c.grad, c.factors = cases[0].grad, cases[0].factors
    for c, updates in zip(cases, counts, strict=True):
        c.counts = updates
    scales = check(graft, cases, adam=True)[1]
    assert len(set(scales.tolist())) == len(counts)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_is_the_reference(graft: Graft, adam: bool, dtype: torch.dtype) -> None:
    cases = [case(shape, kind, dtype) for shape in SHAPES for kind in KINDS]
    momenta = [c.momentum.double().clone() for c in cases]
    second_moments = [c.second_moment.double().clone() for c in cases]
    factors = [[factor.double() for factor in c.factors] for c in cases]
    directions, scales = reference.grafted_directions_(
        momenta,
        [c.grad.double() for c in cases],
        factors,
        NUMBERS["momentum"],
        second_moments if adam else None,
        table(cases) if adam else None,
        second_decay=NUMBERS["second_decay"],
        eps=NUMBERS["eps"],
    )
    result = graft(cases, adam=adam)
    expected = map(Expected, momenta, second_moments, directions, scales.tolist())
    for c, direction, scale, wanted in zip(cases, *result, expected, strict=True):
        c.assert_became(direction, scale, wanted)


def test_moments_accumulate(graft: Graft, adam: bool) -> None:
    one = case((9, 65), "full", torch.float64)
    for n in range(1, 4):
        one.counts = (n, 2 * n)
        check(graft, [one], adam=adam)
        one.grad = normal((9, 65), torch.float64)


@pytest.mark.parametrize("momentum_layout", WRITABLE_LAYOUTS)
@pytest.mark.parametrize("second_layout", WRITABLE_LAYOUTS)
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_layouts_of_what_is_written(
    graft: Graft, adam: bool, momentum_layout: str, second_layout: str, dtype: torch.dtype
) -> None:
    one = case(LAYOUT_SHAPE, "mixed", dtype)
    one.momentum = LAYOUTS[momentum_layout](one.momentum)
    one.second_moment = LAYOUTS[second_layout](one.second_moment)
    written = one.momentum, one.second_moment
    beside = [int(buffer_of(tensor).isnan().sum()) for tensor in written]
    assert (beside[0] > 0) == (momentum_layout == "sliced")
    strides = [tensor.stride() for tensor in written]
    check(graft, [one], adam=adam)
    assert strides == [tensor.stride() for tensor in written]
    assert beside == [int(buffer_of(tensor).isnan().sum()) for tensor in written]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUT_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_gradients(
    graft: Graft, adam: bool, layout: str, dtype: torch.dtype, kind: str
) -> None:
    state = torch.float64 if dtype == torch.float64 else torch.float32
    one = case(LAYOUT_SHAPE, kind, state, dtype)
    one.grad = LAYOUTS[layout](one.grad)
    check(graft, [one], adam=adam)


def test_directions_go_where_they_are_told(graft: Graft, adam: bool) -> None:
    """To ``out``, which is returned, or to memory of their own: the same bits."""
    together = many(SHAPES)
    again = copied(together)
    fresh = graft(together, adam=adam)
    out = [torch.full(c.grad.shape, float("nan"), dtype=c.momentum.dtype) for c in again]
    given = graft(again, adam=adam, out=out)
    assert all(direction is target for direction, target in zip(given[0], out, strict=True))
    assert_same(given, fresh)
    assert_identical(together, again)
    held = {t.data_ptr() for c in together for t in (c.momentum, c.second_moment, c.grad)}
    assert len({d.data_ptr() for d in fresh[0]} - held) == len(SHAPES)


@pytest.mark.parametrize("name", list(NUMBERS))
@pytest.mark.parametrize("value", [0.0, 0.5, 0.3])
def test_numbers(graft: Graft, adam: bool, name: str, value: float) -> None:
    """Each number does its part, alone; a 0-dim tensor is the number to the bit."""
    cases = many([(65,), (9, 5), (9, 5), (3, 4, 5)])
    before = copied(cases)
    result = check(graft, cases, adam=adam, **{name: value})
    for dtype in STATE_DTYPES if name == "momentum" else ():
        given = scalar(value, dtype)
        if dtype == torch.float64 or given.item() == value:
            again = copied(before)
            assert_same(graft(again, adam=adam, momentum=given), result)
            assert_identical(again, cases)


def test_momentum_zero_is_the_gradient(graft: Graft, adam: bool) -> None:
    cases = many(SHAPES)
    check(graft, cases, adam=adam, momentum=0.0)
    for c in cases:
        identical(c.momentum, c.grad.to(c.momentum.dtype))


def test_a_plain_sum_of_gradients_has_a_length(graft: Graft) -> None:
    """Momentum 1, which has no average for Adam's."""
    check(graft, many(SHAPES), adam=False, momentum=1.0)


def test_defaults() -> None:
    """A second decay of 0.99 and an eps of 1e-8 where none is given."""
    one = case((9, 5), dtype=torch.float64)
    # So small that eps counts.
    for tensor in (one.momentum, one.grad):
        tensor.mul_(1e-8)
    one.second_moment.mul_(1e-16)
    wanted = one.expected(adam=True, second_decay=0.99, eps=1e-8)
    lists = [one.momentum], [one.grad], [one.factors], 0.9, [one.second_moment]
    (direction,), scales = grafted_directions_(*lists, table([one]))
    one.assert_became(direction, scales[0], wanted)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_a_direction_of_zero_has_scale_zero(graft: Graft, adam: bool, dtype: torch.dtype) -> None:
    """No multiple of it has a length: whatever the other direction's is."""
    cases = [case((9, 5), dtype=dtype) for _ in range(4)]
    cases[1].factors[0].zero_()
    for moment in (cases[2].momentum, cases[2].second_moment, cases[2].grad):
        moment.zero_()
    directions, scales = check(graft, cases, adam=adam)
    assert scales[1] == scales[2] == 0 and scales[0] > 0 and scales[3] > 0
    assert not directions[1].any() and not directions[2].any()
    assert cases[1].momentum.any()


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_elements(graft: Graft, adam: bool, shape: tuple[int, ...], kind: str) -> None:
    cases = [case(shape, kind), case((9, 5), kind)]
    directions, scales = check(graft, cases, adam=adam)
    assert cases[0].momentum.shape == directions[0].shape == shape
    assert scales[0] == 0 and scales[1] > 0


@pytest.mark.parametrize("momentum", [0.1, scalar(0.1)])
def test_empty_lists(graft: Graft, adam: bool, momentum: float | Tensor) -> None:
    directions, scales = graft([], adam=adam, momentum=momentum)
    assert directions == [] and scales.shape == (0,)


def test_list_is_its_entries_one_by_one(graft: Graft, adam: bool) -> None:
    together = many(SHAPES)
    alone = copied(together)
    directions, scales = graft(together, adam=adam)
    for t, one in enumerate(alone):
        assert_same(graft([one], adam=adam), ([directions[t]], scales[t : t + 1]))
    assert_identical(together, alone)


# A product on all threads, elements in chunks, and what is one thread's. (With full factors the
# third would be one thread's beside others and all threads' alone, its sums cut elsewhere.)
LARGE_SHAPES = [(260, 200), (9, 65), (40, 50, 30), (65,)]
LARGE_KINDS = ["full", "full", "diagonal", "full"]


@pytest.mark.parametrize("count", [1, 2])
def test_list_is_its_entries_one_by_one_on_any_threads(
    adam: bool, count: int, threads: Callable[[int], None]
) -> None:
    threads(count)
    together = many(LARGE_SHAPES, LARGE_KINDS)
    alone = copied(together)
    directions, scales = _public(together, adam=adam)
    for t, one in enumerate(alone):
        assert_same(_public([one], adam=adam), ([directions[t]], scales[t : t + 1]))
    assert_identical(together, alone)


def test_scales_are_the_same_on_any_number_of_threads(
    adam: bool, threads: Callable[[int], None]
) -> None:
    """Lengths are summed up in chunks, whoever does them. (Products with full factors are sums
    that are cut elsewhere.)"""
    cases = many([(561, 563), (300, 200), (40, 50, 30), (9,)], ["diagonal"])
    cases[0].grad, cases[2].grad = LAYOUTS["transposed"](cases[0].grad), cases[2].grad[:1, :1]
    cases[2].grad = cases[2].grad.expand(cases[2].momentum.shape)
    cases[1].momentum = LAYOUTS["sliced"](cases[1].momentum)
    wanted = None
    for count in (1, 2, 3):
        threads(count)
        moved = copied(cases)
        result = _public(moved, adam=adam)
        wanted = wanted or (moved, result)
        assert_same(result, wanted[1])
        assert_identical(moved, wanted[0])


def _public(cases: list[Case], *, adam: bool) -> Result:
    return grafted_directions_(
        [c.momentum for c in cases],
        [c.grad for c in cases],
        [c.factors for c in cases],
        NUMBERS["momentum"],
        [c.second_moment for c in cases] if adam else None,
        table(cases) if adam else None,
    )


def test_a_gradient_that_is_not_finite_does_not_disturb_its_neighbours(
    graft: Graft, adam: bool
) -> None:
    cases = [case((9, 5)) for _ in range(3)]
    cases[1].grad[2, 3] = float("nan")
    wanted = [c.expected(adam=adam) for c in cases]
    directions, scales = graft(cases, adam=adam)
    assert cases[1].momentum[2, 3].isnan() and directions[1].isnan().any()
    assert cases[1].momentum.isnan().sum() == 1
    assert cases[1].second_moment.isnan().sum() == int(adam)
    assert scales[1].isnan()
    for t in (0, 2):
        cases[t].assert_became(directions[t], scales[t], wanted[t])


@pytest.mark.parametrize("size", [1e25, 1e-25])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_whose_squares_leave_the_range(graft: Graft, size: float, kind: str) -> None:
    """Of float32: 1e50 is beyond it, 1e-50 below."""
    cases = [case(shape, kind) for shape in SHAPES]
    for c in cases:
        c.momentum.mul_(size)
        c.grad.mul_(size)
    check(graft, cases, adam=False)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_autograd_notices_the_write(graft: Graft, dtype: torch.dtype) -> None:
    one = case((9, 5), dtype=dtype)
    out = torch.zeros(9, 5, dtype=dtype)
    for written in (one.momentum, one.second_moment, out):
        version = written._version
        assert noticed_by_autograd(written, lambda: graft([one], adam=True, out=[out]))
        assert written._version > version


def test_gradients_of_a_graph_are_no_part_of_one(graft: Graft, adam: bool) -> None:
    """As create_graph leaves them."""
    one = case((9, 5))
    wanted = one.expected(adam=adam)
    one.grad = one.grad.requires_grad_() * 1.0
    (direction,), scales = graft([one], adam=adam)
    one.assert_became(direction, scales[0], wanted)
    assert not any(t.requires_grad for t in (one.momentum, one.second_moment, direction, scales))


# Mistakes. Two momenta, (9, 5) float32 with a gradient in bfloat16, and (3,) float64.


def arguments() -> Arguments:
    cases = [
        case((9, 5), grad_dtype=torch.bfloat16),
        case((3,), "full", torch.float64),
    ]
    return {
        "momenta": [c.momentum for c in cases],
        "grads": [c.grad for c in cases],
        "factors": [c.factors for c in cases],
        "second_moments": [c.second_moment for c in cases],
        "counts": table(cases),
        "out": [torch.rand_like(c.momentum) for c in cases],
        **NUMBERS,
    }


def without(*names: str) -> Callable[[Arguments], Arguments]:
    """Makes arguments in which those named are not given."""
    return lambda good: {name: value for name, value in good.items() if name not in names}


def both(*makes: Callable[[Arguments], Arguments]) -> Callable[[Arguments], Arguments]:
    def make(good: Arguments) -> Arguments:
        for change in makes:
            good = change(good)
        return good

    return make


def elsewhere(name: str) -> Callable[[Arguments], Arguments]:
    """All tensors of an argument on the meta device."""

    def make(good: Arguments) -> Arguments:
        def there(entry: Any) -> Any:
            return [there(e) for e in entry] if isinstance(entry, list) else entry.to("meta")

        return {**good, name: there(good[name])}

    return make


COUNTS = torch.ones(2, 2, dtype=torch.float64)
LISTS = ("momenta", "grads", "second_moments", "out")
BAD: list[Mistake] = [
    *(
        mistake
        for name in LISTS
        for mistake in (
            (f"{name} no list", instead(**{name: normal((9, 5))}), TypeError, f"^{name} .*list"),
            (f"{name} a number", instead(**{name: 0.5}), TypeError, f"^{name} .*list.*float"),
            (f"{name} None", replaced(name, 1, None), TypeError, rf"^{name}\[1\] .*None"),
            (
                f"{name} integers",
                replaced(name, 0, torch.ones(9, 5).int()),
                ValueError,
                rf"^{name}\[0\] .*int32",
            ),
            (
                f"{name} sparse",
                replaced(name, 0, normal((9, 5)).to_sparse()),
                ValueError,
                rf"^{name}\[0\] .*sparse_coo",
            ),
            (f"{name} scalar", replaced(name, 1, scalar(1.0)), ValueError, rf"^{name}\[1\] .*mode"),
        )
    ),
    *(
        (f"{what}, no out", both(make, without("out")), error, message)
        for what, make, error, message in (
            (
                "momenta no list",
                instead(momenta=normal((9, 5))),
                TypeError,
                "^momenta .*list of tensors, got Tensor",
            ),
            ("no momenta", instead(momenta=None), TypeError, "^momenta .*list.*None"),
            ("momentum None", replaced("momenta", 1, None), TypeError, r"^momenta\[1\] .*None"),
            (
                "momentum sparse",
                replaced("momenta", 0, normal((9, 5)).to_sparse()),
                ValueError,
                r"^momenta\[0\] .*sparse_coo",
            ),
            (
                "momentum of integers",
                replaced("momenta", 0, torch.ones(9, 5).int()),
                ValueError,
                r"^momenta\[0\] .*int32",
            ),
        )
    ),
    *(
        (f"too few {name}", first_only(name), ValueError, rf"^{name} .*momenta \(2\), got 1")
        for name in ("grads", "factors", "second_moments", "out")
    ),
    *(
        (f"empty {name}", instead(**{name: []}), ValueError, rf"^{name} .*momenta \(2\), got 0")
        for name in ("grads", "factors", "second_moments", "out")
    ),
    (
        "empty second moments and counts",
        instead(second_moments=[], counts=COUNTS[:0]),
        ValueError,
        r"^second_moments .*momenta \(2\), got 0",
    ),
    ("too few momenta", first_only("momenta"), ValueError, r"momenta \(1\), got 2"),
    *(
        (f"{name} elsewhere", elsewhere(name), ValueError, rf"^{name} .*cpu.*meta")
        for name in ("grads", "factors", "second_moments", "out", "counts")
    ),
    ("momenta elsewhere", elsewhere("momenta"), ValueError, "^grads .*meta.*cpu"),
    (
        "grads shape",
        replaced("grads", 0, normal((5, 9))),
        ValueError,
        r"^grads\[0\] must have the shape of momenta\[0\], \(9, 5\), got \(5, 9\)",
    ),
    (
        "half momentum",
        replaced("momenta", 0, normal((9, 5), torch.bfloat16)),
        ValueError,
        r"^momenta\[0\] must be float32 or float64, got torch.bfloat16",
    ),
    *(
        mistake
        for name in ("second_moments", "out")
        for mistake in (
            (
                f"{name} shape",
                replaced(name, 0, normal((5, 9))),
                ValueError,
                rf"^{name}\[0\] must be like momenta\[0\], \(9, 5\) torch.float32, got \(5, 9\) ",
            ),
            (
                f"half {name}",
                replaced(name, 0, normal((9, 5), torch.bfloat16)),
                ValueError,
                rf"^{name}\[0\] must be like momenta\[0\], .*got \(9, 5\) torch.bfloat16",
            ),
            (
                f"single {name}",
                replaced(name, 1, normal((3,))),
                ValueError,
                rf"^{name}\[1\] must be like momenta\[1\], .*float64, got \(3,\) torch.float32",
            ),
        )
    ),
    *(
        (
            f"{name} expanded: several entries in one place",
            replaced(name, 1, normal((1,), torch.float64).expand(3)),
            ValueError,
            rf"^{name}\[1\] must have memory of its own",
        )
        for name in ("momenta", "second_moments", "out")
    ),
    (
        "out not contiguous",
        replaced("out", 0, normal((5, 9)).mT),
        ValueError,
        r"^out\[0\] must be contiguous, got \(1, 9\)",
    ),
    ("no modes", replaced("factors", 1, []), ValueError, r"^factors\[1\] .* 1 modes .*got 0"),
    (
        "factor size",
        replaced("factors", 0, torch.eye(4), 1),
        ValueError,
        r"^factors\[0\]\[1\] must be \(5, 5\) or \(5,\), got \(4, 4\)",
    ),
    (
        "half factor",
        replaced("factors", 0, torch.eye(5).bfloat16(), 1),
        ValueError,
        r"^factors\[0\]\[1\] must be torch.float32 for a torch.float32 .*got torch.bfloat16",
    ),
    ("only counts", without("second_moments"), ValueError, "^second_moments .*counts .*got counts"),
    (
        "only second moments",
        without("counts"),
        ValueError,
        "^second_moments .*counts .*got second_moments",
    ),
    *(
        (f"counts {what}", instead(counts=counts), ValueError, rf"^counts must be .*{message}")
        for what, counts, message in (
            ("of one", COUNTS[:1], r"\(2, 2\) .*got \(1, 2\)"),
            ("of one moment", COUNTS[:, 0], r"\(2, 2\) .*got \(2,\)"),
            ("of three moments", COUNTS.new_ones(2, 3), r"\(2, 2\) .*got \(2, 3\)"),
            ("single", COUNTS.float(), r"\(2, 2\) torch.float64, got .*float32"),
            ("integers", COUNTS.long(), r"\(2, 2\) torch.float64, got .*int64"),
            ("sparse", COUNTS.to_sparse(), r"\(2, 2\) .*got .*sparse_coo"),
            ("zero", COUNTS.clone().fill_diagonal_(0), "at least 1, got 0$"),
            ("below one", COUNTS - 0.5, "at least 1, got 0.5"),
            ("NaN", COUNTS * float("nan"), "at least 1, got nan"),
        )
    ),
    ("counts a list", instead(counts=[[1.0, 1.0]] * 2), TypeError, "^counts .*tensor, got list"),
    (
        "momentum of no average",
        instead(momentum=1.0),
        ValueError,
        "^momentum must be below 1 .*got 1.0",
    ),
    (
        "momentum of no average, a tensor",
        instead(momentum=scalar(1.0)),
        ValueError,
        r"^momentum must be in \[0, 1\), got 1",
    ),
    *(
        (f"{name} {v}", instead(**{name: v}), ValueError, f"^{name} must be .*got {v}$")
        for name, values in (
            ("second_decay", [-0.1, 1.0, 1.5]),
            ("eps", [-0.1, -1e-8]),
        )
        for v in (*values, float("nan"), float("inf"), float("-inf"))
    ),
    *(
        mistake
        for name in ("second_decay", "eps")
        for mistake in (
            (f"{name} None", instead(**{name: None}), TypeError, f"^{name} must be .*None"),
            (f"{name} text", instead(**{name: "0.5"}), TypeError, f"^{name} must be .*'0.5'"),
            (
                f"{name} a tensor",
                instead(**{name: scalar(0.5)}),
                TypeError,
                f"^{name} must be a number, got a tensor",
            ),
        )
    ),
    *bad_numbers("momentum"),
]


@mistakes(BAD)
def test_mistakes(make: Callable[..., Any], error: Errors, message: str) -> None:
    bad = make(arguments())
    with unchanged(bad), pytest.raises(error, match=message):
        grafted_directions_(**bad)


def test_what_the_mistakes_are_made_of_is_none() -> None:
    for make in (without(), without("out"), without("second_moments", "counts", "out")):
        directions, scales = grafted_directions_(**make(arguments()))
        assert len(directions) == 2 and bool((scales > 0).all())
