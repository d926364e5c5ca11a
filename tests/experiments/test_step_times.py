"""Step times: kinds of step, mean steps, state bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.utils._pytree import tree_leaves

from experiments import step_times
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
)
from tools.measuring.state import state_bytes

CPU = torch.device("cpu")
WIDTHS = (6, 5, 3, 5, 6)
SIZES = list(zip(WIDTHS[1:], WIDTHS[:-1], strict=True))  # (out, in) of each layer
NUMBERS = sum(out * (columns + 1) for out, columns in SIZES)
LAYERS = sum(out**2 + (columns + 1) ** 2 for out, columns in SIZES)


def draw(count: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.rand(count, 6, generator=rng)
    return images, images


TINY = StepSet(lambda: autoencoder(WIDTHS), draw, 8, reconstruction_loss, "bernoulli", "kfac")


@pytest.fixture(autouse=True)
def tiny_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "busy_share", lambda: 0.0)
    monkeypatch.setitem(STEP_SETS, "mnist_ae", TINY)


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
    """Copies of all statistics and factors in the optimizer's state."""
    states = step.optimizer.state_dict()["state"].values()
    leaves = tree_leaves([[state.get("stats"), state.get("factors")] for state in states])
    return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 2]


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        # AdamW has the last layer and the biases, Muon only a momentum.
        ("muon", 2 * NUMBERS - sum(out * columns for out, columns in SIZES[:-1])),
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


def test_sets_that_have_none_of_the_methods_are_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="resnet32: no set has one of kfac"):
        step_times.main(sets="resnet32", optimizer="kfac", out=tmp_path / "times.json")
