"""The comparison on the character transformer: forms, search, verdicts, seconds, table."""

import doctest
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from repeating_text import repeating_file, repeating_problem

from experiments import confidence, language_table
from experiments.costs.step_kinds import PLAIN, Kind
from experiments.figures.document import html_page
from experiments.figures.evidence import Record
from experiments.figures.page import build_page
from experiments.language import seconds as language_seconds
from experiments.language.forms import FORMS, command_form, form_settings
from experiments.language.results import (
    HEADER,
    Difference,
    cells,
    conclusions,
    loss_at,
    paired,
    rows,
    steps_to,
)
from experiments.language.seconds import (
    KINDS,
    elapsed,
    kind_seconds,
    run_kinds,
    seconds_at,
    steps_within,
)
from experiments.language_table import Scale
from experiments.problems.language import Language
from experiments.problems.problem import seeded_model
from experiments.runs.methods import build_optimizer, has_statistics
from experiments.tuning.rate_search import best_place, interior, next_places, place_of, rate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def problem() -> Language:
    return repeating_problem()


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return repeating_file(tmp_path)


# The forms


def test_forms_are_the_papers_and_the_grafted(problem: Language) -> None:
    model = seeded_model(problem, 0)
    for name, form in FORMS.items():
        settings = form_settings(name, 8, seed=3)
        assert (settings.schedule, settings.weight_decay) == ("warmup-cosine", 0.0)
        assert (settings.epochs, settings.seed, settings.lr) == (8, 3, form.lr)
        assert (settings.graft == "adam") == name.endswith("grafted")
        if has_statistics(form.optimizer):
            assert (settings.stat_interval, settings.inverse_interval) == (5, 20)
            assert settings.relative_damping == name.endswith("grafted")
            assert settings.warm_start is False
        optimizer = build_optimizer(model, settings, "categorical")
        assert all(group["lr"] == form.lr for group in optimizer.param_groups)
    other = form_settings("tnt-grafted", 8, lr=0.5, intervals=(1, 5))
    assert (other.lr, other.stat_interval, other.inverse_interval) == (0.5, 1, 5)
    assert form_settings("adam", 8, intervals=(1, 5)).stat_interval is None
    assert FORMS["tnt-grafted"].damping == 0.1
    assert [command_form(name, False) for name in ("tnt", "adam")] == ["tnt-grafted", "adam"]
    assert command_form("tnt", True) == "tnt"
    with pytest.raises(ValueError, match="must be one of tnt, tnt-grafted, .*muon, got 'lion'"):
        form_settings("lion", 8)


# The search


def searched(best: float, centre: int, trials: int) -> dict[int, float]:
    """What a search tries on a parabola."""
    tried: dict[int, float] = {}
    while places := next_places(tried, centre, trials):
        assert not tried.keys() & set(places)
        tried |= {place: (place - best) ** 2 for place in places}
    return tried


def test_every_search_makes_as_many_trials_and_ends_in_the_interior() -> None:
    for best in (-3.3, -1.2, 0.1, 0.9, 3.1):
        for trials in (1, 2, 3, 4, 5, 8):
            assert len(searched(best, 0, trials)) == trials
        assert interior(searched(best, 0, 5)), best
        found = best_place(searched(best, 0, 7))
        assert found is not None and abs(found - best) <= 1
    assert sorted(searched(0.9, 0, 5)) == [-2, -1, 0, 1, 2]
    assert sorted(searched(-3.3, 0, 5)) == [-6, -4, -2, 0, 2]
    assert not interior(searched(9.0, 0, 3))


def test_divergence_sends_the_search_down() -> None:
    infinite = {0: math.inf, -2: math.inf, 2: math.inf}
    assert next_places(infinite, 0, 5) == [-4]
    assert best_place(infinite) is None and not interior(infinite)
    assert next_places({0: math.inf, -2: 1.0, 2: math.inf}, 0, 5) == [-4]
    assert best_place({0: math.inf, -2: 1.0}) == -2


