"""Where a recorded number comes from: commit, date, machine, versions, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_CHECKOUT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton", "scipy-openblas32", "numpy", "scikit-learn", "tnt-kernels")


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a reader needs to judge or repeat a recorded run, as a JSON-ready dictionary.

    Call it before the run writes anything. Outside a git repository `commit` is the environment
    variable TNT_COMMIT, or None, and `dirty` is None. It holds no user name, host name or absolute
    path. On a GPU it has the name of the device.
    """
    device = torch.device(device)
    given = os.environ.get("TNT_COMMIT")
    commit = _git("rev-parse", "HEAD") or (given and f"{given} (as given; no git)")
    # A new record must not make the next run "dirty".
    results = [f":(exclude){folder}/results" for folder in ("bench", "experiments")]
    changes = _git("status", "--porcelain", "--", ".", *results)
    return {
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_model(),
            "cores": _usable_cores(),
            "memory_gib": _memory_gib(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            **({"nvidia_smi": _nvidia_smi(device)} if device.type == "cuda" else {}),
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


def _output(*command: str) -> str | None:
    """What a command prints; None if it is not installed, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _git(*arguments: str) -> str | None:
    return _output("git", "-C", str(_CHECKOUT), *arguments)


def _command() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        name = spec.name.removesuffix(".__main__")
        start = ["python", "-m", name]
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
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    # The cores that this process may use: in a container fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _nvidia_smi(device: torch.device) -> str | None:
    """Driver, power limit, clocks and other users of the GPU."""
    query = "driver_version,power.limit,clocks.sm,clocks.mem,utilization.gpu,memory.used"
    # PyTorch counts the visible GPUs, nvidia-smi all of them.
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = f"--id=GPU-{identity}" if identity is not None else "--id=0"
    return _output("nvidia-smi", which, f"--query-gpu={query}", "--format=csv")


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    # torch.__version__ names the build (+cpu, +cu130); the metadata may not.
    versions["torch"] = torch.__version__
    versions["cuda"] = torch.version.cuda
    return versions
