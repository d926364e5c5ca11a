"""Where a recorded number comes from: commit, date, machine, versions, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_CHECKOUT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    *("torch", "triton", "scipy-openblas32", "numpy", "scikit-learn", "pytorch-optimizer"),
    "tnt-kernels",
)


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a reader needs to judge or repeat a recorded run, as a JSON-ready dictionary.

    Call it before the run writes anything. Outside a git repository `commit` and `dirty` are None.
    It holds no user name, host name or absolute path. On a GPU it has the name of the device.
    """
    device = torch.device(device)
    # A new record must not make the next run "dirty".
    results = [f":(exclude){folder}/results" for folder in ("bench", "experiments")]
    changes = _git("status", "--porcelain", "--", ".", *results)
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_model(),
            "cores": _usable_cores(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "threads": {
            "torch": torch.get_num_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "device": str(device),
        "flush_subnormals": flushes_subnormals(),
    }


def flushes_subnormals() -> bool:
    """Whether this thread's arithmetic replaces subnormal numbers by zero."""
    smallest = torch.full((), torch.finfo(torch.float32).smallest_normal)
    return bool(smallest / 2 == 0)


def _git(*arguments: str) -> str | None:
    """What git prints of the checkout; None if there is no checkout, or if git fails."""
    if not (_CHECKOUT / ".git").exists():  # an installed copy may lie in somebody's repository
        return None
    command = ("git", "-C", str(_CHECKOUT), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _command() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        start = ["python", "-m", spec.name.removesuffix(".__main__")]
    else:
        start = ["python", Path(sys.argv[0]).name]
    return shlex.join(start + [_portable(argument) for argument in sys.argv[1:]])


def _portable(argument: str) -> str:
    """The argument with an absolute path made relative, or cut to its last part."""
    option, equals, value = argument.rpartition("=")
    if not os.path.isabs(value):
        return argument
    path = Path(value)
    if path.is_relative_to(_CHECKOUT):
        return f"{option}{equals}{path.relative_to(_CHECKOUT)}"
    return f"{option}{equals}.../{path.name}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.M)
    return model[1] if model else platform.processor() or platform.machine()


def _usable_cores() -> int:
    # The cores that this process may use: in a container fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> dict[str, str | None]:
    known = {
        package.name.replace("_", "-"): package.version
        for package in importlib.metadata.distributions()
    }
    # torch.__version__ names the build (+cpu, +cu130); the metadata may not.
    return {
        **{package: known.get(package) for package in _PACKAGES},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
