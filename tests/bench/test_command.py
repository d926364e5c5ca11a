"""``python -m tnt_kernels bench`` at toy size: its tables, record, errors and deadline."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tnt_kernels.__main__ import main
from tnt_kernels.benchmark import command, report
from tnt_kernels.benchmark.command import Case, growth, measure
from tnt_kernels.benchmark.comparison import OURS
from tnt_kernels.benchmark.inputs import TensorSet
from tnt_kernels.benchmark.operators import OPERATORS, Problem
from tnt_kernels.benchmark.records import read_json

CPU = torch.device("cpu")


def tensor(*shape: int) -> TensorSet:
    return TensorSet("x".join(map(str, shape)), (shape,))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of 8 x 8 matrices, three rounds, and no second to see what other processes use."""
    measured = functools.partial(command.measure_limits, numbers=1024)
    monkeypatch.setattr(command, "measure_limits", measured)
    monkeypatch.setattr(command, "LIMIT_SIZE", {"cpu": 8})
    monkeypatch.setattr(command, "alternate", functools.partial(command.alternate, max_rounds=3))
    monkeypatch.setattr(command, "busy_share", lambda: 0.5)
    monkeypatch.setattr(report, "busy_share", lambda: None)


def run(*options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


# What it prints and writes.


@pytest.mark.usefixtures("quick")
def test_every_operator_has_a_table_and_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    shapes = ("--shape", "5x4", "3x2x2", "--shape", "7x9", "5x4", "6")
    assert run(*shapes, "--seconds=1000", f"--json={out}") == 0
    printed = capsys.readouterr().out
    assert "used 50 % of the machine" in printed
    record = read_json(out)
    assert record["left_out"] == [] and record["provenance"]["threads"]["torch"] >= 1
    assert {(row["op"], row["set"]) for row in record["rows"]} == {
        (op, name) for op in OPERATORS for name in ("5x4", "3x2x2", "7x9", "6")
    }
    for row in record["rows"]:
        assert 0 < row["quartiles"][0] <= row["median"] <= row["quartiles"][1]
        assert row["rounds"] >= 3 and row["error"] < 1e-4
        if row["candidate"] == OURS:
            assert row["least_seconds"] > 0 and row["limit"] in record["limits"]
    for op in OPERATORS:
        assert f"\n{op}\n| shape | candidate" in printed.replace("     ", " ").replace("  ", " ")
    assert [row["to"] for row in record["growth"]] == ["7x9"] * len(OPERATORS)
    assert "| operator " in printed and f"wrote {out}" in printed
    # The page of `pytest bench` shows such a record, too.
    assert "## `inverse_root`" in report.page(record)


@pytest.mark.usefixtures("quick")
def test_a_busy_machine_gets_one_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the user says how many."""
    used: list[int] = []
    monkeypatch.setattr(command, "busy_share", lambda: 0.9)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    for options in ([], ["--threads=2"]):
        assert run("--shape=3x2", "--seconds=1000", *options) == 0
    assert used == [1, 2]
    assert capsys.readouterr().out.count("so one thread is used") == 1


def test_without_a_command_it_prints_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    assert printed.startswith("operator") and torch.__version__ in printed


# Growth.


def test_growth_is_that_of_table_2() -> None:
    tensors = {t.name: t for t in (tensor(4, 3), tensor(2, 3), tensor(5), tensor(10))}
    rows = [
        {"op": op, "set": name, "candidate": candidate, "median": seconds}
        for op in OPERATORS
        for name, seconds in (("4x3", 6.0), ("2x3", 4.0), ("5", 1.0), ("10", 3.0))
        for candidate in (OURS, "addmm_")
        if (op, name) != ("mode_products", "10")
    ]
    for row in rows:
        row["median"] = row["median"] if row["candidate"] == OURS else 1e9
    found = {(row["op"], row["from"], row["to"]): row for row in growth(rows, tensors)}
    # From 2 x 3 to 4 x 3: (2 + 3) 6 to (4 + 3) 12, 8 + 27 to 64 + 27, 6 to 12.
    matrices = {
        **dict.fromkeys(OPERATORS, 84 / 30),
        **dict.fromkeys(("damped_inverse", "inverse_root"), 91 / 35),
        "scaled_step_": 2.0,
    }
    vectors = {
        **dict.fromkeys(OPERATORS, 4.0),
        **dict.fromkeys(("damped_inverse", "inverse_root"), 8.0),
        "scaled_step_": 2.0,
    }
    for op in OPERATORS:
        row = found.pop((op, "2x3", "4x3"))
        assert (row["predicted"], row["measured"]) == (pytest.approx(matrices[op]), 1.5)
        if op != "mode_products":
            row = found.pop((op, "5", "10"))
            assert (row["predicted"], row["measured"]) == (pytest.approx(vectors[op]), 3.0)
    assert not found


def test_a_diagonal_mode_grows_as_a_vector() -> None:
    large = tensor(9000, 2)
    assert OPERATORS["gram_ema_"].growth(large) == 18000 + 2 * 18000
    assert OPERATORS["inverse_root"].growth(large) == 9000 + 8


# Time, and wrong results.


def test_after_the_deadline_nothing_starts() -> None:
    case = Case("scaled_step_", tensor(3, 2), least_seconds=0.25)
    rows, left_out = measure([case], CPU, "highest", deadline=-math.inf)
    assert rows == []
    (entry,) = left_out
    assert entry["why"] == "it takes about 10.0 s, 0.0 s are left (--seconds)"
    assert not entry["wrong"]


def test_too_few_rounds_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(runs: dict[str, Any], **_: Any) -> dict[str, list[float]]:
        return dict.fromkeys(runs, [1.0])

    monkeypatch.setattr(command, "alternate", once)
    rows, _ = measure([Case("mode_products", tensor(3, 2), 0.0)], CPU, "highest", math.inf)
    assert {row["rounds"] for row in rows} == {1}
    assert sum("1, too few" in line for line in report.results(rows)) == len(rows) == 3


@pytest.mark.usefixtures("quick")
def test_a_wrong_result_is_not_timed_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = OPERATORS["mode_products"]

    def wrong(tensor_set: TensorSet, device: torch.device) -> Problem:
        problem = right.problem(tensor_set, device)
        return Problem(problem.candidates, [2 * t for t in problem.expected])

    changed = dataclasses.replace(right, problem=wrong)
    monkeypatch.setitem(OPERATORS, "mode_products", changed)
    assert run("--shape", "5x4", "--seconds=1000") == 1
    printed = capsys.readouterr().out
    assert "5x4: WRONG: tnt_kernels: error must be at most 1e-05, got 5.0e-01" in printed
    assert printed.count("| 5x4   | tnt_kernels") == len(OPERATORS) - 1


# Errors.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shape", "0x3"], "--shape: must be positive sizes joined by x, such as 768x3072"),
        (["--shape", "8", "3by4"], "got '3by4'"),
        (["--shape", "100000x10000"], "must have at most 67108864 entries, got 1000000000"),
        (["--shape", "x".join("1" * 25)], "must have at most 24 sizes, got 25"),
        (["--threads", "-1"], "--threads: must be an integer from 1 to 9999, got '-1'"),
        (["--threads", "two"], "got 'two'"),
        (["--seconds", "nan"], "--seconds: must be a positive number, got 'nan'"),
        (["--device", "cuda"], "--device: PyTorch has no GPU here"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--precision", "low"], "--precision: invalid choice: 'low'"),
        (["--json", "record.txt"], "--json: must end in .json, got record.txt"),
    ],
)
def test_an_error_is_one_line_before_anything_runs(
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "new_record", lambda *_, **__: pytest.fail("it runs"))
    assert run(*options) == 2
    printed, error = capsys.readouterr()
    last = error.splitlines()[-1]
    assert printed == "" and said in last
    assert last.startswith("python -m tnt_kernels bench: error: argument --")