def test_rates_are_a_grid() -> None:
    for place in range(-30, 5):
        assert place_of(rate(place)) == place
    assert [rate(p) for p in (-10, -8, -7)] == [3.2e-3, 1e-2, 1.8e-2]
    assert place_of(3e-3) == -10


# Verdicts


def test_verdicts_are_paired_and_take_students_t() -> None:
    base = dict(enumerate([2.0, 3.0, 4.0, 5.0]))
    shifts = [-0.1, -0.2, -0.3, -0.2]  # mean -0.2, standard error 0.0408
    below = paired({seed: base[seed] + shifts[seed] for seed in base}, base)
    assert below.verdict == "below" and below.mean == pytest.approx(-0.2)
    assert below.error == pytest.approx((0.02 / 3 / 4) ** 0.5)
    assert below.text() == "-0.200 ± 0.041, below"
    assert paired(base, {seed: base[seed] + shifts[seed] for seed in base}).verdict == "above"
    noisy = paired({0: 2.1, 1: 2.7, 2: 4.2, 3: 4.9}, base)
    assert noisy.verdict == "cannot tell"
    # Three standard errors from two seeds are nothing, from four they would be.
    assert paired({0: 1.9, 1: 2.8}, base).verdict == "cannot tell"
    assert paired({0: 1.0, 7: 9.0}, base) == Difference(-1.0, None, "cannot tell")
    assert paired({0: math.inf, 1: 2.0}, base).text() == "diverged"
    assert paired({9: 1.0}, base).verdict == "not measured"


def test_losses_between_measurements() -> None:
    curve = [3.0, 2.0, 1.5]
    assert [loss_at(curve, 10, step) for step in (10, 15, 25, 30, 99)] == [3.0, 2.5, 1.75, 1.5, 1.5]
    assert loss_at(curve, 10, 9) == math.inf
    assert loss_at([3.0, math.nan], 10, 10) == math.inf
    assert [steps_to(curve, 10, loss) for loss in (9.0, 3.0, 2.5, 1.5)] == [10, 10, 15, 30]
    assert steps_to(curve, 10, 1.0) == math.inf


def record(
    stage: str, form: str, seed: int, lr: float, curve: list[float], **more: Any
) -> dict[str, Any]:
    """A run as the table's file has it."""
    key = {"stage": stage, "width": 8, "steps": 20, "form": form, "intervals": [5, 20]}
    settings = {"seed": seed, "lr": lr}
    return {
        "key": {**key, "settings": settings},
        "validation_losses": curve,
        "steps_per_epoch": 10,
        "diverged_at_step": None,
        **more,
    }


def seconds(paces: dict[str, float], threads: int = 1, width: int = 8) -> dict[str, Any]:
    """The times of a width, where every kind of step takes a form as long."""
    key = {"stage": "seconds", "width": width, "threads": threads}
    forms = {form: {label: {"median": pace} for label in KINDS} for form, pace in paces.items()}
    return {"key": key, "forms": forms}


