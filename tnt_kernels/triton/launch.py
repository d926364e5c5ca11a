"""Shared by all launchers: tables, addresses and scalars on the device, and product precision."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

# The widest load, in bytes; addresses and strides must be multiples of it.
VECTOR_BYTES = 16


KeyT = TypeVar("KeyT")


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


def layouts(tensors: Sequence[Tensor]) -> tuple[Layout, ...]:
    """The layouts of tensors, hashable: the key of a cached plan."""
    return tuple(
        [Layout(t.shape, t.stride(), t.dtype, t.data_ptr() % VECTOR_BYTES == 0) for t in tensors]
    )


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


# Tables and numbers that CUDA graphs read. Never freed: nothing reports that a graph is gone.
_held: list[object] = []


def hold(device: torch.device, *objects: object) -> None:
    """Keeps objects alive for replays of the CUDA graph that is being recorded, if one is."""
    if is_capturing(device):
        _held.extend(objects)


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


class Addresses:
    """The addresses of a plan's tensors, copied to their device only when one has changed."""

    def __init__(self) -> None:
        self._sent: list[int] = []
        self._table = torch.empty(0, dtype=torch.int64)
        # A pinned buffer for the next recording, during which none may be allocated.
        self._spare: Tensor | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """int64, (len(tensors),), on the tensors' device."""
        addresses = [t.data_ptr() for t in tensors]
        device = tensors[0].device
        if is_capturing(device):
            return self._for_graph(addresses, device)
        if self._spare is None:
            self._spare = _pinned(len(addresses), device)
        if addresses != self._sent:
            self._table = _sent(addresses, _pinned(len(addresses), device), device)
            self._sent = addresses
        return self._table

    def _for_graph(self, addresses: list[int], device: torch.device) -> Tensor:
        if addresses == self._sent:
            hold(device, self._table)
            return self._table
        # The copy runs at the graph's replays, not now, so no other call may use it.
        host = _pinned(len(addresses), device) if self._spare is None else self._spare
        self._spare = None
        there = _sent(addresses, host, device)
        hold(device, host, there)
        return there


def _pinned(count: int, device: torch.device) -> Tensor:
    """Pinned host memory, from which a copy to the device is asynchronous."""
    return torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")


def _sent(addresses: list[int], host: Tensor, device: torch.device) -> Tensor:
    host.copy_(torch.tensor(addresses, dtype=torch.int64))
    return host.to(device, non_blocking=True)


def scalar_on(device: torch.device, value: Tensor) -> Tensor:
    """A 0-dim floating-point tensor on the device: ``value`` itself, or a cached copy."""
    if value.device == device:
        return value
    key = device, value.item()
    number = _numbers.get(key)
    if number is None:
        number = torch.full((), key[1], dtype=torch.float64, device=device)
        if is_capturing(device):
            return number  # not cached: it holds the value only at the graph's replays
        if len(_numbers) >= _MOST_NUMBERS:
            _numbers.clear()
        _numbers[key] = number
    hold(device, number)
    return number


_numbers: dict[tuple[torch.device, float], Tensor] = {}
_MOST_NUMBERS = 64


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


def mark_written(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that kernels wrote to tensors through their addresses."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def launch(
    kernel: "triton.JITFunction", programs: int, *arguments: object, **constants: object
) -> None:
    """Launches ``programs`` programs on the device of the first argument, or nothing for 0."""
    if programs:
        kernel[(programs,)](*arguments, **constants)
