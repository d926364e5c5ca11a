"""The pure parts of the kernel benchmarks: sets, counts, fits, checks, and what the page says."""

import copy
import doctest
import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import close
from torch import nn

from bench.kernels import baselines, breakdown, complexity_report, report, targets
from bench.kernels.checks import check_close, check_finite, check_moved, relative_error
from bench.kernels.complexity import fitted
from bench.kernels.inputs import empty_like, flat, generator, gram_statistics, symmetric_modes
from bench.kernels.limits import Limits, better
from bench.kernels.sweeps import SWEEPS, Run, Sweep
from bench.kernels.timing import OURS, Candidate, add_shares, rates, rotated, rounds_for, summary
from bench.kernels.work import Work, gram_work, inverse_work, products_work, step_work
from tnt_kernels import reference
from tnt_optim import TNT
from tools.measuring.fits import exponent, launch_bound, lost_in_noise
from tools.measuring.parameter_sets import DEFAULT_SETS, PARAMETER_SETS, ParameterSet

SMALL = ParameterSet("small", ((9, 5), (4, 3, 2, 2), (7,), (8193, 3)))


@pytest.mark.parametrize(
    "module", ["complexity_report", "fits", "markdown", "report", "targets", "work"]
)
def test_examples(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(f"bench.kernels.{module}"))
    assert failed == 0


# Parameter sets.


@pytest.mark.parametrize(
    ("name", "modes", "numbers"),
    [
        ("mnist_ae", 24, 2_837_314),
        ("faces_ae", 24, 7_537_655),
        ("resnet32", 158, 464_154),
        ("vgg16", 87, None),
        ("gpt2_full", 198, 124_439_808),  # as published: 124 million
        ("gpt2", 38, None),
        ("square4096", 2, 4096**2),
    ],
)
def test_sets_are_the_models(name: str, modes: int, numbers: int | None) -> None:
    parameter_set = PARAMETER_SETS[name]
    assert parameter_set.modes == modes
    assert numbers in (None, parameter_set.numbers)


def test_only_token_embeddings_are_diagonal() -> None:
    assert set(DEFAULT_SETS) < set(PARAMETER_SETS)
    for parameter_set in PARAMETER_SETS.values():
        diagonal = [
            (view[i], kind)
            for view, kinds in zip(parameter_set.views, parameter_set.diagonal, strict=True)
            for i, kind in enumerate(kinds)
            if kind
        ]
        assert diagonal == ([(50257, True)] if parameter_set.name.startswith("gpt2") else [])


def test_what_is_left_out_is_said() -> None:
    assert "2 of its 12" in PARAMETER_SETS["gpt2"].note
    assert PARAMETER_SETS["gpt2_full"].note == ""


# Counts.


def test_flops_and_bytes_by_hand() -> None:
    views, full = [(3, 2)], [(False, False)]
    # Both Grams: 6 entries of 2 terms each and 3 of 3 terms, a product and a sum each.
    assert gram_work(views, full) == Work(2 * (6 * 2 + 3 * 3), 2 * (9 * 2 + 4 * 3), 4 * (6 + 26))
    assert inverse_work(views, full) == Work(27 + 8, 2 * (27 + 8), 4 * 26)
    # (3, 3) @ (3, 2) and (3, 2) @ (2, 2): 6 entries of 3 terms, 6 of 2.
    assert products_work(views, full) == Work(2 * 6 * 5, 2 * 6 * 5, 4 * (6 + 6 + 13))
    # Beside the products: m and g and W read, m and W written, 5 tensors in all.
    assert step_work(views, full) == Work(2 * 6 * 5, 2 * 6 * 5, 4 * (5 * 6 + 13))


def test_diagonal_modes_cost_next_to_nothing() -> None:
    views, mixed = [(3, 2)], [(True, False)]
    assert gram_work(views, mixed) == Work(2 * 6 + 3 * 6, 2 * 6 + 4 * 6, 4 * (6 + 2 * 3 + 2 * 4))
    assert inverse_work(views, mixed) == Work(3 + 8, 3 + 16, 4 * (6 + 8))
    assert products_work(views, mixed).useful_flops == 6 + 2 * 2 * 6


def test_work_adds_up_over_parameters() -> None:
    views, full = [(3, 2), (5,)], [(False, False), (False,)]
    for work in (gram_work, inverse_work, products_work, step_work):
        assert work(views, full) == work(views[:1], full[:1]) + work(views[1:], full[1:])


