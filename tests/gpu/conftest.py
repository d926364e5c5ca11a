"""Without a GPU, Triton's kernels are compiled for TNT_PTX (80, 90 or 100) and run by gpu.ptx."""

import os
from collections.abc import Iterator, Sequence

import pytest
import torch
from cases import GPU
from gpu.ptx.launch import on_machine

from tnt_kernels.triton import cublas, launch

ARCHITECTURE = int(os.environ.get("TNT_PTX") or 90)


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    """Runs every launch of a file's tests."""
    if GPU.type == "cuda":
        yield
        return
    with on_machine(ARCHITECTURE):
        yield


def _is_large(tensor: launch.Layout, factors: Sequence[launch.Layout], _: str) -> bool:
    dense = len(tensor.shape) == 2 and tensor.strides == (tensor.shape[1], 1)
    full = all(len(factor.shape) == 2 for factor in factors)
    large = dense and len(factors) == 2 and min(tensor.shape) >= 64
    return large and full and tensor.dtype == torch.float32


@pytest.fixture
def by_cublas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuBLAS multiplies matrices of 64 rows and columns, in every precision."""
    launch._plans.clear()
    with monkeypatch.context() as patched:
        patched.setattr(cublas, "is_faster", _is_large)
        yield
    launch._plans.clear()
