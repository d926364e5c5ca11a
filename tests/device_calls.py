"""Calls of the public operators on a device, compared with the reference in float64 on the CPU.

The device is a GPU if there is one; TNT_TEST_DEVICE=cpu makes it the CPU, which tests the tests.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import unchanged
from operators import Call, agree

import tnt_kernels
from tnt_kernels import reference

_NAME = os.environ.get("TNT_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "")
DEVICE = torch.device(_NAME or "cpu")
CUDA = DEVICE.type == "cuda"

on_device = pytest.mark.skipif(not _NAME, reason="no CUDA device (TNT_TEST_DEVICE=cpu for some)")
cuda_only = pytest.mark.skipif(not CUDA, reason="CUDA's own")

# Both operands of a product are cut to TF32's ten bits, at most 2^-10 each.
TF32_PRODUCT = 2.0**-9
# Tensor cores truncate their sums: at worst all the same way, a quarter bit a term.
CUT_TERM = 2.0**-25

# Partial sums (9 and 64 rows), middle modes, vectors, several tiles, sizes that are read widely.
MANY = [(9, 70000), (64, 9000), (100, 33, 9), (129,), (300, 200), (64, 128)]


def check(
    given: Call,
    tolerance: float | None = None,
    device: torch.device = DEVICE,
    functions: Any = tnt_kernels,
) -> None:
    """The function on the device against the reference in float64 on the CPU."""
    wanted = given.double()(reference)
    there = given.copy(device)
    with unchanged(there.read):
        results = there(functions)
    assert all(tensor.device.type == device.type for tensor in there.written)
    agree(results, wanted, there, tolerance)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within it, whatever waits for the GPU is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def usual_settings() -> Iterator[None]:
    """For a fixture: float32 products in full precision, and one thread on the CPU."""
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads if CUDA else 1)
    yield
    torch.set_float32_matmul_precision(before)
    torch.set_num_threads(threads)
