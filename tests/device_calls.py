"""Calls of the public operators on a device, held against the definition in float64 on the CPU.

The device is a GPU where there is one; TNT_TEST_DEVICE=cpu has what is not CUDA's own run on the
CPU's tensors, which tests these tests.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import buffer_of, close, flat, identical, mode_statistics, normal, state_dtype
from tolerances import FLOAT32_OPERATOR, FLOAT64_OPERATOR, NEWTON_OPERATOR
from torch import Tensor

import tnt_kernels
from tnt_kernels import reference
from tnt_kernels.schemas import SCHEMAS

_NAME = os.environ.get("TNT_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "")
DEVICE = torch.device(_NAME or "cpu")
CUDA = DEVICE.type == "cuda"

on_device = pytest.mark.skipif(not _NAME, reason="no CUDA device (TNT_TEST_DEVICE=cpu for some)")
cuda_only = pytest.mark.skipif(not CUDA, reason="CUDA's own")

DECAY, DAMPING, ROOT = 0.9, 0.1, 4
MOMENTUM = 0.9
STEP = (0.1, MOMENTUM, 0.01)  # lr, momentum, weight decay

# One rounding of what a half-precision parameter holds, with room for that of the step itself.
ROUNDED_ONCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# Both operands of a product cut to TF32's ten bits, at most 2^-10 each.
TF32_PRODUCT = 2.0**-9
# Sums on tensor cores are cut, not rounded: at worst all the same way, a quarter bit a term.
CUT_TERM = 2.0**-25

# Modes up to here have random statistics, up to there cheaper full ones, beyond only a diagonal.
MOST_DRAWN, MOST_FULL = 300, 4500


# Calls: arguments of the public functions, nested as they take them.

Nested = Any


@dataclass
class Call:
    """One call of an operator, its arguments on the CPU."""

    name: str
    arguments: list[Nested]

    def on(self, device: torch.device) -> "Call":
        """The same call on copies of the tensors there, with their strides."""
        return Call(self.name, mapped(self.arguments, lambda t: copied(t, device)))

    def in_float64(self) -> "Call":
        return Call(self.name, mapped(self.arguments, lambda t: t.detach().double().clone()))

    def __call__(self, functions: Any = tnt_kernels) -> list[Tensor]:
        """Calls it; returns what it has written and returned."""
        returned = getattr(functions, self.name)(*self.arguments)
        return self.results(returned)

    def results(self, returned: Nested) -> list[Tensor]:
        if self.name == "gram_ema_":
            return flat(self.arguments[0])
        if self.name == "preconditioned_step_":
            return flat(self.arguments[:2])
        if self.name == "grafted_directions_":
            return flat([self.arguments[0], self.arguments[4], returned])
        return flat(returned)


def mapped(nested: Nested, change: Callable[[Tensor], Tensor]) -> Nested:
    if isinstance(nested, Tensor):
        return change(nested)
    if isinstance(nested, list | tuple):
        return [mapped(entry, change) for entry in nested]
    return nested


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """With the same strides, and what lies between its numbers."""
    if tensor.dim() == 0 and not CUDA:
        return tensor.clone()
    buffer = buffer_of(tensor.detach()).to(device, copy=True)
    copy_ = buffer.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return torch._neg_view(copy_) if tensor.is_neg() else copy_


def modes_of(shape: Sequence[int], kind: str, dtype: torch.dtype) -> list[Tensor]:
    """As ``mode_statistics``, but cheap for long modes: near the identity, or diagonal."""
    short = mode_statistics([d if d <= MOST_DRAWN else 1 for d in shape], kind, dtype)
    return [
        stat if d <= MOST_DRAWN else long_mode(d, stat)
        for d, stat in zip(shape, short, strict=True)
    ]


def long_mode(d: int, like: Tensor) -> Tensor:
    if like.dim() == 1 or d > MOST_FULL:
        return (torch.rand(d, dtype=torch.float64) + 0.5).to(like.dtype)
    noise = torch.randn(d, d, dtype=torch.float64).mul_(0.2 / math.sqrt(d)).tril()
    return (noise + noise.tril(-1).mT + torch.eye(d, dtype=torch.float64)).to(like.dtype)


def call(
    name: str,
    shapes: Sequence[Sequence[int]],
    kind: str = "full",
    dtype: torch.dtype = torch.float32,
    layout: Callable[[Tensor], Tensor] = Tensor.contiguous,
    written: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> Call:
    """A call of ``name`` on random tensors of these shapes."""
    state = state_dtype(dtype)
    stats = [modes_of(shape, kind, state) for shape in shapes]
    tensors = [layout(normal(shape, dtype)) for shape in shapes]
    out = [[torch.rand_like(stat) for stat in row] for row in stats]
    arguments: dict[str, Callable[[], list[Nested]]] = {
        "gram_ema_": lambda: [stats, tensors, DECAY],
        "damped_inverse": lambda: [stats, DAMPING, out, False],
        "inverse_root": lambda: [stats, DAMPING, ROOT, out],
        "mode_products": lambda: [tensors, stats],
        "preconditioned_step_": lambda: [
            [written(normal(shape, dtype)) for shape in shapes],
            [written(normal(shape, state)) for shape in shapes],
            *(tensors, stats, *STEP),
        ],
        "grafted_directions_": lambda: [
            [written(normal(shape, state)) for shape in shapes],
            *(tensors, stats, MOMENTUM),
            [written(normal(shape, state).square()) for shape in shapes],
            torch.randint(1, 9, (len(shapes), 2)).double(),
            [torch.rand(tuple(shape), dtype=state) for shape in shapes],
        ],
    }
    return Call(name, arguments[name]())


def check(given: Call, tolerance: float | None = None, device: torch.device = DEVICE) -> None:
    """The public function there against the reference in float64 here."""
    wanted = given.in_float64()(reference)
    there = given.on(device)
    agree(there(), wanted, there, tolerance)


def agree(
    actual: Sequence[Tensor], wanted: Sequence[Tensor], made: Call, tolerance: float | None = None
) -> None:
    assert len(actual) == len(wanted)
    for result, value in zip(actual, wanted, strict=True):
        assert result.device.type == DEVICE.type
        if result.dtype == torch.int32:
            identical(result.cpu(), value.to(torch.int32).cpu())
            continue
        least = ROUNDED_ONCE.get(result.dtype, 0.0)
        # The scales of grafted_directions_ are float64 numbers made of the momenta's.
        dtype = made.arguments[0][0].dtype if made.name == "grafted_directions_" else result.dtype
        close(result.cpu(), value.cpu(), max(least, tolerance or usual(made.name, dtype)))
        if made.name in ("gram_ema_", "damped_inverse", "inverse_root") and result.dim() == 2:
            identical(result, result.mT)


def usual(name: str, dtype: torch.dtype) -> float:
    if dtype == torch.float64:
        return NEWTON_OPERATOR if name == "inverse_root" else FLOAT64_OPERATOR
    return FLOAT32_OPERATOR


every_operator = pytest.mark.parametrize("name", SCHEMAS)


# Partial sums (9 and 64 rows), middle modes, vectors, several tiles, sizes that are read widely.
MANY = [(9, 70000), (64, 9000), (100, 33, 9), (129,), (300, 200), (64, 128)]


def usual_settings() -> Iterator[None]:
    """Float32 products are float32 products, and on the CPU one thread is enough; then as it was.

    For a fixture to yield from.
    """
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads if CUDA else 1)
    yield
    torch.set_float32_matmul_precision(before)
    torch.set_num_threads(threads)
