"""Step times and Table 2: kinds of step, mean steps, state bytes, fitted exponents."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from experiments import step_times, table2
from experiments.models.autoencoder import autoencoder, reconstruction_loss
from experiments.run_files import RunFile, load_runs
from experiments.step_times import STEP_SETS, StepSet, measure_set
from experiments.steps import (
    BOTH,
    INVERSES,
    PLAIN,
    STATISTICS,
    TrainingStep,
    amortised,
    components,
    shares,
    state_bytes,
)
from experiments.table2 import MEMORY, SWEEPS, Sweep, fitted, measure_memory, measure_time

CPU = torch.device("cpu")
WIDTHS = (6, 5, 3, 5, 6)
SIZES = list(zip(WIDTHS[1:], WIDTHS[:-1], strict=True))  # (out, in) of each layer
NUMBERS = sum(out * (columns + 1) for out, columns in SIZES)
# Statistics: out and in of the weight, out of the bias.
MODES = sum(out**2 + columns**2 + out**2 for out, columns in SIZES)
LAYERS = sum(out**2 + (columns + 1) ** 2 for out, columns in SIZES)


def draw(count: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.rand(count, 6, generator=rng)
    return images, images


TINY = StepSet(lambda: autoencoder(WIDTHS), draw, 8, reconstruction_loss, "bernoulli", "kfac")


@pytest.fixture(autouse=True)
def tiny_set(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "busy_share", lambda: 0.0)
    monkeypatch.setitem(STEP_SETS, "mnist_ae", TINY)


@pytest.mark.parametrize("pair", [(1, 1), (1, 20), (10, 100), (2, 3), (3, 2), (7, 1)])
def test_shares_are_those_of_a_period(pair: tuple[int, int]) -> None:
    steps = [(t % pair[0] == 0, t % pair[1] == 0) for t in range(4200)]
    found = shares(*pair)
    assert found == {kind: Fraction(steps.count(kind), 4200) for kind in set(steps)}


def test_a_mean_step_is_the_mean_of_a_period() -> None:
    seconds = {PLAIN: 1.0, STATISTICS: 3.0, INVERSES: 8.0, BOTH: 10.0}
    assert amortised(seconds, shares(1, 20)) == pytest.approx((19 * 3 + 10) / 20)
    assert amortised(seconds, shares(10, 100)) == pytest.approx((90 + 9 * 3 + 10) / 100)
    assert amortised(seconds, shares(3, 2)) == pytest.approx((10 + 3 + 2 * 8 + 2 * 1) / 6)
    assert components(seconds, shares(1, 20)) == pytest.approx(
        {"plain": 1, "statistics": 2, "inverses": 7 / 20}
    )
    assert components(seconds, shares(3, 2)) == pytest.approx(
        {"plain": 1, "statistics": 2 / 3, "inverses": 7 / 2}
    )


@pytest.mark.parametrize("method", ["tnt", "tnt-ef", "shampoo", "kfac"])
def test_a_kind_of_step_changes_what_is_due(method: str) -> None:
    step = TINY.training_step(method, CPU)
    step()
    for kind in (PLAIN, STATISTICS, PLAIN, INVERSES, BOTH, PLAIN):
        before = _matrices(step)
        step.set_due(kind)
        step()
        changed = [not torch.equal(a, b) for a, b in zip(before, _matrices(step), strict=True)]
        assert any(changed) == (kind != PLAIN), kind
        # Statistics and inverses: half of the matrices each.
        assert (sum(changed) > len(changed) // 2) == (kind == BOTH), kind


def _matrices(step: TrainingStep) -> list[torch.Tensor]:
    """Copies of all square matrices in the optimizer's state, of even the smallest size."""
    leaves = tree_leaves(step.optimizer.state_dict()["state"])
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 2]
    return [matrix.clone() for matrix in found if matrix.shape[0] == matrix.shape[1]]


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("sgd", NUMBERS),
        ("adam", 2 * NUMBERS),
        # AdamW has the last layer and the biases, Muon only a momentum.
        ("muon", 2 * NUMBERS - sum(out * columns for out, columns in SIZES[:-1])),
        ("tnt", NUMBERS + 2 * MODES),
        ("tnt-ef", NUMBERS + 2 * MODES),
        ("shampoo", NUMBERS + 2 * MODES),
        ("kfac", NUMBERS + 2 * LAYERS),
        ("kfac-eigen", NUMBERS + 2 * LAYERS + NUMBERS),
    ],
)
def test_bytes_of_the_state(method: str, numbers: int) -> None:
    step = TINY.training_step(method, CPU)
    step()
    assert state_bytes(step.optimizer) == 4 * numbers