def test_the_limit_is_the_later_of_products_and_memory() -> None:
    limits = Limits("", 1, 1, sgemm=100.0, ssyrk=50.0, copy=10.0, torch_sgemm=1.0)
    work = Work(useful_flops=1000, effective_flops=2000, bytes=150)
    assert limits.seconds(work, symmetric=True) == 20
    assert limits.binding(work, symmetric=True) == "ssyrk"
    assert limits.seconds(work, symmetric=False) == 15
    assert limits.binding(work, symmetric=False) == "copy"


def test_shares_are_of_the_better_of_two_measurements() -> None:
    disturbed = Limits("", 1, 1, sgemm=60.0, ssyrk=50.0, copy=1.0, torch_sgemm=1.0)
    limits = better(disturbed, replace(disturbed, sgemm=50.0, copy=10.0))
    assert limits == replace(disturbed, copy=10.0)
    record = _benchmark("gram_ema_", "", "mnist_ae", {OURS: 4.0, "addmm_": 8.0})
    add_shares([record], limits)
    assert (record["limit"], record["limit_seconds"]) == ("ssyrk", 2.0)
    assert record["candidates"][OURS]["share_of_limit"] == 0.5
    assert "share_of_limit" not in record["candidates"]["addmm_"]  # not compared


# Fits.


def test_exponent_of_a_power_law_with_noise() -> None:
    sizes = [64, 128, 256, 512]
    noise = [1.02, 0.99, 1.01, 0.98]
    assert exponent(sizes, [1e-9 * s**3 * n for s, n in zip(sizes, noise, strict=True)]) == (
        pytest.approx(3, abs=0.03)
    )
    assert exponent(sizes[:2], [1.0, 2.0]) is None


def test_launch_bound_points_are_those_near_the_smallest() -> None:
    assert launch_bound([1.0, 0.9, 2.99, 3.0, 100.0]) == [True, True, True, False, False]
    assert lost_in_noise([2.0, 1.1, 1.09, 0.9], floor=1.0) == [False, False, True, True]


def _sweep(variable: str, predicted: float, fit_from: int) -> Sweep:
    return Sweep(
        "TNT", "part", variable, "term", predicted, (), fit_from, lambda _: Run(lambda: None)
    )


def test_a_fit_leaves_out_what_is_launch_bound_or_below_its_range_and_says_so() -> None:
    values = [16, 32, 64, 128, 256, 512]
    times = [1.0, 1.1, 2.0, 8.0, 64.0, 512.0]
    record = fitted(_sweep("d", 3, 128), values, times, None)
    assert record["status"] == [*["launch-bound"] * 3, *["fitted"] * 3]
    assert record["fitted"] == pytest.approx(3)
    assert complexity_report.left_out(record) == "launch-bound: 16, 32, 64"
    record = fitted(_sweep("d", 3, 256), values, times, None)
    assert record["status"][3:] == ["below the fitted range", "fitted", "fitted"]
    assert record["fitted"] is None  # two points


def test_an_interval_is_fitted_beyond_the_bare_step() -> None:
    intervals = [1, 2, 4, 8, 16]
    record = fitted(_sweep("T2", -1, 1), intervals, [1 + 1 / t for t in intervals], 1.0)
    assert record["fitted"] == pytest.approx(-1)
    assert record["fitted_values"] == [1, 2, 4, 8]
    assert complexity_report.left_out(record) == "lost in noise: 16"


def test_sweeps_predict_what_table_2_says() -> None:
    assert {sweep.variable for sweep in SWEEPS} == {"d", "k", "m", "T1", "T2"}
    assert all(sweep.predicted == -1 for sweep in SWEEPS if sweep.variable in ("T1", "T2"))
    assert all((sweep.floor is None) == (sweep.variable[0] != "T") for sweep in SWEEPS)
    assert all(sum(v >= sweep.fit_from for v in sweep.values) >= 3 for sweep in SWEEPS)


# Checks and rounds.


def test_rounds_fill_the_time_within_bounds() -> None:
    assert [rounds_for(s, 2.0) for s in (10.0, 0.5, 0.1, 1e-5, 0.0)] == [3, 4, 20, 50, 50]


def test_baselines_take_turns_at_being_first() -> None:
    three = [Candidate(name, lambda: None, list) for name in "abc"]
    orders = ["".join(c.name for c in rotated(three, turn)) for turn in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]
    assert rotated([], 3) == []


