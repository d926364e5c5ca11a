"""Grid searches: their grids, their file, what they choose."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import search
from experiments.problems import Autoencoder, Problem, load_autoencoder
from experiments.problems.autoencoders import (
    DIGITS_SEARCH,
    OPTIMIZERS,
    autoencoder_settings,
    default_settings,
)
from experiments.runs.run_file import load_runs
from experiments.runs.settings import Settings
from experiments.tuning.experiments import EXPERIMENTS
from experiments.tuning.grids import (
    GRIDS,
    decades,
    grid_of,
    grid_settings,
    interior,
    log_grid,
)
from experiments.tuning.recorded_search import best_of, tried

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny_problem() -> Problem:
    """Sixteen pixels that two numbers explain, 104 times."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(104, 2, generator=generator)
    images = (4 * codes @ torch.randn(2, 16, generator=generator)).sigmoid()
    return Autoencoder("digits", images, (16, 12, 2, 12, 16))


@pytest.fixture
def tiny_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's digits are the tiny problem."""
    experiment = replace(EXPERIMENTS["autoencoder"], maker=lambda _: tiny_problem)
    monkeypatch.setitem(EXPERIMENTS, "autoencoder", experiment)


def run(settings: Settings, score: float | None, **metrics: float) -> dict[str, Any]:
    """A run as it stands in a search's file."""
    return {
        "key": asdict(settings),
        "final_smoothed_loss": score,
        "diverged_at_step": 3 if score is None else None,
        **metrics,
    }


# Grids


