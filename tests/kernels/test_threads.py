"""Threads: PyTorch's number rules, forks and other threads are safe, the results are the same.

The C++ operators share work out over PyTorch's threads, with single-threaded BLAS calls inside.
What depends on the whole process (a fork, the number of threads it has started) runs in one of its
own.
"""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import close, flat, identical, mode_statistics, normal, statistic
from torch import Tensor

import tnt_kernels

# Small, tiled and shared-out tensors; a convolution, diagonal modes, one that dominates, and one
# whose scratch memory (5 MB) is kept for the next call.
SHAPES = [(9,), (64, 33), (40, 30, 9), (700, 300), (300,), (2, 3, 5, 4), (80, 100, 80)]


def arguments() -> dict[str, Any]:
    """The same at each call, whichever Python thread it is in."""
    with _GENERATOR:
        torch.manual_seed(0)
        return {
            "stats": [mode_statistics(s, "mixed" if len(s) > 3 else "full") for s in SHAPES],
            "tensors": [normal(s) for s in SHAPES],
            "params": [normal(s) for s in SHAPES],
            "momenta": [normal(s) for s in SHAPES],
            "squares": [normal(s).square() for s in SHAPES],
        }


_GENERATOR = threading.Lock()  # PyTorch's, which the arguments are drawn from


def gram() -> list[Tensor]:
    given = arguments()
    tnt_kernels.gram_ema_(given["stats"], given["tensors"], 0.9)
    return flat(given["stats"])


def inverse() -> list[Tensor]:
    factors, info = tnt_kernels.damped_inverse(arguments()["stats"], 0.1)
    return [*flat(factors), info]


def root() -> list[Tensor]:
    factors, info = tnt_kernels.inverse_root(arguments()["stats"], 0.1, 4)
    return [*flat(factors), info]


def products() -> list[Tensor]:
    given = arguments()
    return tnt_kernels.mode_products(given["tensors"], given["stats"])


def step() -> list[Tensor]:
    given = arguments()
    lists = given["params"], given["momenta"], given["tensors"], given["stats"]
    tnt_kernels.preconditioned_step_(*lists, lr=1e-2, momentum=0.9, weight_decay=0.1)
    return [*given["params"], *given["momenta"]]


def graft() -> list[Tensor]:
    given = arguments()
    counts = torch.arange(1.0, 1 + 2 * len(SHAPES), dtype=torch.float64).view(-1, 2)
    lists = given["momenta"], given["tensors"], given["stats"]
    directions, scales = tnt_kernels.grafted_directions_(*lists, 0.9, given["squares"], counts)
    # The scales are float64 numbers made of float32 ones.
    return [*given["momenta"], *given["squares"], *directions, scales.float()]


CALLS = {
    "gram_ema_": gram,
    "damped_inverse": inverse,
    "inverse_root": root,
    "mode_products": products,
    "preconditioned_step_": step,
    "grafted_directions_": graft,
}
each_operator = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture(autouse=True)
def threads_put_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def with_threads(count: int, call: Callable[[], list[Tensor]]) -> list[Tensor]:
    torch.set_num_threads(count)
    return call()


@each_operator
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_repeats_to_the_bit(call: Callable[[], list[Tensor]], threads: int) -> None:
    first = with_threads(threads, call)
    for _ in range(5):
        for a, b in zip(first, with_threads(threads, call), strict=True):
            identical(a, b)


@each_operator
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_any_number_of_threads(call: Callable[[], list[Tensor]], threads: int) -> None:
    alone = with_threads(1, call)
    for a, b in zip(with_threads(threads, call), alone, strict=True):
        close(a, b.double()) if a.is_floating_point() else identical(a, b)


@each_operator
def test_python_threads(call: Callable[[], list[Tensor]]) -> None:
    """Four at once, each on all of PyTorch's threads."""
    wanted = call()
    results: list[list[Tensor]] = []
    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        for a, b in zip(result, wanted, strict=True):
            identical(a, b)


def test_the_gil_is_released() -> None:
    """Python goes on while C++ works: its longest pause is a small part of the call."""
    stats = [[statistic(700, diagonal=False)] for _ in range(8)]
    done = threading.Event()
    took: list[float] = []

    def work() -> None:
        start = time.perf_counter()
        tnt_kernels.damped_inverse(stats, 0.1)
        took.append(time.perf_counter() - start)
        done.set()

    torch.set_num_threads(1)
    thread = threading.Thread(target=work)
    ticks = 0
    thread.start()
    while not done.wait(1e-3):
        ticks += 1
    thread.join()
    # A tick is 1 ms when nobody else wants the processor; 20 leaves room for those who do.
    assert took[0] > 0.02 and ticks > took[0] / 20e-3


def run_alone(source: str, timeout: float = 120) -> str:
    """Runs a script in a process of its own, among the tests; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_fork() -> None:
    """A child of a process whose thread pools are warm gets its results, as data loaders need."""
    # Torch's own operators would hang in the child, as long as they may use two threads.
    run_alone("""
        import os, signal
        import torch
        from cases import flat
        from test_threads import CALLS, arguments
        import tnt_kernels

        torch.set_num_threads(2)
        wanted = [call() for call in CALLS.values()]
        prepared = [arguments() for _ in CALLS]
        large = torch.randn(600, 600)
        large @ large
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            a = prepared[0]
            tnt_kernels.gram_ema_(a["stats"], a["tensors"], 0.9)
            tnt_kernels.damped_inverse(prepared[1]["stats"], 0.1, prepared[2]["stats"])
            tnt_kernels.inverse_root(prepared[3]["stats"], 0.1, 4, prepared[4]["stats"])
            tnt_kernels.mode_products(prepared[3]["tensors"], prepared[3]["stats"])
            torch.set_num_threads(1)
            same = all(
                float((x - y).abs().max()) <= 1e-4 * float(y.abs().max())
                for x, y in zip(flat(a["stats"]), wanted[0])
            )
            os._exit(0 if same else 1)
        status = os.waitpid(child, 0)[1]
        assert status == 0, f"the child ended with {status}"
    """)


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_as_pytorch_has(threads: int) -> None:
    """Processor time over elapsed time: no BLAS pool works beside PyTorch's."""
    printed = run_alone(f"""
        import time
        import torch
        from cases import statistic
        import tnt_kernels

        torch.set_num_threads({threads})
        stats = [[statistic(600, diagonal=False)] for _ in range(8)]
        tnt_kernels.damped_inverse(stats, 0.1)
        time.sleep(0.5)  # pools that have just started look busy
        wall, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < 1:
            tnt_kernels.damped_inverse(stats, 0.1)
        print((time.process_time() - cpu) / (time.perf_counter() - wall))
    """)
    assert float(printed) < threads + 0.1
