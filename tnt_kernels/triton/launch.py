"""Shared by all launchers: tables, addresses and scalars on the device, and product precision."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels import lists

ELEMENTS = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

# The widest load, in bytes; addresses and strides must be multiples of it.
VECTOR_BYTES = 16


KeyT = TypeVar("KeyT")
PlanT = TypeVar("PlanT")


class Layout(NamedTuple):
    """The properties of a tensor that a plan depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    @property
    def vector(self) -> int:
        """Elements of the widest load; 1 if the start is not aligned for it."""
        return VECTOR_BYTES // self.dtype.itemsize if self.aligned else 1


def is_aligned(tensor: Tensor) -> bool:
    """Whether the widest load may start at a tensor's first element."""
    return tensor.data_ptr() % VECTOR_BYTES == 0


def layouts(tensors: Sequence[Tensor]) -> tuple[Layout, ...]:
    """The layouts of tensors."""
    return tuple([Layout(t.shape, t.stride(), t.dtype, is_aligned(t)) for t in tensors])


# Key of a plan -> stream -> the plan. Only one stream reads a plan's tables, so that these can be
# freed while it still does: PyTorch gives the memory to later work of that stream only.
_plans: dict[tuple[Hashable, ...], dict[int, Any]] = {}
_MOST_PLANS = 256
# Plans that recorded CUDA graphs use. They are never freed, because PyTorch does not report that a
# graph is gone: one for each key, however often graphs are recorded.
_read_by_graphs: dict[tuple[Hashable, ...], Any] = {}


def planned(
    plan: Callable[..., PlanT], *groups: Sequence[Tensor], rest: tuple[Hashable, ...] = ()
) -> PlanT:
    """Returns plan(layouts of each group, ..., device, programs, *rest), cached.

    It is kept for graphs that read it. ``programs`` is how many the device runs at once. A lookup
    makes no layouts: they take thirty times as long as their keys.
    """
    device = groups[0][0].device
    rest = (device, programs_at_once(device), *rest)
    key = (plan, *[lists.walked(group).layouts for group in groups], *rest)
    found: PlanT | None
    if is_capturing(device):
        made = list(_plans.get(key, {}).values())  # other threads add plans
        found = _read_by_graphs.get(key) or (made[0] if made else None)
        if found is None:
            found = plan(*map(layouts, groups), *rest)  # raises if it needs tables
        _read_by_graphs[key] = found
        return found
    stream = stream_of(device)
    found = _plans.get(key, {}).get(stream)
    if found is None:
        found = plan(*map(layouts, groups), *rest)
        if key not in _plans and len(_plans) >= _MOST_PLANS:
            _plans.pop(list(_plans)[0], None)  # a copy: other threads add plans
        _plans.setdefault(key, {})[stream] = found
    return found


def contiguous_copies(tensors: Sequence[Tensor]) -> lists.Walked:
    """The tensors, with copies of those that are not contiguous."""
    given = lists.walked(tensors)
    return given if given.contiguous else lists.walked([t.contiguous() for t in tensors])


