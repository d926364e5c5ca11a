"""damped_inverse's Triton launcher: panels, strips, workspace in waves, launches.

tests/gpu/test_contract.py has what it shares with every other implementation.
"""

import pytest
import torch
import triton_operators
from cases import GPU, STATE_DTYPES, identical
from operators import Call, Results, agree, call, everything

from tnt_kernels import reference
from tnt_kernels.triton import damped_inverse, factors, launch


def run(given: Call, programs: int = triton_operators.PROGRAMS) -> Results:
    return given.with_arguments(programs=programs)(triton_operators)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_panels(dtype: torch.dtype) -> None:
    """One row more or less than whole tiles, of 64 rows or 32."""
    sizes = [(n,) for n in (31, 32, 33, 63, 64, 65, 128, 129)]
    given = call("damped_inverse", sizes, "full", dtype)
    agree(run(given), given.double()(reference), given)


def test_results_do_not_depend_on_the_strips() -> None:
    """One program takes several tiles where there are more tiles than programs at once."""
    given = call("damped_inverse", [(200, 3), (70,)], "full")
    lengths = [damped_inverse._length(tiles=14, programs=n) for n in (1, 1000)]
    assert lengths == [8, 1]
    wanted = run(given.copy(), programs=1000)
    for a, b in zip(everything(run(given, programs=1)), everything(wanted), strict=True):
        identical(a, b)


def test_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little workspace, what the largest tensor needs; failures stay where they are."""
    given = call("damped_inverse", [(9, 70), (200,), (5,), (130, 3)], "full")
    given.arguments["stats"][1][0][150, 150] = -1.0
    layouts = launch.layouts([s for row in given.arguments["stats"] for s in row])
    arguments = layouts, (2, 1, 1, 2), GPU, 1
    launch._plans.clear()
    wanted = run(given.copy())
    together = damped_inverse.plan(*arguments)
    monkeypatch.setattr(factors, "SCRATCH_BYTES", 1)
    launch._plans.clear()
    results = run(given)
    in_waves = damped_inverse.plan(*arguments)
    launch._plans.clear()
    # A triangle, a panel and a corner: 3, 6, 15, 3, 10 and 3 tiles of 64 x 64 numbers.
    assert len(together.waves) == 1 and together.scratch == 40 * 64 * 64 * 4
    assert len(in_waves.waves) == 3 and in_waves.scratch == 15 * 64 * 64 * 4
    assert results["info"].tolist() == [0, 1, 0, 0]
    for a, b in zip(everything(results), everything(wanted), strict=True):
        identical(a, b)


def test_launches_do_not_grow_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each panel of the largest matrix but the last, and seven, two of them empty here."""
    launches: list[int] = []
    monkeypatch.setattr(
        damped_inverse, "launch", lambda kernel, programs, *_, **__: launches.append(programs)
    )
    for count in (1, 5):
        launches.clear()
        run(call("damped_inverse", [(150, 3)] * count, "full"))
        assert sum(programs > 0 for programs in launches) == 5 + 2 * 3 - 1
