"""Many runs into one file, in one process or several; the summary of their numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from repeating_text import repeating_problem

from experiments import figures2to6, training
from experiments.figures2to6 import run_comparison, summary
from experiments.methods import (
    Settings,
    default_settings,
    method_settings,
    variant_labels,
)
from experiments.options import overridden


def settings(seed: int, lr: float = 0.1) -> Settings:
    """Momentum for three epochs."""
    return method_settings("sgd", lr, None, batch_size=4, epochs=3, seed=seed)


def test_a_comparison_goes_on_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cpu = tmp_path / "runs.json", torch.device("cpu")
    first = run_comparison(repeating_problem(), [settings(0), settings(1)], out, cpu)
    before = json.loads(out.read_text())["runs"]
    monkeypatch.setattr(
        figures2to6, "train_in_turn", lambda *_, **__: pytest.fail("it trained again")
    )
    again = run_comparison(repeating_problem(), [settings(1), settings(0)], out, cpu)
    assert [run.final_loss for run in again] == [run.final_loss for run in first]
    other = [replace(settings(0), batch_size=6)]
    with pytest.raises(typer.BadParameter, match="batch_size was 4 and is 6"):
        run_comparison(repeating_problem(), other, out, cpu)
    monkeypatch.setattr("tnt_kernels.benchmark.provenance.torch.get_num_threads", lambda: 7)
    with pytest.raises(typer.BadParameter, match="threads was 1 and is 7"):
        run_comparison(repeating_problem(), [settings(2)], out, cpu)
    monkeypatch.undo()
    for wrong, message in (
        ([settings(2), other[0]], r"one batch size, got \[4, 6\]"),
        ([method_settings("tnt", 0.1, 0.1, graft="foo", batch_size=4, epochs=3)], "graft"),
        ([method_settings("adam-authors", 0.1, 0.1, weight_decay=1, batch_size=4, epochs=3)], "^w"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            run_comparison(repeating_problem(), wrong, out, cpu)
    assert json.loads(out.read_text())["runs"] == before
    compact = json.loads(out.read_text())
    del compact["runs"][0]["step_losses"]
    out.write_text(json.dumps(compact))
    with pytest.raises(typer.BadParameter, match="a compact record"):
        run_comparison(repeating_problem(), [settings(2)], out, cpu)
    assert json.loads(out.read_text()) == compact
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs.json", "runs.png"]


def test_the_summary_has_means_over_the_seeds() -> None:
    runs = [training.train(repeating_problem(), settings(seed), report_every=0) for seed in (0, 1)]
    lost = training.train(repeating_problem(), settings(0, lr=1e30), report_every=0)
    losses = torch.tensor([run.final_loss for run in runs], dtype=torch.float64)
    rows = [line.split("|") for line in summary([*runs, lost]).splitlines()]
    assert rows[2][3].strip() == f"{losses.mean():.4g} ± {losses.std():.2g}"
    assert rows[3][3].strip() == "diverged (1 of 1)"


def test_overrides_change_the_settings_that_a_method_has() -> None:
    tnt = method_settings("tnt", 0.1, 0.2, batch_size=4, epochs=3)
    changed = overridden(tnt, ["lr=1e-3", "warm_start=false", "graft=adam", "stat_interval=5"])
    assert changed == replace(tnt, lr=1e-3, warm_start=False, graft="adam", stat_interval=5)
    for wrong in ("lr", "lr=fast", "lr=-1", "lr=inf", "colour=red", "schedule=step:0", "seed=3"):
        with pytest.raises(typer.BadParameter):
            overridden(tnt, [wrong])
    default = overridden(tnt, ["damping=1", "default"])
    assert default == replace(
        default_settings("tnt", batch_size=4, epochs=3, schedule="constant"), damping=1.0
    )
    with pytest.raises(typer.BadParameter, match="SETTING=VALUE, got 'default'"):
        overridden(settings(0), ["default"])
    with pytest.raises(typer.BadParameter, match="SGD-m has no such setting"):
        overridden(settings(0), ["damping=1"])


def test_labels_name_what_differs_and_the_defaults() -> None:
    length: dict[str, Any] = {"batch_size": 4, "epochs": 3}
    paper = method_settings("tnt", 1e-4, 0.1, **length)
    default = default_settings("tnt", schedule="constant", **length)
    assert variant_labels([paper, settings(0), default]) == ["TNT", "SGD-m", "TNT (defaults)"]
    both = [paper, replace(paper, lr=1e-3), default]
    assert variant_labels(both) == ["TNT (lr 0.0001)", "TNT (lr 0.001)", "TNT (defaults)"]
    assert variant_labels([default]) == ["TNT"]
    falling = replace(default, schedule="warmup-cosine")
    wanted = ["TNT", *(f"TNT (defaults, schedule {s})" for s in ("constant", "warmup-cosine"))]
    assert variant_labels([paper, replace(default, seed=1), falling]) == wanted


def test_one_command_trains_several_settings_of_a_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Settings] = []
    monkeypatch.setattr(
        figures2to6, "run_comparison", lambda problem, wanted, *_: trained.extend(wanted)
    )
    figures2to6.main("digits", "sgd,tnt,tnt/lr=1e-3/schedule=step:2", epochs=2, seeds="0,1")
    assert [one.optimizer for one in trained] == 2 * ["sgd", "tnt", "tnt"]
    assert [one.seed for one in trained] == [0, 0, 0, 1, 1, 1]
    assert trained[2] == replace(trained[1], lr=1e-3, schedule="step:2")
    with pytest.raises(typer.BadParameter, match="must be all or some of"):
        figures2to6.main("digits", "lr=1e-3")
