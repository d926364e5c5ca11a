"""gram_ema_: the moving average of the Gram matrices of a tensor's unfoldings."""

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
    bad_numbers,
    close,
    first_only,
    flat,
    identical,
    instead,
    like_stat,
    mistakes,
    mode_statistics,
    normal,
    noticed_by_autograd,
    poisoned_like,
    replaced,
    scalar,
    state_dtype,
    unchanged,
)
from oracle import contraction
from torch import Tensor

import tnt_kernels
from tnt_kernels import reference

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = float("inf"), float("nan")
DECAY = 0.9


# The C++ kernel serves on the CPU; the Triton kernel and the definition that both are held against
# must keep the same contract.
IMPLEMENTATIONS = {
    "C++": tnt_kernels.gram_ema_,
    "Triton": triton_operators.gram_ema_,
    "reference": reference.gram_ema_,
}
GramEma = Callable[[list[list[Tensor]], list[Tensor], float | Tensor], object]


@pytest.fixture(params=list(IMPLEMENTATIONS))
def gram_ema_(request: pytest.FixtureRequest) -> GramEma:
    return IMPLEMENTATIONS[request.param]


def expected(stats: list[Tensor], tensor: Tensor, decay: float) -> list[Tensor]:
    """The definition in float64, on the tensor as its dtype holds it."""
    old = [stat.double() for stat in stats]
    grams = [contraction(tensor.double(), i) for i in range(tensor.dim())]
    return [
        decay * s + (1 - decay) * like_stat(gram, s) for s, gram in zip(old, grams, strict=True)
    ]


