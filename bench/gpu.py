"""The whole job on one GPU in ten minutes: build, test, sanitize, measure, report.

Every stage is a process of its own with a time limit: a stage that fails, hangs or lacks a tool is
reported, and the others run. The driver imports neither PyTorch nor a package that may be missing,
so it survives whatever a stage does to the GPU. Benchmarks write each result as they measure it, so
an ended stage keeps its results.

Exit status: 0 if no stage failed (a stage that lacks a tool is no failure), 1 if one did, 2 without
a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.measuring.records import write_json

CHECKOUT = Path(__file__).resolve().parents[1]
PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "failed", "timed out", "not run"
SECONDS = 540.0
LOOK_SECONDS = 90.0  # the first import of PyTorch from a cold disk takes half of it
SHOWN_LINES = 20  # of the log of a stage that did not pass
GRACE = 15.0  # seconds between SIGINT, on which pytest ends its record, and SIGKILL
LEAST_SECONDS = 5.0  # a stage with less time is not started

SETS = "resnet32,mnist_ae,faces_ae,gpt2_full,vgg16,square4096,vgg16_conv"
STEP_SETS = "mnist_ae,resnet32,faces_ae,gpt2_full"
_NEEDS_NO_GPU = ("test_compile_report.py", "test_cuda_on_host.py")
_SANITIZED = "TestPublic and (layouts or failures or one_by_one)"


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
    """How a stage ended; `log` is the name of its log in the job's folder."""

    stage: str
    status: str
    seconds: float
    message: str
    log: str = ""

    def line(self) -> str:
        """As in the summary."""
        message = f": {self.message}" if self.message else ""
        return f"{self.stage:10} {self.status:9} {self.seconds:6.1f} s{message}"


def stages(out: Path, capability: str) -> list[Stage]:
    """All stages of the job in their order; their limits add up to less than ten minutes.

    The records go to ``out``; the capability is that of the GPU, "9.0" for sm_90.
    """
    python = sys.executable
    pytest = (python, "-m", "pytest", "-p", "no:cacheprovider")
    ignored = tuple(f"--ignore=tests/gpu/{name}" for name in _NEEDS_NO_GPU)
    # Warnings are errors in the tests. A fallback to the reference is no error here: the stage
    # "build" has said why.
    tests = (*pytest, "-W", "ignore:tnt_kernels:RuntimeWarning", "--continue-on-collection-errors")
    parallel = ("-n", "4", "--dist", "loadfile") if _has("xdist") else ()
    bench = (*pytest, "-q", "--benchmark-only", "--device=cuda", "--precision=highest,high")

    def benchmark(name: str, seconds: float, file: str, sets: str) -> Stage:
        options = (f"--sets={sets}", "--seconds=1", f"--out={out / name}.json")
        return Stage(
            name, seconds, (*bench, file, *options), ("pytest_benchmark", "tabulate", "typer")
        )

    return [
        Stage(
            "build",
            110,
            (python, "setup.py", "build_ext", "--inplace"),
            ("nvcc", "setuptools"),
            {"TNT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability},
        ),
        Stage(
            "tests",
            120,
            (*tests, "--maxfail=40", *parallel, *ignored, "tests/gpu"),
            ("pytest", "hypothesis", "numpy"),
        ),
        Stage(
            "sanitizer",
            60,
            (*("compute-sanitizer", "--error-exitcode=9", "--print-limit=20"),
             *tests, "tests/gpu/test_contract.py", "-k", _SANITIZED),
            ("compute-sanitizer", "pytest", "hypothesis"),
            # Without PyTorch's cache every tensor is an allocation with known bounds.
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        ),
        benchmark("operators", 160, "bench/test_operators.py", SETS),
        benchmark("steps", 90, "bench/test_steps.py", STEP_SETS),
    ]  # fmt: skip


def find_tool(name: str) -> str | None:
    """A program on the PATH or in a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(home) / part) for home in homes if home for part in ("bin", name)]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run_stages(
    planned: Sequence[Stage],
    logs: Path,
    seconds: float,
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Run every stage, whatever happens to the others, in ``seconds`` for all of them.

    A stage gets its limit and the time that earlier stages left over. The folder ``logs`` also gets
    `outcomes.json`, which grows stage by stage.
    """
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for number, stage in enumerate(planned):
        kept = sum(later.seconds for later in planned[number + 1 :])
        left = end - time.monotonic()
        limit = min(left, max(left - kept, stage.seconds))
        lacking = [name for name in stage.needs if not (find_tool(name) or _has(name))]
        if lacking:
            outcome = Outcome(stage.name, NOT_RUN, 0.0, f"{', '.join(lacking)} is not installed")
        elif limit < LEAST_SECONDS:
            outcome = Outcome(stage.name, NOT_RUN, 0.0, "no time was left for it")
        else:
            say(f"{stage.name}: at most {limit:.0f} s")
            outcome = run_stage(stage, logs, limit)
        outcomes.append(outcome)
        write_json(logs / "outcomes.json", {"rows": [asdict(o) for o in outcomes]})
        say(outcome.line())
        if outcome.status in (FAILED, TIMED_OUT):
            for line in _last_lines(logs / outcome.log, SHOWN_LINES):
                say(f"    | {line}")
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
        code: int | None = None
        try:
            code = process.wait(timeout=max(0.1, seconds - grace))
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process, grace)
    last = next(iter(_last_lines(log, 1)), "")
    status = PASSED if code == 0 else TIMED_OUT if code is None else FAILED
    how = {PASSED: "", TIMED_OUT: "ended at its limit; "}.get(status, f"exit status {code}; ")
    return Outcome(stage.name, status, time.monotonic() - start, how + last, log.name)


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End what is left of a process group: children may outlive their parent."""
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(timeout=grace)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _last_lines(log: Path, count: int) -> list[str]:
    if not log.is_file():
        return []
    # A progress bar rewrites its line: the last version counts.
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip()][-count:]


_LOOK = """
import json, torch
found = {"torch": torch.__version__, "device": None}
if torch.cuda.is_available():
    found["device"] = torch.cuda.get_device_name()
    found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
print(json.dumps(found))
"""


def look(seconds: float = LOOK_SECONDS) -> dict[str, Any]:
    """The GPU and PyTorch's version, asked of another process: a broken driver may hang it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return {"device": None, "torch": f"could not be started: {str(said).strip()[-200:]}"}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds, tests and measures on one GPU; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder of records")
    parser.add_argument("--stage", help="some stages, separated by commas")
    options = parser.parse_args(arguments)
    found = look()
    if found["device"] is None:
        print(f"no CUDA device: nothing to measure (torch {found['torch']})", file=sys.stderr)
        return 2
    print(f"{found['device']}, torch {found['torch']}")
    out = options.out.resolve()
    planned = stages(out, found["capability"])
    if options.stage is not None:
        known = [s.name for s in planned]
        asked = [name.strip() for name in options.stage.split(",")]
        if set(asked) - set(known):
            parser.error(f"--stage must be of {', '.join(known)}, got {options.stage}")
        planned = [s for s in planned if s.name in asked]
    # The driver ends its stage if it is ended itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    outcomes = run_stages(planned, out / "logs", SECONDS)
    print("\n".join(["", *(outcome.line() for outcome in outcomes), f"results: {out}"]))
    return int(any(o.status in (FAILED, TIMED_OUT) for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
