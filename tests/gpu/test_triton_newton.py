"""The coupled Newton iteration's kernels: products, decisions, and converged matrices."""

import math
from collections.abc import Sequence

import pytest
import torch
from cases import GPU, STATE_DTYPES, close, identical, normal, scalar, statistic
from torch import Tensor

from tnt_kernels.operators import inverse_root as definition
from tnt_kernels.triton import inverse_root, launch, newton


def run(stats: Sequence[Tensor], damping: float, roots: Sequence[int]) -> list[int]:
    """The info of tensors of one mode."""
    stats = [stat.to(GPU) for stat in stats]
    out, orders = [torch.empty_like(stat) for stat in stats], [1] * len(stats)
    numbers = scalar(damping), list(roots), False
    return inverse_root.inverse_root(out, stats, orders, *numbers).tolist()


@pytest.mark.parametrize("root", range(1, 40))
def test_levels_make_the_products(root: int) -> None:
    """With numbers in place of matrices. No product reads what its own level writes."""
    m, n, h = 3.0, 1.25, 7.0
    values = {newton.M.value: m, newton.N.value: n, newton.H.value: h}
    made = inverse_root.levels(root)
    for level in made:
        operands = {name for product in level for name in product[:2]}
        targets = [product.target for product in level]
        assert not operands & set(targets) and len(set(targets)) == len(targets)
        assert max(targets) < inverse_root.buffers(root) <= 6
        assert not {newton.M.value, newton.H.value} & set(targets)
        values |= {to: values[first] * values[second] for first, second, to in level}
    assert math.isclose(values[newton.NEXT_M.value], n**root * m)
    assert math.isclose(values[newton.NEXT_H.value], h * n)
    assert newton.NEXT_M.value in {product.target for product in made[-1]}
    assert len(made) == root.bit_length()


