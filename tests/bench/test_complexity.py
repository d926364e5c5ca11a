"""Exponents of sweeps are fitted to the right points."""

import pytest
import torch

from bench import complexity
from bench.complexity import SWEEPS, fitted, measured
from tools.measuring.fits import exponent, launch_bound


def test_exponents_are_slopes_of_logarithms() -> None:
    sizes = [16.0, 32.0, 64.0, 128.0]
    assert exponent(sizes, [3 * s**2.5 for s in sizes]) == pytest.approx(2.5)
    assert exponent([1.0, 2.0], [1.0, 2.0]) is None
    assert launch_bound([1.0, 2.9, 3.1]) == [True, True, False]


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda s: f"{s.part} {s.variable} {s.k}")
def test_a_time_of_the_predicted_order_agrees(sweep: complexity.Sweep) -> None:
    times = [1e-9 * sweep.abscissa(value) ** sweep.predicted for value in sweep.values]
    # The fixed cost of a call hides the small sizes, and rates still climb below the fitted range.
    times = [max(time, times[0] * 50) for time in times]
    row = fitted(sweep, times)
    used = [v for v, s in zip(row["values"], row["status"], strict=True) if s == "fitted"]
    assert min(used) >= sweep.fit_from and len(used) >= 3
    assert row["fitted"] == pytest.approx(sweep.predicted)
    assert set(row["status"]) <= {"fitted", "launch-bound", "below the fitted range"}


def test_a_sweep_times_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complexity, "SAMPLE_SECONDS", 1e-4)
    for sweep in SWEEPS:
        small = complexity.Sweep(**{**vars(sweep), "values": sweep.values[:2]})
        row = measured(small, torch.device("cpu"), 0.0)
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert row["fitted"] is None  # two points
