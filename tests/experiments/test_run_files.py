"""The file of an experiment's runs: goes on where it stopped, and never mixes settings."""

import json
from pathlib import Path

import pytest

from experiments.run_files import RunFile, load_runs

PROTOCOL = {"epochs": 3, "widths": (4, 2, 4)}


def test_runs_are_found_again_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    first = RunFile(path, "example", PROTOCOL)
    assert first.find({"seed": 0}) is None
    assert not path.exists()  # nothing is written before there is a run
    first.add({"seed": 0, "betas": (0.9, 0.999)}, {"losses": [2.0, 1.0]})
    first.add({"seed": 1, "betas": (0.9, 0.999)}, {"losses": [float("nan")]})

    again = RunFile(path, "example", PROTOCOL)
    found = again.find({"seed": 0, "betas": (0.9, 0.999)})
    assert found is not None and found["losses"] == [2.0, 1.0]
    assert again.find({"seed": 2, "betas": (0.9, 0.999)}) is None
    again.add({"seed": 2}, {"losses": []})
    record = load_runs(path)
    assert [run["key"]["seed"] for run in record["runs"]] == [0, 1, 2]
    assert record["runs"][1]["losses"] == [None]
    assert [run["provenance"] for run in record["runs"]] == [0, 0, 1]
    assert len(record["provenance"]) == 2 and "commit" in record["provenance"][0]
    assert [p.name for p in tmp_path.iterdir()] == ["runs.json"]


def test_processes_that_add_to_one_file_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    one, other = RunFile(path, "example", PROTOCOL), RunFile(path, "example", PROTOCOL)
    one.add({"seed": 0}, {"by": "one"})
    assert other.add({"seed": 1}, {"by": "other"})["provenance"] == 1
    one.add({"seed": 2}, {"by": "one"})
    # Both were at it at the same time: the first one's counts.
    assert other.add({"seed": 2}, {"by": "other"})["by"] == "one"
    assert one.find({"seed": 1}) is not None
    runs = load_runs(path)["runs"]
    assert [(run["key"]["seed"], run["by"], run["provenance"]) for run in runs] == [
        (0, "one", 0),
        (1, "other", 1),
        (2, "one", 0),
    ]
    path.write_text(path.read_text().replace('"epochs": 3', '"epochs": 4'))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="epochs was 4 and is 3"):
        one.add({"seed": 3}, {})
    assert path.read_bytes() == before


def test_seconds_with_other_arithmetic_do_not_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.json"
    RunFile(path, "example", PROTOCOL).add({"seed": 0}, {})
    RunFile(path, "example", PROTOCOL).check_same_machine()
    record = json.loads(path.read_text())
    assert record["provenance"][0].pop("flush_subnormals") is False
    path.write_text(json.dumps(record))  # as older files are
    RunFile(path, "example", PROTOCOL).check_same_machine()
    monkeypatch.setattr("tnt_kernels.benchmark.provenance.flushes_subnormals", lambda: True)
    with pytest.raises(ValueError, match="flush_subnormals was False and is True"):
        RunFile(path, "example", PROTOCOL).check_same_machine()


@pytest.mark.parametrize(
    ("experiment", "protocol", "message"),
    [
        ("other", PROTOCOL, "holds runs of 'example', not of 'other'"),
        ("example", {**PROTOCOL, "epochs": 4}, "epochs was 3 and is 4"),
        ("example", {"epochs": 3}, r"widths was \[4, 2, 4\] and is None"),
    ],
)
def test_other_settings_are_refused_and_the_file_kept(
    tmp_path: Path, experiment: str, protocol: dict, message: str
) -> None:
    path = tmp_path / "runs.json"
    RunFile(path, "example", PROTOCOL).add({"seed": 0}, {})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        RunFile(path, experiment, protocol)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"runs": 3}', '{"runs": [{}]}'])
def test_what_is_no_record_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not the record of an experiment's runs"):
        RunFile(path, "example", PROTOCOL)
    assert path.read_text() == content
