"""`whitened_gram_ema_` against the oracle, which forms the Kronecker product of the covariances."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DTYPES, KINDS, identical, mode_statistics, normal, state_dtype, unchanged
from oracle import whitened_gram
from tolerances import FLOAT32_OPERATOR, FLOAT64_OPERATOR
from torch import Tensor

from tnt_kernels import gram_ema_, mode_products, whitened_gram_ema_, whitening

SHAPES = [(1,), (9,), (1, 5), (6, 4), (4, 1, 3), (3, 2, 4), (2, 3, 2, 2)]


def arguments(kind: str, dtype: torch.dtype, layout: str = "contiguous") -> dict[str, Any]:
    """One call of all shapes."""
    torch.manual_seed(3)
    tensors = [normal(shape, dtype) for shape in SHAPES]
    if layout == "permuted":
        tensors = [g.mT.contiguous().mT if g.dim() > 1 else g for g in tensors]
    state = state_dtype(dtype)
    stats, factors = (
        [mode_statistics(shape, kind, state) for shape in SHAPES] for _ in ("stats", "factors")
    )
    return {"stats": stats, "tensors": tensors, "factors": factors, "decay": 0.7}


def matrix(mode: Tensor) -> Tensor:
    """A full or a diagonal mode as a float64 matrix."""
    return torch.diag(mode.double()) if mode.dim() == 1 else mode.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
def test_it_is_the_oracle(kind: str, dtype: torch.dtype, layout: str) -> None:
    given = arguments(kind, dtype, layout)
    before = [[s.clone() for s in row] for row in given["stats"]]
    whitened_gram_ema_(**given)
    tolerance = FLOAT64_OPERATOR if dtype == torch.float64 else FLOAT32_OPERATOR
    for row, old, g, factors in zip(
        given["stats"], before, given["tensors"], given["factors"], strict=True
    ):
        covariances = [torch.linalg.inv(matrix(a)) for a in factors]
        for i, (stat, earlier) in enumerate(zip(row, old, strict=True)):
            gram = whitened_gram(g.double(), covariances, i)
            gram = gram.diagonal() if stat.dim() == 1 else gram
            wanted = 0.7 * earlier.double() + 0.3 * gram
            assert (stat.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
            identical(stat, stat.mT if stat.dim() == 2 else stat)


def test_identities_leave_the_gram_matrices() -> None:
    given = arguments("mixed", torch.float64)
    for row in given["factors"]:
        for a in row:
            a.copy_(torch.eye(len(a)) if a.dim() == 2 else torch.ones(len(a)))
    plain = [[s.clone() for s in row] for row in given["stats"]]
    whitened_gram_ema_(**given)
    gram_ema_(plain, given["tensors"], given["decay"])
    for row, wanted in zip(given["stats"], plain, strict=True):
        torch.testing.assert_close(row, wanted, rtol=FLOAT64_OPERATOR, atol=0)


def test_alternating_updates_find_the_covariances() -> None:
    """Of a matrix-normal sample: the likelihood's maximum, which the moments are not."""
    torch.manual_seed(0)
    true = [s @ s for s in mode_statistics((5, 4), "full", torch.float64)]
    roots = [torch.linalg.cholesky(s) for s in true]
    sample = roots[0] @ normal((4000, 5, 4), torch.float64) @ roots[1].mT
    # A whole sample is one more mode, with the identity as its covariance.
    ones = torch.ones(len(sample), dtype=torch.float64)
    stats = [ones.clone(), *(torch.eye(d, dtype=torch.float64) for d in (5, 4))]
    for _ in range(20):
        factors = [ones, *map(torch.linalg.inv, stats[1:])]
        whitened_gram_ema_([stats], [sample], [factors], 0.0)
    for found, wanted in zip(stats[1:], true, strict=True):
        ratio = found / found.trace() - wanted / wanted.trace()
        assert ratio.norm() < 3 / math.sqrt(len(sample)) * float((wanted / wanted.trace()).norm())


def test_a_gradient_of_zero_adds_nothing() -> None:
    stats = [[torch.eye(3), torch.ones(2)]]
    whitened_gram_ema_(stats, [torch.zeros(3, 2)], [[torch.eye(3), torch.ones(2)]], 0.5)
    identical(stats[0][0], 0.5 * torch.eye(3))
    identical(stats[0][1], torch.full((2,), 0.5))


@pytest.mark.parametrize("decay", [1.0, torch.tensor(1.0, dtype=torch.float64)])
def test_decay_1_reads_no_gradient(decay: float | Tensor) -> None:
    given = {**arguments("mixed", torch.float32), "decay": decay}
    given["tensors"] = [torch.full_like(g, math.nan) for g in given["tensors"]]
    before = [[s.clone() for s in row] for row in given["stats"]]
    whitened_gram_ema_(**given)
    for row, wanted in zip(given["stats"], before, strict=True):
        for stat, earlier in zip(row, wanted, strict=True):
            identical(stat, earlier)


def test_empty_lists_and_tensors() -> None:
    whitened_gram_ema_([], [], [], 0.5)
    stats = [[torch.zeros(0, 0), torch.eye(2)]]
    whitened_gram_ema_(stats, [torch.zeros(0, 2)], [[torch.zeros(0, 0), torch.eye(2)]], 0.5)
    identical(stats[0][1], 0.5 * torch.eye(2))


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "stats": (lambda a: a["stats"][3].__setitem__(0, torch.eye(5)), r"stats\[3\]\[0\]"),
    "factors": (lambda a: a["factors"][3].__setitem__(1, torch.eye(4).double()), r"factors\[3\]"),
    "modes": (lambda a: a["factors"][4].pop(), r"factors\[4\]"),
    "tensors": (lambda a: a["tensors"].__setitem__(1, torch.ones(9).int()), r"tensors\[1\]"),
    "decay": (lambda a: a.update(decay=1.5), "decay must be in"),
    "overlap": (lambda a: a["factors"].__setitem__(3, a["stats"][3]), "stats"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_change_nothing(mistake: str) -> None:
    given = arguments("full", torch.float32)
    change, message = MISTAKES[mistake]
    change(given)
    flat = [s for row in given["stats"] for s in row]
    with unchanged(*flat), pytest.raises(ValueError, match=message):
        whitened_gram_ema_(**given)


def test_neither_autocast_nor_a_failure_halfway_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, given = arguments("full", torch.float32), arguments("full", torch.float32)
    whitened_gram_ema_(**wanted)
    with torch.autocast("cpu", torch.bfloat16):
        whitened_gram_ema_(**given)
    for row, exact in zip(given["stats"], wanted["stats"], strict=True):
        assert all(map(torch.equal, row, exact))

    calls = itertools.count()

    def fails_at_the_second_mode(*arguments: Any) -> list[Tensor]:
        if next(calls):
            raise MemoryError
        return mode_products(*arguments)

    monkeypatch.setattr(whitening, "mode_products", fails_at_the_second_mode)
    flat = [s for row in given["stats"] for s in row]
    with unchanged(*flat), pytest.raises(MemoryError):
        whitened_gram_ema_(**given)
