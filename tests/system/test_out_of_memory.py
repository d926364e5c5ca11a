"""An operator without enough memory says so and leaves its outputs unchanged.

In a process of its own, whose address space is limited to its present size and a little more.
"""

import sys

import pytest
import torch
from commands import python

from tnt_kernels import backends

PROGRAM = """
import resource, sys
import torch
from tnt_kernels import damped_inverse, grafted_directions_, inverse_root, preconditioned_step_

torch.set_num_threads(int(sys.argv[2]))
SIDES, SLACK = (1400, 1399), 6 << 20


def definite(d):
    return torch.eye(d, dtype=torch.float64) + 0.5 / d


def calls(sides):
    stats, out = [[[definite(d) for d in sides]] for _ in range(2)]
    out[0][1][0, 1] = 3.0  # not symmetric: all of it must be kept meanwhile
    weight = torch.ones(sides, dtype=torch.float64)
    step = [weight, weight.clone(), weight.clone()]
    grad, moments = weight.clone(), [weight.clone() for _ in range(3)]
    m, v, direction = ([t] for t in moments)
    counts = torch.ones(1, 2, dtype=torch.float64)
    return {
        "inverse": (out[0], lambda: damped_inverse(stats, 0.1, out)),
        "root": (out[0], lambda: inverse_root(stats, 0.1, 2, out)),
        "step": (step, lambda: preconditioned_step_(*[[t] for t in step], stats, 0.1, 0.9, 0.0)),
        "graft": (
            moments,
            lambda: grafted_directions_(m, [grad], stats, 0.9, v, counts, direction),
        ),
    }


name = sys.argv[1]
calls((8, 7))[name][1]()  # loads libraries and starts threads
held, call = calls(SIDES)[name]
before = [tensor.clone() for tensor in held]
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + SLACK
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    call()
    result = "none"
except (MemoryError, RuntimeError) as error:
    result = f"{type(error).__name__}:{error}"
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
same = [torch.equal(a, b) for a, b in zip(before, held)]
call()  # with enough memory
print(result, all(same), all(bool(t.isfinite().all()) for t in held))
"""

_SERVED = {served["cpu"] for served in backends().ops.values()}


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.skipif(_SERVED != {"C++"}, reason="of the C++ kernels")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["inverse", "root", "step", "graft"])
def test_an_operator_without_memory_changes_nothing(name: str, threads: int) -> None:
    # Freed memory goes back to the system, so that a call cannot use it.
    tight = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_ARENA_MAX": "1",
    }
    done = python("-c", PROGRAM, name, str(threads), timeout=600, **tight)
    assert done.returncode == 0, done.stderr
    kind = "RuntimeError" if torch.__version__ >= "2.15" else "MemoryError"
    assert done.stdout.split() == [f"{kind}:std::bad_alloc", "True", "True"]