def bits(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    return torch.tensor(values, dtype=dtype).view(integer).long()


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_decisions(dtype: torch.dtype) -> None:
    """(error, next error) -> (accepted, done, error).

    NaN ends it, and growth by more than 1.2.
    """
    nan, inf = math.nan, math.inf
    cases = [
        ((0.5, 0.25), (True, False, 0.25)),
        ((0.5, 0.59), (True, False, 0.59)),
        ((0.5, 0.61), (False, True, 0.5)),
        ((0.5, inf), (False, True, 0.5)),
        ((0.5, nan), (True, True, nan)),
        ((1e-3, 2e-6), (True, False, 2e-6)),
        ((1e-3, 9e-7), (True, True, 9e-7)),
        ((0.5, 0.0), (True, True, 0.0)),
    ]
    states = torch.zeros(len(cases) + 1, newton.STATE_FIELDS.value, dtype=torch.int64)
    before, after = zip(*(pair for pair, _ in cases), strict=True)
    states[:-1, newton.ERROR.value] = bits(before, torch.float64)
    states[:-1, newton.NEXT_ERROR.value] = bits(after, dtype)
    states[1::2, newton.CURRENT.value] = 1
    states[-1, newton.DONE.value] = 1
    decided = states.clone().to(GPU)
    element = launch.ELEMENTS[dtype]
    launch.launch(newton.decide_kernel, len(states), decided, STATE=element, MAY_GROW=False)
    decided = decided.cpu()
    identical(decided[-1], states[-1])  # a converged matrix keeps its state
    for row, old, (_, (accepted, done, error)) in zip(decided, states, cases, strict=False):
        flipped = row[newton.CURRENT.value] != old[newton.CURRENT.value]
        assert (bool(flipped), bool(row[newton.DONE.value])) == (accepted, done)
        kept = row[newton.ERROR.value].clone().view(torch.float64)
        close(kept.nan_to_num(nan=7.0), torch.tensor(7.0 if math.isnan(error) else error), 1e-6)
        assert row[newton.NEXT_ERROR.value] == 0

    first = states.clone()
    first[:, newton.ERROR.value] = 0
    first = first.to(GPU)
    launch.launch(newton.decide_kernel, len(cases), first, STATE=element, MAY_GROW=True)
    flips = first[:-1, newton.CURRENT.value].cpu() != states[:-1, newton.CURRENT.value]
    assert flips.all()  # there is no previous iterate to keep


def test_limits_are_those_of_the_definition() -> None:
    assert inverse_root.ITERATIONS == definition.NEWTON_ITERATIONS
    assert newton.TOLERANCE.value == definition.NEWTON_TOLERANCE
    assert newton.GROWTH.value == definition.NEWTON_GROWTH
    assert newton.CONVERGED.value == definition.NEWTON_CONVERGED
    assert newton.TRACE.value == definition.NEWTON_TRACE


class Launches:
    """Records launches, and checks that products leave converged matrices alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: list[object] = []
        self.spared = 0
        monkeypatch.setattr(inverse_root, "launch", self._launch)

    def _launch(
        self, kernel: object, programs: int, *arguments: Tensor, **constants: object
    ) -> None:
        if programs:
            self.kernels.append(kernel)
        if kernel is not newton.product_kernel:
            launch.launch(kernel, programs, *arguments, **constants)
            return
        _, matrices, states, scratch = arguments
        before = scratch.clone()
        launch.launch(kernel, programs, *arguments, **constants)
        starts = matrices[newton.START.value :: newton.MATRIX_FIELDS.value].tolist()
        for n, (start, end) in enumerate(zip(starts, [*starts[1:], len(scratch)], strict=True)):
            same = torch.equal(bytes_of(scratch[start:end]), bytes_of(before[start:end]))
            if states[n, newton.DONE.value]:
                assert same
                self.spared += 1
            else:
                assert not same


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def test_converged_matrices_are_left_alone(launches: Launches) -> None:
    """The first matrix takes one iteration, the other ten."""
    stats = [torch.eye(1), statistic(9, diagonal=False)]
    assert run(stats, 0.1, [1, 1]) == [0, 0]
    assert launches.spared >= 5


def test_growth_stops_the_iteration(launches: Launches) -> None:
    """A matrix that is singular in float32: max|M - I| stays above 0.5, and finally grows."""
    x = normal((5, 2))
    gram = x @ x.mT
    assert run([gram.tril() + gram.tril(-1).mT], 1e-7, [4]) == [1]
    if GPU.type == "cpu":  # a GPU runs iterations until the host sees that all converged
        assert 10 < launches.kernels.count(newton.decide_kernel) < 30


@pytest.mark.parametrize("root", [1, 7])
def test_the_error_is_the_next_iterates(monkeypatch: pytest.MonkeyPatch, root: int) -> None:
    """Not the error of an intermediate product in the same buffer."""
    errors = []

    def look(kernel: object, programs: int, *arguments: Tensor, **constants: object) -> None:
        launch.launch(kernel, programs, *arguments, **constants)
        if kernel is newton.product_kernel and constants["LAST"]:
            _, matrices, states, scratch = (argument.cpu() for argument in arguments)
            if states[0, newton.DONE.value]:  # a GPU runs iterations until the host sees it
                return
            rows, stride = matrices[newton.ROWS.value], matrices[newton.STRIDE.value]
            first = (1 - states[0, newton.CURRENT.value]) * rows * stride
            following = scratch[first : first + rows * stride].view(rows, stride)[:, :rows]
            wanted = (following - torch.eye(int(rows))).abs().max()
            errors.append((states[:1, newton.NEXT_ERROR.value].int().view(torch.float32), wanted))

    monkeypatch.setattr(inverse_root, "launch", look)
    assert run([statistic(5, diagonal=False)], 1.0, [root]) == [0]
    assert len(errors) >= 3
    for actual, wanted in errors:
        identical(actual[0], wanted)


@pytest.mark.parametrize(("root", "levels"), [(2, 2), (4, 3), (6, 3)])
def test_launches_do_not_depend_on_the_number_of_tensors(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, root: int, levels: int
) -> None:
    monkeypatch.setattr(inverse_root, "ITERATIONS", 2)
    counts = []
    for tensors in (1, 3):
        launches.kernels.clear()
        stats = [statistic(3, diagonal=False) for _ in range(tensors)]
        run(stats, 0.1, [root] * tensors)
        counts.append(len(launches.kernels))
    # Damping, measure, begin, decide; the iterations; check, judge, store.
    assert counts == [4 + 2 * (levels + 1) + 3] * 2
