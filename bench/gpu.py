"""The whole job on one GPU in ten minutes: build, tune, test, sanitize, measure, report.

Every stage is a process of its own with a time limit: a stage that fails, hangs or lacks a tool is
reported, and the others run. The driver imports neither PyTorch nor a package that may be missing,
so it survives whatever a stage does to the GPU. Benchmarks write each result as they measure it, so
an ended stage keeps its results.

Exit status: 0 if no stage failed (a stage that lacks a tool is no failure), 1 if one did, 2 without
a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "failed", "timed out", "not run"
SECONDS = 540.0
LOOK_SECONDS = 90.0  # the first import of PyTorch from a cold disk takes half of it
SHOWN_LINES = 20  # of the log of a stage that did not pass
GRACE = 15.0  # seconds between SIGINT, on which pytest ends its record, and SIGKILL

SETS = "resnet32,mnist_ae,faces_ae,gpt2_full,vgg16,square4096,vgg16_conv"
STEP_SETS = "mnist_ae,resnet32,faces_ae,gpt2_full"


@dataclass(frozen=True)
class Stage:
    """One part of the job."""

    name: str  # as on the command line
    seconds: float  # its time limit; the time that earlier stages leave over is added
    command: tuple[str, ...]  # a program and its arguments
    needs: tuple[str, ...] = ()  # programs and Python modules without which it cannot run
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the driver's


@dataclass(frozen=True)
class Outcome:
    """How a stage ended."""

    stage: str
    status: str
    seconds: float
    message: str

    def __str__(self) -> str:
        """As in the summary."""
        return f"{self.stage:10} {self.status:9} {self.seconds:6.1f} s  {self.message}".rstrip()


def stages(out: Path) -> list[Stage]:
    """All stages of the job in their order; their limits add up to less than ten minutes.

    The records go to ``out``.
    """
    python = sys.executable
    pytest = (python, "-m", "pytest", "-p", "no:cacheprovider")
    # Warnings are errors in the tests. The fallback to the reference warns, which is no error here.
    tests = (*pytest, "-W", "ignore:tnt_kernels:RuntimeWarning", "--continue-on-collection-errors")
    needs_no_gpu = ("--ignore=tests/gpu/test_compile_report.py",)
    # pytest-benchmark warns of workers, also where nothing is to be timed.
    workers = str(min(8, os.cpu_count() or 1))
    parallel = ("-p", "no:benchmark", "-n", workers, "--dist", "worksteal") if _has("xdist") else ()
    bench = (*pytest, "-q", "--benchmark-only", "--device=cuda", "--precision=highest,high")

    def benchmark(name: str, seconds: float, sets: str, *more: str) -> Stage:
        options = (f"--sets={sets}", "--seconds=0.5", f"--out={out / name}.json", *more)
        command = (*bench, f"bench/test_{name}.py", *options)
        return Stage(name, seconds, command, ("pytest_benchmark", "tabulate", "typer"))

    return [
        Stage(
            "build",
            60,
            (python, "setup.py", "build_ext", "--inplace"),
            ("c++", "setuptools", "scipy_openblas32"),
        ),
        # Before the tests and the benchmarks, which then run as the table says.
        Stage(
            "tune",
            60,
            (*(python, "-m", "tnt_kernels", "tune", "--seconds=35"), f"--out={out / 'tune.json'}"),
            ("triton",),
        ),
        Stage(
            "tests",
            120,
            # Verbose: what is not in the log of an ended stage had not ended.
            (*tests, "-v", "--maxfail=40", *parallel, *needs_no_gpu, "tests/gpu"),
            ("pytest", "hypothesis", "numpy"),
            {"OMP_NUM_THREADS": "2"},  # of each worker's reference
        ),
        Stage(
            "sanitizer",
            70,
            (*("compute-sanitizer", "--error-exitcode=9", "--print-limit=20"),
             *tests, "tests/gpu/test_contract.py",
             "-k", "TestPublic and (layouts or failures or one_by_one)"),
            ("compute-sanitizer", "pytest", "hypothesis"),
            # Without PyTorch's cache every tensor is an allocation with known bounds.
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        ),
        benchmark("operators", 130, SETS),
        # What an option costs does not depend on the precision.
        benchmark("steps", 100, STEP_SETS, "-k", "methods or highest"),
    ]  # fmt: skip


def find_tool(name: str) -> str | None:
    """A program on the PATH or in a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(home) / part) for home in homes if home for part in ("bin", name)]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run_stages(planned: Sequence[Stage], logs: Path, seconds: float) -> list[Outcome]:
    """Run every stage, whatever happens to the others, in ``seconds`` for all of them.

    A stage gets its limit and the time that earlier stages left over.
    """
    logs.mkdir(parents=True, exist_ok=True)
    spare = seconds - sum(stage.seconds for stage in planned)
    outcomes: list[Outcome] = []
    for stage in planned:
        limit = stage.seconds + spare
        lacking = [name for name in stage.needs if not (find_tool(name) or _has(name))]
        if lacking:
            outcome = Outcome(stage.name, NOT_RUN, 0.0, f"{', '.join(lacking)} is not installed")
        else:
            print(f"{stage.name}: at most {limit:.0f} s", flush=True)
            outcome = run_stage(stage, logs, limit)
        spare = limit - outcome.seconds
        outcomes.append(outcome)
        print(outcome, flush=True)
        if outcome.status in (FAILED, TIMED_OUT):
            for line in _last_lines(logs / f"{stage.name}.log", SHOWN_LINES):
                print(f"    | {line}")
    return outcomes


