"""The tests of the contract that PyTorch's optimizers keep, counted by optimizer."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
# As the tests call them, and what they are.
OPTIMIZERS = {
    "sampled": "TNT",
    "empirical": "TNT, empirical",
    "shampoo": "Shampoo",
    "kfac": "KFAC",
    "fallback": "TNT with AdamW",
}
OUTCOMES = ("passed", "failed", "skipped")


class ContractError(RuntimeError):
    """The tests could not be run; the message has pytest's own words."""


def files() -> list[str]:
    """The contract's tests."""
    found = sorted((ROOT / "tests").glob("test_optimizer_contract*.py"))
    return [str(path.relative_to(ROOT)) for path in found]


def counted(chosen: Sequence[str], expression: str = "") -> dict[str, dict[str, dict[str, int]]]:
    """Runs the tests; returns under "tests" how many had which outcome, by optimizer.

    Args:
        chosen: files, relative to the checkout.
        expression: what pytest takes as ``-k``.

    Raises:
        ContractError: where pytest ends without a report of tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        arguments = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", expression]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments, *chosen],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1):  # all passed, some failed
            raise ContractError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return {"tests": outcomes(report.read_text(encoding="utf-8"))}


def outcomes(report: str) -> dict[str, dict[str, int]]:
    """Counts the tests of a report in JUnit's XML; an error counts as a failure."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in OPTIMIZERS.values()}
    for case in ElementTree.fromstring(report).iter("testcase"):
        ends = {child.tag for child in case}
        failed = ends & {"failure", "error"}
        outcome = "failed" if failed else "skipped" if "skipped" in ends else "passed"
        counts.setdefault(_optimizer(case.get("name", "")), Counter())[outcome] += 1
    return {name: {outcome: c[outcome] for outcome in OUTCOMES} for name, c in counts.items()}


def _optimizer(test: str) -> str:
    """Whose test it is, by the name in its parameters' brackets."""
    parameters = test.partition("[")[2].removesuffix("]").split("-")
    named = [title for name, title in OPTIMIZERS.items() if name in parameters]
    return named[0] if len(named) == 1 else "other"
