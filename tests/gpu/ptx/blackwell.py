"""Instructions of sm_100: tensor memory, products of a block in it, and mbarriers.

A product writes tensor memory when it is issued, but its columns and operands may not be used until
a mbarrier that it was committed to has been waited for.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gpu.ptx.instructions import check_parts, instruction
from gpu.ptx.machine import Lanes, Machine, Step, target, value
from gpu.ptx.matrices import described, in_shared_memory, numbers_of
from gpu.ptx.memory import POISON, Array
from gpu.ptx.program import Address, Fault, Immediate, Instruction, Unknown

TENSOR_LANES, TENSOR_COLUMNS = 128, 512
# Swizzles of a descriptor, as those of wgmma: 128, 64 and 32 bytes.
SWIZZLES = {2: 1, 4: 2, 6: 3}


Area = tuple[int, Array, Array]  # of tensor memory: a block, rows as a column, columns


@dataclass
class Product:
    """A product that was not waited for: what it writes, and what it reads."""

    written: Area
    read: Area | None
    words: Array  # of shared memory

    def note(self, machine: Machine, more: int) -> None:
        """Adds to the number of products that use each place."""
        memory = _tensor(machine)
        memory.writing[self.written] += more
        if self.read:
            memory.reading[self.read] += more
        machine.shared.read_later[self.words] += more


@dataclass
class Barrier:
    """A mbarrier: arrivals that complete a phase, those still missing, and what they wait for."""

    count: int
    missing: int
    phase: int = 0
    products: list[Product] = field(default_factory=list)


@dataclass
class TensorMemory:
    """The tensor memory of several blocks."""

    bits: Array  # (blocks, lanes, columns)
    # How many stores, and products, were not waited for that write or read each place.
    storing: Array
    writing: Array
    reading: Array
    allocated: list[int]  # columns of each block
    # For each place, one bit for every warp that has used it since its block's last barrier.
    readers: Array
    writers: Array
    uncommitted: list[Product] = field(default_factory=list)
    barriers: dict[tuple[int, int], Barrier] = field(default_factory=dict)
    stores: list[tuple[Array, Array, Array, Array]] = field(default_factory=list)

    def barrier(self, block: int) -> None:
        """All warps of a block have arrived: what they did before is in order."""
        self.readers[block] = self.writers[block] = 0

    def check(self, area: Area, bits: Array, *, writes: bool) -> None:
        """Checks that no other warps than those in ``bits`` use an area without a barrier."""
        before = self.writers[area] | (self.readers[area] if writes else np.uint32(0))
        if (before & ~bits).any():
            raise Fault("two warps use the same tensor memory without a barrier between them")

    def use(self, places: Any, warps: Array, *, writes: bool) -> None:
        """Checks and notes that warps read or write places."""
        bits = (np.uint32(1) << warps.astype(np.uint32))[:, None]
        self.check(places, bits, writes=writes)
        np.bitwise_or.at(self.writers if writes else self.readers, places, bits)


def _tensor(machine: Machine) -> TensorMemory:
    if machine.tensor_memory is None:
        shape = len(np.unique(machine.block)), TENSOR_LANES, TENSOR_COLUMNS
        machine.tensor_memory = TensorMemory(
            bits=np.full(shape, POISON & 0xFFFFFFFF, np.uint32),
            storing=np.zeros(shape, np.int8),
            writing=np.zeros(shape, np.int8),
            reading=np.zeros(shape, np.int8),
            allocated=[0] * shape[0],
            readers=np.zeros(shape, np.uint32),
            writers=np.zeros(shape, np.uint32),
        )
    memory: TensorMemory = machine.tensor_memory
    return memory


@instruction("tcgen05")
def _tcgen05(given: Instruction) -> Step:
    what = given.parts[1]
    if what in ("relinquish_alloc_permit", "wait:ld"):
        return lambda machine, lanes: None
    return {
        "alloc": _allocate,
        "dealloc": _free,
        "ld": _load,
        "st": _store,
        "mma": _product,
        "commit": _commit,
        "wait:st": lambda given: _wait_for_stores,
    }[what](given)


def _one_lane_each(machine: Machine, lanes: Lanes) -> Array:
    """Lanes of which every block has one."""
    chosen = machine.lanes[lanes]
    if np.unique(machine.block[chosen]).size != chosen.size:
        raise Fault("more than one thread of a block executes the instruction")
    return chosen


def _allocate(given: Instruction) -> Step:
    check_parts(given, "alloc", "cta_group:1", "sync", "aligned", "shared:cta", "b32")
    at, columns = value(given.operands[0], "u32"), given.operands[1]
    assert isinstance(columns, Immediate)
    if columns.value not in (32, 64, 128, 256, 512):
        raise Fault("tensor memory is allocated in powers of two from 32 to 512 columns")

    def step(machine: Machine, lanes: Lanes) -> None:
        first = machine.whole_warps(lanes)[:, 0]
        memory = _tensor(machine)
        for block in machine.block[first]:
            if memory.allocated[block]:
                raise Unknown("two allocations")
            memory.allocated[block] = columns.value
        blocks, warps = machine.block[first], machine.warp[first]
        addresses = np.broadcast_to(at(machine, lanes), machine.lanes[lanes].shape)[::32]
        places = machine.shared.places(addresses, blocks, 4, 4)
        machine.shared.store(places, 4, np.zeros(places.shape, np.uint32), warps)

    return step


def _free(given: Instruction) -> Step:
    check_parts(given, "dealloc", "cta_group:1", "sync", "aligned", "b32")

    def step(machine: Machine, lanes: Lanes) -> None:
        memory = _tensor(machine)
        first = machine.whole_warps(lanes)[:, 0]
        for block, warp in zip(machine.block[first], machine.warp[first], strict=True):
            memory.check((block, slice(None), slice(None)), np.uint32(1 << warp), writes=True)
            if (memory.storing + memory.writing + memory.reading)[block].any():
                raise Fault("tensor memory is freed before what uses it was waited for")
            memory.allocated[block] = 0

    return step


def _places(
    machine: Machine, lanes: Lanes, addresses: Array, count: int, second: int | None
) -> tuple[Array, Array, Array]:
    """Block, row and columns of each lane's ``count`` numbers.

    With ``second`` for the shape 16x32bx2, else for 32x32b: one row for each lane.
    """
    chosen = machine.lanes[lanes]
    machine.whole_warps(lanes)
    addresses = np.broadcast_to(addresses, chosen.size).astype(np.int64)
    thread = machine.thread[chosen] % 32
    height = 32 if second is None else 16
    row = (addresses >> 16) + thread % height
    first = (addresses & 0xFFFF) + np.where(thread < height, 0, second or 0)
    columns = first[:, None] + np.arange(count)
    quarter = machine.warp[chosen] % 4
    if (row // 32 != quarter).any() or ((addresses >> 16) % height).any():
        raise Fault("a warp uses tensor memory outside of its 32 lanes")
    allocated = np.array(_tensor(machine).allocated)[machine.block[chosen]]
    if (columns >= allocated[:, None]).any():
        raise Fault("a column of tensor memory that is not allocated")
    return machine.block[chosen][:, None], row[:, None], columns


def _registers(given: Instruction, operand: Any) -> tuple[Any, ...]:
    shape = "32x32b" if len(given.operands) == 2 else "16x32bx2"
    check_parts(given, given.parts[1], "sync", "aligned", shape, given.parts[5], "b32")
    if given.parts[4] != shape or int(given.parts[5][1:]) != len(operand):
        raise Unknown("a shape")
    return tuple(operand)


def _second(given: Instruction) -> int | None:
    """The first column of the upper 16 lanes; None for the shape 32x32b."""
    if len(given.operands) == 2:
        return None
    found = given.operands[2 if given.parts[1] == "ld" else 1]
    assert isinstance(found, Immediate)
    return int(found.value)


def _load(given: Instruction) -> Step:
    registers = _registers(given, given.operands[0])
    at, second = value(given.operands[1], "u32"), _second(given)
    writes = [target(register, "b32") for register in registers]

    def step(machine: Machine, lanes: Lanes) -> None:
        memory = _tensor(machine)
        places = _places(machine, lanes, at(machine, lanes), len(writes), second)
        if memory.storing[places].any() or memory.writing[places].any():
            raise Fault("tensor memory is read before what writes it was waited for")
        memory.use(places, machine.warp[machine.lanes[lanes]], writes=False)
        # At once, not at the wait: the compiler packs registers in pairs before it.
        for write, bits in zip(writes, memory.bits[places].T, strict=True):
            write(machine, lanes, bits)

    return step


def _store(given: Instruction) -> Step:
    at, operand, second = given.operands[0], given.operands[-1], _second(given)
    reads = [value(register, "u32") for register in _registers(given, operand)]
    address = value(at, "u32")

    def step(machine: Machine, lanes: Lanes) -> None:
        memory = _tensor(machine)
        places = _places(machine, lanes, address(machine, lanes), len(reads), second)
        if (memory.storing[places] | memory.writing[places] | memory.reading[places]).any():
            raise Fault("tensor memory is written before what uses it was waited for")
        chosen = machine.lanes[lanes]
        memory.use(places, machine.warp[chosen], writes=True)
        values = [np.broadcast_to(read(machine, lanes), chosen.size) for read in reads]
        memory.bits[places] = np.stack(values, axis=1)
        memory.storing[places] += 1
        memory.stores.append((chosen, *places))

    return step


def _wait_for_stores(machine: Machine, lanes: Lanes) -> None:
    memory, kept = _tensor(machine), []
    for chosen, block, row, columns in memory.stores:
        now = np.isin(chosen, machine.lanes[lanes])
        memory.storing[block[now], row[now], columns[now]] -= 1
        if not now.all():
            kept.append((chosen[~now], block[~now], row[~now], columns[~now]))
    memory.stores = kept


def _product(given: Instruction) -> Step:
    kind = given.parts[-1].removeprefix("kind:")
    check_parts(given, "mma", "cta_group:1", f"kind:{kind}")
    if kind not in ("tf32", "f16"):
        raise Unknown(kind)
    to, left, right, instruction_, adds = given.operands
    reads = [value(x, "u64") for x in (left, right)]
    if isinstance(left, Address):
        reads[0] = value(left, "u32")
    at, descriptor, adding = value(to, "u32"), value(instruction_, "u32"), value(adds, "pred")

    def step(machine: Machine, lanes: Lanes) -> None:
        chosen = _one_lane_each(machine, lanes)
        operands = [f(machine, lanes) for f in (at, *reads, descriptor, adding)]
        given_ = np.broadcast_arrays(*operands, chosen)[:-1]
        for i, lane in enumerate(chosen):
            one = [x[i].item() for x in given_]
            _multiply(
                machine,
                int(machine.block[lane]),
                int(machine.warp[lane]),
                kind,
                isinstance(left, Address),
                *one,
            )

    return step


def _multiply(
    machine: Machine,
    block: int,
    warp: int,
    kind: str,
    left_in_tensor_memory: bool,
    to: int,
    left: int,
    right: int,
    form: int,
    adds: bool,
) -> None:
    """D <- A B^T, or D + A B^T, of one block."""
    memory = _tensor(machine)
    rows, columns = (form >> 24 & 31) << 4, (form >> 17 & 63) << 3
    left_type, right_type = form >> 7 & 7, form >> 10 & 7
    number = {("f16", 0): "f16", ("f16", 1): "bf16", ("tf32", 2): "tf32"}.get((kind, left_type))
    if number is None or left_type != right_type or form >> 4 & 3 != 1 or form >> 13 & 3:
        raise Unknown(f"instruction descriptor {form:#x}")
    if rows not in (64, 128):
        raise Unknown(f"a product of {rows} rows")
    depth = 8 if kind == "tf32" else 16
    # 64 rows take the first or the second half of each warp's lanes.
    lane = np.arange(rows) if rows == 128 else np.arange(64) // 16 * 32 + np.arange(64) % 16

    def area(address: int, width: int) -> Area:
        first = address & 0xFFFF
        if first + width > memory.allocated[block]:
            raise Fault("a column of tensor memory that is not allocated")
        return block, (lane + (address >> 16))[:, None], np.arange(first, first + width)

    words: list[Array] = []
    written, read = area(to, columns), None
    if left_in_tensor_memory:
        read = area(left, 8)
        a = numbers_of(memory.bits[read], number).reshape(rows, depth)
    else:
        a = _operand(machine, block, warp, left, rows, depth, number, form >> 15 & 1, words)
    if memory.storing[written].any() or (read and memory.storing[read].any()):
        raise Fault("a product uses tensor memory before the store to it was waited for")
    # What comes later is in order with the product by the wait for its mbarrier.
    own = np.uint32(1 << warp)
    memory.check(written, own, writes=True)
    if read:
        memory.check(read, own, writes=False)
    b = _operand(machine, block, warp, right, columns, depth, number, form >> 16 & 1, words)
    before = memory.bits[written].view(np.float32).astype(np.float64) if adds else 0.0
    memory.bits[written] = (a @ b.T + before).astype(np.float32).view(np.uint32)
    product = Product(written, read, np.unique(np.concatenate(words)))
    product.note(machine, 1)
    memory.uncommitted.append(product)


def _operand(
    machine: Machine,
    block: int,
    warp: int,
    descriptor: int,
    rows: int,
    depth: int,
    number: str,
    transposed: int,
    used: list[Array],
) -> Array:
    """An operand in shared memory, (rows, depth); adds its words to ``used``."""
    swizzle = SWIZZLES.get(descriptor >> 61)
    if swizzle is None or descriptor >> 46 & 7 != 1 or descriptor >> 52 & 1:
        raise Unknown(f"descriptor {descriptor:#x}")
    as_wgmma = descriptor & ~(7 << 61 | 7 << 46) | swizzle << 62
    addresses = described(as_wgmma, rows, depth, number, not transposed)
    lane = np.flatnonzero((machine.block == block) & (machine.warp == warp))[:1]
    numbers, words = in_shared_memory(machine, lane, addresses[None], number)
    used.append(words.ravel())
    return numbers[0]


def _commit(given: Instruction) -> Step:
    check_parts(given, "commit", "cta_group:1", "mbarrier:arrive:one", "shared:cluster", "b64")
    at = value(given.operands[0], "u32")

    def step(machine: Machine, lanes: Lanes) -> None:
        memory = _tensor(machine)
        chosen = _one_lane_each(machine, lanes)
        for lane, address in zip(
            chosen, np.broadcast_to(at(machine, lanes), chosen.size), strict=True
        ):
            block = int(machine.block[lane])
            barrier = _barrier(memory, block, int(address))
            barrier.products += [p for p in memory.uncommitted if p.written[0] == block]
            memory.uncommitted = [p for p in memory.uncommitted if p.written[0] != block]
            barrier.missing -= 1
            if not barrier.missing:
                barrier.phase, barrier.missing = barrier.phase ^ 1, barrier.count
        machine.wake()

    return step


def _barrier(memory: TensorMemory, block: int, address: int) -> Barrier:
    try:
        return memory.barriers[block, address]
    except KeyError:
        raise Fault("a mbarrier that is not initialised") from None


@instruction("mbarrier")
def _mbarrier(given: Instruction) -> Step:
    what = given.parts[1]
    check_parts(given, what, "parity", "shared", "shared:cta", "b64")
    if what == "try_wait":
        return _try_wait(given)
    at = value(given.operands[0], "u32")
    count = given.operands[1].value if what == "init" else 0  # type: ignore[union-attr]
    if what not in ("init", "inval"):
        raise Unknown(what)

    def step(machine: Machine, lanes: Lanes) -> None:
        memory = _tensor(machine)
        chosen = _one_lane_each(machine, lanes)
        addresses = np.broadcast_to(at(machine, lanes), chosen.size)
        places = machine.shared.places(addresses, machine.block[chosen], 4, 8)
        machine.shared.use(places, machine.warp[chosen], writes=True)
        for block, address in zip(machine.block[chosen], addresses, strict=True):
            if what == "init":
                memory.barriers[int(block), int(address)] = Barrier(count, count)
            elif _barrier(memory, int(block), int(address)).products:
                raise Fault("a mbarrier ends before its products were waited for")
            else:
                del memory.barriers[int(block), int(address)]

    return step


def _try_wait(given: Instruction) -> Step:
    write = target(given.operands[0], "pred")
    at, parity = value(given.operands[1], "u32"), value(given.operands[2], "u32")

    def step(machine: Machine, lanes: Lanes) -> None:
        memory, chosen = _tensor(machine), machine.lanes[lanes]
        blocks = machine.block[chosen]
        addresses, parities = (
            np.broadcast_to(f(machine, lanes), chosen.size) for f in (at, parity)
        )
        machine.shared.use(
            machine.shared.places(addresses, blocks, 4, 8), machine.warp[chosen], writes=False
        )
        done = np.zeros(chosen.size, bool)
        for block, address, wanted in set(
            zip(blocks.tolist(), addresses.tolist(), parities.tolist(), strict=True)
        ):
            barrier = _barrier(memory, block, address)
            if barrier.phase == wanted:
                continue  # the phase of this parity is not complete
            done |= (blocks == block) & (addresses == address) & (parities == wanted)
            for product in barrier.products:
                product.note(machine, -1)
            barrier.products = []
        write(machine, lanes, done)
        if not done.all():
            machine.sleep(chosen[~done])

    return step