def test_the_table_tells_tokens_from_seconds() -> None:
    runs = [seconds({"adam": 1.0, "tnt-grafted": 2.0})]
    for seed, shift in enumerate([0.0, 0.5, 1.0]):
        runs.append(record("final", "adam", seed, 0.1, [3.0 + shift, 2.0 + shift]))
        own = [2.2 + shift + 0.01 * seed, 1.0 + shift - 0.01 * seed]
        runs.append(record("final", "tnt-grafted", seed, 0.1, own))
        lost = {"diverged_at_step": 4} if seed == 1 else {}
        runs.append(record("final", "muon", seed, 0.1, [3.0, 2.0], **lost))
    for lr, loss in ((0.032, 3.0), (0.1, 1.0), (0.32, 2.0)):
        runs.append(record("tuning", "tnt-grafted", 100, lr, [4.0, loss]))
    searched_adam = [record("tuning", "adam", 100, lr, [4.0, lr]) for lr in (0.032, 0.32)]
    table = {row.variant.form: row for row in rows(runs)}
    assert list(table) == ["tnt-grafted", "adam", "muon"]
    tnt = table["tnt-grafted"]
    assert tnt.tokens["adam"].verdict == "below"
    assert tnt.tokens["adam"].mean == pytest.approx(-1.01)
    # Twice as slow: when AdamW is done, TNT has done 10 steps.
    assert tnt.seconds["adam"].mean == pytest.approx(0.21)
    assert tnt.seconds["adam"].verdict == "above"
    assert tnt.speed["adam"] is not None and tnt.speed["adam"] > 1
    assert tnt.tokens["muon"].verdict == "diverged" and tnt.speed["muon"] is None
    assert table["muon"].seconds_per_step is None
    assert len(cells(tnt)) == len(HEADER)
    assert cells(tnt)[:6] == (
        *("TNT, grafted", "0.1", "1.490 ± 0.490", "-1.010 ± 0.006, below", "diverged"),
        "2000.0, threads: 1",
    )
    assert cells(table["muon"])[2] == "diverged (1 of 3)"
    assert cells(table["adam"])[1:4] == ("0.1 (end of the search)", "2.500 ± 0.500", "-")
    assert HEADER[6] == "at AdamW's seconds, the slower run cut mid-schedule"
    end = "the best learning rate of AdamW is an end of its search"
    assert tnt.ends.own is None and table["adam"].ends.own == "AdamW"
    assert tnt.doubt("adam", tnt.tokens["adam"]) == end
    # above a baseline that may do still better
    assert tnt.doubt("adam", tnt.seconds["adam"]) is None
    lines = conclusions(list(table.values()))
    start = "TNT, grafted, width 8, 20 steps: tokens: -1.010 ± 0.006, below against AdamW; "
    assert lines[0].startswith(start)
    assert f"not counted: {end}" in lines[0]
    assert "seconds, the slower run cut mid-schedule: +0.210" in lines[0]
    where = "widths and lengths in tokens, and at 0 in seconds, the slower run cut mid-schedule"
    assert lines[1:] == [
        f"TNT, grafted is below AdamW at 0 of 1 {where}",
        f"TNT, grafted is below Muon + AdamW at 0 of 1 {where}",
    ]
    assert conclusions([table["adam"]]) == []
    lines = conclusions(rows([*runs, *searched_adam]))
    assert lines[1] == f"TNT, grafted is below AdamW at 1 of 1 {where}"
    assert end not in lines[0]


def test_what_is_earlier_than_the_first_measurement_was_not_measured() -> None:
    runs = [seconds({"adam": 1.0, "tnt-grafted": 2.1})]  # 9.5 of the 10 steps it takes
    runs += [record("final", form, 0, 0.1, [3.0, 2.0]) for form in ("adam", "tnt-grafted")]
    (tnt,) = (row for row in rows(runs) if row.variant.form == "tnt-grafted")
    assert tnt.seconds["adam"].verdict == "not measured"
    assert tnt.tokens["adam"].mean == 0.0


def test_times_with_other_threads_never_stand_side_by_side() -> None:
    finals = [record("final", form, 0, 0.1, [3.0, 2.0]) for form in ("adam", "tnt-grafted")]
    one, two = seconds({"adam": 4.0}), seconds({"adam": 1.0, "tnt-grafted": 2.0}, threads=2)
    for runs in ([one, two, *finals], [two, one, *finals]):
        tnt, adam = rows(runs)
        assert (adam.threads, adam.seconds_per_step) == (1, 4.0)
        assert tnt.clock is None and tnt.seconds["adam"].verdict == "not measured"
        tnt, adam = rows(runs, threads=2)
        assert (tnt.threads, tnt.seconds_per_step, adam.seconds_per_step) == (2, 2.0, 1.0)
        assert rows(runs, threads=3)[0].clock is None
    other_width = [seconds({"adam": 1.0}, width=16), *finals]
    assert all(row.clock is None for row in rows(other_width))


