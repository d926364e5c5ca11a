"""Where a GPU's numbers come from: what ``tools.measuring.provenance`` says, and the GPU."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from typing import Any

import torch

from bench.gpu.look import find_tool
from tnt_kernels import backends
from tools.measuring.provenance import provenance

# As nvidia-smi names them.
_QUERIES = (
    "driver_version",
    "power.limit",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "temperature.gpu",
    "utilization.gpu",
    "memory.used",
    "mig.mode.current",
)


def origin(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Provenance, the GPU, what serves each operator.

    Args:
        device: where the run computes.
        commit: recorded where git does not say, and marked as given.
    """
    record = provenance(device)
    if record["commit"] is None and commit is not None:
        record["commit"] = f"{commit} (as given; the files came without git)"
    return {
        **record,
        "gpu": gpu(device),
        "nvidia_smi": nvidia_smi(device),
        "backends": asdict(backends()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def gpu(device: torch.device) -> dict[str, Any] | None:
    """What PyTorch knows of the GPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "gpus": torch.cuda.device_count(),
    }


def nvidia_smi(device: torch.device) -> dict[str, str] | None:
    """Driver, clocks, power limit and who else is there, now; None where no one tells."""
    program = find_tool("nvidia-smi")
    if device.type != "cuda" or program is None:
        return None
    # PyTorch counts the visible GPUs, nvidia-smi all of them.
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = f"GPU-{identity}" if identity is not None else "0"
    try:
        done = subprocess.run(
            [
                *(program, f"--id={which}", f"--query-gpu={','.join(_QUERIES)}"),
                "--format=csv,noheader",
            ],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(_QUERIES, values, strict=False))
