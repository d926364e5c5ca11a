"""Every kernel launch that the Triton launchers can make, recorded without a device.

The launchers themselves are called, on CPU tensors of every dtype and of both widths, while what
starts a kernel is replaced by a recorder. So the tile classes (block sizes, depths, warps, dtypes,
precisions) are what is launched and cannot drift from it. A new operator needs one entry in
``CALLS``; ``kernels`` finds every kernel there is, so one without an entry is noticed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

import tnt_kernels.triton as package
from tnt_kernels.triton import gram_ema, inverse_root, mode_products, preconditioned_step
from tnt_kernels.triton.launch import ELEMENTS, state_dtype

KERNEL_SUFFIX = "_kernel"  # what a function that is launched ends in; one that is called does not
WIDE, NARROW = (128, 64), (27, 9)  # read 16 bytes at a time, and only one element


@dataclass(frozen=True)
class Launch:
    """One kernel as a launcher starts it: what Triton compiles a version of its own for.

    Attributes:
        kernel: the kernel.
        arguments: its run-time arguments.
        constants: its compile-time ones, and Triton's options.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's module and name."""
        return name_of(self.kernel)

    @property
    def settings(self) -> dict[str, str | int | bool]:
        """The constants, printable."""
        return {
            name: value if isinstance(value, int | str) else str(value)
            for name, value in self.constants.items()
        }

    @property
    def vector(self) -> int:
        """How many elements are read at a time; 1 where the kernel knows no other way."""
        return int(self.constants.get("VECTOR", 1))


def modules() -> list[Any]:
    """All modules of the Triton operators that are there now."""
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def kernels() -> list[str]:
    """The names of all kernels that are there now."""
    found = {
        name_of(value)
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    return sorted(name for name in found if name.endswith(KERNEL_SUFFIX))


def name_of(kernel: Any) -> str:
    """A kernel's module and name, as ``chain.product_kernel``."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def recorded(capability: int) -> list[Launch]:
    """All different launches on a device of a compute capability (80 for sm_80), in order.

    Raises:
        RuntimeError: where Triton interprets its kernels: then there is nothing to compile.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "Triton interprets its kernels in this process, so none can be compiled: unset "
            "TRITON_INTERPRET and start again"
        )
    launches: dict[tuple[object, ...], Launch] = {}

    def record(kernel: Any, *arguments: Any, grid: object, warmup: bool, **constants: Any) -> None:
        types = tuple((a.dtype, a.data_ptr() % 16) for a in arguments if isinstance(a, Tensor))
        # float64 products are made in one way only.
        same = {"PRECISION"} if constants.get("STATE") is tl.float64 else set()
        told = [(name, str(value)) for name, value in constants.items() if name not in same]
        key = (name_of(kernel), types, tuple(sorted(told)))
        launches.setdefault(key, Launch(kernel, arguments, constants))

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", record))
        for module in modules():
            if hasattr(module, "has_tensor_cores"):
                answer = mock.patch.object(module, "has_tensor_cores", lambda _: capability >= 80)
                patches.enter_context(answer)
        for precision in ("highest", "high"):
            with _float32_products(precision):
                for call in CALLS.values():
                    for dtype in ELEMENTS:
                        for shape in (WIDE, NARROW):
                            call(dtype, shape)
    return list(launches.values())


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


Shape = tuple[int, ...]


def _square(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(d, d, dtype=state_dtype(dtype)) for d in shape]


def _number(value: float) -> Tensor:
    """As the public operators pass on a Python number."""
    return torch.tensor(value, dtype=torch.float64)


def _gram_ema(dtype: torch.dtype, shape: Shape) -> None:
    decay, tensor = _number(0.9), torch.zeros(shape, dtype=dtype)
    gram_ema.gram_ema_(_square(shape, dtype), [tensor], decay)
    diagonal = [torch.zeros(d, dtype=state_dtype(dtype)) for d in shape]
    gram_ema.gram_ema_(diagonal, [tensor], decay)
    # So many columns that partial sums are made and added up.
    skinny = torch.zeros(shape[0], 1 << 16, dtype=dtype)
    stats = [*_square(shape[:1], dtype), torch.zeros(1 << 16, dtype=state_dtype(dtype))]
    gram_ema.gram_ema_(stats, [skinny], decay, programs=128)


def _mode_products(dtype: torch.dtype, shape: Shape) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    mode_products.mode_products([tensor], _square(shape, dtype))


def _preconditioned_step(dtype: torch.dtype, shape: Shape) -> None:
    param, momentum = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=state_dtype(dtype))
    number = _number(0.1)
    for grad_dtype in ELEMENTS:
        preconditioned_step.preconditioned_step_(
            [param],
            [momentum],
            [torch.zeros(shape, dtype=grad_dtype)],
            _square(shape, dtype),
            number,
            number,
            number,
        )


def _inverse_root(dtype: torch.dtype, shape: Shape) -> None:
    if dtype not in (torch.float32, torch.float64):
        return
    stats = [*_square(shape, dtype), torch.zeros(shape[0], dtype=dtype)]
    for programs in (1, 1 << 10):  # there are smaller tiles where large ones would be too few
        inverse_root.inverse_root(
            [s.clone() for s in stats],
            stats,
            [3],
            _number(0.1),
            [6],
            programs=programs,
            iterations=1,
        )


# What to call for every dtype and width, by the operator's name.
CALLS: dict[str, Callable[[torch.dtype, Shape], None]] = {
    "gram_ema_": _gram_ema,
    "inverse_root": _inverse_root,
    "mode_products": _mode_products,
    "preconditioned_step_": _preconditioned_step,
}
