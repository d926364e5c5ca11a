"""The commands of the benchmarks run, and their records have what their pages need."""

from pathlib import Path

import pytest
from commands import python

from bench import complexity, processes
from tnt_kernels.benchmark import report
from tnt_kernels.benchmark.operators import OPERATORS
from tnt_kernels.benchmark.records import read_json


def run(*arguments: str) -> str:
    done = python("-m", *arguments, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pytest_bench_prints_its_table_and_writes_a_record(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = ["--sets=resnet32", "--seconds=0", "--limit-size=64", f"--out={out}"]
    printed = run("pytest", "bench", "--benchmark-only", "-q", "-p", "no:cacheprovider", *options)
    assert "Name (time in" in printed and "test_operator[resnet32-highest-gram_ema_]" in printed
    record = read_json(out)
    assert {row["op"] for row in record["rows"]} == {
        *("gram_ema_", "gram_ema_ whitened", "damped_inverse", "inverse_root"),
        *("preconditioned_step_", "mode_products", "grafted_directions_", "scaled_step_"),
        *("TNT.step", "options of a plain step", "calls next to steps"),
    }
    for row in record["rows"]:
        assert row["median"] > 0 and row["rounds"] >= 3 and len(row["ratio"]) == 3
    first = record["rows"][0]
    assert first["least_seconds"] > 0 and first["limit"] in record["limits"]
    assert out.with_suffix(".md").read_text() == report.page(record)


def test_the_installed_command_writes_a_record(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = ["--shape=9x8", "--threads=1", "--seconds=100", f"--json={out}"]
    printed = run("tnt_kernels", "bench", *options)
    record = read_json(out)
    assert record["provenance"]["command"].startswith("python -m tnt_kernels bench --shape=9x8")
    assert record["provenance"]["threads"]["torch"] == 1
    assert {row["op"] for row in record["rows"]} == set(OPERATORS)
    assert printed.count("| 9x8   | tnt_kernels") == len(OPERATORS)


def test_checking_only_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = ["--sets=resnet32", f"--out={out}", "-k", "gram or options"]
    run("pytest", "bench", "--benchmark-disable", "-q", "-p", "no:cacheprovider", *options)
    assert not out.exists()


def test_complexity_writes_a_record_and_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "complexity.json"
    short = [complexity.Sweep(**{**vars(s), "values": s.values[:4]}) for s in complexity.SWEEPS]
    monkeypatch.setattr(complexity, "SWEEPS", short)
    complexity.main(out, seconds=0.0)
    record = read_json(out)
    assert [len(row["seconds"]) for row in record["rows"]] == [4] * 8
    assert all(min(row["seconds"]) > 0 for row in record["rows"])
    assert out.with_suffix(".md").read_text() == complexity.page(record)


def test_processes_end_where_one_does(tmp_path: Path) -> None:
    out = tmp_path / "processes.json"
    command = ["--sets=resnet32", "--processes=2", "--periods=1", "--threads=1", f"--out={out}"]
    run("bench.processes", *command)
    record = read_json(out)
    rows = {(row["processes"], row["way"]): row for row in record["rows"]}
    assert list(rows) == [(1, "none"), *((2, way) for way in processes.WAYS)]
    assert out.with_suffix(".md").read_text() == processes.page(record)
    alone = rows[1, "none"]
    assert alone["difference"] == 0 and sum(alone["sent_bytes"]["statistics"]) == 0
    for (count, way), row in rows.items():
        assert row["difference"] < 1e-4 and row["processes_differ"] == 0
        assert len(row["state_bytes"]) == count
        if count > 1:
            assert min(row["sent_bytes"]["statistics"]) > 0
        if way in ("directions", "fully_shard"):
            assert max(row["state_bytes"]) < alone["state_bytes"][0]
