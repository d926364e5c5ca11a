"""Table 2 for whole methods: exact counts of the state, fits, and what a sweep times."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import complexity
from experiments.complexity import (
    TIME_SWEEPS,
    Sweep,
    fitted,
    least_seconds,
    measure_memory,
    measure_time,
    memory_cases,
)
from experiments.costs.complexity_methods import (
    BUILDERS,
    DAMPING,
    DenseNewton,
    one_tensor_step,
    predicted_bytes,
)
from experiments.costs.complexity_table import TABLE_2, complexity_page, plot_complexity
from experiments.costs.step_kinds import PLAIN, Kind, Plan, check_moved
from experiments.runs.run_file import load_runs
from tnt_kernels import reference

BOTH, STATISTICS = Kind(True, True), Kind(True, False)
QUICK = Plan(0.0, fewest=2, most=2)


@pytest.fixture(autouse=True)
def quiet(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complexity, "busy_share", lambda seconds: 0.0)


# Memory.


@pytest.mark.parametrize(("method", "k"), memory_cases())
def test_the_state_is_counted_exactly(method: str, k: int) -> None:
    record = measure_memory(method, k, (2, 3, 4))
    assert record["bytes"] == record["formula_bytes"] and record["equal"]
    expected = {"Adam": k, "Newton-like": 2 * k}.get(method, 2)
    assert record["predicted"] == expected
    assert record["fitted"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("TNT", 2 * 3 * 25),
        ("Shampoo", 2 * 3 * 25),
        ("Adam", 125),
        ("Newton-like", 2 * 125 * 125),
        ("SGD-m", 0),
    ],
)
def test_the_formula_by_hand(method: str, numbers: int) -> None:
    assert predicted_bytes(method, d=5, k=3) == 4 * numbers


# The one tensor.


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("method", BUILDERS)
def test_every_method_moves_the_tensor_in_every_kind_of_step(method: str, k: int) -> None:
    if method == "KFAC" and k != 2:
        with pytest.raises(ValueError, match="k must be 2 for KFAC"):
            one_tensor_step(method, 3, k, 4)
        return
    step = one_tensor_step(method, 3, k, 4)
    (weight,) = step.model.parameters()
    assert weight.shape == (3,) * k
    step()
    for kind in (PLAIN, STATISTICS, Kind(False, True), BOTH):
        before = [weight.detach().clone()]
        step.set_due(kind)
        step()
        check_moved(method, step.model, before)


def test_the_dense_matrix_is_what_it_says() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
    optimizer = DenseNewton([weight], lr=0.5)
    start, gradients = weight.detach().clone(), [torch.randn_like(weight) for _ in range(2)]
    fisher, momentum, expected = None, torch.zeros(6, dtype=torch.float64), start.flatten()
    for gradient in gradients:
        weight.grad = gradient
        optimizer.state[weight].setdefault("inverse", torch.eye(6, dtype=torch.float64))
        if fisher is None:
            optimizer.state[weight].update(
                momentum=torch.zeros(6, dtype=torch.float64),
                fisher=torch.outer(gradient.flatten(), gradient.flatten()),
            )
        optimizer.step()
        g = gradient.flatten()
        fisher = torch.outer(g, g) if fisher is None else 0.9 * fisher + 0.1 * torch.outer(g, g)
        momentum = 0.9 * momentum + g
        damped = fisher + DAMPING * torch.eye(6, dtype=torch.float64)
        expected = expected - 0.5 * torch.linalg.solve(damped, momentum)
    torch.testing.assert_close(weight.detach().flatten(), expected)


def test_roots_from_eigenvalues_are_shampoos() -> None:
    steps = [one_tensor_step(m, 5, 2, 16) for m in ("Shampoo, eigenvalues", "Shampoo")]
    for step in steps:
        step()
    (state,) = steps[0].optimizer.state.values()
    wanted, _ = reference.inverse_root([state["stats"]], DAMPING, [4])
    for factor, root in zip(state["factors"], wanted[0], strict=True):
        torch.testing.assert_close(factor, root.float(), rtol=1e-3, atol=1e-3)


# Fits.


def sweep(variable: str, predicted: float, fit_from: int = 1) -> Sweep:
    values = (1, 2, 4, 8, 16, 32)
    return Sweep("TNT", 2, BOTH, variable, "a term", predicted, values, fit_from, d=4)


@pytest.mark.parametrize("power", [1.0, 2.5, 3.0])
def test_a_fit_finds_the_exponent_of_what_is_beyond(power: float) -> None:
    own = sweep("d", power)
    bare = [5e-6 * value for value in own.values]
    excess = [1e-5 * value**power for value in own.values]
    times = [a + b for a, b in zip(bare, excess, strict=True)]
    record = fitted(own, own.values, times, bare)
    assert record["fitted"] == pytest.approx(power)
    assert record["excess_seconds"] == pytest.approx(excess)
    assert record["status"][0] == "launch-bound" and record["status"][-1] == "fitted"


def test_a_fit_over_intervals_uses_what_is_not_lost() -> None:
    own = sweep("T1", -1)
    times = [1.0 + 2.0 / value for value in own.values]
    record = fitted(own, own.values, times, [1.0] * 6)
    assert record["status"] == ["fitted"] * 5 + ["lost in noise"]
    assert record["fitted"] == pytest.approx(-1)


def test_no_exponent_of_two_points() -> None:
    own = sweep("d", 3, fit_from=16)
    record = fitted(own, own.values, [1e-5 * v**3 for v in own.values], [0.0] * 6)
    assert record["status"][2] == "below the fitted range"
    assert record["fitted_values"] == [16, 32] and record["fitted"] is None


def test_the_least_of_several_counts() -> None:
    given = [iter([9.0, 3.0, 2.0]), iter([9.0, 5.0, 7.0])]
    assert least_seconds([lambda own=own: next(own) for own in given], QUICK) == [2.0, 5.0]


# Sweeps.


@pytest.mark.parametrize("variable", ["d", "m", "T1", "T2"])
def test_sweeps_are_timed(variable: str) -> None:
    due = {"T1": STATISTICS, "T2": Kind(False, True)}.get(variable, BOTH)
    own = Sweep("TNT", 2, due, variable, "a term", 1, (1, 2, 4), d=3, m=2)
    record = measure_time(own, QUICK)
    assert record["values"] == [1, 2, 4] and min(record["seconds"]) > 0
    # Over an interval everything is beyond one and the same bare step.
    assert len(set(record["bare_seconds"])) == (1 if variable[0] == "T" else 3)


def test_every_row_of_the_table_is_swept() -> None:
    assert {own.method for own in TIME_SWEEPS} == set(TABLE_2) == {m for m, _ in memory_cases()}
    keys = [tuple(own.key.values()) for own in TIME_SWEEPS]
    assert len(set(keys)) == len(keys)
    for own in TIME_SWEEPS:
        assert sum(value >= own.fit_from for value in own.values) >= 3
    assert {own.variable for own in TIME_SWEEPS if own.method == "TNT"} == {"d", "m", "T1", "T2"}


SMALL = (
    Sweep("TNT", 2, BOTH, "d", "sum d^3", 3, (2, 3, 4, 5)),
    Sweep("Adam", 2, PLAIN, "d", "prod d", 2, (2, 3, 4, 5)),
    Sweep("TNT", 2, STATISTICS, "T1", "m prod d / T1", -1, (1, 2, 4), d=3, m=2),
)


def test_the_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(complexity, "TIME_SWEEPS", SMALL[:2])
    monkeypatch.setattr(complexity, "QUICK", QUICK)
    out = tmp_path / "complexity.json"
    command = ["--quick", "--threads", "1", "--out", str(out)]
    assert complexity.main(command) == 0
    before = load_runs(out)["runs"]
    assert len(before) == len(memory_cases()) + 2
    monkeypatch.setattr(complexity, "TIME_SWEEPS", SMALL)
    monkeypatch.setattr(complexity, "measure_memory", None)  # not called
    assert complexity.main(command) == 0
    assert load_runs(out)["runs"][:-1] == before
    assert "# Table 2 for whole methods" in capsys.readouterr().out
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".md", ".png"]
    with pytest.raises(SystemExit):
        complexity.main(command[1:])
    assert "quick was True and is False" in capsys.readouterr().err
    further = replace(SMALL[0], values=(2, 3, 4, 5, 6))
    monkeypatch.setattr(complexity, "TIME_SWEEPS", [further])
    with pytest.raises(SystemExit):
        complexity.main(command)
    assert "holds TNT over d at [2, 3], not at [2, 3, 4]: give another file" in (
        capsys.readouterr().err
    )
    assert load_runs(out)["runs"][:-1] == before


def test_the_page(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [
        {"key": {"of": "memory", "method": m, "over": "d", "part": f"k = {k}"}}
        | measure_memory(m, k)
        for m, k in memory_cases()
    ]
    times = [1e-5 * v**3 for v in range(1, 7)]
    own = sweep("d", 3)
    record = fitted(own, own.values, times, [1e-7] * 6)
    runs.append({"key": own.key, "busy_before": 0.0, "busy_after": None} | record)
    page = complexity_page(runs)
    assert "| TNT | k = 2 | sum d^2 | 2 | 2.00 | agrees | 8 | 1024 | equal |" in page
    assert "**" not in page.replace("**off**", "")
    plot_complexity(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "complexity.txt"], "must end in .json"),
        (["--threads", "0"], "must be at least 1"),
        (["--sweeps", "all"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        complexity.main(arguments)
    assert message in capsys.readouterr().err
