"""Exponents are fitted to the right points, and states have the bytes of Table 2."""

import pytest

from bench import complexity
from bench.complexity import MEMORY, SWEEPS, counted, fitted


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda s: f"{s.part} {s.variable} {s.k}")
def test_a_time_of_the_predicted_order_agrees(sweep: complexity.Sweep) -> None:
    times = [1e-9 * sweep.abscissa(value) ** sweep.predicted for value in sweep.values]
    # The fixed cost of a call hides the small sizes, and rates still climb below the fitted range.
    times = [max(time, times[0] * 50) for time in times]
    row = fitted(sweep, times)
    used = row["fitted_values"]
    assert min(used) >= sweep.fit_from and len(used) >= 3
    assert row["fitted"] == pytest.approx(sweep.predicted)


def test_a_fit_leaves_out_small_sizes() -> None:
    """Those whose time is mostly a call's fixed cost, and those below the fitted range."""
    sweep = complexity.Sweep(**{**vars(SWEEPS[0]), "values": (1, 2, 4, 8, 16, 32), "fit_from": 1})
    assert fitted(sweep, [1.0, 2.9, 4.0, 8.0, 16.0, 32.0])["fitted_values"] == [4, 8, 16, 32]
    later = complexity.Sweep(**{**vars(sweep), "fit_from": 16})
    row = fitted(later, [1.0, 2.9, 4.0, 8.0, 16.0, 32.0])
    assert row["fitted_values"] == [16, 32] and row["fitted"] is None


@pytest.mark.parametrize(("method", "k"), MEMORY)
def test_states_have_the_bytes_of_table_2(method: str, k: int) -> None:
    row = counted(method, k)
    assert row["bytes"] == row["formula_bytes"]
    # Two matrices of 8 x 8 for each mode, or one number for each parameter, in float32.
    assert row["bytes"][-1] == 4 * (8**k if method == "Adam" else k * 2 * 8 * 8)