def test_summary_has_median_and_spread() -> None:
    found = summary([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found["median"], found["quartiles"]) == (3.0, [2.0, 4.0])
    assert (found["least"], found["most"]) == (1.0, 5.0)


def test_checks_refuse_what_is_wrong() -> None:
    wanted = [torch.tensor([1.0, 4.0]), torch.tensor([1e-3])]
    assert relative_error(wanted, wanted) == 0
    assert relative_error([torch.tensor([1.0, 3.0]), wanted[1]], wanted) == 0.25
    poisoned = [wanted[0], torch.tensor([math.nan])]
    for error in (relative_error(poisoned, wanted), 0.25):
        with pytest.raises(ValueError, match="candidate is"):
            check_close("candidate", error, 1e-3)
    with pytest.raises(ValueError, match="tensor 1 is no longer finite"):
        check_finite("candidate", poisoned)
    with pytest.raises(ValueError, match="tensor 0 has not moved"):
        check_moved("candidate", wanted, [wanted[0].clone(), wanted[1] + 1])
    check_moved("candidate", wanted, [w + 1 for w in wanted])


# Baselines: at odd sizes, also those that the timed sets do not have.


@pytest.mark.parametrize("update", [baselines.gram_einsum_, baselines.gram_addmm_])
def test_gram_baselines_equal_the_reference(update: Any) -> None:
    rng = generator()
    tensors = [torch.randn(view, generator=rng) for view in SMALL.views]
    stats = symmetric_modes(SMALL, rng)
    expected = copy.deepcopy(stats)
    update(stats, tensors, 0.9)
    reference.gram_ema_(expected, tensors, 0.9)
    for stat, wanted in zip(flat(stats), flat(expected), strict=True):
        close(stat, wanted)


def test_step_baseline_equals_the_reference() -> None:
    rng = generator()
    factors = symmetric_modes(SMALL, rng)
    ours = [[torch.randn(view, generator=rng) for view in SMALL.views] for _ in range(3)]
    theirs = copy.deepcopy(ours)
    baselines.step_tensordot_(*ours, factors, 0.1, 0.9, 0.01)
    reference.preconditioned_step_(*theirs, factors, 0.1, 0.9, 0.01)
    for result, wanted in zip(flat(ours), flat(theirs), strict=True):
        close(result, wanted)


@pytest.mark.parametrize("invert", [baselines.inverse_linalg, baselines.inverse_cholesky])
def test_inverse_baselines_equal_the_reference(invert: Any) -> None:
    stats = gram_statistics(SMALL, generator())
    out = empty_like(stats)
    invert(stats, 0.1, out)
    expected, _ = reference.damped_inverse(stats, 0.1)
    for result, wanted in zip(flat(out), flat(expected), strict=True):
        close(result, wanted, 1e-4)


def test_root_baseline_equals_the_reference() -> None:
    stats, roots = gram_statistics(SMALL, generator()), [4, 6, 2, 4]
    out = empty_like(stats)
    baselines.root_eigh(stats, 0.1, roots, out)
    expected, _ = reference.inverse_root(stats, 0.1, roots)
    for result, wanted in zip(flat(out), flat(expected), strict=True):
        close(result, wanted, 1e-4)


def test_plain_optimizer_takes_the_same_steps() -> None:
    rng = generator()
    start = [torch.randn(shape, generator=rng) for shape in SMALL.shapes[:3]]
    ours, plain = ([nn.Parameter(w.clone()) for w in start] for _ in range(2))
    options: dict[str, Any] = {"damping": 0.1, "weight_decay": 0.1, "inverse_interval": 2}
    tnt = TNT(ours, 0.01, fisher="empirical", stat_interval=2, **options)
    other = baselines.PlainTNT(plain, 0.01, stat_interval=2, **options)
    for _ in range(5):
        for a, b in zip(ours, plain, strict=True):
            a.grad = torch.randn(a.shape, generator=rng)
            b.grad = a.grad.clone()
        tnt.step()
        other.step()
    for a, b in zip(ours, plain, strict=True):
        close(b.detach(), a.detach(), 1e-4)


# The page.


def _benchmark(op: str, kind: str, name: str, medians: dict[str, float]) -> dict[str, Any]:
    candidates: dict[str, Any] = {c: summary([m] * 3) for c, m in medians.items()}
    record: dict[str, Any] = {
        **{"op": op, "kind": kind, "set": name, "note": "", "symmetric": True},
        **{"useful_flops": 100, "effective_flops": 200, "bytes": 10, "errors": {OURS: 0.0}},
        "candidates": candidates,
    }
    add_shares([record], Limits("", 1, 1, sgemm=200.0, ssyrk=200.0, copy=200.0, torch_sgemm=1.0))
    candidates[OURS].update(rates(candidates[OURS]["median"], record))
    return record


def test_misses_and_losses_are_said_plainly() -> None:
    medians = {OURS: 1.0, "einsum + lerp_": 2.999, "addmm_": 0.8}
    benchmark = _benchmark("gram_ema_", "", "mnist_ae", medians)
    page = "\n".join(report.targets_section([benchmark]))
    # Useful flops at the limit's rate would take half a second: what else the ratio could be.
    assert "| `gram_ema_` | mnist_ae | einsum + lerp_ | 3 | 3.00 | 6.00 | **missed** |" in page
    assert "| `gram_ema_` | mnist_ae | addmm_ | 2.8 | **0.80** | 1.60 | **missed** |" in page
    assert "| `gram_ema_` | vgg16 | addmm_ | 2.5 |  |  | not run |" in page
    assert "reached" not in page
    assert "**0.80**" in "\n".join(report.operator_section("gram_ema_", [benchmark]))


def test_a_cycle_not_run_is_added_up_and_marked() -> None:
    parts = [
        _benchmark("TNT.step", "statistics due", "faces_ae", {OURS: 1.0, "plain torch": 3.0}),
        _benchmark(
            "TNT.step", "statistics and inverses due", "faces_ae", {OURS: 21.0, "plain torch": 43.0}
        ),
    ]
    *_, cycle = report.with_cycles(parts)
    assert cycle["kind"] == targets.CYCLE
    assert cycle["candidates"][OURS]["median"] == pytest.approx(2.0)
    assert targets.ratio(cycle, "plain torch") == pytest.approx(2.5)
    assert "added up" in "\n".join(report.step_section([*parts, cycle]))
    assert len(report.with_cycles([*parts, cycle])) == 3  # not twice


def test_every_target_names_a_set_and_a_verdict() -> None:
    for (op, kind, baseline), sets in targets.TARGETS.items():
        for name, wanted in sets.items():
            assert name in DEFAULT_SETS
            assert targets.target(op, kind, baseline, name) == wanted
            assert targets.verdict(wanted, wanted) == "reached"
            assert targets.verdict(wanted * 0.999, wanted) == "**missed**"


def test_exponents_off_the_prediction_are_marked() -> None:
    assert complexity_report.agreement(3, 3.149) == "agrees"
    assert complexity_report.agreement(3, 2.849) == "**off**"
    assert complexity_report.agreement(2, None) == "too few points"


@pytest.mark.parametrize(("before", "after", "warned"), [(0.0, 0.05, 0), (0.5, None, 1)])
def test_a_busy_machine_is_said(before: float, after: float | None, warned: int) -> None:
    limits = {"blas": "BLAS", "size": 1, "sgemm": 1e9, "ssyrk": 1e9, "copy": 1e9}
    limits["torch_sgemm"] = 1e9
    origin = {
        **{"commit": None, "dirty": None, "date": "2026-01-01T00:00", "command": "python"},
        **{"machine": {"cpu": "a", "cores": 2}, "versions": {"torch": "2"}},
        "threads": {"torch": 2},
    }
    record = {
        **{"provenance": origin, "limits": limits, "limits_at_the_end": limits},
        **{"protocol": {"busy_before": before, "busy_after": after}, "benchmarks": []},
    }
    assert report.page(record, None).count("not to be relied on") == warned


# Breakdown.


def test_shrunk_set_has_as_many_modes_of_size_one_or_two() -> None:
    views = ParameterSet("", ((64, 3, 3, 3), (1, 7), (5,))).views
    assert breakdown.shrunk(ParameterSet("", ((64, 3, 3, 3), (1, 7), (5,)))).views == [
        tuple(min(d, 2) for d in view) for view in views
    ]
    assert views == [(64, 3, 9), (1, 7), (5,)]


def test_breakdown_times_every_state_and_leaves_the_threads_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breakdown, "ROUNDS", 2)
    monkeypatch.setattr(breakdown, "COPY_NUMBERS", 1024)
    threads = torch.get_num_threads()
    for make in (breakdown.gram_calls, breakdown.step_calls):
        found = breakdown.breakdown(make, SMALL)
        assert len(found) == 7 and all(seconds > 0 for seconds in found.values())
        assert torch.get_num_threads() == threads
