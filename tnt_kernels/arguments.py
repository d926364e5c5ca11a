"""Checks of arguments that several operators share; errors name the argument, the rule, the value.

The C++ operators check the same rules in a tenth of the time, but on flat lists. After they have
refused a call, these checks run to name the argument (see ``calls``).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Number = float | Tensor
Tensors = Sequence[Tensor]
Modes = Sequence[Tensors]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def state_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of the statistics, factors and momenta of ``tensor``."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def scalar(name: str, value: Number, *, high: float = float("inf")) -> Tensor:
    """Returns a number in [0, high] as a 0-dim tensor; a tensor's value is not checked."""
    if isinstance(value, Tensor):
        if value.dim() != 0 or not value.is_floating_point():
            raise ValueError(
                f"{name} must be a number or a 0-dim floating-point tensor, got "
                f"{tuple(value.shape)}, {value.dtype}"
            )
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number or a 0-dim tensor, got {value!r}")
    if not 0 <= value <= high or value == float("inf"):
        bound = f"in [0, {high:g}]" if high < float("inf") else "finite and >= 0"
        raise ValueError(f"{name} must be {bound}, got {value!r}")
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")


# As in PyTorch's own loops; csrc/cpu/views.h has the same number.
MOST_MODES = 64


def check_length(name: str, got: Sequence[Any], other: str, want: Sequence[Any]) -> None:
    """Refuses ``got`` if it is not a list of the length of ``want``."""
    if not isinstance(got, list | tuple):
        raise TypeError(f"{name} must be a list, got {type(got).__name__}")
    if len(got) != len(want):
        raise ValueError(
            f"{name} must have one entry for each of {other} ({len(want)}), got {len(got)}"
        )


def check_tensors(name: str, tensors: Tensors) -> None:
    """Refuses all but lists of dense floating-point tensors with 1 to ``MOST_MODES`` modes each."""
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
    for t, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}[{t}] must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _FLOATS or tensor.layout != torch.strided:
            raise ValueError(
                f"{name}[{t}] must be a dense float32, float64, bfloat16 or float16 tensor, "
                f"got {tensor.dtype}, {tensor.layout}"
            )
        if tensor.dim() == 0:
            raise ValueError(f"{name}[{t}] must have at least one mode; view a scalar as (1,)")
        if tensor.dim() > MOST_MODES:
            raise ValueError(
                f"{name}[{t}] must have at most {MOST_MODES} modes, got {tensor.dim()}"
            )


def check_modes(
    name: str, modes: Modes, other: str, tensors: Tensors, *, written: bool = False
) -> None:
    """Each modes[t][i] must be (d_i, d_i) or (d_i,), of the state dtype of tensors[t]."""
    check_length(name, modes, other, tensors)
    for t, (row, tensor) in enumerate(zip(modes, tensors, strict=True)):
        if not isinstance(row, list | tuple) or len(row) != tensor.dim():
            got = str(len(row)) if isinstance(row, list | tuple) else type(row).__name__
            raise ValueError(
                f"{name}[{t}] must have one tensor for each of the {tensor.dim()} modes of "
                f"{other}[{t}], got {got}"
            )
        dtype = state_dtype(tensor)
        for i, (stat, d) in enumerate(zip(row, tensor.shape, strict=True)):
            if not isinstance(stat, Tensor):
                raise TypeError(f"{name}[{t}][{i}] must be a tensor, got {type(stat).__name__}")
            if stat.layout != torch.strided:
                raise ValueError(f"{name}[{t}][{i}] must be dense, got {stat.layout}")
            if stat.shape != (d, d) and stat.shape != (d,):
                raise ValueError(
                    f"{name}[{t}][{i}] must be ({d}, {d}) or ({d},), got {tuple(stat.shape)}"
                )
            if stat.dtype != dtype:
                raise ValueError(
                    f"{name}[{t}][{i}] must be {dtype} for a {tensor.dtype} tensor, "
                    f"got {stat.dtype}"
                )
            if written:
                check_written(f"{name}[{t}][{i}]", stat, contiguous=True)


