"""preconditioned_step_: momentum, product with the factors, decay and update in one."""

from collections.abc import Callable
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
    state_dtype,
    unchanged,
)
from oracle import mode_product
from tolerances import FLOAT32_OPERATOR
from torch import Tensor, nn

from tnt_kernels import preconditioned_step_, reference

pytestmark = pytest.mark.usefixtures("one_thread")

Step = Callable[..., None]

# A large alpha, so that an error of the direction is one of the parameters.
NUMBERS = {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.1}


@dataclass
class Case:
    """One parameter with what moves it."""

    param: Tensor
    momentum: Tensor
    grad: Tensor
    factors: list[Tensor]

    def expected(
        self, lr: float = 0.7, momentum: float = 0.9, weight_decay: float = 0.1
    ) -> tuple[Tensor, Tensor]:
        """The definition in float64: the parameter and the momentum after a step."""
        m = momentum * self.momentum.double() + self.grad.double()
        direction = m
        for i, factor in enumerate(self.factors):
            direction = mode_product(direction, dense(factor), i)
        weight = self.param.detach().double()
        return weight - lr * (direction + weight_decay * weight), m

    def assert_became(self, wanted: tuple[Tensor, Tensor]) -> None:
        weight, m = wanted
        assert self.momentum.dtype == state_dtype(self.param.dtype)
        close(self.momentum, m)
        if self.param.dtype in STATE_DTYPES:
            close(self.param.detach(), weight)
        else:
            assert_rounded_once(self.param.detach(), weight)


def assert_rounded_once(actual: Tensor, exact: Tensor) -> None:
    """Half a spacing of the dtype, which a second rounding on the way would exceed somewhere."""
    if exact.numel() == 0:
        return
    _, exponent = torch.frexp(exact)
    half_spacing = torch.finfo(actual.dtype).eps / 4 * 2.0 ** exponent.double()
    allowed = half_spacing + FLOAT32_OPERATOR * exact.abs().max()
    assert ((actual.double() - exact).abs() <= allowed).all()


def case(
    shape: tuple[int, ...],
    kind: str = "mixed",
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
) -> Case:
    return Case(
        normal(shape, dtype),
        normal(shape, state_dtype(dtype)),
        normal(shape, grad_dtype or dtype),
        mode_statistics(shape, kind, state_dtype(dtype)),
    )


IMPLEMENTATIONS = {
    "C++": preconditioned_step_,
    "Triton": triton_operators.preconditioned_step_,
}


@pytest.fixture(params=list(IMPLEMENTATIONS))
def step(request: pytest.FixtureRequest) -> Step:
    """The operator on given cases; it must leave gradients and factors alone."""

    def step(cases: list[Case], **numbers: float | Tensor) -> None:
        grads, factors = [c.grad for c in cases], [c.factors for c in cases]
        with unchanged(grads, factors, numbers):
            result = IMPLEMENTATIONS[request.param](
                [c.param for c in cases],
                [c.momentum for c in cases],
                grads,
                factors,
                **{**NUMBERS, **numbers},
            )
        assert result is None

    return step


def copied(cases: list[Case]) -> list[Case]:
    return [Case(c.param.clone(), c.momentum.clone(), c.grad, c.factors) for c in cases]