def assert_symmetric(stats: list[Tensor]) -> None:
    for stat in stats:
        if stat.dim() == 2:
            identical(stat, stat.mT)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_definition(
    gram_ema_: GramEma, shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    tensor = normal(shape, dtype)
    stats = mode_statistics(shape, kind, state_dtype(dtype))
    wanted = expected(stats, tensor, DECAY)
    with unchanged(tensor):
        assert gram_ema_([stats], [tensor], DECAY) is None
    for stat, value in zip(stats, wanted, strict=True):
        assert stat.dtype == state_dtype(dtype)
        close(stat, value)
    assert_symmetric(stats)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_is_the_reference(dtype: torch.dtype) -> None:
    """The one that serves against ``reference``, on one list of every shape and kind."""
    rows = [(normal(s, dtype), mode_statistics(s, kind, dtype)) for s in SHAPES for kind in KINDS]
    tensors = [tensor for tensor, _ in rows]
    stats = [row for _, row in rows]
    wanted = [[stat.clone() for stat in row] for row in stats]
    reference.gram_ema_(wanted, tensors, DECAY)
    tnt_kernels.gram_ema_(stats, tensors, DECAY)
    for stat, value in zip(flat(stats), flat(wanted), strict=True):
        close(stat, value)


def test_serves_from_the_extension() -> None:
    """What these tests run is the C++ kernel, not the reference twice."""
    assert tnt_kernels.backends().ops["gram_ema_"]["cpu"] == "C++"


@pytest.mark.parametrize(("layout", "dtype"), LAYOUT_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(gram_ema_: GramEma, layout: str, kind: str, dtype: torch.dtype) -> None:
    tensor = LAYOUTS[layout](normal(LAYOUT_SHAPE, dtype))
    assert (layout == "contiguous") == tensor.is_contiguous()
    stats = mode_statistics(LAYOUT_SHAPE, kind, state_dtype(tensor.dtype))
    wanted = expected(stats, tensor, DECAY)
    with unchanged(tensor):
        gram_ema_([stats], [tensor], DECAY)
    for stat, value in zip(stats, wanted, strict=True):
        close(stat, value)
    assert_symmetric(stats)


@pytest.mark.parametrize("kind", KINDS)
def test_threads(gram_ema_: GramEma, kind: str) -> None:
    """Enough work that it is split among threads, unevenly."""
    torch.set_num_threads(2)
    tensor = normal((65, 9, 301))
    stats = mode_statistics(tensor.shape, kind)
    wanted = expected(stats, tensor, DECAY)
    gram_ema_([stats], [tensor], DECAY)
    for stat, value in zip(stats, wanted, strict=True):
        close(stat, value)
    assert_symmetric(stats)


@pytest.mark.parametrize("decay", [0, 0.0, scalar(0.0), scalar(0.0, torch.float32)])
@pytest.mark.parametrize("kind", KINDS)
def test_decay_zero_does_not_read_the_statistics(
    gram_ema_: GramEma, decay: float | Tensor, kind: str
) -> None:
    for shape in SHAPES:
        tensor, stats = normal(shape), poisoned_like(mode_statistics(shape, kind))
        gram_ema_([stats], [tensor], decay)
        for i, stat in enumerate(stats):
            close(stat, like_stat(contraction(tensor.double(), i), stat))
        assert_symmetric(stats)


@pytest.mark.parametrize("decay", [1, 1.0, scalar(1.0), scalar(1.0, torch.float32)])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
def test_decay_one_does_not_look_at_the_tensor(
    gram_ema_: GramEma, decay: float | Tensor, value: float
) -> None:
    tensors = [normal(shape).fill_(value) for shape in SHAPES]
    stats = [mode_statistics(shape, "mixed") for shape in SHAPES]
    before = [stat.clone() for stat in flat(stats)]
    gram_ema_(stats, tensors, decay)
    for stat, old in zip(flat(stats), before, strict=True):
        identical(stat, old)


@pytest.mark.parametrize("decay", [0.25, 0.9])
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_decay_as_a_tensor(gram_ema_: GramEma, decay: float, dtype: torch.dtype) -> None:
    """A 0-dim float64 tensor is the number to the bit; a float32 one where it holds it exactly."""
    tensors = [normal(shape, dtype) for shape in SHAPES]
    stats = [mode_statistics(shape, "mixed", dtype) for shape in SHAPES]
    held = [d for d in STATE_DTYPES if scalar(decay, d).item() == decay]
    results: list[list[Tensor]] = []
    numbers: list[float | Tensor] = [decay, *(scalar(decay, d) for d in held)]
    for given in numbers:
        copies = [[stat.clone() for stat in row] for row in stats]
        with unchanged(given):
            gram_ema_(copies, tensors, given)
        results.append(flat(copies))
    assert len(results) >= 2
    for result in results[1:]:
        for actual, wanted in zip(result, results[0], strict=True):
            identical(actual, wanted)


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_no_elements(gram_ema_: GramEma, shape: tuple[int, ...], kind: str, decay: float) -> None:
    """The Gram matrix of nothing is zero: the statistics only decay."""
    old = mode_statistics(shape, kind)
    stats = poisoned_like(old) if decay == 0 else [stat.clone() for stat in old]
    gram_ema_([stats], [normal(shape)], decay)
    for stat, before in zip(stats, old, strict=True):
        identical(stat, decay * before)


@pytest.mark.parametrize("decay", [0.5, scalar(0.5)])
def test_empty_lists(gram_ema_: GramEma, decay: float | Tensor) -> None:
    assert gram_ema_([], [], decay) is None


def test_list_is_its_entries_one_by_one(gram_ema_: GramEma) -> None:
    dtypes = [DTYPES[n % len(DTYPES)] for n in range(len(SHAPES))]
    tensors = [normal(shape, dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]
    together = [mode_statistics(t.shape, "mixed", state_dtype(t.dtype)) for t in tensors]
    alone = [[stat.clone() for stat in row] for row in together]
    gram_ema_(together, tensors, DECAY)
    for row, tensor in zip(alone, tensors, strict=True):
        gram_ema_([row], [tensor], DECAY)
    for actual, wanted in zip(flat(together), flat(alone), strict=True):
        identical(actual, wanted)


def test_a_tensor_that_is_not_finite_does_not_disturb_its_neighbours(gram_ema_: GramEma) -> None:
    tensors = [normal((9, 5)), normal((9, 5)).fill_(NAN), normal((9, 5))]
    stats = [mode_statistics((9, 5), "mixed") for _ in tensors]
    wanted = [expected(stats[t], tensors[t], DECAY) for t in (0, 2)]
    gram_ema_(stats, tensors, DECAY)
    for t, values in zip((0, 2), wanted, strict=True):
        for stat, value in zip(stats[t], values, strict=True):
            close(stat, value)
    assert all(stat.diagonal().isnan().all() for stat in stats[1] if stat.dim() == 2)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_autograd_notices_the_write(gram_ema_: GramEma, kind: str, decay: float) -> None:
    stats, tensor = mode_statistics((9, 5), kind), normal((9, 5))
    for stat in stats:
        version = stat._version
        assert noticed_by_autograd(stat, lambda: gram_ema_([stats], [tensor], decay))
        assert stat._version > version


def test_outside_autograd() -> None:
    """Tensors that require a gradient are read, and nothing is recorded."""
    tensor = normal((9, 5)).requires_grad_()
    stats = mode_statistics((9, 5), "full")
    tnt_kernels.gram_ema_([stats], [tensor * 2], DECAY)
    assert not any(stat.requires_grad for stat in stats)


def test_inference_mode(gram_ema_: GramEma) -> None:
    with torch.inference_mode():
        tensor, stats = normal((9, 5)), mode_statistics((9, 5), "mixed")
        wanted = expected(stats, tensor, DECAY)
        gram_ema_([stats], [tensor], DECAY)
        for stat, value in zip(stats, wanted, strict=True):
            close(stat, value)


# Mistakes. Two tensors, (9, 5) float32 and (3,) float64.


def arguments() -> Arguments:
    return {
        "stats": [
            mode_statistics((9, 5), "mixed"),
            mode_statistics((3,), "full", torch.float64),
        ],
        "tensors": [normal((9, 5)), normal((3,), torch.float64)],
        "decay": DECAY,
    }


BAD: list[Mistake] = [
    ("tensor, no list", instead(tensors=normal((9, 5))), TypeError, "tensors .*list"),
    ("number", replaced("tensors", 1, 2.0), TypeError, r"tensors\[1\] .*float"),
    (
        "integers",
        replaced("tensors", 0, torch.ones(9, 5).int()),
        ValueError,
        r"tensors\[0\].*int32",
    ),
    (
        "complex",
        replaced("tensors", 0, torch.ones(9, 5, dtype=torch.complex64)),
        ValueError,
        r"tensors\[0\] .*complex64",
    ),
    ("sparse", replaced("tensors", 0, normal((9, 5)).to_sparse()), ValueError, "sparse_coo"),
    ("scalar", replaced("tensors", 1, scalar(1.0)), ValueError, r"tensors\[1\] .*one mode"),
    ("too few", first_only("stats"), ValueError, r"stats .*\(2\), got 1"),
    ("too many", first_only("tensors"), ValueError, r"stats .*\(1\), got 2"),
    ("row is a tensor", replaced("stats", 1, torch.eye(3)), ValueError, r"stats\[1\] .*one tensor"),
    ("no modes", replaced("stats", 1, []), ValueError, r"stats\[1\] .* 1 modes .*got 0"),
    ("stat is a number", replaced("stats", 0, 1.0, 1), TypeError, r"stats\[0\]\[1\] .*float"),
    (
        "wrong size",
        replaced("stats", 0, torch.eye(4), 1),
        ValueError,
        r"stats\[0\]\[1\] must be \(5, 5\) or \(5,\), got \(4, 4\)",
    ),
    ("diagonal of wrong size", replaced("stats", 0, torch.ones(1), 0), ValueError, r"got \(1,\)"),
    (
        "three dimensions",
        replaced("stats", 0, torch.ones(5, 5, 1), 1),
        ValueError,
        r"stats\[0\]\[1\] .*\(5, 5, 1\)",
    ),
    (
        "float64 for float32",
        replaced("stats", 0, torch.ones(9, dtype=torch.float64), 0),
        ValueError,
        r"stats\[0\]\[0\] must be torch.float32 .*got torch.float64",
    ),
    (
        "float32 for float64",
        replaced("stats", 1, torch.eye(3), 0),
        ValueError,
        r"stats\[1\]\[0\] must be torch.float64 .*got torch.float32",
    ),
    (
        "not contiguous",
        replaced("stats", 0, torch.rand(5, 10)[:, ::2], 1),
        ValueError,
        r"stats\[0\]\[1\] must be contiguous",
    ),
    ("elsewhere", replaced("tensors", 0, torch.ones(9, 5, device="meta")), ValueError, "meta"),
    *bad_numbers("decay", high=1.0),
]


@mistakes(BAD)
def test_mistakes(make: Callable[..., Any], error: Errors, message: str) -> None:
    bad = make(arguments())
    with unchanged(bad), pytest.raises(error, match=message):
        tnt_kernels.gram_ema_(**bad)


# torch.ops.tnt_kernels has no validation but that of csrc/check.h: it must raise, not crash.

BAD_DIRECT: list[tuple[str, list[Tensor], list[Tensor], Tensor, str]] = [
    ("no statistics", [], [torch.ones(3)], scalar(0.5), "stats .*1 entries, got 0"),
    ("too few", [torch.eye(3)], [torch.ones(3, 2)], scalar(0.5), "stats .*2 entries, got 1"),
    ("too many", [torch.eye(3)] * 2, [torch.ones(3)], scalar(0.5), "must have 1 entries, got 2"),
    ("too small", [torch.eye(2)], [torch.ones(3)], scalar(0.5), r"stats\[0\] must be \(3, 3\)"),
    ("too wide", [torch.ones(3, 4)], [torch.ones(3)], scalar(0.5), r"got \[3, 4\]"),
    ("0-dim", [torch.ones(())], [torch.ones(3)], scalar(0.5), r"stats\[0\] .*got \[\]"),
    ("diagonal", [torch.ones(2)], [torch.ones(3)], scalar(0.5), r"stats\[0\] .*got \[2\]"),
    ("float64", [torch.eye(3).double()], [torch.ones(3)], scalar(0.5), r"stats\[0\] .*Float"),
    ("half", [torch.eye(3).half()], [torch.ones(3).half()], scalar(0.5), r"stats\[0\] .*Half"),
    ("strided", [torch.ones(3, 6)[:, ::2]], [torch.ones(3)], scalar(0.5), r"stats\[0\] .*contig"),
    ("integers", [torch.eye(3)], [torch.ones(3).int()], scalar(0.5), r"tensors\[0\] .*Int"),
    ("decay", [torch.eye(3)], [torch.ones(3)], torch.ones(1), r"decay .*0-dim.*\[1\]"),
    (
        "second tensor",
        [torch.eye(3), torch.eye(4)],
        [torch.ones(3), torch.ones(2)],
        scalar(0.5),
        r"stats\[1\] must be \(2, 2\)",
    ),
]


@pytest.mark.parametrize(
    ("stats", "tensors", "decay", "message"),
    [c[1:] for c in BAD_DIRECT],
    ids=[c[0] for c in BAD_DIRECT],
)
def test_direct_mistakes(
    stats: list[Tensor], tensors: list[Tensor], decay: Tensor, message: str
) -> None:
    with unchanged(stats, tensors), pytest.raises(ValueError, match=message):
        torch.ops.tnt_kernels.gram_ema_(stats, tensors, decay)