def check_shapes(name: str, tensors: Tensors, other: str, wanted: Tensors) -> None:
    """Each ``tensors[t]`` must be a tensor of the shape of ``wanted[t]``."""
    check_tensors(name, tensors)
    check_length(name, tensors, other, wanted)
    for t, (tensor, like) in enumerate(zip(tensors, wanted, strict=True)):
        if tensor.shape != like.shape:
            raise ValueError(
                f"{name}[{t}] must have the shape of {other}[{t}], {tuple(like.shape)}, "
                f"got {tuple(tensor.shape)}"
            )


def check_like(name: str, written: Tensors, other: str, wanted: Tensors, contiguous: bool) -> None:
    """Each ``written[t]`` must be writable and like ``wanted[t]``, but another tensor."""
    check_tensors(name, written)
    check_length(name, written, other, wanted)
    for t, (tensor, like) in enumerate(zip(written, wanted, strict=True)):
        if tensor is like:
            raise ValueError(f"{name}[{t}] must not be {other}[{t}] itself")
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"{name}[{t}] must be like {other}[{t}], {tuple(like.shape)} {like.dtype}, "
                f"got {tuple(tensor.shape)} {tensor.dtype}"
            )
        check_written(f"{name}[{t}]", tensor, contiguous=contiguous)


def check_directions(params: Tensors, directions: Tensors, name: str = "directions") -> None:
    """``directions`` must fit ``params``, which have passed ``check_tensors``, and are written."""
    check_shapes(name, directions, "params", params)
    for t, (direction, param) in enumerate(zip(directions, params, strict=True)):
        if direction.dtype != state_dtype(param):
            raise ValueError(
                f"{name}[{t}] must be {state_dtype(param)} for a {param.dtype} parameter, "
                f"got {direction.dtype}"
            )
        check_written(f"params[{t}]", param)


def check_table(name: str, table: Tensor | None, shape: tuple[int, ...]) -> None:
    """``table`` must be float64 of this shape."""
    if not isinstance(table, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(table).__name__}")
    if (table.shape, table.dtype, table.layout) != (shape, torch.float64, torch.strided):
        raise ValueError(
            f"{name} must be a dense {shape} torch.float64, got {tuple(table.shape)} "
            f"{table.dtype}, {table.layout}"
        )


def check_statistics(stats: Modes) -> None:
    """Each stats[t] must hold (d, d) or (d,), of one dtype, for at least one mode."""
    check_length("stats", stats, "stats", stats)
    for t, row in enumerate(stats):
        if not isinstance(row, list | tuple) or not row:
            got = repr(row) if row is None or len(row) == 0 else type(row).__name__
            raise ValueError(f"stats[{t}] must be a list of one tensor for each mode, got {got}")
        check_tensors(f"stats[{t}]", row)
        for i, stat in enumerate(row):
            if stat.dim() > 2 or stat.shape[0] != stat.shape[-1]:
                raise ValueError(f"stats[{t}][{i}] must be (d, d) or (d,), got {tuple(stat.shape)}")
            if stat.dtype != row[0].dtype or stat.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"stats[{t}][{i}] must be float32 or float64, one dtype for each tensor, "
                    f"got {stat.dtype}"
                )


def check_factors(stats: Modes, out: Modes | None, damping: Tensor) -> None:
    """The rules of inverses and roots: ``out`` must be like ``stats``, in other memory."""
    check_statistics(stats)
    if out is not None:
        check_length("out", out, "stats", stats)
        for t, (kept, row) in enumerate(zip(out, stats, strict=True)):
            check_like(f"out[{t}]", kept, f"stats[{t}]", row, contiguous=True)
    check_device(stats=stats, out=out or [], damping=damping)
    check_overlaps({"out": out or []}, {"stats": stats})


def check_written(name: str, tensor: Tensor, *, contiguous: bool = False) -> None:
    """``tensor`` must be writable, with memory of its own for each element."""
    if not torch.compiler.is_compiling():  # a traced tensor has no memory
        if tensor.is_neg() or tensor._is_zerotensor():
            raise ValueError(f"{name} must be writable, got a negated or zero view")
        reach = 0
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride <= reach and tensor.numel():
                raise ValueError(
                    f"{name} must have memory of its own for each element, got strides "
                    f"{tensor.stride()}"
                )
            reach += stride * (size - 1)
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got {tensor.stride()}")


