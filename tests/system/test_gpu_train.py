"""The training on a GPU, on a CPU and with a tiny text: its record, its page, its failures."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from repeating_text import repeating_problem

from experiments import gpu_train
from experiments.gpu_train import BATCH_SIZE, POINTS, RATES, Shared, draw, make, page
from experiments.methods import Settings, build_optimizer
from experiments.tasks import modern_settings
from tnt_kernels.benchmark.records import read_json

# dynamo hides this warning itself, but not from a filter that makes it an error.
pytestmark = pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")

CPU = torch.device("cpu")


def shared(left: float = 600.0) -> Shared:
    return Shared(repeating_problem(), CPU, time.monotonic() + left)


def wanted(*methods: str) -> list[Settings]:
    return [modern_settings(name, 1, RATES[name], BATCH_SIZE) for name in methods]


def failing(monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    """Lets the steps of these methods fail."""

    def build(model: Any, settings: Settings, likelihood: str) -> Any:
        optimizer = build_optimizer(model, settings, likelihood)
        if settings.optimizer in methods:
            optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        return optimizer

    monkeypatch.setattr(gpu_train, "build_optimizer", build)


def test_every_method_trains_compiled_and_not(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    record = make(shared(), wanted(*RATES), 0.1, out)
    saved = read_json(out)
    assert saved["protocol"]["source"] == "x.txt" and saved["protocol"]["parameters"] > 0
    assert saved["provenance"]["device"] == "cpu"
    methods = [(run["settings"]["optimizer"], run["compiled"]) for run in saved["runs"]]
    assert methods == [(name, compiled) for compiled in (False, True) for name in RATES]
    for run in saved["runs"]:
        assert "error" not in run
        curve = run["curve"]
        steps, seconds, losses = (curve[name] for name in ("steps", "seconds", "loss"))
        assert 0 < len(steps) == len(seconds) == len(losses) <= POINTS
        assert steps == sorted(set(steps)) and seconds == sorted(set(seconds))
        assert steps[-1] == run["steps"] and seconds[-1] >= run["seconds"] == 0.1
        assert run["steps_per_second"] == pytest.approx(run["steps"] / seconds[-1], rel=1e-4)
        assert run["training_loss"] == losses[-1] and 0 < run["validation_loss"] < 10
        assert run["warm_up_seconds"] > 0 and run["peak_memory_gb"] is None
    rows = [line for line in page(record).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(saved["runs"])
    assert out.with_suffix(".md").read_text() == page(record)
    draw(record, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "adam")
    record = make(shared(), wanted("tnt", "adam", "muon"), 0.02, tmp_path / "run.json")
    for compiled in (0, 3):
        first, failed, last = read_json(tmp_path / "run.json")["runs"][compiled : compiled + 3]
        assert failed["error"] == "ZeroDivisionError: division by zero"
        assert failed["settings"]["optimizer"] == "adam" and "steps" not in failed
        assert first["steps"] > 0 and last["steps"] > 0
    assert page(record).count("ZeroDivisionError") == 2
    draw(record, tmp_path / "run.png")


def test_the_record_is_written_after_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C shows, which the stage's limit sends."""

    def attempt(*_: Any) -> dict[str, Any]:
        if done:
            raise KeyboardInterrupt
        done.append(original(*_))
        return done[0]

    original, done = gpu_train.attempt, []
    monkeypatch.setattr(gpu_train, "attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        make(shared(), wanted("adam", "muon"), 0.02, tmp_path / "run.json")
    (run,) = read_json(tmp_path / "run.json")["runs"]
    assert run["steps"] == done[0]["steps"]
    assert "AdamW" in (tmp_path / "run.md").read_text()


def test_what_no_time_is_left_for_is_not_run(tmp_path: Path) -> None:
    record = make(shared(left=0.0), wanted("adam"), 0.02, tmp_path / "run.json")
    for run in record["runs"]:
        assert run["error"].startswith("TimeoutError: ") and "steps" not in run
    draw(record, tmp_path / "run.png")


def test_a_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shared()
    monkeypatch.setattr(place.problem, "loss", lambda outputs, _: outputs.sum() * math.nan)
    make(place, wanted("adam"), 600.0, tmp_path / "run.json")
    for run in read_json(tmp_path / "run.json")["runs"]:
        assert run["curve"]["loss"] == [None] and run["training_loss"] is None


def test_the_rate_rises_and_falls_with_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each step takes a tenth of the run from."""
    rates: list[float] = []

    def build(model: Any, settings: Settings, likelihood: str) -> Any:
        optimizer = build_optimizer(model, settings, likelihood)

        def before(*_: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"] / settings.lr)

        optimizer.register_step_pre_hook(before)
        return optimizer

    monkeypatch.setattr(gpu_train, "build_optimizer", build)
    monkeypatch.setattr(gpu_train, "now", lambda _: 0.0)
    monkeypatch.setattr(
        gpu_train.time, "perf_counter", lambda: float(len(rates) - gpu_train.WARM_UP_STEPS)
    )
    run = gpu_train.train(shared(), *wanted("adam"), 10.0, False)
    assert run["steps"] == 10 and run["curve"]["seconds"] == list(range(1, 11))
    assert set(rates[: gpu_train.WARM_UP_STEPS + 1]) == {1 / 500}
    own = rates[gpu_train.WARM_UP_STEPS + 1 :]
    assert own == sorted(own, reverse=True) and own[0] > 0.99 and 0 < own[-1] < 0.03


def test_the_command_fails_if_a_method_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, "adam")
    monkeypatch.setattr(gpu_train, "load_language", lambda **_: repeating_problem())
    out = tmp_path / "run.json"
    with pytest.raises(typer.Exit) as end:
        gpu_train.main("muon,adam/lr=0.5", 0.02, device="cpu", quick=True, out=out)
    assert end.value.exit_code == 1
    assert capsys.readouterr().out.strip().endswith("failed: AdamW, 0.5, AdamW, 0.5, compiled")
    assert out.with_suffix(".png").exists()
