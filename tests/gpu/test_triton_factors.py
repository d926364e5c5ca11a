"""The Triton launchers of damped_inverse and inverse_root: tiles, workspace in waves, launches.

tests/gpu/test_contract.py has what they share with every other implementation.
"""

from typing import Any

import pytest
import torch
import triton_operators
from cases import GPU, STATE_DTYPES, statistic
from operators import Call, Results, agree, call, same

from tnt_kernels import reference
from tnt_kernels.triton import damped_inverse, factors, inverse_root, launch


def run(given: Call, programs: int) -> Results:
    return given.with_arguments(programs=programs)(triton_operators)


def with_little_workspace(given: Call, module: Any, arguments: Any) -> tuple[Any, Any, Results]:
    """The plans with much and with little workspace, whose results are the same."""
    launch._plans.clear()
    wanted = given.copy()(triton_operators)
    together = module.plan(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "SCRATCH_BYTES", 1)
        launch._plans.clear()
        results = given(triton_operators)
        in_waves = module.plan(*arguments)
    launch._plans.clear()
    same(results, wanted)
    return together, in_waves, results


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(("at_once", "programs"), [(2, 1), (4, 1), (2, 1000), (8, 1)])
def test_panels_of_inverses(
    dtype: torch.dtype, at_once: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row more or less than whole tiles, of 64 rows or 32; groups of so many panels.

    With few programs at once, updates have large tiles in float32.
    """
    monkeypatch.setattr(damped_inverse, "AT_ONCE", at_once)
    launch._plans.clear()
    sizes = [(n,) for n in (31, 32, 33, 63, 64, 65, 128, 129)]
    if at_once < 8:
        sizes += [(161,), (200,)]
    given = call("damped_inverse", sizes, "full", dtype)
    agree(run(given, programs), given.double()(reference), given)


def test_results_do_not_depend_on_the_strips() -> None:
    """One program takes several tiles where there are more tiles than programs at once."""
    given = call("damped_inverse", [(200, 3), (70,)], "full")
    lengths = [damped_inverse._length(tiles=14, programs=n) for n in (1, 1000)]
    assert lengths == [8, 1]
    wanted = run(given.copy(), 1000)
    same(run(given, 1), wanted)


def test_waves_of_inverses() -> None:
    """With little workspace, what the largest tensor needs; failures stay where they are."""
    given = call("damped_inverse", [(9, 70), (200,), (5,), (130, 3)], "full")
    given.arguments["stats"][1][0][150, 150] = -1.0
    layouts = launch.layouts([s for row in given.arguments["stats"] for s in row])
    arguments = layouts, GPU, 1, (2, 1, 1, 2)
    together, in_waves, results = with_little_workspace(given, damped_inverse, arguments)
    # The matrices have 1, 2, 4, 1, 3 and 1 panels. Each needs tiles of 64 x 64 numbers for a
    # triangle, and for an operand of two parts, with rows for the group's later panels.
    one, two, three, four = (n * (n + 1) // 2 + 2 * n * 2 * n for n in (1, 2, 3, 4))
    assert [wave.scratch for wave in together] == [(3 * one + two + three + four) * 64 * 64 * 4]
    assert len(in_waves) == 3 and in_waves[0].scratch == four * 64 * 64 * 4
    assert results["info"].tolist() == [0, 1, 0, 0]


def test_launches_do_not_grow_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each panel of the largest matrix, and one for every two; and seven, two of them empty
    here.
    """
    monkeypatch.setattr(damped_inverse, "AT_ONCE", 2)
    launch._plans.clear()
    launches: list[int] = []
    monkeypatch.setattr(
        damped_inverse, "launch", lambda kernel, programs, *_, **__: launches.append(programs)
    )
    for count in (1, 5):
        launches.clear()
        call("damped_inverse", [(150, 3)] * count, "full")(triton_operators)
        assert sum(programs > 0 for programs in launches) == 5 + 3 + 2
    launch._plans.clear()


@pytest.mark.parametrize(
    ("size", "dtype", "programs"), [(130, torch.float32, 1), *((33, d, 1000) for d in STATE_DTYPES)]
)
def test_tiles_of_roots(size: int, dtype: torch.dtype, programs: int) -> None:
    """Several; and small ones, as on a device with so many programs that larger ones would leave it
    idle.
    """
    given = call("inverse_root", [(size,)], "full", dtype).with_arguments(root=[2])
    wanted = given.double()(reference)
    agree(run(given, programs), wanted, given)


def test_waves_of_roots() -> None:
    """With little workspace, one tensor after the other, in what the largest of them needs."""
    roots = (2, 2, 3)
    stats = [[statistic(9, diagonal=True), statistic(n + 2, diagonal=False)] for n in range(3)]
    stats[1][0] *= -1
    given = call("inverse_root", [(9, n + 2) for n in range(3)]).with_arguments(
        stats=stats, damping=1.0, root=list(roots)
    )
    flat = [stat for row in stats for stat in row]
    arguments = launch.layouts(flat), GPU, 1, (2, 2, 2), roots
    together, in_waves, results = with_little_workspace(given, inverse_root, arguments)
    # Rows of 4 numbers; five buffers, six for the third root.
    largest = 6 * 4 * 4 * 4
    assert len(in_waves) == 3 and in_waves[0].scratch == largest
    assert [wave.scratch for wave in together] == [largest + 5 * (2 + 3) * 4 * 4]
    assert results["info"].tolist() == [0, 1, 0]
