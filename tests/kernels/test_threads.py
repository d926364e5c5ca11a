"""Threads: PyTorch's number of them rules, Python's may call at once, results stay the same.

tests/system/test_thread_pools.py has what depends on a whole process: forks, and its threads.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import LAYOUTS, STATE_DTYPES, close, identical, statistic
from operators import GRAFTS, VARIANTS, Call, Results, call, everything, row, same

import tnt_kernels

# Small, tiled and shared-out tensors; a convolution, one that dominates, and one whose workspace
# (5 MB) is kept for the next call.
SHAPES = [(9,), (64, 33), (40, 30, 9), (700, 300), (300,), (2, 3, 5, 4), (80, 100, 80)]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
Run = Callable[[Call, int], Results]


@pytest.fixture
def on_threads() -> Iterator[Run]:
    """Runs a copy of a call on a number of threads."""
    before = torch.get_num_threads()

    def run(given: Call, threads: int) -> Results:
        torch.set_num_threads(threads)
        return given.copy()()

    yield run
    torch.set_num_threads(before)


def large(variant: str) -> Call:
    return call(variant, SHAPES, "full")


@every_variant
def test_repeats_to_the_bit(variant: str, on_threads: Run) -> None:
    given = large(variant)
    for threads in (2, 3):
        first = on_threads(given, threads)
        for _ in range(2):
            same(on_threads(given, threads), first)


@every_variant
def test_any_number_of_threads(variant: str, on_threads: Run) -> None:
    given = large(variant)
    alone = on_threads(given, 1)
    for threads in (2, 3, 8):
        for a, b in zip(everything(on_threads(given, threads)), everything(alone), strict=True):
            if a.is_floating_point():
                close(a.float(), b.double())
            else:
                identical(a, b)


@every_variant
def test_python_threads(variant: str, on_threads: Run) -> None:
    """Three calls at once, each on two of PyTorch's threads."""
    given = call(variant, [(9,), (64, 33), (300, 200), (2, 3, 5, 4)])
    wanted = on_threads(given, 2)
    results: list[Results] = []
    threads = [
        threading.Thread(target=lambda: results.append(on_threads(given, 2))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for result in results:
        same(result, wanted)


@pytest.mark.parametrize("variant", GRAFTS)
def test_a_list_is_its_entries_one_by_one(variant: str, on_threads: Run) -> None:
    """A product on all threads, elements in chunks, and tensors of one thread."""
    given = call(variant, [(260, 200), (9, 65), (40, 50, 30), (65,)], "full", STATE_DTYPES)
    # With full factors, the sums of a chunked tensor would be split otherwise in a list.
    given.arguments["factors"][2] = [a.diagonal().clone() for a in given.arguments["factors"][2]]
    for threads in (1, 2):
        together = on_threads(given, threads)
        for t in range(4):
            alone = on_threads(given.only(t), threads)
            identical(row(together, t), row(alone, 0))


@pytest.mark.parametrize("variant", GRAFTS)
def test_norms_do_not_depend_on_the_number_of_threads(variant: str, on_threads: Run) -> None:
    """Lengths are sums over chunks of fixed size, unlike products with full factors."""
    given = call(variant, [(561, 563), (300, 200), (40, 50, 30), (9,)], "diagonal")
    momenta, grads = given.arguments["momenta"], given.arguments["grads"]
    grads[0], momenta[1] = LAYOUTS["transposed"](grads[0]), LAYOUTS["sliced"](momenta[1])
    grads[2] = LAYOUTS["expanded"](grads[2])
    wanted = on_threads(given, 1)
    for threads in (2, 3):
        same(on_threads(given, threads), wanted)


def test_the_gil_is_released() -> None:
    """Python goes on while C++ works: its longest pause is a small part of the call."""
    stats = [[statistic(700, diagonal=False)]] * 40
    done = threading.Event()
    took: list[float] = []

    def work() -> None:
        torch.set_num_threads(1)
        start = time.perf_counter()
        tnt_kernels.damped_inverse(stats, 0.1)
        took.append(time.perf_counter() - start)
        done.set()

    thread = threading.Thread(target=work)
    ticks = 0
    thread.start()
    while not done.wait(1e-3):
        ticks += 1
    thread.join()
    # A tick is 1 ms when nobody else wants the processor; 20 ms leaves room for others.
    assert took[0] > 0.02 and ticks > took[0] / 20e-3
