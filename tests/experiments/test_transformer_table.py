"""The transformer's table: search, paired differences, seconds, rows."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from repeating_text import repeating_problem

from experiments.confidence import interval
from experiments.methods import build_optimizer
from experiments.models import seeded
from experiments.problems.language import Language
from experiments.search import lowest
from experiments.steps import BOTH, INVERSES, PLAIN, STATISTICS, Kind
from experiments.tasks import form_settings
from experiments.transformer_table import (
    HEADER,
    Difference,
    cells,
    next_places,
    paired,
    place_of,
    rate,
    rows,
    run_kinds,
    seconds_at,
    steps_to,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def problem() -> Language:
    return repeating_problem()


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
        tried = searched(best, 0, 5)
        found = lowest(tried)
        assert found is not None and min(tried) < found < max(tried)
        found = lowest(searched(best, 0, 7))
        assert found is not None and abs(found - best) <= 1
    assert sorted(searched(0.9, 0, 5)) == [-2, -1, 0, 1, 2]
    assert sorted(searched(-3.3, 0, 5)) == [-6, -4, -2, 0, 2]
    assert lowest(searched(9.0, 0, 3)) == max(searched(9.0, 0, 3))


def test_divergence_sends_the_search_down() -> None:
    infinite = {0: math.inf, -2: math.inf, 2: math.inf}
    assert next_places(infinite, 0, 5) == [-4]
    assert lowest(infinite) is None
    assert next_places({0: math.inf, -2: 1.0, 2: math.inf}, 0, 5) == [-4]
    assert lowest({0: math.inf, -2: 1.0}) == -2


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
    assert [steps_to(curve, 10, loss) for loss in (9.0, 3.0, 2.5, 1.5)] == [10, 10, 15, 30]
    assert steps_to(curve, 10, 1.0) == math.inf


def record(
    stage: str, form: str, seed: int, lr: float, curve: list[float], **more: Any
) -> dict[str, Any]:
    """A run as the table's file has it."""
    key = {"stage": stage, "width": 8, "steps": 100, "form": form, "intervals": [5, 20]}
    settings = {"seed": seed, "lr": lr}
    return {
        "key": {**key, "settings": settings},
        "validation_losses": curve,
        "steps_per_epoch": 50,
        "diverged_at_step": None,
        **more,
    }


def seconds(paces: dict[str, float], threads: int = 1, width: int = 8) -> dict[str, Any]:
    """The times of a width, where every kind of step takes a form as long."""
    key = {"stage": "seconds", "width": width, "threads": threads}
    labels = [kind.label for kind in (PLAIN, STATISTICS, INVERSES, BOTH)]
    forms = {form: {label: {"median": pace} for label in labels} for form, pace in paces.items()}
    return {"key": key, "forms": forms}


def test_a_run_is_priced_with_its_start() -> None:
    """A form with costly inverses, and a plain form that is otherwise as fast."""
    times = seconds({"adam": 1.0, "tnt-grafted": 1.0})
    for kind in (INVERSES, BOTH):
        times["forms"]["tnt-grafted"][kind.label]["median"] = 11.0
    finals = [record("final", form, 0, 0.1, [3.0, 2.0]) for form in ("adam", "tnt-grafted")]
    tnt, adam = rows([times, *finals], 1)
    # 100 steps, T1 = 5, T2 = 20: inverses at 0, 5, 10, 15, then at 20, 40, 60, 80.
    assert adam.clock is not None and adam.clock[-1] == 100.0
    assert tnt.clock is not None and tnt.clock[-1] == 180.0
    # AdamW's last loss is TNT's last, too: it takes the whole run, 1.8 times as long.
    assert tnt.speed["adam"] == pytest.approx(1.8)


@pytest.mark.parametrize("intervals", [(1, 5), (5, 20), (10, 100), (3, 14), (7, 3)])
def test_the_schedule_is_the_optimizers(problem: Language, intervals: tuple[int, int]) -> None:
    kinds = run_kinds(45, intervals)
    made = form_settings("tnt-ef", 1, intervals=intervals)
    model = seeded(problem.build, 0)
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
    assert run_kinds(3, None) == [PLAIN] * 3
    clock = [0.0, 4.0, 5.0, 6.0]
    assert [seconds_at(clock, step) for step in (0.0, 0.25, 1.0, 2.5)] == [0.0, 1.0, 4.0, 5.5]
    assert seconds_at(clock, math.inf) == math.inf


def test_rows_compare_at_equal_tokens() -> None:
    runs = [seconds({"adam": 1.0, "tnt-grafted": 2.0}), seconds({"adam": 9.0}, threads=2)]
    for seed, shift in enumerate([0.0, 0.5, 1.0]):
        runs.append(record("final", "adam", seed, 0.1, [3.0 + shift, 2.0 + shift]))
        own = [2.2 + shift + 0.01 * seed, 1.0 + shift - 0.01 * seed]
        runs.append(record("final", "tnt-grafted", seed, 0.1, own))
        lost = {"diverged_at_step": 4} if seed == 1 else {}
        runs.append(record("final", "muon", seed, 0.1, [3.0, 2.0], **lost))
    for lr, loss in ((0.032, 3.0), (0.1, 1.0), (0.32, 2.0)):
        runs.append(record("tuning", "tnt-grafted", 100, lr, [4.0, loss]))
    table = {row.variant.form: row for row in rows(runs, 1)}
    tnt = table["tnt-grafted"]
    assert tnt.tokens["adam"].verdict == "below"
    assert tnt.tokens["adam"].mean == pytest.approx(-1.01)
    assert tnt.tokens["muon"].verdict == "diverged" and tnt.speed["muon"] is None
    assert table["muon"].clock is None and tnt.interior and not table["adam"].interior
    assert len(cells(tnt)) == len(HEADER)
    assert cells(tnt)[:3] == ("TNT, grafted", "0.1", "1.490 ± 0.490")
    assert cells(table["muon"])[2] == "diverged (1 of 3)"
    assert cells(table["adam"])[1] == "0.1 (end of the search)"


def test_intervals_against_known_values() -> None:
    # Student's t for 4 degrees of freedom: 2.776445.
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * (2.5 / 5) ** 0.5
    assert found == pytest.approx((3.0, 0.5**0.5, 3 - half, 3 + half), rel=1e-6)
    assert interval([4.0]) == (4.0, None, -math.inf, math.inf)
