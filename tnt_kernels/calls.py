"""Calls of the operators: nested lists to the flat ones of their schemas, and back."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from tnt_kernels.arguments import Modes, Tensors, check_statistics, has_memory
from tnt_kernels.lists import Walked, are_apart, is_plain, mark_written, walked

NAMESPACE = "tnt_kernels"
_operators = getattr(torch.ops, NAMESPACE)


def call(schema: str, check: Callable[[], None], arguments: Callable[[], tuple[Any, ...]]) -> Any:
    """Calls the operator on checked arguments.

    The C++ operators check before they write; ``check`` then runs only after a refusal, to name the
    argument in terms of nested lists. (Checking resnet32's 158 modes in Python takes half as long
    as their Gram matrices.)
    """
    name = schema.partition("(")[0]
    if torch.compiler.is_compiling():
        check()
        return _op(name)(*arguments())
    try:
        given = arguments()
        if not all_on_cpu(given):  # another backend may run, which checks nothing
            return _on_gpu(name, given, schema.count("!"), check)
        if not in_extension(name):
            check()
            return _op(name)(*given)
        result = _op(name)(*given)
        # The written lists come first; PyTorch's stable C++ interface cannot mark them.
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


# What serves an operator's calls on a GPU.
gpu: dict[str, Callable[..., Any]] = {}


def _on_gpu(name: str, given: Sequence[Any], written: int, check: Callable[[], None]) -> Any:
    """Checks a call, unless one like it has passed, and makes it.

    The first ``written`` arguments are written. A training step repeats its calls, with gradients
    and directions at new addresses, and a key takes much less time than the checks. PyTorch's
    dispatcher takes longer than all the rest, so it is left out where it has nothing to do.
    """
    known = _walked(given)
    if known is None or not all(map(_is_plain, known)):
        check()
        return _op(name)(*given)
    key = name, *map(_key, known)
    lists = [argument for argument in known if type(argument) is Walked]
    memory = key, *[one.addresses for one in lists]
    if memory not in _apart:
        if key not in _checked or not _are_apart(lists, known[:written]):
            check()
        _remember(_checked, key)
        _remember(_apart, memory)
    return _op(name)(*given) if _is_observed() else gpu[name](*known)


def _is_plain(argument: Any) -> bool:
    """Whether an argument's tensors can be read without PyTorch's dispatcher."""
    if type(argument) is Walked:
        return argument.plain
    return not isinstance(argument, Tensor) or is_plain(argument)


def _is_observed() -> bool:
    """Whether a mode or a profiler wants to see what the dispatcher calls."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled()
    return bool(modes) or torch._C._autograd._profiler_enabled()


# Keys of calls that have passed, without and with their addresses.
_checked: set[tuple[Hashable, ...]] = set()
_apart: set[tuple[Hashable, ...]] = set()
_MOST_KEYS = 256


def _remember(keys: set[tuple[Hashable, ...]], key: tuple[Hashable, ...]) -> None:
    if key not in keys and len(keys) >= _MOST_KEYS:
        keys.clear()
    keys.add(key)


def _are_apart(lists: Sequence[Walked], written: Sequence[Any]) -> bool:
    """Whether no memory that a call writes is used by another of its tensors."""
    marked = [id(argument) for argument in written]
    groups: tuple[list[tuple[bytes, bytes]], ...] = [], []
    for one in lists:
        groups[id(one) not in marked].append((one.addresses, one.ends))
    return are_apart(*groups)


def _walked(given: Sequence[Any]) -> list[Any] | None:
    """The arguments, their lists walked; None if not all of these are on a GPU, with memory."""
    known: list[Any] = []
    for argument in given:
        if not isinstance(argument, list) or not argument or isinstance(argument[0], int):
            known.append(argument)
        elif isinstance(argument[0], Tensor) and argument[0].is_cuda and has_memory(argument[0]):
            try:
                known.append(walked(argument))
            except (AttributeError, TypeError, RuntimeError):  # no tensor, or one without memory
                return None
        else:
            return None
    return known


def _key(argument: Any) -> Hashable:
    """All that the checks of an argument depend on, but for memory that lists share."""
    if type(argument) is Walked:
        return argument.layouts
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype, argument.device, argument.layout
    return str(argument)


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
