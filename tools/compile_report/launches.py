"""Every kernel launch that the Triton launchers make, recorded without a device.

The launchers themselves run, on CPU tensors of every dtype and of all classes of shapes, while a
recorder replaces what starts a kernel. So the compiled classes (block sizes, warps, dtypes,
precisions) are those that are launched. A new operator needs one entry in ``CALLS``; ``kernels``
finds all kernels, so a kernel without an entry is noticed.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

import tnt_kernels.triton as package
from tnt_kernels.triton import (
    damped_inverse,
    grafted_directions,
    gram_ema,
    inverse_root,
    launch,
    mode_products,
    preconditioned_step,
    scaled_step,
)
from tnt_kernels.triton.launch import ELEMENTS, state_dtype

# Shapes for tiles of 128 rows and of 64, with loads of 16 bytes, and for loads of one element.
SHAPES = ((256, 128), (96, 64), (27, 9))
Shape = Sequence[int]


@dataclass(frozen=True)
class Launch:
    """One kernel as a launcher starts it: one version that Triton compiles."""

    name: str  # module and name of the kernel, as ``chain.product_kernel``
    kernel: Any
    arguments: tuple[Any, ...]  # its run-time arguments
    constants: dict[str, Any]  # its compile-time ones, and Triton's options

    @property
    def settings(self) -> dict[str, str | int | bool]:
        """The constants in which launches differ, printable."""
        named = {k: v for k, v in self.constants.items() if k != "enable_fp_fusion"}
        return {k: v if isinstance(v, int | str) else str(v) for k, v in named.items()}

    @property
    def is_main(self) -> bool:
        """Whether the tests compile this class.

        They leave out float16, which compiles like bfloat16, and results whose dtype is not the
        inputs'.
        """
        dtypes = {self.settings.get(name) for name in ("ELEMENT", "RESULT")} - {None}
        return "fp16" not in dtypes and len(dtypes) < 2


def name_of(kernel: Any) -> str:
    """A kernel's module and name."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def modules() -> list[Any]:
    """All modules of the Triton operators."""
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def kernels() -> list[str]:
    """The names of all kernels: they end in ``_kernel``, and functions that they call do not."""
    values = [value for module in modules() for value in vars(module).values()]
    found = {name_of(value) for value in values if isinstance(value, JITFunction)}
    return sorted(name for name in found if name.endswith("_kernel"))


