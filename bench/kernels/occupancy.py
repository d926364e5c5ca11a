"""How many blocks of a kernel one multiprocessor holds at a time.

The formula is that of NVIDIA's ``cuda_occupancy.h`` (CUDA 13.0): the least of four limits, the
blocks' number, warps, registers and shared memory; and, on compute capability 10.0, of tensor
memory, which that file does not count. The figures are those of the CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability", and of the tuning guides of Ampere, Ada, Hopper
and Blackwell for what a block's shared memory is rounded up to and how much of it the system takes.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32  # threads
REGISTERS = 65536  # of 32 bits, of a multiprocessor
MOST_REGISTERS = 255  # of a thread
PARTITIONS = 4  # of a multiprocessor: each has a quarter of the registers, and warps of its own
REGISTER_UNIT = 256  # registers: what a warp has is rounded up to it
SHARED_UNIT = 128  # bytes: what a block has is rounded up to it
TENSOR_MEMORY = 512  # columns of a multiprocessor that has tensor memory


@dataclass(frozen=True)
class Architecture:
    """What one multiprocessor has.

    Attributes:
        warps: at most resident.
        blocks: at most resident.
        shared: bytes of shared memory, with the largest of the carve-outs.
        shared_of_block: bytes of it that one block may have.
        reserved: bytes of it that the system takes from each block.
    """

    warps: int
    blocks: int
    shared: int
    shared_of_block: int
    reserved: int


# By compute capability, as in sm_80.
ARCHITECTURES = {
    75: Architecture(32, 16, 64 << 10, 64 << 10, 0),
    80: Architecture(64, 32, 164 << 10, 163 << 10, 1 << 10),
    89: Architecture(48, 24, 100 << 10, 99 << 10, 1 << 10),
    90: Architecture(64, 32, 228 << 10, 227 << 10, 1 << 10),
    100: Architecture(64, 32, 228 << 10, 227 << 10, 1 << 10),
}


@dataclass(frozen=True)
class Occupancy:
    """What is resident on one multiprocessor, and which limit it is."""

    blocks: int
    warps: int
    share: float  # of the warps that could be
    limit: str


def occupancy(
    capability: int, warps: int, registers: int, shared: int = 0, tensor_memory: int = 0
) -> Occupancy:
    """What one multiprocessor holds of a kernel.

    Args:
        capability: a key of ``ARCHITECTURES``.
        warps: of a block.
        registers: of a thread.
        shared: bytes of shared memory of a block, without what the system takes.
        tensor_memory: columns of a block.

    >>> occupancy(90, warps=4, registers=128, shared=48 << 10)
    Occupancy(blocks=4, warps=16, share=0.25, limit='registers')
    """
    a = ARCHITECTURES[capability]
    limits = {"warps": a.warps // warps, "blocks": a.blocks}
    if registers:
        of_warp = _rounded_up(registers * WARP, REGISTER_UNIT)
        # A launch is refused as if every partition held as many of a block's warps as the fullest.
        allowed = of_warp * _rounded_up(warps, PARTITIONS) <= REGISTERS
        fitting = REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps
        limits["registers"] = fitting if allowed and registers <= MOST_REGISTERS else 0
    needed = _rounded_up(shared + a.reserved, SHARED_UNIT)
    limits["shared memory"] = 0 if shared > a.shared_of_block else a.shared // max(needed, 1)
    if tensor_memory:
        limits["tensor memory"] = TENSOR_MEMORY // tensor_memory
    blocks = min(limits.values())
    resident = blocks * warps
    return Occupancy(blocks, resident, resident / a.warps, min(limits, key=lambda k: limits[k]))


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