def assert_identical(cases: list[Case], others: list[Case]) -> None:
    for c, other in zip(cases, others, strict=True):
        identical(c.param, other.param)
        identical(c.momentum, other.momentum)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_definition(step: Step, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    one = case(shape, kind, dtype)
    wanted = one.expected()
    step([one])
    one.assert_became(wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_dtypes(step: Step, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """A gradient may have another dtype than its parameter, as in bfloat16 over float32 state."""
    cases = [case(shape, "mixed", dtype, grad_dtype) for shape in SHAPES]
    wanted = [c.expected() for c in cases]
    step(cases)
    for c, values in zip(cases, wanted, strict=True):
        c.assert_became(values)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_is_the_reference(step: Step, dtype: torch.dtype) -> None:
    cases = [case(shape, kind, dtype) for shape in SHAPES for kind in KINDS]
    params = [c.param.double().clone() for c in cases]
    momenta = [c.momentum.double().clone() for c in cases]
    grads = [c.grad.double() for c in cases]
    factors = [[factor.double() for factor in c.factors] for c in cases]
    reference.preconditioned_step_(params, momenta, grads, factors, **NUMBERS)
    step(cases)
    for c, wanted in zip(cases, zip(params, momenta, strict=True), strict=True):
        c.assert_became(wanted)


def test_momentum_accumulates(step: Step) -> None:
    one = case((9, 65), "full", torch.float64)
    for _ in range(3):
        wanted = one.expected()
        step([one])
        one.assert_became(wanted)
        one.grad = normal((9, 65), torch.float64)


@pytest.mark.parametrize("param_layout", WRITABLE_LAYOUTS)
@pytest.mark.parametrize("momentum_layout", WRITABLE_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_of_what_is_written(
    step: Step, param_layout: str, momentum_layout: str, dtype: torch.dtype
) -> None:
    one = case(LAYOUT_SHAPE, "mixed", dtype)
    one.param = LAYOUTS[param_layout](one.param)
    one.momentum = LAYOUTS[momentum_layout](one.momentum)
    beside = {
        name: int(buffer_of(tensor).isnan().sum())
        for name, tensor in (("param", one.param), ("momentum", one.momentum))
    }
    assert (beside["param"] > 0) == (param_layout == "sliced")
    strides = one.param.stride(), one.momentum.stride()
    wanted = one.expected()
    step([one])
    one.assert_became(wanted)
    assert strides == (one.param.stride(), one.momentum.stride())
    assert int(buffer_of(one.param).isnan().sum()) == beside["param"]
    assert int(buffer_of(one.momentum).isnan().sum()) == beside["momentum"]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUT_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_gradients(step: Step, layout: str, dtype: torch.dtype, kind: str) -> None:
    one = case(LAYOUT_SHAPE, kind, dtype)
    one.grad = LAYOUTS[layout](one.grad)
    wanted = one.expected()
    step([one])
    one.assert_became(wanted)


@pytest.mark.parametrize("name", list(NUMBERS))
@pytest.mark.parametrize("value", [0.0, 0.5, 0.3])
def test_numbers(step: Step, name: str, value: float) -> None:
    """Each number does its part, alone; a 0-dim tensor is the number to the bit."""
    cases = [case(shape, "mixed", dtype) for shape in [(65,), (9, 5)] for dtype in DTYPES]
    wanted = [c.expected(**{**NUMBERS, name: value}) for c in cases]
    before = copied(cases)
    step(cases, **{name: value})
    for c, values in zip(cases, wanted, strict=True):
        c.assert_became(values)
    for dtype in STATE_DTYPES:
        given = scalar(value, dtype)
        if dtype == torch.float64 or given.item() == value:
            again = copied(before)
            step(again, **{name: given})
            assert_identical(again, cases)


def test_learning_rate_zero_moves_only_the_momenta(step: Step) -> None:
    cases = [case(shape, "mixed", dtype) for shape in SHAPES for dtype in DTYPES]
    before = copied(cases)
    step(cases, lr=0.0)
    for c, old in zip(cases, before, strict=True):
        identical(c.param, old.param)
        assert not torch.equal(c.momentum, old.momentum)


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_elements(step: Step, shape: tuple[int, ...], kind: str) -> None:
    empty, neighbour = case(shape, kind), case((9, 5), kind)
    wanted = neighbour.expected()
    step([empty, neighbour])
    assert empty.param.shape == empty.momentum.shape == shape
    neighbour.assert_became(wanted)


@pytest.mark.parametrize("lr", [0.1, scalar(0.1)])
def test_empty_lists(step: Step, lr: float | Tensor) -> None:
    step([], lr=lr)


def test_list_is_its_entries_one_by_one(step: Step) -> None:
    together = [case(shape, "mixed", DTYPES[n % len(DTYPES)]) for n, shape in enumerate(SHAPES)]
    alone = copied(together)
    step(together)
    for one in alone:
        step([one])
    assert_identical(together, alone)


def test_a_gradient_that_is_not_finite_does_not_disturb_its_neighbours(step: Step) -> None:
    cases = [case((9, 5)) for _ in range(3)]
    cases[1].grad[2, 3] = float("nan")
    wanted = [c.expected() for c in cases]
    step(cases)
    assert cases[1].momentum[2, 3].isnan() and cases[1].param.isnan().any()
    for t in (0, 2):
        cases[t].assert_became(wanted[t])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autograd_notices_the_write(step: Step, dtype: torch.dtype) -> None:
    one = case((9, 5), dtype=dtype)
    for written in (one.param, one.momentum):
        version = written._version
        assert noticed_by_autograd(written, lambda: step([one]))
        assert written._version > version


def test_leaf_parameters(step: Step) -> None:
    """What an optimizer holds: a leaf that requires a gradient, updated outside the graph."""
    one = case((9, 5))
    wanted = one.expected()
    one.param = nn.Parameter(one.param)
    step([one])
    one.assert_became(wanted)
    assert one.param.is_leaf and one.param.requires_grad and one.param.grad is None
    assert not one.momentum.requires_grad


# Mistakes. Two parameters, (9, 5) bfloat16 and (3,) float64.


def arguments() -> Arguments:
    cases = [case((9, 5), dtype=torch.bfloat16), case((3,), "full", torch.float64)]
    return {
        "params": [c.param for c in cases],
        "momenta": [c.momentum for c in cases],
        "grads": [c.grad for c in cases],
        "factors": [c.factors for c in cases],
        **NUMBERS,
    }


BAD: list[Mistake] = [
    *(
        mistake
        for name in ("params", "momenta", "grads")
        for mistake in (
            (f"{name} no list", instead(**{name: normal((9, 5))}), TypeError, f"^{name} .*list"),
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
        mistake
        for name in ("momenta", "grads", "factors")
        for mistake in (
            (f"too few {name}", first_only(name), ValueError, rf"^{name} .*params \(2\), got 1"),
            (
                f"{name} elsewhere",
                lambda a, name=name: {
                    **a,
                    name: [
                        [f.to("meta") for f in entry] if name == "factors" else entry.to("meta")
                        for entry in a[name]
                    ],
                },
                ValueError,
                rf"^{name} .*cpu.*meta",
            ),
        )
    ),
    *(
        (
            f"{name} shape",
            replaced(name, 0, normal((5, 9))),
            ValueError,
            rf"^{name}\[0\] must have the shape of params\[0\], \(9, 5\), got \(5, 9\)",
        )
        for name in ("momenta", "grads")
    ),
    ("too few params", first_only("params"), ValueError, r"params \(1\), got 2"),
    (
        "half momentum",
        replaced("momenta", 0, normal((9, 5), torch.bfloat16)),
        ValueError,
        r"^momenta\[0\] must be torch.float32 for a torch.bfloat16 .*got torch.bfloat16",
    ),
    (
        "single momentum",
        replaced("momenta", 1, normal((3,))),
        ValueError,
        r"^momenta\[1\] must be torch.float64 for a torch.float64 .*got torch.float32",
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
        r"^factors\[0\]\[1\] must be torch.float32 for a torch.bfloat16 .*got torch.bfloat16",
    ),
    *(
        (
            f"{name} expanded: several entries in one place",
            replaced(name, 1, normal((1,), torch.float64).expand(3)),
            ValueError,
            rf"^{name}\[1\]",
        )
        for name in ("params", "momenta")
    ),
    *(mistake for name in NUMBERS for mistake in bad_numbers(name)),
]


@mistakes(BAD)
def test_mistakes(make: Callable[..., Any], error: Errors, message: str) -> None:
    bad = make(arguments())
    with unchanged(bad), pytest.raises(error, match=message):
        preconditioned_step_(**bad)
