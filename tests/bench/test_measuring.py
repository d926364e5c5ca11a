"""The layer under bench and experiments: the clock, records, provenance, tables."""

import json
import math
from pathlib import Path

import pytest
import torch

from tnt_kernels.benchmark import clock
from tnt_kernels.benchmark import provenance as provenance_module
from tnt_kernels.benchmark.clock import alternate
from tnt_kernels.benchmark.provenance import flushes_subnormals, provenance
from tnt_kernels.benchmark.records import check_writable, read_json, write_json


def test_candidates_alternate_and_another_one_starts_each_round() -> None:
    calls: list[str] = []
    candidates = {name: lambda name=name: calls.append(name) for name in "abc"}
    samples = alternate(candidates, seconds=0.0, min_rounds=4)
    assert {name: len(times) for name, times in samples.items()} == {"a": 4, "b": 4, "c": 4}
    assert "".join(calls) == "aabbcc" + "abc" + "bca" + "cab" + "abc"


def test_setup_runs_before_each_run_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    time = [0.0]
    log: list[str] = []
    monkeypatch.setattr(clock.time, "perf_counter", lambda: time[0])

    def run() -> None:
        log.append("run")
        time[0] += 2.0

    def setup(name: str) -> None:
        log.append(name)
        time[0] += 100.0

    assert alternate({"only": run}, seconds=7.0, setup=setup) == {"only": [2.0] * 4}
    assert log == ["only", "run"] * 5  # above half a second, one warm-up is enough


def test_no_round_starts_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    time = [0.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: time[0])

    def run() -> None:
        time[0] += 1.0

    def rounds_and_end(deadline: float) -> tuple[int, float]:
        time[0] = 0.0
        samples = alternate({"a": run, "b": run}, seconds=0.0, deadline=deadline)
        return len(samples["b"]), time[0]

    # Four warm-ups, then two seconds a round.
    assert rounds_and_end(0.0) == (1, 4.0)
    assert rounds_and_end(4.0) == (1, 6.0)
    assert rounds_and_end(6.0) == rounds_and_end(7.0) == (2, 8.0)
    assert rounds_and_end(100.0) == (3, 10.0)


def test_records_round_trip_with_null_for_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = {"a": [1.5, math.nan, -math.inf], "b": {"c": (1, 2)}, "d": [], "rows": [{"x": 1}, {}]}
    write_json(path, record)
    wanted = {"a": [1.5, None, None], "b": {"c": [1, 2]}, "d": [], "rows": [{"x": 1}, {}]}
    assert read_json(path) == wanted
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]
    write_json(path, {})
    assert read_json(path) == {}


def test_each_row_takes_one_line_and_floats_are_rounded(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"rows": [{"t": 0.123456789, "n": 123456789}, {"t": 2e-9 / 3}]}, digits=4)
    lines = path.read_text().splitlines()
    assert lines[2:4] == ['  {"t": 0.1235, "n": 123456789},', '  {"t": 6.667e-10}']
    path.write_text("[1]")
    with pytest.raises(ValueError, match="JSON object"):
        read_json(path)


def test_checking_an_output_leaves_no_trace_and_no_damage(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old.json", "old")]
    with pytest.raises(ValueError, match=".json"):
        check_writable(tmp_path / "record.txt")
    with pytest.raises(IsADirectoryError):
        (tmp_path / "folder.json").mkdir()
        check_writable(tmp_path / "folder.json")


def test_provenance_works_without_git_and_names_no_private_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["x", f"--data={tmp_path}/mnist", str(tmp_path), "--seed", "1"])
    found = provenance()
    assert (found["commit"], found["dirty"]) == (None, None)
    assert str(tmp_path.parent) not in json.dumps(found)
    assert found["command"].endswith("--seed 1") and "/mnist" in found["command"]
    assert found["machine"]["cores"] >= 1 and found["threads"]["torch"] >= 1


def test_an_installed_copy_is_no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a repository surrounds it, as it does a virtual environment."""
    monkeypatch.setattr(provenance_module, "_CHECKOUT", Path(__file__).parent)
    assert provenance()["commit"] is None


def test_provenance_says_how_subnormal_numbers_are_treated() -> None:
    assert provenance()["flush_subnormals"] is False
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        assert flushes_subnormals()
    finally:
        torch.set_flush_denormal(False)
    assert not flushes_subnormals()