def run_stage(stage: Stage, logs: Path, seconds: float, grace: float = GRACE) -> Outcome:
    """Run one stage in a process group of its own; end the group at the limit."""
    log = logs / f"{stage.name}.log"
    program = find_tool(stage.command[0]) or stage.command[0]
    roots = [str(CHECKOUT), str(CHECKOUT / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, roots)),
        "PYTHONUNBUFFERED": "1",  # or the last lines are lost with the process
        **stage.environment,
    }
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *stage.command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=CHECKOUT,
            env=environment,
            process_group=0,
        )
        try:
            code = process.wait(timeout=max(0.1, seconds - grace))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, grace)
    last = next(iter(_last_lines(log, 1)), "")
    status = PASSED if code == 0 else TIMED_OUT if code is None else FAILED
    how = {PASSED: "", TIMED_OUT: "ended at its limit; "}.get(status, f"exit status {code}; ")
    return Outcome(stage.name, status, time.monotonic() - start, how + last)


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End what is left of a process group: children may outlive their parent."""
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal_number)
            process.wait(timeout=grace)


def _last_lines(log: Path, count: int) -> list[str]:
    # A progress bar rewrites its line: the last version counts.
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip()][-count:]


_LOOK = """
import torch
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
"""


def look() -> str:
    """What GPU and PyTorch are here, asked of another process: a broken driver may hang it."""
    command = [sys.executable, "-c", _LOOK]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True
        )
        return done.stdout.splitlines()[-1]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()[-200:]
        print(f"no CUDA device: nothing to measure ({said})", file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds, tests and measures on one GPU; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder of records")
    parser.add_argument("--stage", help="some stages, separated by commas")
    options = parser.parse_args(arguments)
    print(look())
    out = options.out.resolve()
    planned = stages(out)
    if options.stage:
        asked = options.stage.split(",")
        if unknown := set(asked) - {stage.name for stage in planned}:
            parser.error(f"--stage: there is no {', '.join(sorted(unknown))}")
        planned = [stage for stage in planned if stage.name in asked]
    # The stages end on SIGINT, also where the driver is a background job, which ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The driver ends its stage if it is ended itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    outcomes = run_stages(planned, out / "logs", SECONDS)
    print("", *outcomes, f"results: {out}", sep="\n")
    return int(any(o.status in (FAILED, TIMED_OUT) for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
