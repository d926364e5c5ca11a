"""`make gpu` without a GPU: its stages, with a Python that plays them."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from commands import ROOT

SCRIPT = ROOT / "bench" / "gpu.sh"


@pytest.fixture
def job(tmp_path: Path):
    """Runs the job with a program in place of Python, in a folder of its own."""

    def run(program: str, *stages: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/bash\n{program}\n")
        python.chmod(0o755)
        return subprocess.run(
            ["bash", script, tmp_path / "out", *stages],
            env={**os.environ, "PYTHON": str(python)},
            capture_output=True,
            text=True,
        )

    return run


def test_every_stage_runs_whatever_happens_to_the_others(job, tmp_path: Path) -> None:
    """Here the tests fail, and pytest-benchmark is missing."""
    done = job(
        'case "$*" in *tests/gpu*) echo why; exit 3;; *"\'pytest_benchmark\'"*) exit 1;; esac'
    )
    assert done.returncode == 1, done.stdout + done.stderr
    *_, build, tests, sanitizer, operators, steps, results = done.stdout.splitlines()
    assert build.startswith("build: passed")
    assert re.fullmatch(r"tests: failed, exit status 3, \d+ s: why", tests)
    assert sanitizer.startswith("sanitizer: ")
    assert operators == "operators: not run, pytest_benchmark is not installed"
    assert steps == "steps: not run, pytest_benchmark is not installed"
    assert "    | why" in done.stdout and results == f"results: {tmp_path / 'out'}"
    assert (tmp_path / "out" / "logs" / "tests.log").read_text() == "why\n"


def test_a_stage_that_hangs_ends_at_its_limit_with_its_children(job, tmp_path: Path) -> None:
    """The job is given three seconds. The child does not end at SIGINT."""
    short = SCRIPT.read_text().replace("total=540", "total=3").replace("grace=15", "grace=1")
    short = short.replace("[build]=60", "[build]=3")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "gpu.sh").write_text(short)
    hangs = 'case "$*" in *build_ext*) sleep 600 & echo $!; wait;; esac'
    done = job(hangs, "build", script=tmp_path / "bench" / "gpu.sh")
    assert done.returncode == 1 and "build: ended at its limit" in done.stdout, done.stdout
    child = Path("/proc", (tmp_path / "out" / "logs" / "build.log").read_text().split()[0], "stat")
    while child.exists() and child.read_text().split()[2] != "Z":  # it needs a moment
        time.sleep(0.01)


def test_without_a_gpu_or_with_an_unknown_stage_nothing_runs(job) -> None:
    without = job('echo "no driver" >&2; exit 1')
    assert without.returncode == 2 and "no driver" in without.stderr
    unknown = job("true", "build,other")
    assert unknown.returncode == 2 and "there is no stage other" in unknown.stderr
    long = job("true", "build,tests,operators,steps,train")
    assert long.returncode == 2 and "760 s, of 540 s at most" in long.stderr


def test_a_training_runs_only_if_it_is_named(job, tmp_path: Path) -> None:
    program = 'case "$*" in *gpu-train*) echo "$*";; esac'
    assert "train: " not in job(program).stdout
    done = job(program, "build,train")
    assert done.returncode == 0, done.stdout + done.stderr
    *_, build, train, _ = done.stdout.splitlines()
    assert build.startswith("build: passed") and train.startswith("train: passed")
    expected = f"-m experiments gpu-train --device=cuda --out={tmp_path / 'out' / 'train.json'}"
    assert (tmp_path / "out" / "logs" / "train.log").read_text().strip() == expected


def test_the_stages_fit_into_ten_minutes_and_name_existing_files() -> None:
    text = SCRIPT.read_text()
    limits = dict(re.findall(r"\[(\w+)\]=(\d+)", text))
    chosen = re.search(r"^chosen=\$\{2:-(.*)\}", text, re.M)
    total = re.search(r"^total=(\d+)", text, re.M)
    assert chosen and total
    for names in (chosen[1].split(","), ["build", "design"], ["build", "train"]):
        assert sum(int(limits[name]) for name in names) <= int(total[1]) < 600
    assert limits.keys() - set(chosen[1].split(",")) == {"design", "train"}
    for path in re.findall(r"\b(?:tests|bench)/\w+[\w/]*(?:\.py)?", text.split("pytest=(")[1]):
        assert (ROOT / path).exists(), path
