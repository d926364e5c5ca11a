"""The stage ``tests``: the operators' tests, on the GPU.

Several pytest processes at once: most of the time goes into compiling Triton's kernels on the CPU,
and a kernel that corrupts its process's GPU memory then takes no other file's tests with it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.gpu.json_lines import JsonLines
from bench.gpu.stage_process import Job, SomethingIsMissing, run
from bench.stage_runs import CHECKOUT

TESTS = CHECKOUT / "tests"
# After so many failures the GPU's state is suspect, and the rest would only take time.
MOST_FAILURES = 40
SHOWN_FAILURES = 20
GRACE = 2.0  # seconds to end after an interrupt
_VERDICT = re.compile(r"(\S+::.*) (PASSED|FAILED|SKIPPED)\b")


@dataclass(frozen=True)
class Group:
    """Test files that one process runs.

    Attributes:
        name: of its log and its XML.
        files: relative to the tests' folder, with wildcards.
        select: as pytest's -k.
    """

    name: str
    files: tuple[str, ...]
    select: str = ""


GROUPS = (
    Group("on_gpu", ("test_on_gpu.py",)),
    Group("streams", ("test_on_gpu_streams.py",), "not graph"),
    # Alone: a graph that reads memory which is no longer its own takes the process with it.
    Group("graphs", ("test_on_gpu_streams.py",), "graph"),
    Group("gram_ema", ("test_gram_ema.py",), "Triton"),
    Group("products_and_step", ("test_mode_products.py", "test_preconditioned_step.py"), "Triton"),
    Group("grafted_directions", ("test_grafted_directions.py",), "Triton"),
    Group("triton_and_dispatch", ("test_triton_*.py", "test_gpu_dispatch.py")),
)


def run_tests(job: Job) -> bool:
    """Runs all groups whose files have what they import."""
    if importlib.util.find_spec("pytest") is None:
        raise SomethingIsMissing("pytest is not installed")
    lines = JsonLines(job.folder / "tests.jsonl")
    started = []
    well = True
    for group in GROUPS:
        files, left_out = runnable(sorted(p for name in group.files for p in TESTS.glob(name)))
        for path, why in left_out:
            print(f"{path.name} is left out: {why}")
            lines.add("not run", file=path.name, why=why)
        if not files:
            well = well and bool(left_out)
            continue
        started.append((group, _start(group, files, job.folder), time.monotonic()))
    for group, process, began in started:
        try:
            status: int | None = process.wait(timeout=max(job.left(), 0.1))
        except subprocess.TimeoutExpired:
            _stop([process for _, process, _ in started])
            status = None
        counts = count(job.folder / f"tests-{group.name}.xml")
        if not any(counts.values()):
            counts = count_in_log(job.folder / f"tests-{group.name}.log")
        seconds = time.monotonic() - began
        lines.add("tests", group=group.name, status=status, seconds=seconds, **counts)
        print(_said(group, status, counts))
        well = well and status == 0
    return well


def runnable(files: Sequence[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Those that have all they import, and those that have not, with what they lack."""
    good, bad = [], []
    for path in files:
        lacking = sorted(lacking_modules(path, set()))
        if lacking:
            bad.append((path, f"{', '.join(lacking)} is not installed"))
        else:
            good.append(path)
    return good, bad


def lacking_modules(path: Path, seen: set[Path]) -> set[str]:
    """What a test file, or the tests' own modules that it imports, imports and is not here."""
    seen.add(path)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    lacking: set[str] = set()
    for name in found:
        own = TESTS / f"{name}.py"
        if own.is_file():
            lacking |= lacking_modules(own, seen) if own not in seen else set()
        elif importlib.util.find_spec(name) is None:
            lacking.add(name)
    if "triton" in found and importlib.util.find_spec("numpy") is None:
        lacking.add("numpy")  # Triton's interpreter, which these import to mend it
    return lacking


def _start(group: Group, files: Sequence[Path], folder: Path) -> subprocess.Popen[bytes]:
    xml = folder / f"tests-{group.name}.xml"
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--verbose", "-p", "no:cacheprovider"]
    command += [f"--junit-xml={xml}", f"--maxfail={MOST_FAILURES}", "--durations=10"]
    # Warnings are errors in the tests. That something is served by the reference is none here: it
    # is recorded, and the stage `build` has said why.
    command += ["-W", "ignore:tnt_kernels:RuntimeWarning"]
    command += ["-k", group.select] if group.select else []
    with (folder / f"tests-{group.name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *map(str, files)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=CHECKOUT,
            # One thread each for the float64 references: the processes share the cores.
            env={**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 4))},
        )


def count(xml: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and which failed; of pytest's XML."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    if not xml.is_file():
        return counts
    for case in ElementTree.parse(xml).iter("testcase"):
        broken = [child for child in case if child.tag in ("failure", "error")]
        if broken:
            counts["failed"] += 1
            said = (broken[0].get("message") or "").splitlines() or [""]
            name = f"{case.get('classname')}.{case.get('name')}"
            counts["failures"].append([name, said[0][:300]])
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def count_in_log(log: Path) -> dict[str, Any]:
    """The same of pytest's words, where it came to no XML."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        found = _VERDICT.match(line)
        if found:
            counts[found[2].lower()] += 1
            if found[2] == "FAILED":
                counts["failures"].append([found[1], "see the log"])
    return counts


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupts pytest, which then still writes its XML unless the GPU hangs; then ends it."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    patience = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(timeout=max(patience - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _said(group: Group, status: int | None, counts: dict[str, Any]) -> str:
    how = "ran out of time (its log has the last test)" if status is None else f"status {status}"
    lines = [
        f"{group.name}: {how}, {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['skipped']} skipped"
    ]
    lines += [f"  {name}: {said}" for name, said in counts["failures"][:SHOWN_FAILURES]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(run_tests))
