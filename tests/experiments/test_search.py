"""Grid searches: the paper's grids, the rule of choice, runs of different lengths."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from experiments import pool, search
from experiments.methods import Settings
from experiments.search import GRIDS, interior, kept, log_grid, mean_scores, ranked
from experiments.tasks import TASKS, autoencoder_settings

STEADY = autoencoder_settings("digits", "sgd")


def run(settings: Settings, score: float | None) -> dict[str, Any]:
    """A run of a search's file."""
    lost = 3 if score is None else None
    return {
        "key": asdict(settings),
        "final_smoothed_loss": score,
        "diverged_at_step": lost,
        "seconds_per_epoch": 1.0,
        "warm_start_seconds": None,
    }


@pytest.mark.parametrize("optimizer", TASKS["digits"].methods)
def test_the_digits_settings_are_in_the_interior_of_their_grids(optimizer: str) -> None:
    grid, own = GRIDS["digits"][optimizer], autoencoder_settings("digits", optimizer)
    points = 1
    for name, values in grid.items():
        assert getattr(own, name) in values
        points *= len(values)
    assert points == 35 and interior(own, grid)
    assert not interior(replace(own, lr=max(grid["lr"])), grid)


def test_a_setting_that_diverges_from_one_seed_is_out() -> None:
    wild = replace(STEADY, lr=1.0)
    runs = [
        *(run(replace(wild, seed=s), score) for s, score in ((1, 1.0), (2, None))),
        *(run(replace(STEADY, seed=s), score) for s, score in ((1, 4.0), (2, 6.0))),
    ]
    scores = mean_scores(runs)
    assert [(one.lr, scores[one]) for one in ranked(scores)] == [(STEADY.lr, 5.0)]


def test_a_classifier_is_chosen_by_the_best_of_its_epochs() -> None:
    errors = [{"metrics": {"validation_error": error}} for error in (0.5, 0.2, 0.3)]
    record = {**run(STEADY, 7.0), "epochs": errors}
    assert kept(record, "validation_error")["validation_error"] == 0.2
    assert kept(record, "final_smoothed_loss")["final_smoothed_loss"] == 7.0


def test_runs_of_another_length_do_not_count() -> None:
    long, short = replace(STEADY, lr=0.1, seed=1), replace(STEADY, lr=0.2, seed=1, epochs=2)
    runs = [run(long, 1.0), run(short, 2.0)]
    text = "\n".join(search.report(runs, {"sgd": {"lr": (0.1, 0.2)}}, {short: "sgd"}, search.LOSS))
    assert "lr 0.2" in text and "lr 0.1" not in text


def test_the_command_makes_only_what_its_file_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Settings] = []

    def fake(maker: Any, todo: list[Settings], jobs: int) -> Iterator[tuple[Settings, Any]]:
        for one in todo:
            made.append(one)
            yield one, run(one, one.lr + one.seed + (one.damping or 0))

    monkeypatch.setattr(pool, "run_all", fake)
    out = tmp_path / "search.json"
    given: dict[str, Any] = {"optimizer": "sgd,tnt", "seeds": "1,2", "epochs": 2, "out": out}
    search.main("digits", grid=["lr=0.1,0.2,0.3", "damping=0.5"], **given)
    assert len(made) == 2 * 3 * 2, "SGD-m has no damping to search"
    assert "lr 0.1 " in capsys.readouterr().out
    search.main("digits", grid=["lr=0.1,0.4", "damping=0.5"], **given)
    assert [one.lr for one in made[12:]] == [0.4] * 4
    for wrong in (["lr=1", "lr=2"], ["seed=5"], ["optimizer=adam"]):
        with pytest.raises(typer.BadParameter, match="--grid|a setting must be"):
            search.main("digits", grid=wrong, **given)
    wide = ["lr=1,2,3,4,5", "damping=0.5"]
    for points, more in ((2, 2), (2, 0), (4, 2), (9, 1)):
        before = len(made)
        search.main("digits", grid=wide, points=points, **given)
        assert len(made) - before == 2 * 2 * more, "a larger number has the smaller one's points"


def test_the_best_settings_train_again_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Settings] = []

    def fake(maker: Any, todo: list[Settings], jobs: int) -> Iterator[tuple[Settings, Any]]:
        for one in todo:  # the order after nine epochs is the reverse of that after one
            made.append(one)
            lost = 3 if one.lr == 0.01 else None
            yield one, run(one, one.lr / (2 - one.epochs)) | {"diverged_at_step": lost}

    monkeypatch.setattr(pool, "run_all", fake)
    rates = ",".join(str(round(0.01 * number, 2)) for number in range(1, 12))
    given: dict[str, Any] = {"grid": [f"lr={rates}"], "optimizer": "sgd", "seeds": "1,2"}
    search.main("digits", **given, epochs=1, then=9, out=tmp_path / "search.json")
    again = [one for one in made if one.epochs == 9]
    best = [round(0.01 * number, 2) for number in range(2, 10)]
    assert [(one.lr, one.seed) for one in again] == [(lr, seed) for lr in best for seed in (1, 2)]
    assert "lr 0.09 " in capsys.readouterr().out, "the best of those that trained for longer"


def test_the_papers_grids_have_its_steps_and_sizes() -> None:
    paper, networks = GRIDS["mnist"], GRIDS["resnet32"]
    assert paper["sgd"]["lr"] == (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03)
    sizes = {name: tuple(map(len, grid.values())) for name, grid in paper.items()}
    assert sizes["tnt"] == sizes["tnt-ef"] == (9, 6) and sizes["kfac"] == (8, 7)
    assert sizes["shampoo"] == (6, 5) and sizes["adam"] == (7, 3)
    sizes = {name: tuple(map(len, grid.values())) for name, grid in networks.items()}
    assert sizes["tnt"] == (7, 3) and sizes["kfac-eigen"] == (9, 3) and sizes["adam"] == (10, 7)
    assert networks["adam"]["weight_decay"] == (1e-4, 0.001, 0.01, 0.1, 1, 10, 100)
    assert log_grid(1e-3, 1, 4) == (1e-3, 1e-2, 1e-1, 1)
