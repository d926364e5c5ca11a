"""Options and fixtures of the benchmarks, and their record.

`pytest bench --benchmark-only` prints pytest-benchmark's table of our candidate and writes the
record (`--out`) and its page, with every candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.measuring.packages import require_bench

require_bench("pytest_benchmark")

import pytest
import torch

from bench import report
from bench.comparison import Comparison
from bench.limits import better, binding, matmul_precision, measure_limits
from bench.work import Work
from tnt_kernels import backends
from tools.measuring.parameter_sets import DEFAULT_SETS, PARAMETER_SETS
from tools.measuring.records import write_json


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
    content["limits"] = better(content["limits"], measure_limits(device, size))
    for row in content["rows"]:
        if "work" in row:
            limit = binding(content["limits"], Work(*row["work"]), row["precision"])
            row["limit"], row["least_seconds"] = limit
    report.write(path, content, report.page)


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

    def add(rows: list[dict[str, Any]]) -> None:
        if record is not None:
            record["rows"] += rows
            # Written after every benchmark: an interrupted run loses none.
            write_json(option("--out"), record, report.DIGITS)

    with matmul_precision(precision):
        yield Comparison(benchmark, device, precision, option("--seconds"), add)
    if device.type == "cuda":
        torch.cuda.empty_cache()