def contiguous(layout: Layout) -> Layout:
    """The layout of a contiguous copy."""
    strides = torch.empty(layout.shape, device="meta").stride()
    return Layout(layout.shape, strides, layout.dtype, True)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the statistics, factors and momenta of tensors of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is recording launches instead of running them."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The current stream, for caches of tensors that only work on one stream may read."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def table(rows: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table of integers on the device, row after row."""
    if is_capturing(device):
        raise RuntimeError(
            "this call must run once before a CUDA graph records it: its plan does not exist yet"
        )
    return torch.tensor([entry for row in rows for entry in row], dtype=dtype, device=device)


def tile_tables(
    tiles: Mapping[KeyT, Sequence[Sequence[int]]], device: torch.device
) -> list[tuple[KeyT, int, Tensor]]:
    """Launches: key, number of programs and tile table, for all keys that have tiles."""
    return [(key, len(t), table(t, torch.int32, device)) for key, t in tiles.items() if t]


def block_of(state: torch.dtype) -> int:
    """Rows and columns of a tile: four warps hold 64 x 64 float32 sums in registers."""
    return 64 if state == torch.float32 else 32


def addresses_of(*groups: Sequence[Tensor]) -> Tensor:
    """The addresses of lists of tensors on their device, int64, for the current stream."""
    device = groups[0][0].device
    addresses = b"".join([lists.walked(group).addresses for group in groups])
    if not is_capturing(device):
        return _sent(addresses, device, stream_of(device))
    # Kernels write the addresses, which are their arguments. A copy would read host memory at every
    # replay, and nothing reports when to free it; this table is the graph's own memory. Eager calls
    # copy, because that takes the host a tenth of the time: 12 us for 100 addresses.
    there = torch.zeros(len(addresses) // 8, dtype=torch.int64, device=device)
    torch._foreach_add_(there.unbind(), memoryview(addresses).cast("q").tolist())
    return there


# Tensors of equal layouts share a plan, not a table of addresses.
_MOST_TABLES = 256


@functools.lru_cache(maxsize=_MOST_TABLES)
def _sent(addresses: bytes, device: torch.device, stream: int) -> Tensor:
    """The addresses on the device, for one stream.

    Threads share a table, which never changes. On its stream the copy runs before the launches that
    read the table, and they run before its memory is reused.
    """
    # A bytearray: PyTorch warns of memory that it may not write.
    host = torch.frombuffer(bytearray(addresses), dtype=torch.int64)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def table_on(device: torch.device, numbers: Tensor) -> Tensor:
    """A table of numbers on the device, contiguous, as it is now.

    The host may change pinned memory before a copy that does not block has read it.
    """
    if numbers.device != device:
        numbers = numbers.to(device, non_blocking=not numbers.is_pinned())
    return numbers.contiguous()


def scalar_on(device: torch.device, value: Tensor) -> Tensor:
    """A 0-dim floating-point tensor on the device: ``value`` itself, or a cached copy."""
    if value.device == device:
        return value
    # A graph writes its own numbers at every replay.
    number = _number.__wrapped__ if is_capturing(device) else _number
    return number(value.item(), device, stream_of(device))


@functools.lru_cache(maxsize=64)
def _number(value: float, device: torch.device, stream: int) -> Tensor:
    """A number on the device, for one stream."""
    return torch.full((), value, dtype=torch.float64, device=device)


@functools.cache
def programs_at_once(device: torch.device) -> int:
    """How many programs fill the device: its number of multiprocessors."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether float32 products can run in TF32: NVIDIA, from compute capability 8."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def precision(device: torch.device) -> str:
    """Triton's name for the float32 precision that PyTorch's own setting selects."""
    if not has_tensor_cores(device):
        return "ieee"
    # Every setting of PyTorch reaches this one. get_float32_matmul_precision() raises after a user
    # chose TF32 here or for all backends.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


# Kernels that Triton has compiled, by all that it compiles them for.
_compiled: dict[tuple[Hashable, ...], Any] = {}


def launch(
    kernel: "triton.JITFunction",
    programs: int,
    table: Tensor,
    /,
    *arguments: Any,
    **constants: Any,
) -> None:
    """Launches ``programs`` programs on the device of the first argument, or nothing for 0.

    From the second time on the compiled kernel is called directly: finding it, Triton compares
    every global number that a kernel names, which takes longer than the launch.
    """
    if not programs:
        return
    # Triton compiles for the types of arguments, addresses and integers that are multiples of 16,
    # and the integer 1.
    kinds = [
        (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else (a % 16 == 0, a == 1)
        for a in arguments
    ]
    key = (kernel.fn, table.get_device(), *kinds, *constants.values())
    found = _compiled.get(key)
    if found is not None:
        # It takes the constants' places, too.
        places = [None] * (len(kernel.arg_names) - 1 - len(arguments))
        found[programs, 1, 1](table, *arguments, *places)
        return
    # Fused multiply-adds in every version: Triton 3.9 warns that 3.10 will turn them off.
    made = kernel[(programs,)](table, *arguments, enable_fp_fusion=True, **constants)
    if made is not None and torch.version.hip is None:  # for AMD the size of memory counts, too
        _compiled[key] = made


class Prepared(NamedTuple):
    """Launches that take no memory: it is all there, but for a workspace that they get."""

    scratch: int  # the workspace's bytes
    start: Callable[[Tensor], None]  # gets at least that many, uint8
    kept: object = None  # tensors of which the launches know the addresses only


def run(device: torch.device, prepared: Sequence[Prepared], written: Sequence[Tensor] = ()) -> None:
    """Takes the workspace that launches use in turn, then starts them, which write ``written``.

    An operator prepares all its launches first, so that whatever raises (no memory, cuBLAS) does so
    before the first write: the call has then changed nothing and can be repeated.
    """
    most = max(p.scratch for p in prepared)
    scratch = torch.empty(most, dtype=torch.uint8, device=device)
    lists.mark_written(written)
    for p in prepared:
        p.start(scratch)
