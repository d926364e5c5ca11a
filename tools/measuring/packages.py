"""The packages of the extra `bench`, without which nothing here measures."""

from __future__ import annotations

import sys
from importlib.util import find_spec

BENCH = ("matplotlib", "numpy", "sklearn", "scipy", "tqdm", "typer")


def require_bench(*more: str) -> None:
    """End the program with one line if a package of the extra is missing.

    ``more``: packages of the extra that only some programs need.
    """
    missing = [name for name in (*BENCH, *more) if find_spec(name) is None]
    if missing:
        command = "pip install -e '.[bench]'"
        sys.exit(f"missing packages: {', '.join(missing)}. To install them: {command}")
