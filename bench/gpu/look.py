"""What there is to do the job with: device, versions, tools. Asked of a process of its own.

PyTorch's start may hang or crash where a driver is broken, and it takes memory on the GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.stage_runs import CHECKOUT, stage_environment

LIMIT = 90.0  # seconds: the first import of PyTorch from a cold disk takes half of it

# What the stages go without, or with less: module -> what is lost.
OPTIONAL_MODULES = {
    "numpy": "the Triton kernels' own tests",
    "pytest": "the tests",
    "hypothesis": "tests that draw their examples",
    "matplotlib": "the plots",
    "tqdm": "the training",
    "triton": "the Triton kernels",
    "setuptools": "the build of the extension",
    "ninja": "a parallel build",
}
OPTIONAL_TOOLS = {
    "nvcc": "the CUDA kernels",
    "compute-sanitizer": "the sanitizer",
    "nvidia-smi": "driver, clocks and power limit",
}


@dataclass(frozen=True)
class Surroundings:
    """What was found.

    Attributes:
        device: the GPU's name; None where there is none that PyTorch can use.
        why_no_device: what stands in the way.
        torch: PyTorch's version, "none" where it cannot be imported.
        triton: Triton's.
        missing: what is not here, and what is lost without it.
    """

    device: str | None
    why_no_device: str
    torch: str
    triton: str
    missing: tuple[str, ...]


def look(seconds: float = LIMIT) -> Surroundings:
    """Asks a new process."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu.look"],
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=CHECKOUT,
            env=stage_environment(os.environ),
            check=False,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Surroundings(None, f"PyTorch did not start in {seconds:.0f} s", "none", "none", ())
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Surroundings(None, f"PyTorch could not be started: {said}", "none", "none", ())
    return Surroundings(**{**found, "missing": tuple(found["missing"])})


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on the PATH, or where toolkits are."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / part for home in homes if home for part in ("bin", f"{name}")]
    places = [os.environ.get("PATH", ""), *map(str, folders)]
    return shutil.which(name, path=os.pathsep.join(places))


def missing(modules: Sequence[str], tools: Sequence[str]) -> list[str]:
    """Which of them are not here, and what is lost."""
    lost = {**OPTIONAL_MODULES, **OPTIONAL_TOOLS}
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    absent += [name for name in tools if find_tool(name) is None]
    return [f"{name} ({lost[name]})" for name in absent]


def _here() -> Surroundings:
    absent = tuple(missing(list(OPTIONAL_MODULES), list(OPTIONAL_TOOLS)))
    try:
        import torch
    except ImportError as error:
        return Surroundings(None, f"PyTorch cannot be imported: {error}", "none", "none", absent)
    from tnt_kernels import triton

    versions = (torch.__version__, triton.version(), absent)
    if torch.version.cuda is None:
        return Surroundings(None, f"torch {torch.__version__} is built without CUDA", *versions)
    if not torch.cuda.is_available():
        return Surroundings(None, "torch.cuda.is_available() says no", *versions)
    return Surroundings(torch.cuda.get_device_name(), "", *versions)


if __name__ == "__main__":
    print(json.dumps(asdict(_here())))
