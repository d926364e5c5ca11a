"""Thread pools of a whole process: after a fork, and next to PyTorch's own."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run_alone(source: str, timeout: float = 120) -> str:
    """Runs a script in a process of its own, in the tests' folder; returns what it prints."""
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
        from operators import VARIANTS, call, everything

        torch.set_num_threads(2)
        shapes = [(9,), (64, 33), (40, 30, 9), (700, 300), (2, 3, 5, 4)]
        calls = [call(variant, shapes, "full") for variant in VARIANTS]
        copies = [given.copy() for given in calls]
        wanted = [everything(given()) for given in calls]
        large = torch.randn(600, 600)
        large @ large
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            results = [everything(given()) for given in copies]
            torch.set_num_threads(1)
            same = all(
                float((x - y).abs().max()) <= 1e-4 * float(y.abs().max())
                for result, values in zip(results, wanted)
                for x, y in zip(result, values)
            )
            os._exit(0 if same else 1)
        status = os.waitpid(child, 0)[1]
        assert status == 0, f"the child ended with {status}"
    """)


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_as_pytorch_has(threads: int) -> None:
    """Processor time over elapsed time: no BLAS pool works next to PyTorch's."""
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
