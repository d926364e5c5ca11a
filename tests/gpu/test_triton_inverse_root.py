"""inverse_root's Triton launcher: tiles, roots, workspace in waves.

tests/gpu/test_contract.py has what it shares with every other implementation.
"""

import pytest
import torch
import triton_operators
from cases import GPU, STATE_DTYPES, identical, statistic
from operators import Call, Results, agree, call, everything

from tnt_kernels import reference
from tnt_kernels.triton import factors, inverse_root, launch


def run(given: Call, programs: int = 1) -> Results:
    return given.with_arguments(programs=programs)(triton_operators)


def check(given: Call, programs: int = 1) -> None:
    wanted = given.double()(reference)
    agree(run(given, programs), wanted, given)


def test_several_tiles() -> None:
    check(call("inverse_root", [(130,)], "full").with_arguments(root=[2]))


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_small_tiles(dtype: torch.dtype) -> None:
    """As on a device with so many programs that larger tiles would leave it idle."""
    check(call("inverse_root", [(33,)], "full", dtype).with_arguments(root=[2]), programs=1000)


def test_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little workspace, one tensor after the other, in what the largest of them needs."""
    roots = (2, 2, 3)
    stats = [[statistic(9, diagonal=True), statistic(n + 2, diagonal=False)] for n in range(3)]
    stats[1][0] *= -1
    given = call("inverse_root", [(9, n + 2) for n in range(3)]).with_arguments(
        stats=stats, damping=1.0, root=list(roots)
    )
    flat = [stat for row in stats for stat in row]
    arguments = launch.layouts(flat), (2, 2, 2), roots, GPU, 1
    launch._plans.clear()
    wanted = run(given.copy())
    together = inverse_root.plan(*arguments)
    assert len(together.waves) == 1
    monkeypatch.setattr(factors, "SCRATCH_BYTES", 1)
    launch._plans.clear()
    results = run(given)
    in_waves = inverse_root.plan(*arguments)
    launch._plans.clear()
    # Rows of 4 numbers; five buffers, six for the third root.
    assert len(in_waves.waves) == 3 and in_waves.scratch == 6 * 4 * 4 * 4
    assert together.scratch == in_waves.scratch + 5 * (2 + 3) * 4 * 4
    assert results["info"].tolist() == [0, 1, 0]
    for a, b in zip(everything(results), everything(wanted), strict=True):
        identical(a, b)