def measured(path: Path, methods: tuple[str, ...]) -> list[dict[str, Any]]:
    file = RunFile(path, "step times", {"quick": True})
    measure_set(file, "mnist_ae", methods, CPU, 0.0, 2, 2)
    return file.runs


def test_runs_hold_their_parts_and_only_missing_ones_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.json"
    sgd, often, _ = measured(path, ("sgd", "tnt"))
    assert sgd["ratio"] == 1.0 and often["key"]["inverse_interval"] == 20
    known = {name: kind["median"] for name, kind in often["kinds"].items()}
    expected = 0.95 * known["statistics"] + 0.05 * known["statistics and inverses"]
    assert often["seconds"] == pytest.approx(expected)
    assert sum(often["components"].values()) == pytest.approx(often["seconds"])
    before = load_runs(path)["runs"]
    runs = measured(path, ("sgd", "tnt", "shampoo"))
    assert runs[:3] == before and len(runs) == 5
    monkeypatch.setattr(step_times, "time_kinds", None)  # not called
    assert measured(path, ("sgd", "tnt", "shampoo")) == runs
    assert f"| {often['ratio']:.2f} " in step_times.page(runs)


# Table 2


@pytest.mark.parametrize(("method", "k"), MEMORY)
def test_the_state_is_counted_exactly(method: str, k: int) -> None:
    record = measure_memory(method, k)
    assert record["bytes"] == record["formula_bytes"]
    assert record["fitted"] == pytest.approx(record["predicted"], abs=1e-12)
    assert table2.predicted_bytes("Adam", 5, 3) == 4 * 125
    assert table2.predicted_bytes("TNT", 5, 3) == 4 * 2 * 3 * 25


@pytest.mark.parametrize("over", ["d", "m"])
def test_sweeps_are_timed(over: str) -> None:
    own = Sweep("TNT", 2, BOTH.label, over, "a term", 1, (1, 2, 4), d=3, m=2)
    record = measure_time(own, own.values, 0.0, 2)
    assert record["values"] == [1, 2, 4] and min(record["seconds"]) > 0


def sweep(over: str, predicted: float, fit_from: int = 1) -> Sweep:
    return Sweep("TNT", 2, "plain", over, "a term", predicted, (1, 2, 4, 8, 16, 32), fit_from, d=4)


@pytest.mark.parametrize("power", [1.0, 2.5, 3.0])
def test_a_fit_finds_the_exponent_of_the_excess(power: float) -> None:
    own = sweep("d", power)
    bare = [5e-6 * value for value in own.values]
    times = [1e-5 * v**power + b for v, b in zip(own.values, bare, strict=True)]
    record = fitted(own, own.values, times, bare)
    assert record["fitted"] == pytest.approx(power)
    assert record["fitted_values"][0] > 1 and record["fitted_values"][-1] == 32


def test_a_fit_leaves_out_noise_and_sizes_below_its_range() -> None:
    own = sweep("m", -1)
    record = fitted(own, own.values, [1.0 + 2.0 / value for value in own.values], [1.0] * 6)
    assert record["fitted_values"] == [1, 2, 4, 8, 16], "the last is lost in noise"
    assert record["fitted"] == pytest.approx(-1)
    own = sweep("d", 3, fit_from=16)
    record = fitted(own, own.values, [1e-5 * v**3 for v in own.values], [0.0] * 6)
    assert record["fitted_values"] == [16, 32] and record["fitted"] is None
    for one in SWEEPS:
        assert sum(value >= one.fit_from for value in one.values) >= 3
