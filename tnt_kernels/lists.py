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

from tnt_kernels.arguments import end_of, has_memory

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


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel may read a tensor's memory as it is.

    Not that of a lazy negation or zero, nor of a subclass with a dispatch of its own.
    """
    return has_memory(tensor) and not tensor.is_neg() and not tensor._is_zerotensor()


@_in_cpp
def walk(tensors: Sequence[Tensor]) -> tuple[Hashable, bytes, bytes, bool, bool]:
    """Layouts, addresses, ends, whether all tensors are contiguous, and whether all are plain.

    The first is equal for equal shapes, strides, dtypes, devices, negations and alignments to 16
    bytes. Addresses, and ends, those after the last bytes, are int64. See ``is_plain``.

    Raises:
        AttributeError, TypeError: not tensors.
        RuntimeError: a tensor without memory or without strides.
    """
    addresses = array("q", [t.data_ptr() for t in tensors])
    layouts = [(t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in tensors]
    ends = array("q", map(end_of, tensors))
    return (
        (*layouts, *(address % 16 == 0 for address in addresses)),
        addresses.tobytes(),
        ends.tobytes(),
        all(t.is_contiguous() for t in tensors),
        all(map(is_plain, tensors)),
    )


@_in_cpp
def are_apart(written: Sequence[tuple[bytes, bytes]], read: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether no tensor's memory reaches into that of another, one of them written.

    Both are lists of addresses and ends. False is no proof of shared bytes: views may interleave.
    """
    spans = sorted(
        (start, stop, is_written)
        for lists, is_written in ((written, True), (read, False))
        for group in lists
        for start, stop in zip(*(memoryview(words).cast("q") for words in group), strict=True)
        if start < stop
    )
    reached = written_to = 0
    for start, stop, is_written in spans:
        if start < (reached if is_written else written_to):
            return False
        reached = max(reached, stop)
        if is_written:
            written_to = max(written_to, stop)
    return True


class Walked(list[Tensor]):
    """A list of tensors that was walked, with what ``walk`` found; it must not change."""

    __slots__ = ("addresses", "contiguous", "ends", "layouts", "plain")

    layouts: Hashable
    addresses: bytes
    ends: bytes
    contiguous: bool
    plain: bool


def walked(tensors: Sequence[Tensor]) -> Walked:
    """The tensors with what a walk finds; a list that was walked is not walked again."""
    if type(tensors) is Walked:
        return tensors
    found = Walked(tensors)
    found.layouts, found.addresses, found.ends, found.contiguous, found.plain = walk(found)
    return found


@_in_cpp
def mark_written(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that kernels wrote to tensors through their addresses."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # an inference tensor has no version; to look for one would take longer
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])
