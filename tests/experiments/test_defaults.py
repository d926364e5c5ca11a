"""Optimizers without any argument against tuned rivals: search, differences, seconds, rows."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from repeating_text import repeating_file, repeating_problem

from experiments import defaults
from experiments.defaults import (
    TASKS,
    TUNING_SEED,
    around,
    best_rate,
    cells,
    last_loss,
    page,
    paired,
    rows,
    run_kinds,
    steps_to,
    tried,
)
from experiments.methods import build_optimizer
from experiments.models import seeded
from experiments.run_files import RunFile, load_runs
from experiments.steps import BOTH, PLAIN
from experiments.tasks import RIVALS, UNTUNED, modern_settings

RECORD = Path(defaults.__file__).with_name("results") / "defaults.json"
TASK = replace(TASKS["transformer64-400"], epochs=2, seeds=range(2))


def a_run(method: str, lr: float | None, seed: int, losses: list[float | None]) -> dict[str, Any]:
    settings = asdict(modern_settings(method, 2, lr, 32, seed))
    key = {"task": "t", "settings": settings}
    return {"key": key, "losses": losses, "epoch_steps": 10, "diverged_at_step": None}


def record(**last: list[float]) -> list[dict[str, Any]]:
    """Two final runs of each method, with a search for the rivals, and the seconds."""
    runs = []
    for method, values in last.items():
        lr = RIVALS[method]["lr"] if method in RIVALS else None
        runs += [a_run(method, lr, seed, [4.0, value]) for seed, value in enumerate(values)]
        if lr is not None:
            # Final runs of one seed at another rate, and of all that diverge: they do not count.
            runs.append(a_run(method, around(lr)[0], 0, [4.0, 0.1]))
            runs += [
                a_run(method, around(lr)[2], seed, [4.0, None]) for seed, _ in enumerate(values)
            ]
            for other in around(lr):
                runs.append(a_run(method, other, TUNING_SEED, [4.0, 2.0 + (other != lr)]))
    seconds = {m: {"plain": 0.1} if m in RIVALS else dict.fromkeys(KINDS, 0.2) for m in last}
    return [*runs, {"key": {"task": "t", "settings": None}, "median_seconds": seconds}]


KINDS = ("plain", "statistics", "inverses", "statistics and inverses")


def test_searches_begin_with_rates_of_the_grid() -> None:
    for task in TASKS.values():
        for centre in task.centres.values():
            assert around(centre)[1] == centre


def test_tried_rates_are_those_of_the_tuning_seed() -> None:
    runs = [
        a_run("adam", 0.1, TUNING_SEED, [3.0, 2.0]),
        a_run("adam", 0.2, TUNING_SEED, [3.0, None]),
        a_run("adam", 0.3, 0, [3.0, 1.0]),
        a_run("muon", 0.4, TUNING_SEED, [3.0, 1.0]),
    ]
    found = tried(runs, "t", "adam")
    assert found == {0.1: 2.0, 0.2: math.inf} and best_rate(runs, "t", "adam") == 0.1
    assert best_rate(runs, "t", "soap") is None
    lost = [a_run("adam", lr, TUNING_SEED, [None]) for lr in (0.3, 0.1, 0.2)]
    assert best_rate(lost, "t", "adam") == 0.1
    assert last_loss({**runs[0], "diverged_at_step": 3}) == math.inf


def test_kinds_of_steps_are_the_optimizers(tmp_path: Path) -> None:
    """Counted on an optimizer that takes the steps."""
    problem = repeating_problem()
    settings = replace(modern_settings("tnt", 1), batch_size=4)
    model = seeded(problem.build, 0)
    opt: Any = build_optimizer(model, settings, "categorical")
    observed = []
    for _ in range(40):
        inputs, targets = problem.batch(torch.arange(4), torch.Generator())
        opt.zero_grad()
        outputs = model(inputs)
        observed.append(opt.observing)
        opt.observe(outputs)
        problem.loss(outputs, targets).backward()
        opt.step()
    assert observed == [kind.statistics for kind in run_kinds(settings, 40)]
    assert run_kinds(modern_settings("adam"), 3) == [PLAIN] * 3
    assert run_kinds(settings, 3)[0] == BOTH


def test_paired_differences_are_judged_by_their_interval() -> None:
    assert paired([1.0, 1.1, 1.2], [2.0, 2.1, 2.3]).verdict == "below"
    assert paired([2.0, 2.1, 2.3], [1.0, 1.1, 1.2]).verdict == "above"
    assert paired([1.0, 2.0, 3.0], [1.1, 1.8, 3.0]).verdict == "level"
    assert paired([1.0], [2.0]).verdict == "level"
    assert paired([1.0, math.inf], [2.0, 2.0]).verdict == "diverged"


def test_steps_to_a_loss_are_linear_between_epochs() -> None:
    assert steps_to([3.0, 2.0, 1.0], 10, 1.5) == 25.0
    assert steps_to([3.0, 2.0], 10, 3.5) == 10.0
    assert steps_to([3.0, None, 1.0], 10, 0.5) == math.inf


def test_rows_compare_losses_and_seconds() -> None:
    found = {row.method: row for row in rows(record(tnt=[1.0, 1.2], adam=[2.0, 2.2]), "t", TASK)}
    tnt = found["tnt"]
    assert tnt.final == [1.0, 1.2] and tnt.against["adam"].mean == pytest.approx(-1.0)
    assert tnt.against["adam"].verdict == "below"
    # From 4.0 to 2.1, AdamW's mean: 0.6333 and 0.6786 of the second epoch, at twice the seconds.
    share = (1 + 0.5 * ((4 - 2.1) / 3 + (4 - 2.1) / 2.8)) / 2
    assert tnt.time["adam"] == pytest.approx(2 * share)
    texts = cells(tnt, ["adam", "muon"])
    assert texts[1:5] == ("default", "1.100 ± 0.141", "-1.000 below", "-") and len(texts) == 8
    assert cells(found["adam"], ["adam"])[3] == "-"


def test_a_rivals_better_rate_counts() -> None:
    """Whatever the search with one seed has chosen."""
    runs = record(tnt=[1.0, 1.2], adam=[2.0, math.inf])
    runs += [a_run("adam", 0.5, seed, [4.0, 1.5]) for seed in range(2)]
    (tnt, adam) = rows(runs, "t", TASK)
    assert (adam.lr, adam.final) == (0.5, [1.5, 1.5])
    assert tnt.against["adam"].mean == pytest.approx(-0.4)


def test_a_rival_that_is_not_reached_or_diverges_is_said() -> None:
    runs = record(tnt=[2.0, 2.0], adam=[1.0, 1.0])
    runs[0]["diverged_at_step"] = 7
    (tnt, _) = rows(runs, "t", TASK)
    assert cells(tnt, ["adam"])[2:4] == ("diverged (1 of 2)", "diverged")
    assert "not reached" in cells(tnt, ["adam"])


def test_a_rival_that_diverges_is_no_goal() -> None:
    (tnt, _) = rows(record(tnt=[2.0, 2.0], adam=[1.0, math.inf]), "t", TASK)
    texts = cells(tnt, ["adam"])
    assert texts[3] == "diverged" and texts[-1] == "-" and tnt.time == {}


def test_a_page_has_the_rivals_whose_runs_and_steps_are_recorded() -> None:
    runs = record(tnt=[1.0, 1.2], adam=[2.0, 2.2], muon=[3.0, 3.1], psgd=[1.5, 1.7])
    runs.append(a_run("soap", 0.01, 0, [4.0, 1.0]))  # the other seed is missing
    before = dict(runs[-2]["median_seconds"])
    del before["psgd"]
    early = {"key": {"task": "t", "settings": None}, "median_seconds": before}
    text = page([early, *runs], {"t": TASK, "without runs": TASK})
    header = next(line for line in text.splitlines() if "loss" in line and line[0] == "|")
    names = [cell.strip() for cell in header.strip("|").split("|")]
    assert names[3:6] == ["AdamW", "Muon", "PSGD-Kron"]
    assert names[7:] == ["time to AdamW's loss", "to Muon's", "to PSGD-Kron's"]
    assert text.count("## ") == 1 and "PSGD-Kron" not in page([*runs[:-2], early], {"t": TASK})


def test_the_recorded_page_is_the_records() -> None:
    runs = load_runs(RECORD)["runs"]
    text = page(runs, TASKS)
    assert RECORD.with_suffix(".md").read_text() == f"{text}\n"
    for name, task in TASKS.items():
        for row in rows(runs, name, task):
            searched = tried(runs, name, row.method)
            assert row.method in task.untuned or set(around(row.lr)) <= searched.keys()


@pytest.mark.filterwarnings("ignore:KFAC updates:RuntimeWarning")  # embeddings and norms
def test_a_small_comparison_runs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("pytorch_optimizer", "heavyball"):
        pytest.importorskip(package)
    problem = repeating_problem()
    small = replace(TASK, load=lambda data: problem, batch_size=4, epochs=1, seeds=range(1))
    out = tmp_path / "defaults.json"
    for centres in ({"adam": 5.6e-3}, small.centres):  # a record goes on with more rivals
        monkeypatch.setattr(defaults, "SMALL", {"small": replace(small, centres=centres)})
        defaults.main(data=repeating_file(tmp_path), quick=True, jobs=1, threads=1, out=out)
        printed = capsys.readouterr().out
    assert "diverged" not in printed
    for label in ("TNT", "Shampoo", "SOAP", "Muon + AdamW", "KL-Shampoo", "PSGD-Kron"):
        assert label in printed
    runs = RunFile(out, "defaults", {"schedule": "warmup-cosine", "tuning_seed": 100}).runs
    for method in RIVALS:
        rates = tried(runs, "small", method)
        assert min(rates) < min(rates, key=rates.__getitem__) < max(rates)
    finals = [run["key"]["settings"] for run in runs[:-1] if run["key"]["settings"] is not None]
    assert sum(settings["seed"] == 0 for settings in finals) == len(RIVALS) + len(UNTUNED)
    assert (tmp_path / "defaults-small.png").exists()
    defaults.main(data=repeating_file(tmp_path), quick=True, jobs=1, threads=1, out=out)
    assert capsys.readouterr().out == printed


def test_a_picture_is_of_one_task() -> None:
    with pytest.raises(typer.BadParameter, match="--draw needs one --task"):
        defaults.main(draw=Path("losses.png"))
