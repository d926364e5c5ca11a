"""Host work on lists of tensors that every call on a GPU repeats.

The functions here are the definitions. ``tnt_kernels._host`` has each of them in C++
(csrc/lists.cpp), in less than a tenth of the time, for the PyTorch that it was built with; without
it, or with another PyTorch, these definitions run.
"""

import importlib
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def _load() -> Any:
    """``tnt_kernels._host``, once it has accepted this PyTorch; None without it."""
    try:
        module = importlib.import_module("tnt_kernels._host")
        module.define(torch.__version__)
    except ImportError:
        return None
    return module


host = _load()


def _in_cpp(definition: FunctionT) -> FunctionT:
    """The C++ function of the same name, if there is one."""
    return cast(FunctionT, getattr(host, definition.__name__, definition))


@_in_cpp
def layouts_key(tensors: Sequence[Tensor], alignment: int) -> Hashable:
    """A key that is equal for equal shapes, strides, dtypes, devices, negations and alignments.

    A tensor is aligned if its address is a multiple of ``alignment``.

    Raises:
        AttributeError, TypeError: not tensors.
        RuntimeError: a tensor without memory or without strides.
    """
    return tuple(
        [
            (t.data_ptr() % alignment == 0, t.shape, t.stride(), t.dtype, t.device, t.is_neg())
            for t in tensors
        ]
    )


@_in_cpp
def addresses(tensors: Sequence[Tensor]) -> bytes:
    """The tensors' addresses, int64. Raises as ``layouts_key`` does."""
    return array("q", [t.data_ptr() for t in tensors]).tobytes()


@_in_cpp
def are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are contiguous."""
    return all(t.is_contiguous() for t in tensors)


@_in_cpp
def mark_written(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that kernels wrote to tensors through their addresses."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # an inference tensor has no version; to look for one would take longer
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])
