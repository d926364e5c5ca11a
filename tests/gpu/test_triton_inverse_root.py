"""inverse_root's Triton launcher: against eigenvalues, and what its kernels do to each matrix."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import triton_operators
from cases import (
    EMPTY_SHAPES,
    GPU,
    KINDS,
    LAYOUTS,
    STATE_DTYPES,
    bad_statistics,
    close,
    dense,
    flat,
    identical,
    inverse_power,
    like_stat,
    mode_statistics,
    normal,
    poisoned_like,
    scalar,
    statistic,
    unchanged,
)
from oracle import contraction
from tolerances import FLOAT32_OPERATOR, NEWTON_OPERATOR
from torch import Tensor

from tnt_kernels import reference
from tnt_kernels.triton import inverse_root, launch, newton

# The interpreter's numbers overflow and become NaN with a warning, a GPU's do not.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

DAMPING = 0.1
# Of one tile and of several, the last of them of every fullness.
SHAPES = [(1,), (33, 9), (65,), (31,)]
ROOTS = [2, 6, 3, 4]

Row = list[Tensor]


@pytest.fixture(autouse=True, params=[math.nan])
def garbage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory that a call has not written yet holds."""

    def filled(kernel: object, programs: int, *arguments: Tensor, **constants: object) -> None:
        if kernel is newton.begin_kernel:
            arguments[5].fill_(request.param)  # the scratch memory
        launch.launch(kernel, programs, *arguments, **constants)

    monkeypatch.setattr(inverse_root, "launch", filled)


# A root made of it would look like one.
harmless_garbage = pytest.mark.parametrize("garbage", [0.5], indirect=True)


def run(
    stats: Sequence[Row],
    damping: float | Tensor,
    roots: Sequence[int],
    out: Sequence[Row] | None = None,
    programs: int = 1,
) -> tuple[list[Row], list[int]]:
    """Factors and info, of tensors on the CPU."""
    gpu = triton_operators.OnGpu()
    out = [poisoned_like(row) for row in stats] if out is None else out
    orders = [len(row) for row in stats]
    eps = damping if isinstance(damping, Tensor) else scalar(damping)
    with unchanged(stats, eps):
        info = inverse_root.inverse_root(
            gpu(flat(out)), gpu(flat(stats)), orders, eps, list(roots), programs=programs
        )
        assert info.dtype == torch.int32 and info.device.type == GPU.type
        gpu.back()
    return [list(row) for row in out], info.tolist()


def expected(stats: Sequence[Tensor], damping: float, root: int) -> Row:
    """The definition in float64, by eigenvalues."""
    damped = [dense(s) + damping * torch.eye(s.shape[0]).double() for s in stats]
    powers = [inverse_power(matrix, -1 / root) for matrix in damped]
    return [like_stat(power, stat) for power, stat in zip(powers, stats, strict=True)]


