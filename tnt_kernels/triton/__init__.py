"""The operators on a GPU: Triton kernels, each of which handles a whole list of tensors.

This module does not import Triton; the others do.
"""

import importlib.util
import re
from importlib import metadata

import torch

OLDEST = (3, 6)
OLDEST_CAPABILITY = (7, 0)


def version() -> str:
    """The installed Triton's version, "none" where there is none."""
    for package in ("triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "unknown" if importlib.util.find_spec("triton") else "none"


def missing(device: torch.device | None = None) -> str | None:
    """Why the kernels cannot run, here or on a device; None if they can.

    An unknown version passes.
    """
    found = version()
    if found == "none":
        return "Triton is not installed"
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        return f"Triton {found} is too old, {OLDEST[0]}.{OLDEST[1]} or later is needed"
    if device is not None and device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            return (
                f"{name} has compute capability {capability[0]}.{capability[1]}, "
                f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or later is needed"
            )
    return None
