"""The experiments as commands: they write, continue, refuse, and run in several processes."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.methods import Settings
from experiments.pool import run_all
from experiments.problems.autoencoders import load_autoencoder
from experiments.tasks import autoencoder_settings
from tools.measuring import packages

ROOT = Path(__file__).parents[2]


def settings(seed: int) -> Settings:
    return replace(autoencoder_settings("digits", "sgd"), epochs=1, seed=seed)


def test_processes_give_the_same_records_as_this_one() -> None:
    def made(jobs: int) -> dict[int, list[float]]:
        maker = functools.partial(load_autoencoder, "digits")
        todo = {settings(seed): None for seed in range(3)}
        return {s.seed: r["step_losses"] for s, r in run_all(maker, todo, jobs)}

    earlier = set(multiprocessing.active_children())  # of other tests
    alone = made(1)
    assert made(2) == alone and len(set(map(tuple, alone.values()))) == 3
    assert set(multiprocessing.active_children()) == earlier


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m experiments` in a folder, without data."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "COLUMNS": "200"}
    environment.pop("TNT_DATA", None)
    command = [sys.executable, "-m", "experiments", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.usefixtures("ctrl_c")  # a process that is started has it too
def test_ctrl_c_is_a_line(tmp_path: Path) -> None:
    given = ["figures2to6", "digits", "--optimizer", "sgd", "--epochs", "400"]
    command = [sys.executable, "-m", "experiments", *given]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the first epoch
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, out
    assert err.decode().strip() == "stopped; the same command goes on from what is saved"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    """Not only their present runs: another one waits in the queue."""
    given = ["search", "digits", "--optimizer", "sgd", "--seeds", "1,2,3", "--jobs", "2"]
    command = [sys.executable, "-m", "experiments", *given, "--epochs", "1000000"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, process_group=0, stderr=subprocess.PIPE
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) < 3:  # two workers, and multiprocessing's own
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=300)
    assert process.returncode == 130


def test_missing_packages_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"tqdm": None}
    monkeypatch.setattr(packages, "find_spec", lambda name: found.get(name, True))
    with pytest.raises(SystemExit, match=r"missing packages: tqdm\. .*'\.\[bench\]'"):
        packages.require_bench()
    found = {"pytest_benchmark": None}
    packages.require_bench()
    with pytest.raises(SystemExit, match=r"missing packages: pytest_benchmark\. "):
        packages.require_bench("pytest_benchmark")


@pytest.mark.parametrize(
    "arguments",
    [
        "theorem1 --steps 20 --seeds 0,1",
        "demo --epochs 2",
        "gpu-train --device cpu --quick --seconds 0.2 --threads 1",
    ],
)
def test_commands_without_data_run(tmp_path: Path, arguments: str) -> None:
    out = tmp_path / "run.json"
    done = run(tmp_path, *arguments.split(), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert out.exists() and out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_all_leaves_out_what_has_no_data_and_goes_on(tmp_path: Path) -> None:
    given = ["all", "--quick", "--only", "theorem1,resnet32", "--out", "quick"]
    done = run(tmp_path, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if " s" in line}
    assert "passed" in lines["theorem1"] and "not run" in lines["resnet32"]
    assert "no cifar10" in lines["resnet32"]
    record = (tmp_path / "quick" / "theorem1.json").read_bytes()
    assert run(tmp_path, *given).returncode == 0
    assert (tmp_path / "quick" / "theorem1.json").read_bytes() == record
    (tmp_path / "quick" / "theorem1.json").write_text("{}")
    broken = run(tmp_path, *given)
    assert broken.returncode == 1 and "failed" in broken.stdout
    assert "not run" in broken.stdout, "the other stages follow"
    assert run(tmp_path, "all").returncode == 2
