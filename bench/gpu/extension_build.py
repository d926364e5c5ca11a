"""The stage ``build``: the extension, with its CUDA kernels, for the GPU that is here.

Where it fails, or nvcc is missing, Triton and the reference serve, and every record says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from bench.gpu.json_lines import JsonLines
from bench.gpu.look import find_tool
from bench.gpu.stage_process import Job, SomethingIsMissing, present_gpu, run
from bench.stage_runs import CHECKOUT


def build(job: Job) -> bool:
    """Builds in place, then prints what serves each operator."""
    nvcc = find_tool("nvcc")
    if nvcc is None:
        raise SomethingIsMissing("nvcc is not installed: Triton and the reference serve")
    if torch.version.cuda is None:
        raise SomethingIsMissing(f"torch {torch.__version__} is built without CUDA")
    environment = build_environment(torch.cuda.get_device_capability(present_gpu()))
    lines = JsonLines(job.folder / "build.jsonl")
    _run([nvcc, "--version"], environment)
    start = time.monotonic()
    status = _run([sys.executable, "setup.py", "build_ext", "--inplace"], environment)
    lines.add(
        "build",
        status=status,
        seconds=time.monotonic() - start,
        architectures=environment["TORCH_CUDA_ARCH_LIST"],
    )
    page = _run([sys.executable, "-m", "tnt_kernels"], environment)
    if status != 0:
        print("the build failed: Triton and the reference serve")
    return status == 0 and page == 0


def build_environment(capability: tuple[int, int]) -> dict[str, str]:
    """With CUDA, for this GPU alone unless the environment says otherwise."""
    major, minor = capability
    return {
        "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}",
        **os.environ,
        "TNT_CUDA": "1",
    }


def _run(command: list[str], environment: dict[str, str]) -> int:
    print(f"$ {' '.join(command)}", flush=True)
    return subprocess.run(command, cwd=CHECKOUT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(run(build))
