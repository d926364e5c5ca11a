"""Which implementation each operator uses on each device.

PyTorch's dispatcher selects among the registered kernels: C++ on the CPU, Triton on a GPU, and the
reference everywhere else.
"""

import functools
import importlib
import itertools
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

import tnt_kernels
from tnt_kernels import lists, reference, triton
from tnt_kernels.arguments import state_dtype
from tnt_kernels.schemas import NAMESPACE, SCHEMAS, in_extension

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
        name: {"cpu": "C++" if in_extension(name) else "reference", "cuda": gpu} for name in SCHEMAS
    }
    return Backends(served, _versions())


def register_reference(library: torch.library.Library) -> None:
    """Registers the reference for all devices without another kernel, and the fake kernels."""
    for name, one in OPERATORS.items():
        library.impl(name, _outside_of_autocast(one.reference), "CompositeExplicitAutograd")
        for key in _NOT_DENSE:
            library.impl(name, _refuse, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", one.shapes, lib=library)
    library.impl("_may_round", _may_round, "CompositeExplicitAutograd")


def register_triton(library: torch.library.Library) -> None:
    """Registers the Triton kernels for GPUs.

    Triton is imported at an operator's first call. Where it is missing, the reference runs with
    one warning.
    """
    for name in OPERATORS:
        library.impl(name, functools.partial(_serve, name), "CUDA")


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
        return _outside_of_autocast(OPERATORS[name].reference)
    module = importlib.import_module(f"tnt_kernels.triton.{OPERATORS[name].triton}")
    return _outside_of_autocast(getattr(module, name))


def _device(arguments: Sequence[Any]) -> torch.device | None:
    """The device of the lists, or of the scalars if all lists are empty; None without tensors."""
    for argument in arguments:
        for tensor in argument if isinstance(argument, list) else ():
            if isinstance(tensor, Tensor):
                return tensor.device
    return next((a.device for a in arguments if isinstance(a, Tensor)), None)


def _nested(flat: Sequence[Tensor], orders: Sequence[int]) -> list[list[Tensor]]:
    items = iter(flat)
    return [list(itertools.islice(items, order)) for order in orders]


def _by_mode(flat: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return _nested(flat, [tensor.dim() for tensor in tensors])


def _codes(*arguments: Any) -> Tensor:
    _, stats, orders, damping, *_ = arguments
    like = stats[0] if stats else damping
    return cast(Tensor, like.new_empty(len(orders), dtype=torch.int32))


def _norms(momenta: Sequence[Tensor], *arguments: Any) -> Tensor:
    like = momenta[0] if momenta else arguments[4]
    return like.new_empty(len(momenta), 2, dtype=torch.float64)


@dataclass(frozen=True)
class Operator:
    """What serves an operator beside C++; both functions take the flat arguments of its schema."""

    triton: str  # the module of tnt_kernels.triton with a function of its name
    reference: Callable[..., Any]
    # Its results without data, for ``torch.compile`` and meta tensors.
    shapes: Callable[..., Any] = lambda *_: None


def _grafted_directions_(*arguments: Any) -> Tensor:
    momenta, squares, out, grads, factors, momentum, counts, *rest = arguments
    second_decay, eps, nesterov = rest
    if not squares:
        squares = counts = None
    return reference.grafted_directions_(
        *(momenta, grads, _by_mode(factors, momenta), momentum, squares, counts, out),
        second_decay=second_decay,
        eps=eps,
        nesterov=nesterov,
    )[1]


OPERATORS = {
    "gram_ema_": Operator(
        "gram_ema",
        lambda stats, tensors, decay, factors: reference.gram_ema_(
            *(_by_mode(stats, tensors), tensors, decay),
            _by_mode(factors, tensors) if factors else None,
        ),
    ),
    "damped_inverse": Operator(
        "damped_inverse",
        lambda out, stats, orders, damping, relative: reference.damped_inverse(
            _nested(stats, orders), damping, _nested(out, orders), relative
        )[1],
        _codes,
    ),
    "inverse_root": Operator(
        "inverse_root",
        lambda out, stats, orders, damping, roots, relative: reference.inverse_root(
            _nested(stats, orders), damping, roots, _nested(out, orders), relative
        )[1],
        _codes,
    ),
    "mode_products": Operator(
        "mode_products",
        lambda tensors, factors: reference.mode_products(tensors, _by_mode(factors, tensors)),
        lambda tensors, _: [t.new_empty(t.shape, dtype=state_dtype(t)) for t in tensors],
    ),
    "preconditioned_step_": Operator(
        "preconditioned_step",
        lambda params, momenta, grads, factors, *numbers: reference.preconditioned_step_(
            params, momenta, grads, _by_mode(factors, params), *numbers
        ),
    ),
    "scaled_step_": Operator(
        "scaled_step",
        lambda params, directions, lr, weight_decay, decayed, scales: reference.scaled_step_(
            *(params, directions, lr, weight_decay, decayed), scales if len(scales) else None
        ),
    ),
    "grafted_directions_": Operator("grafted_directions", _grafted_directions_, _norms),
}


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