def check_overlaps(written: Mapping[str, Iterable[Any]], read: Mapping[str, Iterable[Any]]) -> None:
    """Refuses written memory that appears twice; the same rule as in C++ (csrc/check.h).

    Both hold lists of tensors, or lists of lists, by name.
    """
    if torch.compiler.is_compiling():
        return
    ranges = sorted(
        (
            (tensor.data_ptr(), end_of(tensor), is_written, name, tensor)
            for group, is_written in ((written, True), (read, False))
            for argument, entries in group.items()
            for name, tensor in _named(argument, entries)
            if tensor.numel() and has_memory(tensor)
        ),
        key=lambda r: r[0],
    )
    reaching: list[tuple[Any, ...]] = []  # those that reach beyond the start of the next one
    for current in ranges:
        first, _, is_written, name, tensor = current
        reaching = [other for other in reaching if other[1] > first]
        for _, _, other_written, other_name, other in reaching:
            if (is_written or other_written) and _share_memory(tensor, other):
                raise ValueError(
                    f"{name} must not share memory with {other_name}: one of them is written to"
                )
        reaching.append(current)


def _named(name: str, entries: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    for t, entry in enumerate(entries):
        if isinstance(entry, Tensor):
            yield f"{name}[{t}]", entry
        else:
            yield from _named(f"{name}[{t}]", entry)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has an address: not one on meta, nor a wrapper, such as a FakeTensor."""
    return not tensor.is_meta and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def end_of(tensor: Tensor) -> int:
    """The address after a tensor's last element; that of its start if it has none."""
    if tensor.numel() == 0:
        return tensor.data_ptr()
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 1 + sum(stride * (size - 1) for stride, size in strides)
    return int(tensor.data_ptr() + tensor.element_size() * reach)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte, exact for nested strides: views may interleave."""
    terms: dict[int, list[int]] = {}  # stride -> the least and the largest factor of it
    for sign, tensor in ((1, a), (-1, b)):
        item = tensor.element_size()
        strides = [(s * item, d) for s, d in zip(tensor.stride(), tensor.shape, strict=True)]
        for stride, size in [*strides, (1, item)]:
            if size > 1 and stride > 0:
                low_high = terms.setdefault(stride, [0, 0])
                low_high[sign > 0] += sign * (size - 1)
    ordered = sorted(((s, *bounds) for s, bounds in terms.items()), reverse=True)
    return _can_add_up(ordered, b.data_ptr() - a.data_ptr(), [1000])


def _can_add_up(terms: Sequence[tuple[int, ...]], total: int, tries: list[int]) -> bool:
    """Whether factors of the strides can give ``total``; gives up, with True, without ``tries``."""
    if not terms:
        return total == 0
    (stride, low, high), *rest = terms
    least, most = (sum(term[0] * term[end] for term in rest) for end in (1, 2))
    for factor in range(max(low, -((most - total) // stride)), high + 1):
        if total - factor * stride < least:
            return False
        tries[0] -= 1
        if tries[0] < 0 or _can_add_up(rest, total - factor * stride, tries):
            return True
    return False


def check_device(**arguments: Tensor | Iterable[Any]) -> None:
    """All lists must be on one device; a 0-dim tensor may be on the CPU instead."""
    device = None
    for name, argument in arguments.items():
        if isinstance(argument, Tensor):
            if argument.device.type != "cpu" and device is not None and argument.device != device:
                where = device if device.type == "cpu" else f"{device} or the CPU"
                raise ValueError(f"{name} must be on {where}, got {argument.device}")
            continue
        entries = ([entry] if isinstance(entry, Tensor) else entry for entry in argument)
        for tensor in itertools.chain.from_iterable(entries):
            device = device or tensor.device
            if tensor.device != device:
                raise ValueError(
                    f"{name} must be on the device of the other arguments, {device}, "
                    f"got a tensor on {tensor.device}"
                )