def assert_good(factors: Row, stats: Row, damping: float, root: int) -> None:
    for factor, stat, value in zip(factors, stats, expected(stats, damping, root), strict=True):
        if factor.dim() == 1:
            close(factor, value, 4 * torch.finfo(stat.dtype).eps)
            continue
        close(factor, value, NEWTON_OPERATOR if stat.dtype == torch.float64 else FLOAT32_OPERATOR)
        identical(factor, factor.mT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_definition(kind: str, dtype: torch.dtype) -> None:
    stats = [mode_statistics(shape, kind, dtype) for shape in SHAPES]
    factors, info = run(stats, DAMPING, ROOTS)
    doubled = [[stat.double() for stat in row] for row in stats]
    wanted, _ = reference.inverse_root(doubled, DAMPING, ROOTS)
    assert info == [0] * len(SHAPES)
    for row, modes, values, root in zip(factors, stats, wanted, ROOTS, strict=True):
        assert_good(row, modes, DAMPING, root)
        for factor, value in zip(row, values, strict=True):
            close(factor, value, NEWTON_OPERATOR if dtype == torch.float64 else FLOAT32_OPERATOR)


def test_several_tiles() -> None:
    stats = [[statistic(130, diagonal=False)]]
    factors, info = run(stats, DAMPING, [2])
    assert info == [0]
    assert_good(factors[0], stats[0], DAMPING, 2)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_small_tiles(dtype: torch.dtype) -> None:
    """As on a device that larger ones would leave idle."""
    stats = [mode_statistics((33,), "full", dtype)]
    factors, info = run(stats, DAMPING, [2], programs=1000)
    assert info == [0]
    assert_good(factors[0], stats[0], DAMPING, 2)


@pytest.mark.parametrize("root", [5, 7, 16])
def test_roots_that_take_every_buffer(root: int) -> None:
    stats = [mode_statistics((9,), "full")]
    factors, info = run(stats, 1.0, [root])
    assert info == [0]
    assert_good(factors[0], stats[0], 1.0, root)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("root", [1, 4])
def test_units(scale: float, root: int) -> None:
    """Squares of the entries are out of float32's range."""
    stats = [[scale * stat for stat in mode_statistics((9, 33), "mixed")] for _ in range(2)]
    stats[1].reverse()
    factors, info = run(stats, DAMPING * scale, [root, root])
    assert info == [0, 0]
    for row, modes in zip(factors, stats, strict=True):
        assert_good(row, modes, DAMPING * scale, root)


def _negated_in_place(stat: Tensor) -> Tensor:
    return torch._neg_view(-stat)


@pytest.mark.parametrize(
    "lay", [LAYOUTS["sliced"], LAYOUTS["transposed"], LAYOUTS["negated"], _negated_in_place]
)
def test_layouts(lay: Callable[[Tensor], Tensor]) -> None:
    stats = mode_statistics((9, 13, 5), "mixed")
    factors, info = run([[lay(stat) for stat in stats]], DAMPING, [2])
    assert info == [0]
    assert_good(factors[0], stats, DAMPING, 2)


def test_damping_as_a_tensor() -> None:
    stats = [mode_statistics((9, 3), "mixed", dtype) for dtype in STATE_DTYPES]
    wanted, _ = run(stats, 0.25, [2, 2])
    for eps in (scalar(0.25, torch.float32), scalar(0.25).to(GPU)):
        factors, info = run(stats, eps, [2, 2])
        assert info == [0, 0]
        for factor, value in zip(flat(factors), flat(wanted), strict=True):
            identical(factor, value)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_statistics(kind: str) -> None:
    """eps^(-1/p) I, also where a mode, or the tensor, has no elements."""
    shapes = [*EMPTY_SHAPES, (3,)]
    stats = [[torch.zeros_like(s) for s in mode_statistics(shape, kind)] for shape in shapes]
    factors, info = run(stats, DAMPING, [2] * len(shapes))
    assert info == [0] * len(shapes)
    for row in factors:
        for factor in row:
            identity = torch.eye(len(factor)).double()
            close(factor, like_stat(DAMPING**-0.5 * identity, factor))


@pytest.mark.parametrize("damping", [scalar(DAMPING), scalar(DAMPING, torch.float32)])
def test_empty_lists(damping: Tensor) -> None:
    info = inverse_root.inverse_root([], [], [], damping.to(GPU), [])
    assert info.dtype == torch.int32 and info.shape == (0,) and info.device.type == GPU.type


@pytest.mark.parametrize(("dtype", "damping"), [(torch.float32, 1e-2), (torch.float64, 1e-3)])
def test_gram_matrices_of_one_gradient(dtype: torch.dtype, damping: float) -> None:
    """Statistics as training makes them, singular for the larger mode."""
    grams = [contraction(normal((7, 3)).double(), i) for i in range(2)]
    stats = [(g.tril() + g.tril(-1).mT).to(dtype) for g in grams]
    (factors,), info = run([stats], damping, [4])
    assert info == [0]
    for factor, value, stat in zip(factors, expected(stats, damping, 4), stats, strict=True):
        condition = 1 + float(torch.linalg.eigvalsh(stat.double())[-1]) / damping
        close(factor, value, NEWTON_OPERATOR + 4 * condition * torch.finfo(dtype).eps)


# Many at once.


def test_list_is_its_entries_one_by_one() -> None:
    roots = [1, 2, 3]
    stats = [mode_statistics((n + 2, 5), "mixed", STATE_DTYPES[n % 2]) for n in range(3)]
    together, _ = run(stats, 1.0, roots)
    again, _ = run(stats, 1.0, roots, [[torch.rand_like(s) for s in row] for row in stats])
    for row, same, modes, root in zip(together, again, stats, roots, strict=True):
        (alone,), _ = run([modes], 1.0, [root])
        for actual, twice, wanted in zip(row, same, alone, strict=True):
            identical(actual, wanted)
            identical(twice, wanted)


def test_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor after the other, in the scratch memory that the largest of them needs."""
    stats = [[statistic(9, diagonal=True), statistic(n + 2, diagonal=False)] for n in range(3)]
    stats[1][0] *= -1
    roots = (2, 2, 3)
    arguments = launch.layouts(flat(stats)), (2, 2, 2), roots, GPU, 1
    inverse_root.plan.cache_clear()
    wanted, codes = run(stats, 1.0, roots)
    together = inverse_root.plan(*arguments)
    assert len(together.waves) == 1
    monkeypatch.setattr(inverse_root, "SCRATCH_BYTES", 1)
    inverse_root.plan.cache_clear()
    factors, info = run(stats, 1.0, roots)
    apart = inverse_root.plan(*arguments)
    inverse_root.plan.cache_clear()
    # Rows of 4 numbers; five buffers, six for the third root.
    assert len(apart.waves) == 3 and apart.scratch == 6 * 4 * 4 * 4
    assert together.scratch == apart.scratch + 5 * (2 + 3) * 4 * 4
    assert info == codes == [0, 1, 0]
    for factor, value in zip(flat(factors), flat(wanted), strict=True):
        identical(factor, value)


# What has no root.


@harmless_garbage
@bad_statistics
def test_failures(kind: str, mode: int, spoil: Callable[[Tensor], Tensor]) -> None:
    """``info`` names the mode, ``out`` keeps what it held, and the neighbours do not notice."""
    stats = [[statistic(2, diagonal=kind == "diagonal" or t < 2)] for t in range(3)]
    # The modes before the spoiled one are full, and good.
    stats[1] = [
        statistic(3 if i == mode else 1, diagonal=kind == "diagonal" or i > mode) for i in range(3)
    ]
    stats[1][mode] = spoil(stats[1][mode])
    out = [[torch.rand_like(stat) for stat in row] for row in stats]
    before = [target.clone() for target in out[1]]
    factors, info = run(stats, 3.0, [1, 1, 1], out)
    assert info == [0, mode + 1, 0]
    for target, old in zip(out[1], before, strict=True):
        identical(target, old)
    for t in (0, 2):
        assert_good(factors[t], stats[t], 3.0, 1)


@pytest.mark.parametrize(("spoiled", "first"), [([0, 2], 0), ([1, 2], 1), ([2], 2)])
def test_first_failure_counts(spoiled: list[int], first: int) -> None:
    stats = mode_statistics((5, 9, 3), "mixed")
    for mode in spoiled:
        stats[mode] = stats[mode] * -1
    assert run([stats], DAMPING, [2])[1] == [first + 1]


@pytest.mark.parametrize("eigenvalue", [-1e-3, -0.3, -2.0])
def test_one_negative_eigenvalue(eigenvalue: float) -> None:
    """However small, it is no root of anything: the iteration must not end on one that looks it."""
    vectors = torch.linalg.qr(normal((5, 5), torch.float64))[0]
    values = torch.linspace(0.5, 2, 5).double()
    values[0] = eigenvalue - DAMPING
    matrix = vectors @ torch.diag(values) @ vectors.mT
    stat = matrix.tril() + matrix.tril(-1).mT
    roots = [1, 2, 3]
    assert run([[stat.float()]] * 3, DAMPING, roots, [[stat.float()] for _ in roots])[1] == [1] * 3


@harmless_garbage
def test_undamped() -> None:
    """Damping 0 takes the root of what is regular, and says so where it is zero."""
    stats = [[statistic(3, diagonal=n % 2 == 0)] for n in range(4)]
    stats[2][0].zero_()
    stats[3][0].zero_()
    factors, info = run(stats, 0.0, [2] * 4)
    assert info == [0, 0, 1, 1]
    for t in (0, 1):
        assert_good(factors[t], stats[t], 0.0, 2)
    assert all(factor.isnan().all() for factor in flat(factors[2:]))


def test_a_root_out_of_range() -> None:
    """1 / 1e-40 is not a float32."""
    stats = [[torch.full((3,), 1e-40)], [1e-40 * torch.eye(3)]]
    assert run(stats, 0.0, [1, 1])[1] == [1, 1]


def test_autograd_notices_the_write() -> None:
    out = [torch.zeros(3, 3, device=GPU)]
    version = out[0]._version
    inverse_root.inverse_root(out, [torch.eye(3, device=GPU)], [1], scalar(DAMPING), [1])
    assert out[0]._version > version
