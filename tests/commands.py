"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(
    *arguments: str, cwd: Path = ROOT, timeout: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments, and with this in its environment."""
    # pytest-benchmark does not measure in a process that it takes for a worker of pytest-xdist.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
