"""The JSON records of the experiments, and where they say they come from."""

import json
import math
from pathlib import Path

import pytest
import torch

from tools.measuring.provenance import flushes_subnormals, provenance
from tools.measuring.records import check_writable, write_json


def test_subnormals_are_recorded_as_they_are_treated() -> None:
    assert provenance()["flush_subnormals"] is False
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        assert flushes_subnormals()
    finally:
        torch.set_flush_denormal(False)
    assert not flushes_subnormals()


def test_records_round_trip_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = {"a": [1.5, math.nan, -math.inf], "b": {"c": (1, 2)}, "d": [], "e": ["x", None]}
    write_json(path, record)
    wanted = {"a": [1.5, None, None], "b": {"c": [1, 2]}, "d": [], "e": ["x", None]}
    assert json.loads(path.read_text()) == wanted
    assert "[1.5, null, null]" in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_checking_an_output_leaves_no_trace_and_no_damage(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old.json", "old")]


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
