"""Thread pools of a whole process: after a fork, and next to PyTorch's own."""

import textwrap
from pathlib import Path

import pytest
import torch
from commands import python


def run_alone(source: str, **environment: str) -> str:
    """Runs a script in a process of its own, in the tests' folder; returns what it prints."""
    folder = Path(__file__).parents[1]
    result = python("-c", textwrap.dedent(source), cwd=folder, timeout=120, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_fork() -> None:
    """A child of a process whose thread pools are warm gets its results, as data loaders need."""
    # Torch's own operators would hang in the child, as long as they may use two threads.
    run_alone("""
        import os, signal
        import torch
        from operators import VARIANTS, Call, call, everything

        torch.set_num_threads(2)
        shapes = [(9,), (64, 33), (40, 30, 9), (700, 300), (2, 3, 5, 4)]
        calls = [call(variant, shapes, "full") for variant in VARIANTS]
        strided = torch.rand(1200, 1200)[::2, ::2]  # a matrix that is only read
        given = {"tensors": [torch.ones(600)], "factors": [[strided]]}
        calls.append(Call("mode_products", given))
        large_mode = {"stats": [[torch.rand(40_000) + 1]], "out": [[torch.empty(40_000)]]}
        roots = {**large_mode, "damping": 0.3, "root": 2, "relative": True}
        calls.append(Call("inverse_root", roots))  # PyTorch's mean would take two threads
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
@pytest.mark.parametrize("blas", ["own", "torch"])
def test_products_leave_pytorchs_threads_alone(blas: str, threads: int) -> None:
    """The calling thread's products have one thread during a call, and PyTorch's after it."""
    if blas == "torch" and not torch.backends.mkl.is_available():
        pytest.skip("this PyTorch has no MKL")
    printed = run_alone(
        f"""
        import torch
        import tnt_kernels

        torch.set_num_threads({threads})
        before = torch.__config__.parallel_info()
        g = torch.randn(300, 200, dtype=torch.float64)
        factors = [[torch.eye(300, dtype=torch.float64), torch.eye(200, dtype=torch.float64) * 2]]
        product, = tnt_kernels.mode_products([g], factors)
        assert torch.equal(product, 2 * g)
        assert torch.__config__.parallel_info() == before
        print(tnt_kernels.backends().versions["BLAS"])
        """,
        TNT_BLAS=blas,
    )
    assert f"(TNT_BLAS={blas}" in printed
    assert ("by PyTorch's MKL" in printed) == (blas == "torch")


def test_another_package_may_change_the_number_of_threads() -> None:
    """As threadpoolctl does: the next call sets it back to one."""
    run_alone("""
        import ctypes
        from pathlib import Path
        import torch
        import scipy_openblas32
        import tnt_kernels

        path = next(Path(scipy_openblas32.get_lib_dir()).glob("lib*openblas*.so"))
        blas = ctypes.CDLL(str(path))
        factors = [[torch.eye(3), torch.eye(2)]]
        for call in (
            lambda: tnt_kernels.gram_ema_(factors, [torch.ones(3, 2)], 0.5),
            lambda: tnt_kernels.damped_inverse(factors, 0.1),
            lambda: tnt_kernels.inverse_root(factors, 0.1, [2]),
            lambda: tnt_kernels.mode_products([torch.ones(3, 2)], factors),
        ):
            blas.scipy_openblas_set_num_threads(2)
            assert blas.scipy_openblas_get_num_threads() == 2
            call()
            assert blas.scipy_openblas_get_num_threads() == 1
    """)


def test_a_blas_that_there_is_not() -> None:
    with pytest.raises(AssertionError, match="ValueError: TNT_BLAS must be 'own', 'torch' or not"):
        run_alone("import tnt_kernels", TNT_BLAS="mkl")
