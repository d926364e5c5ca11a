"""Options and fixtures of the benchmarks, and their record.

`pytest bench --benchmark-only` prints pytest-benchmark's table of our candidate and writes the
record (`--out`) and its page, with every candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.measuring.packages import require_bench

require_bench("pytest_benchmark")

import pytest
import torch

from tnt_kernels import backends
from tnt_kernels.benchmark import report
from tnt_kernels.benchmark.clock import Run, Stopwatch, no_collection, rotated, rounds_for
from tnt_kernels.benchmark.comparison import Comparison
from tnt_kernels.benchmark.limits import finish, matmul_precision, measure_limits
from tnt_kernels.benchmark.records import write_json
from tools.measuring.parameter_sets import DEFAULT_SETS, PARAMETER_SETS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options, with the names that they have in all commands of this project."""
    group = parser.getgroup("benchmarks of the operators and of whole steps")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    group.addoption(
        "--sets",
        default=",".join((*DEFAULT_SETS, "vgg16_conv")),
        help=f"parameter sets, separated by commas, of {', '.join(PARAMETER_SETS)}",
    )
    group.addoption("--seconds", default=2.0, type=float, help="for each benchmark (default: 2)")
    group.addoption(
        "--precision",
        default="highest",
        help="of float32 products, separated by commas: highest,high,medium (default: highest)",
    )
    group.addoption("--threads", default=None, type=int, help="(default: PyTorch's own)")
    group.addoption("--limit-size", default=4096, type=int, help="of the matrices for the limits")
    group.addoption("--out", default="results/bench.json", help="the record; its page next to it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by the parameter sets and the precisions of the command line."""
    if "parameter_set" in metafunc.fixturenames:
        names = metafunc.config.getoption("--sets").split(",")
        if unknown := set(names) - set(PARAMETER_SETS):
            known = ", ".join(PARAMETER_SETS)
            raise pytest.UsageError(f"--sets must be of {known}, got {', '.join(sorted(unknown))}")
        metafunc.parametrize("parameter_set", [PARAMETER_SETS[name] for name in names], ids=names)
    if "precision" in metafunc.fixturenames:
        metafunc.parametrize("precision", metafunc.config.getoption("--precision").split(","))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Where everything computes."""
    chosen = torch.device(pytestconfig.getoption("--device"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device cuda: PyTorch has no GPU here", returncode=2)
    if pytestconfig.getoption("--threads"):
        torch.set_num_threads(pytestconfig.getoption("--threads"))
    return chosen


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config, device: torch.device) -> Iterator[dict[str, Any] | None]:
    """The record of this run; None with --benchmark-disable, which only checks the candidates.

    At the end it measures the limits again, adds each row's limit, and writes the page.
    """
    option = pytestconfig.getoption
    if option("--benchmark-disable"):
        yield None
        return
    path, size = Path(option("--out")), option("--limit-size")
    content = report.new_record(path, device, seconds=option("--seconds"))
    content["backends"] = asdict(backends())
    content["limits"] = measure_limits(device, size)
    yield content
    if not content["rows"]:
        return
    finish(content, measure_limits(device, size))
    report.write(path, content, report.page)


def in_turns(
    runs: Mapping[str, Run], benchmark: Any, device: torch.device, seconds: float
) -> dict[str, list[float]] | None:
    """Times candidates in turns; None with --benchmark-disable.

    pytest-benchmark runs the first one (ours); its setup function runs all others before each
    round. So all alternate in one process, and one clock times them all.
    """
    (ours, run), *others = runs.items()
    stopwatch = Stopwatch(device)
    took = sum(stopwatch(run) for run in runs.values())
    samples: dict[str, list[float]] = {name: [] for name in runs}
    turns = 0

    def time_others() -> None:
        nonlocal turns
        for name, other in rotated(others, turns):
            samples[name].append(stopwatch(other))
        turns += 1
        stopwatch.prepare()

    def time_ours() -> None:
        samples[ours].append(stopwatch.timed(run))

    with no_collection():
        benchmark.pedantic(time_ours, setup=time_others, rounds=rounds_for(took, seconds))
    return None if benchmark.stats is None else samples


@pytest.fixture
def compare(
    benchmark: Any,
    pytestconfig: pytest.Config,
    device: torch.device,
    precision: str,
    record: dict[str, Any] | None,
) -> Iterator[Comparison]:
    """Checks, times and records candidates, in the precision of this benchmark."""
    option = pytestconfig.getoption

    def timed(runs: Mapping[str, Run]) -> dict[str, list[float]] | None:
        return in_turns(runs, benchmark, device, option("--seconds"))

    def add(rows: list[dict[str, Any]]) -> None:
        benchmark.group = rows[0]["op"]
        if record is not None:
            record["rows"] += rows
            # Written after every benchmark: an interrupted run loses none.
            write_json(option("--out"), record, report.DIGITS)

    with matmul_precision(precision):
        yield Comparison(device, precision, timed, add)
    if device.type == "cuda":
        torch.cuda.empty_cache()
