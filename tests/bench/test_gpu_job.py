"""The GPU's job without a GPU: its driver on fake stages, and what its stages read off tools."""

import doctest
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench.gpu.__main__ as command
from bench.gpu import (
    device_tests,
    every_operator,
    extension_build,
    sanitizer,
    stages,
)
from bench.gpu.driver import OUTCOMES, Stage, run_stages
from bench.gpu.json_lines import JsonLines, read
from bench.gpu.look import Surroundings
from bench.gpu.stage_process import Job
from bench.stage_runs import (
    CHECKOUT,
    FAILED,
    NOT_RUN,
    PASSED,
    TIMED_OUT,
    Outcome,
    exit_status,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
RESULTS = CHECKOUT / "bench" / "results"


@pytest.mark.parametrize("module", ["report_sections", "stages"])
def test_examples(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(f"bench.gpu.{module}"))
    assert failed == 0


# The driver.


def fake(name: str, code: str, seconds: float = 30.0) -> Stage:
    """A stage that runs ``code``, in which ``folder`` is the job's."""
    start = "import os, pathlib, subprocess, sys, time\nfolder = pathlib.Path(sys.argv[2])\n"
    return Stage(name, f"does {name}", seconds, ("-c", start + code))


GOOD = fake("good", "print('fine')")
FAILING = fake("failing", "print('reason'); sys.exit(3)")
CRASHING = fake("crashing", "os.kill(os.getpid(), 11)")
LACKING = fake("lacking", "print('nvcc is not installed'); sys.exit(77)")
# With a child of its own, which must not survive it.
HANGING = fake(
    "hanging",
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    "(folder / 'child').write_text(str(child.pid)); print('waiting', flush=True)\n"
    "time.sleep(300)",
    seconds=5.0,
)
# Passes only where the stages before it are already on record.
LOOKING = fake("looking", f"sys.exit('hanging' not in (folder / '{OUTCOMES}').read_text())")


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_stage_runs_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    planned = [HANGING, LOOKING, FAILING, CRASHING, LACKING, GOOD]
    outcomes = run_stages(
        planned, tmp_path, sum(stage.seconds for stage in planned), say=said.append
    )
    ended = {outcome.stage: outcome for outcome in outcomes}
    assert [o.status for o in outcomes] == [TIMED_OUT, PASSED, FAILED, FAILED, NOT_RUN, PASSED]
    assert ended["hanging"].message == "ended after 5 s; its last line: waiting"
    assert 4 < ended["hanging"].seconds < 15
    assert ended["failing"].message == "exit status 3; its last line: reason"
    assert "signal 11" in ended["crashing"].message
    assert ended["lacking"].message == "nvcc is not installed"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
    assert (tmp_path / "good.log").read_text() == "fine\n"
    record = json.loads((tmp_path / OUTCOMES).read_text())
    assert [o["stage"] for o in record["stages"]] == [stage.name for stage in planned]
    assert exit_status(outcomes) == 1
    text = "\n".join(said)
    assert "    | reason" in text
    assert "lacking      not run" in text and "nvcc is not installed" in text


def test_a_tool_that_is_missing_is_no_failure(tmp_path: Path) -> None:
    outcomes = run_stages([LACKING, GOOD], tmp_path, 60, say=lambda line: None)
    assert exit_status(outcomes) == 0


def test_a_stage_without_time_is_not_started(tmp_path: Path) -> None:
    outcomes = run_stages([GOOD, FAILING], tmp_path, 0.5, say=lambda line: None)
    assert [o.status for o in outcomes] == [NOT_RUN, NOT_RUN]
    assert all(o.message == "no time was left for it" for o in outcomes)
    assert not (tmp_path / "good.log").exists()


def test_what_a_stage_leaves_goes_to_the_next(tmp_path: Path) -> None:
    said: list[str] = []
    run_stages([GOOD, replace(GOOD, name="better")], tmp_path, 60, say=said.append)
    assert said[0] == "good: does good (at most 30 s)"
    limit = int(said[2].split("at most ")[1].split()[0])
    assert 40 <= limit <= 60


def test_the_shares_fit_into_ten_minutes() -> None:
    assert stages.shares(stages.STAGES) <= 60 * command.MINUTES < 600


# The command.


@pytest.fixture
def fake_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs the command on three fake stages, on what looks like a GPU."""
    fakes = (GOOD, FAILING, replace(GOOD, name="report", needs_device=False))
    monkeypatch.setattr(stages, "STAGES", fakes)
    found = Surroundings("a GPU", "", "2.11", "3.6", ("pytest (the tests)",))
    monkeypatch.setattr(command, "look", lambda: found)

    def run(*arguments: str) -> int:
        return command.main(["--folder", str(tmp_path), "--minutes", "2", *arguments])

    return run


def test_stages_are_selected_in_the_jobs_order(
    fake_job: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake_job("--stage", "report,good") == 0
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["good.log", "report.log"]
    assert [o["stage"] for o in json.loads((tmp_path / OUTCOMES).read_text())["stages"]] == [
        "good",
        "report",
    ]
    said = capsys.readouterr().out
    assert "a GPU, torch 2.11, triton 3.6\nmissing: pytest (the tests)\n" in said
    assert fake_job() == 1


@pytest.mark.parametrize("wrong", ["kernel", "", ",", "good,no"])
def test_unknown_stages_are_refused(
    fake_job: Callable[..., int], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        fake_job("--stage", wrong)
    assert stopped.value.code == 2
    assert "must be one or several of good, failing, report, got" in capsys.readouterr().err


def test_every_stage_is_a_module() -> None:
    for stage in stages.STAGES:
        assert stage.command[0] == "-m"
        assert importlib.util.find_spec(stage.command[1]) is not None
    assert [stage.name for stage in stages.STAGES if not stage.needs_device] == ["report"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_done(tmp_path: Path) -> None:
    before = sorted(RESULTS.rglob("*"))
    folder = tmp_path / "job"
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--folder", str(folder)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("no CUDA device: nothing to measure (")
    assert not folder.exists()
    assert sorted(RESULTS.rglob("*")) == before


# What the stages make of what they find.


def test_lines_survive_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "a" / "lines.jsonl"
    lines = JsonLines(path)
    lines.add("one", value=float("nan"), row=(1, 0.12345678))
    lines.add("two", of={"it": True})
    with path.open("a") as file:
        file.write('{"kind": "thr')
    assert read(path) == [
        {"kind": "one", "value": None, "row": [1, 0.123457]},
        {"kind": "two", "of": {"it": True}},
    ]
    assert read(tmp_path / "none.jsonl") == []
    JsonLines(path)
    assert read(path) == []  # a new run's


def test_the_build_is_for_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    environment = extension_build.build_environment((9, 0))
    assert (environment["TNT_CUDA"], environment["TORCH_CUDA_ARCH_LIST"]) == ("1", "9.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert extension_build.build_environment((9, 0))["TORCH_CUDA_ARCH_LIST"] == "8.0"


def test_tests_are_counted(tmp_path: Path) -> None:
    xml = tmp_path / "tests.xml"
    xml.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="first&#10;second"/></testcase>'
        '<testcase classname="a" name="left"><skipped message="x"/></testcase></testsuite>'
        "</testsuites>"
    )
    assert device_tests.count(xml) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "failures": [["a.bad", "first"]],
    }
    assert device_tests.count(tmp_path / "none.xml")["passed"] == 0
    log = tmp_path / "tests.log"
    log.write_text(
        "tests/a.py::one[x y] PASSED  [ 1%]\ntests/a.py::two FAILED [ 2%]\n"
        "tests/a.py::three SKIPPED (no) [3%]\ntests/a.py::four "
    )
    assert device_tests.count_in_log(log) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "failures": [["tests/a.py::two", "see the log"]],
    }


def test_test_files_that_lack_a_module_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tests, "TESTS", tmp_path)
    (tmp_path / "drawing.py").write_text("import not_installed_here\n")
    (tmp_path / "test_a.py").write_text("from drawing import x\nimport os\n")
    (tmp_path / "test_b.py").write_text("import torch, os.path\n")
    good, bad = device_tests.runnable([tmp_path / "test_a.py", tmp_path / "test_b.py"])
    assert [path.name for path in good] == ["test_b.py"]
    assert [(path.name, why) for path, why in bad] == [
        ("test_a.py", "not_installed_here is not installed")
    ]


def test_every_group_has_files_and_the_selection_finds_tests() -> None:
    for group in device_tests.GROUPS:
        for name in group.files:
            assert list(device_tests.TESTS.glob(name)), name
        if group.select:
            for name in group.files:
                word = group.select.removeprefix("not ")
                assert word in (device_tests.TESTS / name).read_text()


@pytest.mark.parametrize(
    ("status", "said", "result"),
    [
        (0, "========= ERROR SUMMARY: 0 errors\n", "clean"),
        (9, "========= ERROR SUMMARY: 2 errors\n", "errors"),
        (0, "===== RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", "errors"),
        (0, "nothing", "failed"),
        (1, "Traceback\n========= ERROR SUMMARY: 0 errors\n", "failed"),
        (None, "", "out of time"),
        (1, "========= Error: Device not supported\n", "refused"),
    ],
)
def test_what_the_sanitizer_says(status: int | None, said: str, result: str) -> None:
    assert sanitizer.judged(status, said)[0] == result


def test_the_sanitizer_runs_every_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        "#!/bin/sh\n"
        'echo "$@; $PYTORCH_NO_CUDA_MEMORY_CACHING"\n'
        'case "$1" in *racecheck) echo "===== RACECHECK SUMMARY: 2 hazards"; exit 9;; esac\n'
        'echo "========= ERROR SUMMARY: 0 errors"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert not sanitizer.sanitize(Job(tmp_path, 60))
    found = [(line["tool"], line["result"]) for line in read(tmp_path / "sanitizer.jsonl")]
    assert found == [("memcheck", "clean"), ("racecheck", "errors")]
    said = (tmp_path / "sanitizer-memcheck.log").read_text()
    assert said.startswith("--tool=memcheck --error-exitcode=9 --print-limit=20 ")
    assert " -m bench.gpu.every_operator; 1\n" in said


def test_every_operator_is_called() -> None:
    every_operator.call_all(CPU)


def test_outcomes_decide_the_status() -> None:
    def ended(*statuses: str) -> int:
        return exit_status([Outcome("a", status, 1.0, "", "") for status in statuses])

    assert [ended(), ended(PASSED, NOT_RUN), ended(PASSED, FAILED), ended(TIMED_OUT)] == [
        *(0, 0),
        *(1, 1),
    ]
