"""C++ operators and steps whose allocations fail, each in turn, in a process of its own.

An operator then changes nothing. A step can be repeated: the end is that of a training with enough
memory, to the bit. tests/kernels/test_out_of_memory.py has the reference,
tests/gpu/test_out_of_memory.py Triton.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import memory_faults
import pytest
from commands import ROOT, python
from operators import VARIANTS

from tnt_kernels import backends

COMPILER = os.environ.get("CXX", "c++")
_SERVED = {served["cpu"] for served in backends().ops.values()}
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="replaces the allocator"),
    pytest.mark.skipif(_SERVED != {"C++"}, reason="of the C++ kernels"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes allocations fail."""
    library = tmp_path_factory.mktemp("allocator") / "failing.so"
    source = Path(__file__).with_name("failing_allocator.cpp")
    options = ["-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([COMPILER, *options, str(source), "-ldl"], check=True, timeout=300)
    return library


def failures(allocator: Path, *arguments: object) -> list[int]:
    """Runs a program of ``memory_faults``; returns what it prints."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "python", ROOT / "tests")))
    done = python(
        *("-m", "memory_faults", *map(str, arguments)),
        timeout=900,
        LD_PRELOAD=str(allocator),
        PYTHONPATH=path,
    )
    assert done.returncode == 0, done.stderr
    print(*arguments, done.stdout)  # pytest -s shows it
    return [int(number) for number in done.stdout.splitlines()[-1].split()]


@pytest.mark.parametrize(("layout", "threads"), [("contiguous", 2), ("transposed", 1)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_operator_without_memory_changes_nothing(
    variant: str, layout: str, threads: int, allocator: Path
) -> None:
    (count,) = failures(allocator, "operator", threads, variant, layout)
    assert count >= 10


@pytest.mark.parametrize(
    ("name", "number", "bucket"),
    [
        *((name, 2, 20) for name in memory_faults.OPTIMIZERS),  # several buckets
        ("sampled", 0, 1 << 22),
        ("kfac", 0, 1 << 22),
    ],
)
def test_a_step_without_memory_can_be_repeated(
    name: str, number: int, bucket: int, allocator: Path
) -> None:
    before, within = failures(allocator, "step", 1, name, number, bucket)
    assert before >= 10 and within >= 10
