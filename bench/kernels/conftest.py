"""Options and fixtures of the kernel benchmarks, and the record they write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from bench.kernels.limits import Limits, better, measure_limits
from bench.kernels.timing import MAX_ROUNDS, MIN_ROUNDS, Comparison, add_shares
from tnt_kernels import backends
from tools.measuring.clock import busy_share
from tools.measuring.parameter_sets import DEFAULT_SETS, PARAMETER_SETS
from tools.measuring.provenance import provenance
from tools.measuring.records import check_writable, write_json

_LIMITS: pytest.StashKey[Limits] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what ``python -m bench.kernels`` sets."""
    group = parser.getgroup("kernel benchmarks")
    group.addoption("--kernel-sets", default=",".join(DEFAULT_SETS), help="parameter sets to time")
    group.addoption("--kernel-seconds", default=2.0, type=float, help="time for each benchmark")
    group.addoption("--kernel-limit-size", default=4096, type=int, help="matrices for the limits")
    group.addoption("--kernel-record", default=None, help="JSON file to write")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each benchmark on those of its module's SETS that were asked for."""
    if "parameter_set" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--kernel-sets").split(",")
        own = getattr(metafunc.module, "SETS", tuple(PARAMETER_SETS))
        sets = [PARAMETER_SETS[name] for name in own if name in asked]
        metafunc.parametrize("parameter_set", sets, ids=[s.name for s in sets])


@pytest.fixture(scope="session")
def records(pytestconfig: pytest.Config) -> Iterator[list[dict[str, Any]]]:
    """One entry for each benchmark; written at the end, with the provenance of the start."""
    path = pytestconfig.getoption("--kernel-record")
    if path is not None:
        check_writable(path)
    origin = provenance()
    busy = busy_share()
    collected: list[dict[str, Any]] = []
    yield collected
    if path is None:
        return
    start = pytestconfig.stash[_LIMITS] if collected else None
    end = None if start is None else measure_limits(start.size)
    if start is not None and end is not None:
        add_shares(collected, better(start, end))
    write_json(
        path,
        {
            "provenance": origin,
            "backends": asdict(backends()),
            "protocol": {
                "precision": "float32",
                "seconds": pytestconfig.getoption("--kernel-seconds"),
                "rounds": [MIN_ROUNDS, MAX_ROUNDS],
                "order": "candidates alternate in one process; ours follows the baselines",
                "busy_before": busy,
                "busy_after": busy_share(),
            },
            "limits": start and asdict(start),
            "limits_at_the_end": end and asdict(end),
            "benchmarks": collected,
        },
    )


@pytest.fixture(scope="session")
def limits(pytestconfig: pytest.Config) -> Limits:
    """The machine's limits, measured before the first benchmark."""
    measured = measure_limits(pytestconfig.getoption("--kernel-limit-size"))
    pytestconfig.stash[_LIMITS] = measured
    return measured


@pytest.fixture
def compare(
    benchmark: Any,
    pytestconfig: pytest.Config,
    limits: Limits,
    records: list[dict[str, Any]],
) -> Comparison:
    """Checks and times candidates, and records them."""
    return Comparison(benchmark, pytestconfig.getoption("--kernel-seconds"), records)