def test_a_run_is_priced_with_its_start() -> None:
    """A form whose inverses cost, beside a plain one of the same pace otherwise."""
    times = seconds({"adam": 1.0, "tnt-grafted": 1.0})
    for label, kind in KINDS.items():
        if kind.inverses:
            times["forms"]["tnt-grafted"][label]["median"] = 11.0
    finals = [record("final", form, 0, 0.1, [3.0, 2.0]) for form in ("adam", "tnt-grafted")]
    tnt, adam = rows([times, *finals])
    # 20 steps with T1 = 5 and T2 = 20: inverses at 0, 5, 10 and 15, where a steady share has one.
    assert adam.clock is not None and adam.clock[-1] == 20.0
    assert tnt.clock is not None and tnt.clock[-1] == 60.0
    assert tnt.seconds_per_step == 3.0
    # When AdamW is done after 20 s, TNT has done 5 steps (15 s) and 5/11 of the sixth.
    assert steps_within(tnt.clock, 20.0) == pytest.approx(5 + 5 / 11)
    # AdamW's last loss is TNT's last, too: it takes the whole run, which is three times as long.
    assert tnt.speed["adam"] == pytest.approx(3.0)


@pytest.mark.parametrize("intervals", [(1, 5), (5, 20), (10, 100), (3, 14), (7, 3)])
def test_the_schedule_is_the_optimizers(problem: Language, intervals: tuple[int, int]) -> None:
    kinds = run_kinds(45, intervals)
    made = form_settings("tnt-ef", 1, intervals=intervals)
    model = seeded_model(problem, 0)
    optimizer = build_optimizer(model, replace(made, lr=1e-9), "categorical")
    weight = next(p for p in model.parameters() if p.dim() == 2)
    seen = []
    for step in range(len(kinds)):
        before = _state_of(optimizer, weight)
        inputs, targets = problem.batch(torch.arange(4) + 4 * step, torch.Generator())
        optimizer.zero_grad()
        problem.loss(model(inputs), targets).backward()
        optimizer.step()
        after = _state_of(optimizer, weight)
        seen.append(Kind(*(before[n] != after[n] for n in ("stats", "factors"))))
    # Factors that are made again of the same statistics are the same.
    wanted = [kind.statistics for kind in kinds]
    assert [kind.statistics for kind in seen] == wanted
    for found, kind in zip(seen, kinds, strict=True):
        assert not (found.inverses and not kind.inverses)
        assert found.inverses or not (kind.inverses and kind.statistics)


def _state_of(optimizer: torch.optim.Optimizer, weight: Any) -> dict[str, list[Any]]:
    state = optimizer.state.get(weight, {})
    return {name: [t.tolist() for t in state.get(name, [])] for name in ("stats", "factors")}


def test_clocks() -> None:
    assert doctest.testmod(language_seconds).failed == 0
    assert doctest.testmod(confidence).failed == 0
    assert run_kinds(3, None) == [PLAIN] * 3
    clock = elapsed({PLAIN: 1.0, Kind(True, True): 4.0}, [Kind(True, True), PLAIN, PLAIN])
    assert clock == [0.0, 4.0, 5.0, 6.0]
    for step in (0.0, 0.25, 1.0, 2.5, 3.0):
        assert steps_within(clock, seconds_at(clock, step)) == pytest.approx(step)
    assert seconds_at(clock, math.inf) == math.inf and steps_within(clock, 7.0) == 3.0


# The table


SMALL = Scale((8,), (4, 8), (3, 1), (0, 1), ((1, 2),), 1, 1, 2, 6, 2)


