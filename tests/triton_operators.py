"""The Triton launchers under the names and signatures of the public operators.

Arguments on the CPU are copied to the GPU with their strides, and everything is copied back;
without a GPU the launchers run on the arguments themselves (gpu/conftest.py).
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from cases import GPU
from operators import INVERSES, Call, copied, flat_arguments
from torch import Tensor

import tnt_kernels
from tools.compile_report.launches import at_once

# So few that a hundred columns are already split into partial sums.
PROGRAMS = 4


class OnGpu:
    """Copies tensors to the GPU with their strides, and everything back at the end."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """The copy; without a GPU the tensor itself."""
        tensor = tensor.resolve_neg()  # as PyTorch's dispatcher does before it calls a launcher
        if GPU.type == "cpu" or tensor.is_cuda:
            return tensor
        copy = copied(tensor, GPU)
        self._copies.append((tensor.detach(), copy))
        return copy

    def back(self) -> None:
        for tensor, copy in self._copies:
            if copy.is_inference() or copy._version:  # written
                tensor.copy_(copy)


def launched(name: str, usual: int = PROGRAMS) -> Callable[..., Any]:
    """The launcher of an operator, called as the public function, with so many programs."""
    module = importlib.import_module(f"tnt_kernels.triton.{name.rstrip('_')}")
    signature = inspect.signature(getattr(tnt_kernels, name))

    @torch.no_grad()
    def call(*arguments: Any, programs: int = usual, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        given.apply_defaults()
        if "out" in given.arguments and given.arguments["out"] is None:
            like = given.arguments["stats" if name in INVERSES else "momenta"]
            given.arguments["out"] = poisoned(like)
        gpu = OnGpu()
        # Numbers stay on the CPU, but for a tensor as the damping.
        there = Call(name, dict(given.arguments)).map(
            lambda _, tensor: gpu.copy(tensor) if tensor.dim() or name in INVERSES else tensor
        )
        with at_once(programs):
            result = getattr(module, name)(*flat_arguments(there))
        gpu.back()
        if isinstance(result, list):
            return [product.cpu() for product in result]
        return None if result is None else (given.arguments["out"], result.cpu())

    return call


def poisoned(like: Any) -> Any:
    """NaN in contiguous tensors of these shapes."""
    if isinstance(like, Tensor):
        return torch.full_like(like, torch.nan, memory_format=torch.contiguous_format)
    return [poisoned(entry) for entry in like]


gram_ema_ = launched("gram_ema_")
damped_inverse = launched("damped_inverse")
inverse_root = launched("inverse_root", 1)
mode_products = launched("mode_products")
preconditioned_step_ = launched("preconditioned_step_")
scaled_step_ = launched("scaled_step_")
grafted_directions_ = launched("grafted_directions_")
