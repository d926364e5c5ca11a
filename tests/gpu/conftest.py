"""Without a GPU, Triton's kernels are compiled for TNT_PTX (80, 90 or 100) and run by gpu.ptx."""

import os
from collections.abc import Iterator

import pytest
from cases import GPU
from gpu.ptx.launch import on_machine

ARCHITECTURE = int(os.environ.get("TNT_PTX") or 90)


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    """Runs every launch of a file's tests."""
    if GPU.type == "cuda":
        yield
        return
    with on_machine(ARCHITECTURE):
        yield
