"""With TNT_PTX=80, 90 or 100, kernels are compiled for that architecture and run on the machine."""

import os
from collections.abc import Iterator

import pytest

ARCHITECTURE = int(os.environ.get("TNT_PTX") or 0)


@pytest.fixture(scope="session", autouse=True)
def machine() -> Iterator[None]:
    """Every launch of the session."""
    if not ARCHITECTURE:
        yield
        return
    from gpu.ptx.launch import on_machine

    with on_machine(ARCHITECTURE):
        yield
