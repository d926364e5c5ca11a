"""The stage ``sanitizer``: compute-sanitizer over every operator, small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from bench.gpu.json_lines import JsonLines
from bench.gpu.look import find_tool
from bench.gpu.stage_process import Job, SomethingIsMissing, run
from bench.stage_runs import CHECKOUT

TOOLS = ("memcheck", "racecheck")
FOUND_ERRORS = 9  # the exit status that it is told to give them
_SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (.*)")
_REFUSALS = ("Device not supported", "is not supported on this device", "LibraryNotLoaded")


def sanitize(job: Job) -> bool:
    """Runs every tool, for at most an even share of the time each."""
    program = find_tool("compute-sanitizer")
    if program is None:
        raise SomethingIsMissing("compute-sanitizer is not installed")
    lines = JsonLines(job.folder / "sanitizer.jsonl")
    results = []
    for number, tool in enumerate(TOOLS):
        log = job.folder / f"sanitizer-{tool}.log"
        seconds = job.left() / (len(TOOLS) - number)
        result, summary = check(program, tool, log, max(seconds, 1.0))
        lines.add("sanitizer", tool=tool, result=result, summary=summary)
        print(f"{tool}: {result}{f': {summary}' if summary else ''} ({log.name})")
        results.append(result)
    if all(result == "refused" for result in results):
        raise SomethingIsMissing("compute-sanitizer does not work on this machine")
    return all(result in ("clean", "refused") for result in results)


def check(program: str, tool: str, log: Path, seconds: float) -> tuple[str, str]:
    """Runs one tool: "clean", "errors", "failed", "out of time" or "refused", and its summary."""
    command = [program, f"--tool={tool}", f"--error-exitcode={FOUND_ERRORS}", "--print-limit=20"]
    command += [sys.executable, "-m", "bench.gpu.every_operator"]
    # Without PyTorch's cache every tensor is an allocation whose ends the tool knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=CHECKOUT, env=environment
        )
        try:
            status: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    return judged(status, log.read_text(encoding="utf-8", errors="replace"))


def judged(status: int | None, said: str) -> tuple[str, str]:
    """What a tool's exit status and words amount to."""
    summaries = _SUMMARY.findall(said)
    summary = "; ".join(summaries)
    if any(refusal in said for refusal in _REFUSALS):
        return "refused", summary
    if status is None:
        return "out of time", summary
    if status == FOUND_ERRORS or any(not text.startswith("0 ") for text in summaries):
        return "errors", summary
    if status != 0 or not summaries:
        return "failed", summary or f"exit status {status}"
    return "clean", summary


if __name__ == "__main__":
    sys.exit(run(sanitize))
