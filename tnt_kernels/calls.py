"""Calls of the operators: nested lists to the flat ones of their schemas, and back."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tnt_kernels.arguments import Modes, Tensors, check_statistics, has_memory
from tnt_kernels.lists import addresses, layouts_key, mark_written

NAMESPACE = "tnt_kernels"
_operators = getattr(torch.ops, NAMESPACE)


def call(schema: str, check: Callable[[], None], arguments: Callable[[], tuple[Any, ...]]) -> Any:
    """Calls the operator on checked arguments.

    The C++ operators check before they write; ``check`` then runs only after a refusal, to name the
    argument in terms of nested lists. (Checking resnet32's 158 modes in Python takes half as long
    as their Gram matrices.)
    """
    name = schema.partition("(")[0]
    if torch.compiler.is_compiling() or not in_extension(name):
        check()
        return _op(name)(*arguments())
    try:
        given = arguments()
        on_cpu = all_on_cpu(given)
        if not on_cpu:  # another backend may run, which checks nothing
            _check_once(name, given, check)
        result = _op(name)(*given)
        if on_cpu:  # the written lists come first; PyTorch's stable C++ interface cannot mark them
            for written in given[: schema.count("!")]:
                mark_written(written)
        return result
    except Exception:
        check()
        raise


@functools.cache
def in_extension(name: str) -> bool:
    """Whether C++ implements an operator on the CPU."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CPU")


def _check_once(name: str, given: Sequence[Any], check: Callable[[], None]) -> None:
    """Checks a call, unless one with the same key has passed.

    A training step repeats its calls, and a key takes much less time than the checks.
    """
    key = _recognised(name, given)
    if key in _checked:
        return
    check()
    if key is None:
        return
    if len(_checked) >= _MOST_CHECKED:
        _checked.clear()
    _checked.add(key)


# Keys of calls that have passed; bounded, because gradients may get new addresses at every step.
_checked: set[tuple[Any, ...]] = set()
_MOST_CHECKED = 256


def _recognised(name: str, given: Sequence[Any]) -> tuple[Any, ...] | None:
    """The key of a call on GPU tensors: all that its checks depend on. None for other calls."""
    key: list[Any] = [name]
    for argument in given:
        if isinstance(argument, Tensor):
            key.append((argument.shape, argument.dtype, argument.device))
        elif not isinstance(argument, list) or not argument or isinstance(argument[0], int):
            key.append(str(argument))
        elif isinstance(argument[0], Tensor) and argument[0].is_cuda and has_memory(argument[0]):
            try:
                key += addresses(argument), layouts_key(argument, 1)
            except (AttributeError, TypeError, RuntimeError):  # no tensor, or one without memory
                return None
        else:
            return None
    return tuple(key)


def _op(name: str) -> Any:
    return getattr(_operators, name).default


_is_cpu = operator.attrgetter("is_cpu")


def all_on_cpu(arguments: Sequence[Any]) -> bool:
    """Whether the C++ operators run, which check: all tensors have memory, on the CPU."""
    lists = [a if isinstance(a, list | tuple) else [a] for a in arguments]
    try:
        lists = [a for a in lists if a and isinstance(a[0], Tensor)]
        return all(has_memory(a[0]) and all(map(_is_cpu, a)) for a in lists)
    except AttributeError:  # not a tensor, which the operator refuses
        return True


def listed(tensors: Sequence[Any]) -> list[Any]:
    """A list's entries. A tensor has entries too, its rows, but is no list of tensors."""
    if isinstance(tensors, Tensor):
        raise TypeError("must be a list, got a tensor")
    return list(tensors)


def flat(modes: Modes, tensors: Tensors | None = None) -> list[Tensor]:
    """The modes of all tensors in one list; refuses another number than ``tensors`` have."""
    if tensors is not None and [len(row) for row in modes] != [t.dim() for t in tensors]:
        raise ValueError("there must be one entry for each mode of each tensor")
    return [tensor for row in listed(modes) for tensor in listed(row)]


def nested(entries: Tensors, orders: Sequence[int]) -> list[list[Tensor]]:
    """A flat list's entries, ``orders[t]`` of them in list t."""
    items = iter(entries)
    return [list(itertools.islice(items, order)) for order in orders]


def by_mode(entries: Tensors, tensors: Tensors) -> list[list[Tensor]]:
    """A flat list's entries, nested: a list for each tensor, an entry for each of its modes."""
    return nested(entries, [tensor.dim() for tensor in tensors])


def new_factors(stats: Modes) -> list[list[Tensor]]:
    """New tensors for factors, filled with NaN."""
    try:
        dense = torch.contiguous_format
        return [[torch.full_like(s, math.nan, memory_format=dense) for s in row] for row in stats]
    except (TypeError, RuntimeError):
        check_statistics(stats)
        raise