def test_the_papers_grids() -> None:
    paper = GRIDS["mnist"]
    assert paper["sgd"]["lr"] == (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03)
    assert paper["adam"]["lr"] == (1e-5, 3e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01)
    assert paper["adam"]["damping"] == (1e-8, 1e-4, 1e-2)
    assert paper["shampoo"]["lr"] == (1e-5, 3e-5, 1e-4, 3e-4, 0.001, 0.003)
    assert paper["shampoo"]["damping"] == (1e-4, 3e-4, 0.001, 0.003, 0.01)
    assert paper["tnt"]["lr"] == (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 0.001)
    assert paper["tnt"]["damping"] == (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    assert paper["kfac"]["lr"] == (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    assert paper["kfac"]["damping"] == (0.01, 0.03, 0.1, 0.3, 1, 3, 10)
    networks = GRIDS["resnet32"]
    assert networks["sgd"]["lr"] == decades(3e-5, 1) and len(networks["sgd"]["lr"]) == 10
    assert networks["sgd"]["weight_decay"] == (0.001, 0.01, 0.1, 1)
    assert networks["adam"]["lr"] == decades(1e-6, 0.03) and len(networks["adam"]["lr"]) == 10
    assert networks["tnt"]["lr"] == (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 0.001)
    assert networks["tnt"]["weight_decay"] == (1, 10, 100)
    assert networks["kfac-eigen"]["lr"] == (
        *(3e-6, 1e-5, 3e-5, 1e-4, 3e-4),
        *(0.001, 0.003, 0.01, 0.03),
    )


def test_a_grid_is_every_pair_and_knows_its_ends() -> None:
    base = autoencoder_settings("digits", "tnt", 1.0, 1.0)
    grid = {"lr": (1e-3, 1e-2, 1e-1), "damping": (0.1, 0.2)}
    points = grid_settings(base, grid)
    assert [(s.lr, s.damping) for s in points] == [
        *((1e-3, 0.1), (1e-3, 0.2), (1e-2, 0.1)),
        *((1e-2, 0.2), (1e-1, 0.1), (1e-1, 0.2)),
    ]
    assert not interior(points[2], grid)
    assert interior(points[2], {"lr": grid["lr"], "damping": (0.1,)})
    assert not interior(points[0], {"lr": grid["lr"]})
    rates = log_grid(1e-3, 1, 4)
    assert rates == (1e-3, 1e-2, 1e-1, 1)


# What is chosen


def test_what_diverges_from_one_start_is_out() -> None:
    steady = autoencoder_settings("digits", "sgd", 0.1, None)
    wild = replace(steady, lr=1.0)
    runs = [
        *(run(replace(wild, seed=s), score) for s, score in ((1, 1.0), (2, None))),
        *(run(replace(steady, seed=s), score) for s, score in ((1, 4.0), (2, 6.0))),
    ]
    best = best_of(tried(runs), "sgd")
    assert (best.settings.lr, best.mean) == (0.1, 5.0)
    with pytest.raises(ValueError, match="no setting of 'sgd' finished, of 1 that"):
        best_of(tried(runs[:2]), "sgd")
    with pytest.raises(ValueError, match="no setting of 'tnt' finished, of 0 that"):
        best_of(tried(runs), "tnt")


def test_a_classifier_is_chosen_by_the_best_of_its_epochs() -> None:
    errors = [{"metrics": {"validation_error": error}} for error in (0.5, 0.2, 0.3)]
    record = {
        "final_smoothed_loss": 7.0,
        "epochs": errors,
        "diverged_at_step": None,
        "seconds_per_epoch": 1.0,
        "warm_start_seconds": None,
    }
    assert search._kept(record, "validation_error")["validation_error"] == 0.2
    assert search._kept(record, "final_smoothed_loss")["final_smoothed_loss"] == 7.0


# The command


def command(out: Path, *more: str) -> list[str]:
    """A search of two rates and two dampings, one epoch from two starts."""
    given = "autoencoder --data digits --lr 1e-4 1e-3 --damping 0.1 0.3 --epochs 1 --batch-size 20"
    return [*given.split(), "--seeds", "1", "2", "--out", str(out), *more]


def test_a_search_goes_on_where_it_stopped(
    tiny_digits: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "search.json"
    calls: list[Settings] = []
    run_all = search.run_all

    def stops(maker: Any, todo: list[Settings], jobs: int, done: Any, device: Any) -> None:
        def counted(settings: Settings, record: dict[str, Any]) -> None:
            if len(calls) == 5:
                raise KeyboardInterrupt
            calls.append(settings)
            done(settings, record)

        run_all(maker, todo, jobs, counted, device)

    with monkeypatch.context() as context:
        context.setattr(search, "run_all", stops)
        with pytest.raises(KeyboardInterrupt):
            search.main(command(out, "--optimizer", "tnt", "sgd"))
    assert len(load_runs(out)["runs"]) == 5
    assert search.main(command(out, "--optimizer", "tnt", "sgd")) == 0
    record = load_runs(out)
    keys = [(r["key"]["optimizer"], r["key"]["lr"], r["key"]["damping"]) for r in record["runs"]]
    pairs = [("tnt", lr, damping) for lr in (1e-4, 1e-3) for damping in (0.1, 0.3)]
    pairs += [("sgd", lr, None) for lr in (1e-4, 1e-3)]
    assert keys == [pair for pair in pairs for _ in range(2)], "SGD-m has no damping to search"
    assert len(record["provenance"]) == 2
    printed = capsys.readouterr().out
    assert printed.count("at an end of the grid") == 2
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_search_shows_what_is_in_its_file(
    tiny_digits: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search.json"
    assert search.main([*command(out, "--optimizer", "sgd"), "--lr", "1e-6", "1e-5"]) == 0
    assert "at an end of the grid" in capsys.readouterr().out
    # A wider search goes on with the narrow one's runs, and the best is no longer at an end.
    assert search.main([*command(out, "--optimizer", "sgd"), "--lr", "1e-3", "10"]) == 0
    assert "lr 0.001: final smoothed loss" in capsys.readouterr().out
    entries = tried(load_runs(out)["runs"])
    assert grid_of(entries, "sgd", ["lr"]) == {"lr": [1e-6, 1e-5, 1e-3, 10]}


def test_a_search_does_not_mix_protocols(
    tiny_digits: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search.json"
    assert search.main(command(out, "--optimizer", "sgd")) == 0
    before = out.read_bytes()
    for option, message in (
        ("--batch-size=30", "holds runs with other settings"),
        ("--seeds=3", "holds runs with other settings"),
        ("--epochs=2", "holds runs of sgd over 1 epochs, not 2: give another file"),
    ):
        with pytest.raises(SystemExit):
            search.main([*command(out, "--optimizer", "sgd"), option])
        assert message in capsys.readouterr().err
        assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("autoencoder --data nowhere", "argument --data: no such folder: nowhere"),
        ("newton", "invalid choice: 'newton'"),
        ("autoencoder --data digits --optimizer newton", "invalid choice: 'newton'"),
        ("autoencoder --data digits --lr 0", "argument --lr: must be positive and finite, got 0"),
        (
            "autoencoder --data digits --jobs 2 --flush-subnormals",
            "argument --flush-subnormals: only one process does that",
        ),
        (
            "autoencoder --data digits --jobs 2 --threads 2",
            "argument --threads: only one process does that",
        ),
        ("transformer --data nowhere", "argument --data: no such file: nowhere"),
        ("cnn --model resnet32 --data nowhere", "argument --data: no such folder: nowhere"),
        ("autoencoder --data digits --jobs 0", "argument --jobs: must be at least 1, got 0"),
        ("autoencoder --data digits --batch-size 1798", "argument --batch-size: batch_size must"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        search.main([*arguments.split(), "--out", str(tmp_path / "search.json")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# The recorded search of the digits


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_digits_defaults_are_the_best_of_the_recorded_search(optimizer: str) -> None:
    record = load_runs(DIGITS_SEARCH)
    grid = GRIDS["digits"][optimizer]
    entries = [e for e in tried(record["runs"]) if e.settings.optimizer == optimizer]
    points = {(s.lr, s.damping) for s in grid_settings(default_settings("digits", optimizer), grid)}
    assert {(e.settings.lr, e.settings.damping) for e in entries} == points
    assert len(entries) == 35, "every method has the same budget"
    assert {len(e.scores) for e in entries} == {5}
    chosen = default_settings("digits", optimizer)
    means = {(e.settings.lr, e.settings.damping): e.mean or math.inf for e in entries}
    assert means[chosen.lr, chosen.damping] == min(means.values())
    assert interior(chosen, grid), "the grid ends at the best"
    assert (chosen.batch_size, chosen.epochs, chosen.momentum) == (128, 60, 0.9)
    assert chosen.seed not in record["protocol"]["seeds"]


def test_the_recorded_search_is_of_this_problem() -> None:
    protocol = load_runs(DIGITS_SEARCH)["protocol"]
    description = json.loads(json.dumps(load_autoencoder("digits").description()))
    assert protocol == {
        **description,
        "criterion": "final_smoothed_loss",
        "seeds": [1, 2, 3, 4, 5],
        "batch_size": 128,
    }
