"""The Triton launchers under the names and signatures of the public operators.

Arguments on the CPU are copied to the GPU with their strides, and everything is copied back;
without a GPU the launchers run on the arguments themselves (gpu/conftest.py).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from cases import GPU, flat, poisoned_like
from operators import copied
from torch import Tensor

import tnt_kernels.triton.damped_inverse as damped_inverse_kernel
import tnt_kernels.triton.grafted_directions as grafted_directions_kernel
import tnt_kernels.triton.gram_ema as gram_ema_kernel
import tnt_kernels.triton.inverse_root as inverse_root_kernel
import tnt_kernels.triton.mode_products as mode_products_kernel
import tnt_kernels.triton.momentum as momentum_kernels
import tnt_kernels.triton.preconditioned_step as preconditioned_step_kernel

Modes = Sequence[Sequence[Tensor]]
Number = float | Tensor

# So few that a hundred columns are already split into partial sums.
PROGRAMS = 4


class OnGpu:
    """Copies tensors to the GPU with their strides, and everything back at the end."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __call__(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The copies; without a GPU the tensors themselves."""
        return [self.copy(tensor) for tensor in tensors]

    def copy(self, tensor: Tensor) -> Tensor:
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


def scalar(value: Number) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _on_gpu(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ``launcher(gpu, ...)`` outside autograd, and copies back what it wrote."""

    @torch.no_grad()
    def call(*arguments: Any, **named: Any) -> Any:
        gpu = OnGpu()
        results = launcher(gpu, *arguments, **named)
        gpu.back()
        return results

    return call


@_on_gpu
def gram_ema_(
    gpu: OnGpu,
    stats: Modes,
    tensors: Sequence[Tensor],
    decay: Number,
    factors: Modes | None = None,
) -> None:
    given = gpu(flat(stats)), gpu(tensors), scalar(decay), gpu(flat(factors or []))
    gram_ema_kernel.gram_ema_(*given, programs=PROGRAMS)


@_on_gpu
def damped_inverse(
    gpu: OnGpu,
    stats: Modes,
    damping: Number,
    out: Modes | None = None,
    relative: bool = False,
    programs: int = PROGRAMS,
) -> tuple[Modes, Tensor]:
    into = [[t.contiguous() for t in poisoned_like(row)] for row in stats] if out is None else out
    info = damped_inverse_kernel.damped_inverse(
        *(gpu(flat(into)), gpu(flat(stats)), [len(row) for row in stats]),
        *(gpu.copy(scalar(damping)), relative),
        programs=programs,
    )
    return into, info.cpu()


@_on_gpu
def inverse_root(
    gpu: OnGpu,
    stats: Modes,
    damping: Number,
    root: Sequence[int],
    out: Modes | None = None,
    programs: int = 1,
) -> tuple[Modes, Tensor]:
    into = [[t.contiguous() for t in poisoned_like(row)] for row in stats] if out is None else out
    info = inverse_root_kernel.inverse_root(
        *(gpu(flat(into)), gpu(flat(stats)), [len(row) for row in stats]),
        *(gpu.copy(scalar(damping)), list(root)),
        programs=programs,
    )
    return into, info.cpu()


@_on_gpu
def mode_products(gpu: OnGpu, tensors: Sequence[Tensor], factors: Modes) -> list[Tensor]:
    given = gpu(tensors), gpu(flat(factors))
    results = mode_products_kernel.mode_products(*given, programs=PROGRAMS)
    return [result.cpu() for result in results]


@_on_gpu
def preconditioned_step_(
    gpu: OnGpu,
    params: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Modes,
    lr: Number,
    momentum: Number,
    weight_decay: Number,
) -> None:
    preconditioned_step_kernel.preconditioned_step_(
        *(gpu(params), gpu(momenta), gpu(grads), gpu(flat(factors))),
        *(scalar(lr), scalar(momentum), scalar(weight_decay)),
        programs=PROGRAMS,
    )


@_on_gpu
def scaled_step_(
    gpu: OnGpu,
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    lr: Number,
    weight_decay: Number,
    decayed: Sequence[bool] | None = None,
    scales: Tensor | None = None,
) -> None:
    flags = [True] * len(params) if decayed is None else decayed
    table = torch.zeros(0, dtype=torch.float64) if scales is None else scales
    momentum_kernels.scaled_step_(
        *(gpu(params), gpu(directions), scalar(lr), scalar(weight_decay), flags, gpu.copy(table)),
        programs=PROGRAMS,
    )


@_on_gpu
def grafted_directions_(
    gpu: OnGpu,
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Modes,
    momentum: Number,
    second_moments: Sequence[Tensor] | None = None,
    counts: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
    *,
    second_decay: float = 0.99,
    eps: float = 1e-8,
) -> tuple[list[Tensor], Tensor]:
    into = [torch.empty(m.shape, dtype=m.dtype) for m in momenta] if out is None else list(out)
    table = torch.zeros(0, 2, dtype=torch.float64) if counts is None else counts
    scales = grafted_directions_kernel.grafted_directions_(
        *(gpu(momenta), gpu(second_moments or []), gpu(into), gpu(grads), gpu(flat(factors))),
        *(scalar(momentum), table, second_decay, eps),
        programs=PROGRAMS,
    )
    return into, scales.cpu()
