"""The GPU job without a GPU: time limits, failures and missing tools, on fake stages."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu import FAILED, NOT_RUN, PASSED, TIMED_OUT, Stage, run_stage, run_stages


def fake(name: str, code: str, seconds: float = 60.0, needs: tuple[str, ...] = ()) -> Stage:
    return Stage(
        name, seconds, (sys.executable, "-S", "-c", "import os, sys, time\n" + code), needs
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_stage_runs_whatever_happens_to_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [
        fake("failing", "print('the reason'); sys.exit(3)"),
        fake("crashing", "os.kill(os.getpid(), 11)"),
        fake("lacking", "", needs=("no-such-tool", "json")),
        fake("good", "print('fine')"),
    ]
    outcomes = run_stages(planned, tmp_path, 240.0)
    assert [o.status for o in outcomes] == [FAILED, FAILED, NOT_RUN, PASSED]
    assert outcomes[0].message == "exit status 3; the reason"
    assert outcomes[2].message == "no-such-tool is not installed"
    assert "    | the reason" in capsys.readouterr().out
    assert [o.stage for o in outcomes] == ["failing", "crashing", "lacking", "good"]


def started(code: str, log: Path) -> subprocess.Popen[bytes]:
    """A process in a group of its own that has written its first line."""
    with log.open("wb") as output:
        process = subprocess.Popen(fake("", code).command, stdout=output, process_group=0)
    while b"\n" not in log.read_bytes():
        assert process.poll() is None
        time.sleep(0.01)
    return process


def test_a_hanging_stage_ends_at_its_limit(tmp_path: Path) -> None:
    outcome = run_stage(fake("hanging", "time.sleep(600)"), tmp_path, seconds=1.2, grace=1.0)
    assert outcome.status == TIMED_OUT and outcome.message.startswith("ended at its limit")


def test_children_end_with_their_stage(tmp_path: Path) -> None:
    code = """
import signal, subprocess
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])
print(child.pid, flush=True)
time.sleep(600)
"""
    process = started(code, tmp_path / "log")
    gpu._end(process, grace=0.1)
    assert process.wait() == -9
    child = int((tmp_path / "log").read_text())
    while is_running(child):  # it was killed; the system needs a moment
        time.sleep(0.01)


def test_a_stage_gets_an_interrupt_first_to_finish_its_record(tmp_path: Path) -> None:
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start without it
try:
    print('started', flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print('the record is complete', flush=True)
"""
    process = started(code, tmp_path / "log")
    gpu._end(process, grace=60.0)
    assert process.returncode == 0
    assert (tmp_path / "log").read_text().endswith("the record is complete\n")


def test_a_stage_gets_the_time_that_earlier_ones_left_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [fake("first", "", 100.0), fake("second", "", 50.0), fake("third", "", 9000.0)]
    run_stages(planned, tmp_path, 9150.0)
    said = capsys.readouterr().out.splitlines()
    limits = [float(line.split()[-2]) for line in said if "at most" in line]
    assert limits[0] == 100.0 and 140.0 < limits[1] <= 150.0 and limits[2] > 9100.0


def test_the_stages_fit_into_ten_minutes_and_name_existing_files(tmp_path: Path) -> None:
    planned = gpu.stages(tmp_path)
    assert sum(stage.seconds for stage in planned) <= gpu.SECONDS < 600
    for stage in planned:
        files = [arg for arg in stage.command if arg.startswith(("tests/", "bench/", "setup.py"))]
        assert files or stage.command[1:4] == ("-m", "tnt_kernels", "tune")
        assert all((gpu.CHECKOUT / name).exists() for name in files)
    assert [stage.name for stage in planned[:2]] == ["build", "tune"]
    given = [a for stage in planned for a in stage.command if a.startswith("--ignore=")]
    ignored = [a.partition("=")[2] for a in given]
    assert ignored and all((gpu.CHECKOUT / name).is_file() for name in ignored)


def test_without_a_gpu_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for broken in ("raise ImportError('no driver')", "import os; os._exit(0)"):
        monkeypatch.setattr(gpu, "_LOOK", broken)
        with pytest.raises(SystemExit, match="2"):
            gpu.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    said = capsys.readouterr().err
    assert "no driver" in said and said.count("no CUDA device") == 2


def test_chosen_stages_decide_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "look", lambda: "a GPU, torch 2.0")
    good, bad = fake("good", ""), fake("bad", "sys.exit(1)")
    monkeypatch.setattr(gpu, "stages", lambda out: [good, bad])
    out = ["--out", str(tmp_path)]
    assert gpu.main([*out, "--stage", "good"]) == 0
    assert gpu.main([*out, "--stage", "good,bad"]) == 1
    with pytest.raises(SystemExit):
        gpu.main([*out, "--stage", "other"])
