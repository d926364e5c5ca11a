"""The Triton launchers with the arguments of the public operators, on a GPU or interpreted.

Where there is a GPU, arguments are copied to it with their strides and what was written is copied
back, so that the operators' tests on CPU tensors are tests of these launchers too.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton.language as tl
from cases import GPU, buffer_of, flat
from torch import Tensor
from triton.runtime import interpreter

from tnt_kernels.triton import grafted_directions, gram_ema, mode_products, preconditioned_step

Modes = Sequence[Sequence[Tensor]]

# So few that a hundred columns are already cut into partial sums.
PROGRAMS = 4


def _mend_the_interpreter() -> None:
    """bfloat16, of which Triton 3.7's interpreter multiplies the bits, and to which it cuts."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if (given, wanted) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
        return convert(values, given, wanted, rounding)

    def dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(operand, tl.float32) for operand in (a, b))
        return dot(self, a, b, *rest)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = dot_of_numbers


_mend_the_interpreter()


class OnGpu:
    """Copies of tensors on the GPU, with the same strides; the tensors themselves on the CPU."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __call__(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The copies."""
        return [self._copy(tensor) for tensor in tensors]

    def _copy(self, tensor: Tensor) -> Tensor:
        if GPU.type == "cpu" or tensor.is_cuda:
            return tensor
        buffer = buffer_of(tensor.detach()).to(GPU)
        copy = buffer.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        self._copies.append((tensor, buffer))
        return torch._neg_view(copy) if tensor.is_neg() else copy

    def back(self) -> None:
        """Copies everything back."""
        for tensor, buffer in self._copies:
            buffer_of(tensor.detach()).copy_(buffer)


def scalar(value: float | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


@torch.no_grad()
def gram_ema_(stats: Modes, tensors: Sequence[Tensor], decay: float | Tensor) -> None:
    gpu = OnGpu()
    gram_ema.gram_ema_(gpu(flat(stats)), gpu(tensors), scalar(decay), programs=PROGRAMS)
    gpu.back()


@torch.no_grad()
def mode_products_(tensors: Sequence[Tensor], factors: Modes) -> list[Tensor]:
    gpu = OnGpu()
    results = mode_products.mode_products(gpu(tensors), gpu(flat(factors)), programs=PROGRAMS)
    return [result.cpu() for result in results]


@torch.no_grad()
def preconditioned_step_(
    params: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Modes,
    lr: float | Tensor,
    momentum: float | Tensor,
    weight_decay: float | Tensor,
) -> None:
    gpu = OnGpu()
    preconditioned_step.preconditioned_step_(
        *(gpu(params), gpu(momenta), gpu(grads), gpu(flat(factors))),
        *(scalar(lr), scalar(momentum), scalar(weight_decay)),
        programs=PROGRAMS,
    )
    gpu.back()


@torch.no_grad()
def grafted_directions_(
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Modes,
    momentum: float | Tensor,
    second_moments: Sequence[Tensor] | None = None,
    counts: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
    *,
    second_decay: float = 0.99,
    eps: float = 1e-8,
) -> tuple[list[Tensor], Tensor]:
    gpu = OnGpu()
    if out is None:
        out = [torch.empty(m.shape, dtype=m.dtype) for m in momenta]
    table = torch.zeros(0, 2, dtype=torch.float64) if counts is None else counts
    scales = grafted_directions.grafted_directions_(
        *(gpu(momenta), gpu(second_moments or []), gpu(out), gpu(grads), gpu(flat(factors))),
        *(scalar(momentum), table, second_decay, eps),
        programs=PROGRAMS,
    )
    gpu.back()
    return list(out), scales.cpu()
