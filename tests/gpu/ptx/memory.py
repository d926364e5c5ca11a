"""Global and shared memory, with every rule of their use checked."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gpu.ptx.program import Fault
from torch import Tensor

Array = npt.NDArray[Any]
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# What memory and registers hold before they are written: a NaN in every float type.
POISON = 0x7FC0DEAD7FC0DEAD


def nbytes(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


class GlobalMemory:
    """The tensors that a launch may use, at their own addresses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        used = sorted({(t.data_ptr(), t.data_ptr() + nbytes(t)) for t in tensors if t.numel()})
        spans: list[tuple[int, int]] = []
        for first, end in used:  # overlapping tensors become one
            if spans and first < spans[-1][1]:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            else:
                spans.append((first, end))
        self._starts, self._ends = (np.array(ends, np.uint64) for ends in zip(*spans, strict=True))
        self._base = spans[0][0] // 16 * 16
        size = spans[-1][1] - self._base
        # One array over everything between the tensors: only checked addresses are followed.
        everything = (ctypes.c_uint8 * (size + 16)).from_address(self._base)
        array = np.frombuffer(everything, np.uint8)
        self._words = {w: array[: array.size // w * w].view(word) for w, word in WORDS.items()}
        # Which programs used which pairs of bytes, and what they stored there (see _keys).
        self._used: dict[str, list[Array]] = {"load": [], "atomic": []}
        self._stored: list[tuple[Array, Array]] = []

    def check(self, addresses: Array, width: int, programs: Array, what: str) -> None:
        """Checks an access of ``width`` bytes for each address, and notes a load or atomic one."""
        if (addresses % np.uint64(width)).any():
            raise Fault(f"{what} of {width} bytes at an address that is not a multiple of them")
        span = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (span < 0) | (addresses + np.uint64(width) > self._ends[np.maximum(span, 0)])
        if outside.any():
            count, first = int(outside.sum()), int(addresses[outside][0])
            raise Fault(
                f"{what} of {width} bytes outside of all tensors: {count}, first {first:#x}"
            )
        if what != "store":  # it notes itself, with its numbers
            self._used[what].append(_keys(addresses, width, programs).ravel())

    def load(self, addresses: Array, width: int) -> Array:
        """Numbers of ``width`` bytes at checked addresses."""
        return self._words[width][self._places(addresses, width)]

    def store(self, addresses: Array, width: int, values: Array, programs: Array) -> None:
        """The same, written by programs."""
        halves = np.ascontiguousarray(values)[:, None].view(np.uint16)
        self._stored.append((_keys(addresses, width, programs).ravel(), halves.ravel()))
        places = self._places(addresses, width)
        self._words[width][places] = values
        if (self._words[width][places] != values).any():
            raise Fault("lanes store different numbers to one address")

    def maximum(self, addresses: Array, values: Array) -> Array:
        """Atomic: the larger of number and value at each address; returns the numbers before."""
        words = self._words[values.itemsize].view(values.dtype)
        old = np.empty_like(values)
        for lane, place in enumerate(self._places(addresses, values.itemsize)):
            old[lane] = words[place]
            words[place] = max(old[lane], values[lane])
        return old

    def _places(self, addresses: Array, width: int) -> Array:
        return ((addresses - np.uint64(self._base)) // np.uint64(width)).astype(np.int64)

    def check_programs(self) -> None:
        """Raises Fault if two programs used the same memory and one of them wrote it.

        They may store the same number.
        """
        nothing = np.empty(0, np.uint64), np.empty(0, np.uint16)
        stored = zip(nothing, *self._stored, strict=True)
        keys, values = (np.concatenate(parts) for parts in stored)
        order = np.lexsort((values, keys))
        keys, values = keys[order], values[order]
        places = keys >> np.uint64(16)
        same = (places[1:] == places[:-1]) & (keys[1:] != keys[:-1])
        if (same & (values[1:] != values[:-1])).any():
            raise Fault("two programs of a launch store different numbers to one address")
        loads, atomics = (np.unique(np.concatenate([keys[:0], *u])) for u in self._used.values())
        for first, second, what in (
            (keys, loads, "a store and a load"),
            (keys, atomics, "a store and an atomic update"),
            (atomics, loads, "an atomic update and a load"),
        ):
            common = np.isin(second >> np.uint64(16), first >> np.uint64(16))
            if (common & ~np.isin(second, first)).any():
                raise Fault(f"{what} of one address by two programs of a launch")


def _keys(addresses: Array, width: int, programs: Array) -> Array:
    """A number for each program and pair of bytes that it uses, (lanes, pairs)."""
    pairs = addresses[:, None] + np.arange(0, width, 2, np.uint64)
    return pairs >> np.uint64(1) << np.uint64(16) | programs.astype(np.uint64)[:, None]


class SharedMemory:
    """The shared memory of several blocks. Addresses are places in one array of 32-bit words."""

    def __init__(self, blocks: int, size: int, base: int) -> None:
        self.base = base
        self.size = -(-size // 16) * 16
        self.stride = self.size // 4
        self.words = np.full(blocks * self.stride, POISON & 0xFFFFFFFF, np.uint32)
        self._of = {w: self.words.view(word) for w, word in WORDS.items()}
        # For each word, one bit for every warp of the block that has used it since the last barrier
        # that it took part in.
        self._readers = np.zeros(self.words.size, np.uint32)
        self._writers = np.zeros(self.words.size, np.uint32)
        # How many asynchronous instructions will still write a word, or read it.
        self.written_later = np.zeros(self.words.size, np.int8)
        self.read_later = np.zeros(self.words.size, np.int8)

    def places(self, addresses: Array, blocks: Array, width: int, total: int) -> Array:
        """Where ``total`` bytes at each address lie, as numbers of ``width`` bytes: (lanes, n)."""
        offsets = addresses.astype(np.int64) - self.base
        if (offsets % total).any():
            raise Fault(f"shared memory at an address that is not a multiple of {total} bytes")
        if (offsets < 0).any() or (offsets + total > self.size).any():
            raise Fault("an address outside of shared memory")
        first = (offsets + blocks * self.size) // width
        return first[:, None] + np.arange(total // width)

    def load(self, places: Array, width: int, warps: Array) -> Array:
        """Numbers of ``width`` bytes."""
        self.use(places * width // 4, warps, writes=False)
        return self._of[width][places]

    def store(self, places: Array, width: int, values: Array, warps: Array) -> None:
        """The same, written."""
        words = places * width // 4
        same = (self._of[width][places] == values).all()  # then the order does not matter
        self.use(words, warps, writes=True, same=bool(same))
        self._of[width][places] = values
        if (self._of[width][places] != values).any():
            raise Fault("lanes store different numbers to one place of shared memory")

    def use(self, words: Array, warps: Array, *, writes: bool, same: bool = False) -> None:
        """Checks and notes that warps read or write words; ``same``: what is there already."""
        if self.written_later[words].any():
            raise Fault("shared memory is used before an asynchronous copy to it was waited for")
        if writes and self.read_later[words].any():
            raise Fault("shared memory is written before the product that reads it was waited for")
        before = self._readers[words] if writes else np.zeros(words.shape, np.uint32)
        if not same:
            before |= self._writers[words]
        bits = (np.uint32(1) << warps.astype(np.uint32)).reshape(-1, *[1] * (words.ndim - 1))
        if (before & ~bits).any():
            raise Fault("two warps use the same shared memory without a barrier between them")
        np.bitwise_or.at(self._writers if writes else self._readers, words, bits)

    def barrier(self, block: int) -> None:
        """All warps of a block have arrived: what they did before is in order."""
        own = slice(block * self.stride, (block + 1) * self.stride)
        self._readers[own] = self._writers[own] = 0