def table_arguments(text_file: Path, out: Path) -> list[str]:
    return ["--data", str(text_file), "--jobs", "1", "--timing-threads", "1", "--out", str(out)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_table_has_equal_budgets_and_goes_on_where_it_stopped(
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(language_table.SCALES, "full", SMALL)
    out = tmp_path / "table.json"
    made = []
    add = language_table.RunFile.add

    def stops(self: Any, key: Any, result: Any) -> Any:
        if len(made) == 30:
            raise KeyboardInterrupt
        made.append(key)
        return add(self, key, result)

    monkeypatch.setattr(language_table.RunFile, "add", stops)
    with pytest.raises(KeyboardInterrupt):
        language_table.main(table_arguments(text_file, out))
    monkeypatch.setattr(language_table.RunFile, "add", add)
    assert len(json.loads(out.read_text())["runs"]) == 30
    assert language_table.main(table_arguments(text_file, out)) == 0

    runs = json.loads(out.read_text())["runs"]
    keys = [run["key"] for run in runs]
    assert len({json.dumps(key) for key in keys}) == len(keys)
    for form in FORMS:
        for steps, trials in ((4, 3), (8, 1)):
            own = [k for k in keys if (k["stage"], k.get("form")) == ("tuning", form)]
            own = [k for k in own if k["steps"] == steps]
            assert len({k["settings"]["lr"] for k in own}) == len(own) == trials
            assert {k["settings"]["seed"] for k in own} == {100}
    finals = [k for k in keys if k["stage"] == "final"]
    assert len(finals) == 2 * 2 * 9 and {k["settings"]["seed"] for k in finals} == {0, 1}
    (times,) = (run for run in runs if run["key"]["stage"] == "seconds")
    assert len(keys) - 1 == SMALL.runs() == 8 * 4 + 36
    assert set(times["forms"]) == set(FORMS)
    assert set(times["forms"]["adam"]) == {"plain"}
    assert set(times["forms"]["tnt"]) == {"plain", "statistics", "statistics and inverses"}
    medians = [kind["median"] for form in times["forms"].values() for kind in form.values()]
    assert min(medians) > 0
    for steps in (4, 8):
        assert (tmp_path / f"table-width8-steps{steps}.png").exists()
    printed = capsys.readouterr().out
    assert "TNT, grafted, T1 = 1, T2 = 2" in printed and "against Muon + AdamW" in printed
    page = html_page(build_page([Record(out, json.loads(out.read_text()))], tmp_path, (), (), {}))
    for text in ("dampings of TNT, TNT-EF and Shampoo", "more frequent inverses of its first T2"):
        assert text in page
    assert "cannot be read" not in page

    with pytest.raises(SystemExit):
        language_table.main([*table_arguments(text_file, out), "--trials", "4", "1"])
    assert "trials was [3, 1] and is [4, 1]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--trials", "3"], "--trials: give one number for each length, 2, got 1"),
        (["--lengths", "5", "8"], "--lengths: must be multiples of 2, got 5"),
        (["--widths", "7"], "--widths: must be multiples of 2, got 7"),
        (["--seeds", "100"], "--seeds: 100 is the search's"),
        (["--seeds", "1", "1"], "--seeds: must differ"),
        (["--data", "none.txt"], "--data: no such file"),
    ],
)
def test_the_tables_arguments_are_checked(
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    message: str,
) -> None:
    monkeypatch.setitem(language_table.SCALES, "full", SMALL)
    with pytest.raises(SystemExit) as stopped:
        language_table.main([*table_arguments(text_file, tmp_path / "t.json"), *extra])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_every_kind_of_step_is_timed(problem: Language) -> None:
    forms = {
        name: replace(form_settings(name, 2, lr=form.lr / 10), batch_size=2)
        for name, form in FORMS.items()
    }
    threads = torch.get_num_threads()
    found = kind_seconds(problem, forms, list(KINDS.values()), rounds=3, threads=1)
    assert torch.get_num_threads() == threads
    assert list(found) == list(FORMS)
    for name, kinds in found.items():
        second_order = has_statistics(FORMS[name].optimizer)
        assert set(kinds) == (set(KINDS) if second_order else {"plain"})
        for figures in kinds.values():
            low, high = figures["quartiles"]
            assert 0 < low <= figures["median"] <= high and len(figures["samples"]) == 3
