"""Which implementation each operator uses on each device.

PyTorch's dispatcher selects among the registered kernels: C++ on the CPU, Triton on a GPU, and the
reference everywhere else.
"""

import functools
import importlib
import platform
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tnt_kernels
from tnt_kernels import calls, lists, triton
from tnt_kernels.calls import NAMESPACE, in_extension
from tnt_kernels.operators import OPERATORS

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Backends:
    """Which implementation each operator uses on each device, and the versions in use.

    Attributes:
        ops: operator -> device ("cpu", "cuda") -> "C++", "Triton" or "reference".
        versions: component -> version, "none" if it is missing.
    """

    ops: dict[str, dict[str, str]]
    versions: dict[str, str]

    def __str__(self) -> str:
        """The page to paste into a bug report; no column of GPUs where PyTorch has no CUDA."""
        devices = [d for d in DEVICES if d == "cpu" or self.versions["CUDA in torch"] != "none"]
        rows: list[tuple[str, ...]] = [("operator", *devices)]
        rows += [(name, *(served[d] for d in devices)) for name, served in self.ops.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        width = max(len(name) for name in self.versions)
        lines += ["", *(f"{name.ljust(width)}  {v}" for name, v in self.versions.items())]
        return "\n".join(lines)


def backends() -> Backends:
    """Returns which implementation each operator uses on each device, and all versions.

    ``print(tnt_kernels.backends())`` and ``python -m tnt_kernels`` show it as a page.
    """
    gpu = "Triton" if triton.missing() is None else "reference"
    served = {
        name: {"cpu": "C++" if in_extension(name) else "reference", "cuda": gpu}
        for name in OPERATORS
    }
    return Backends(served, _versions())


def register() -> torch.library.Library:
    """Declares every operator, for as long as the returned library is alive, and registers it.

    Triton serves on GPUs: it is imported at an operator's first call, and where it is missing, the
    reference runs with one warning. The reference serves all devices without another kernel.
    """
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, one in OPERATORS.items():
        library.define(one.SCHEMA)
        library.impl(name, _outside_of_autocast(one.from_flat), "CompositeExplicitAutograd")
        calls.gpu[name] = functools.partial(_serve, name)
        library.impl(name, calls.gpu[name], "CUDA")
        for key in _NOT_DENSE:
            library.impl(name, _refuse, key)
        fake = getattr(one, "fake", lambda *_: None)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    # Private: C++ reads a setting of Python's with it.
    library.define("_may_round() -> bool")
    library.impl("_may_round", _may_round, "CompositeExplicitAutograd")
    return library


def signatures() -> str:
    """The schemas without names, a line for each, as the C++ operators state their types."""
    lines = "".join(f"{one.SCHEMA}\n" for one in OPERATORS.values())
    return re.sub(r"\(\w!\)| \w+(?=[,)])", "", lines)


# Without kernels here such arguments would reach the reference, which fails after it has written.
_NOT_DENSE = (
    *("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA"),
    *("MkldnnCPU", "QuantizedCPU", "QuantizedCUDA"),
)


def _refuse(*_: Any) -> None:
    raise ValueError("all tensors must be dense, got a sparse, an MKL-DNN or a quantized one")


def _outside_of_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Disables autocast, which would round products to half precision, around a call."""

    @functools.wraps(implementation)
    def call(*arguments: Any) -> Any:
        device = _device(arguments)
        kind = "cpu" if device is None else device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return implementation(*arguments)
        with torch.autocast(kind, enabled=False):
            return implementation(*arguments)

    return call


def _may_round() -> bool:
    """Whether PyTorch's setting allows float32 products on a CPU that are rounded to bfloat16."""
    settings: Any = torch.backends.mkldnn  # its stubs lack the setting
    return bool(settings.matmul.fp32_precision == "bf16")


def _serve(name: str, *arguments: Any) -> Any:
    device = _device(arguments)
    assert device is not None, "the dispatcher needs a tensor"
    kernel = _kernel(name, device)
    if device.type != "cuda":
        return kernel(*arguments)
    with torch.cuda.device(device):
        return kernel(*arguments)


@functools.cache
def _kernel(name: str, device: torch.device) -> Callable[..., Any]:
    """The operator's implementation on a GPU; warns once if it is the reference."""
    why = triton.missing(device)
    if why is not None:
        warnings.warn(
            f"tnt_kernels.{name} runs on its reference implementation on {device}, with the same "
            f"results up to rounding: {why}",
            RuntimeWarning,
            stacklevel=4,
        )
        return _outside_of_autocast(OPERATORS[name].from_flat)
    module = importlib.import_module(f"tnt_kernels.triton.{name.rstrip('_')}")
    return _outside_of_autocast(getattr(module, name))


def _device(arguments: Sequence[Any]) -> torch.device | None:
    """The device of the lists, or of the scalars if all lists are empty; None without tensors."""
    for argument in arguments:
        for tensor in argument if isinstance(argument, list) else ():
            if isinstance(tensor, Tensor):
                return tensor.device
    return next((a.device for a in arguments if isinstance(a, Tensor)), None)


def _versions() -> dict[str, str]:
    build = sys.modules.get("tnt_kernels._ops")
    return {
        "tnt_kernels": tnt_kernels.__version__,
        "extension": getattr(build, "extension", "not built"),
        "compiler": getattr(build, "compiler", "none"),
        "BLAS": getattr(build, "blas", "none"),
        "lists": "Python" if lists.host is None else "C++",
        "torch": torch.__version__,
        "CUDA in torch": torch.version.cuda or torch.version.hip or "none",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "triton": triton.version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