def recorded() -> list[Launch]:
    """All different launches on a device with tensor cores, in order.

    Raises:
        RuntimeError: Triton interprets its kernels in this process, so there is nothing to compile.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "Triton interprets its kernels in this process, so none can be compiled: unset "
            "TRITON_INTERPRET and start again"
        )
    launches: dict[tuple[object, ...], Launch] = {}

    def record(kernel: Any, *arguments: Any, grid: object, warmup: bool, **constants: Any) -> None:
        types = tuple((a.dtype, a.data_ptr() % 16) for a in arguments if isinstance(a, Tensor))
        # All precisions make float64 products in the same way.
        same = {"PRECISION"} if constants.get("STATE") is tl.float64 else set()
        named = sorted((k, str(v)) for k, v in constants.items() if k not in same)
        name = name_of(kernel)
        launches.setdefault((name, types, tuple(named)), Launch(name, kernel, arguments, constants))

    before = torch.get_float32_matmul_precision()
    with ExitStack() as patches:
        patches.callback(torch.set_float32_matmul_precision, before)
        patches.enter_context(mock.patch.object(JITFunction, "run", record))
        for module in modules():
            if hasattr(module, "has_tensor_cores"):
                patches.enter_context(
                    mock.patch.object(module, "has_tensor_cores", return_value=True)
                )
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for call in CALLS:
                for dtype in ELEMENTS:
                    for shape in SHAPES:
                        call(dtype, shape)
    return list(launches.values())


def _square(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(d, d, dtype=state_dtype(dtype)) for d in shape]


def _number(value: float) -> Tensor:
    """A Python number as the public operators pass it on."""
    return torch.tensor(value, dtype=torch.float64)


def at_once(programs: int) -> AbstractContextManager[Any]:
    """Pretends that the device runs this many programs at once."""
    return mock.patch.object(launch, "programs_at_once", lambda device: programs)


def _gram_ema(dtype: torch.dtype, shape: Shape) -> None:
    decay, tensor = _number(0.9), torch.zeros(*shape, dtype=dtype)
    diagonal = [torch.zeros(d, dtype=state_dtype(dtype)) for d in shape]
    # Enough columns for split-K.
    skinny = torch.zeros(shape[0], 1 << 16, dtype=dtype)
    mixed = [*_square(shape[:1], dtype), torch.zeros(1 << 16, dtype=state_dtype(dtype))]
    for whitens in (False, True):
        for stats in (_square(shape, dtype), diagonal):
            gram_ema.gram_ema_(stats, [tensor], decay, stats if whitens else [])
        with at_once(128):
            gram_ema.gram_ema_(mixed, [skinny], decay, mixed if whitens else [])


def _mode_products(dtype: torch.dtype, shape: Shape) -> None:
    tensors, full = [torch.zeros(*shape, dtype=dtype)], _square(shape, dtype)
    diagonal = [factor[0] for factor in full]
    for factors in (full, diagonal, [full[0], diagonal[1]]):
        mode_products.mode_products(tensors, factors)
    # Products that are packed again.
    tensor, full = torch.zeros(3, 4, 5, 6, dtype=dtype), _square((3, 4, 5, 6), dtype)
    mode_products.mode_products([tensor], [full[0], full[1][0], full[2], full[3][0]])


def _preconditioned_step(dtype: torch.dtype, shape: Shape) -> None:
    params = [torch.zeros(*shape, dtype=dtype)]
    momenta = [torch.zeros(*shape, dtype=state_dtype(dtype))]
    full = _square(shape, dtype)
    for grad_dtype, factors in itertools.product(ELEMENTS, (full, [f[0] for f in full])):
        preconditioned_step.preconditioned_step_(
            params,
            momenta,
            [torch.zeros(*shape, dtype=grad_dtype)],
            factors,
            *(_number(0.1) for _ in range(3)),
        )


def _scaled_step(dtype: torch.dtype, shape: Shape) -> None:
    directions = [torch.zeros(*shape, dtype=state_dtype(dtype))]
    numbers = _number(0.1), _number(0.1)
    for scales in (torch.ones(1, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)):
        params = [torch.zeros(*shape, dtype=dtype)]
        scaled_step.scaled_step_(params, directions, *numbers, [True], scales)


def _damped_inverse(dtype: torch.dtype, shape: Shape) -> None:
    if dtype not in (torch.float32, torch.float64):
        return
    stats = [*_square(shape, dtype), torch.zeros(shape[0], dtype=dtype)]
    # With many programs the launcher chooses smaller tiles.
    for programs, relative in ((1, False), (1 << 10, True)):
        out = [s.clone() for s in stats]
        with at_once(programs):
            damped_inverse.damped_inverse(out, stats, [3], _number(0.1), relative)


def _grafted_directions(dtype: torch.dtype, shape: Shape) -> None:
    state = state_dtype(dtype)
    moments: list[list[Tensor]] = [[], [torch.zeros(*shape, dtype=state)]]
    for squares, nesterov in itertools.product(moments, (False, True)):
        grafted_directions.grafted_directions_(
            *([torch.zeros(*shape, dtype=state)], squares, [torch.zeros(*shape, dtype=state)]),
            *([torch.zeros(*shape, dtype=dtype)], _square(shape, dtype), _number(0.9)),
            *(torch.ones(1, 2, dtype=torch.float64), 0.99, 1e-8),
            nesterov=nesterov,
        )


def _inverse_root(dtype: torch.dtype, shape: Shape) -> None:
    if dtype not in (torch.float32, torch.float64):
        return
    stats = [*_square(shape, dtype), torch.zeros(shape[0], dtype=dtype)]
    # With many programs the launcher chooses smaller tiles.
    for programs, relative in ((1, False), (1 << 10, True)):
        out = [s.clone() for s in stats]
        with at_once(programs), mock.patch.object(inverse_root, "ITERATIONS", 1):
            inverse_root.inverse_root(out, stats, [3], _number(0.1), [6], relative)


# The call of every operator for one dtype and width.
CALLS = (
    _damped_inverse,
    _grafted_directions,
    _gram_ema,
    _inverse_root,
    _mode_products,
    _preconditioned_step,
    _scaled_step,
)
