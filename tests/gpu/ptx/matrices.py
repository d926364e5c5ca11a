"""Instructions of a whole warp: shuffles, and the products of matrices.

A product's operands are exact here, bfloat16 and TF32 included (of TF32's operands the hardware
ignores the last 13 bits); its sum is float64's, rounded once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu.ptx.instructions import check_parts, from_half, instruction
from gpu.ptx.machine import WARP, Lanes, Machine, Step, dtype_of, target, value
from gpu.ptx.memory import POISON, Array, SharedMemory
from gpu.ptx.program import Fault, Immediate, Instruction, Operand, Register, Unknown

# A lane's group of four and its place in it, as the manual's figures number them.
GROUP, IN_GROUP = np.arange(WARP) // 4, np.arange(WARP) % 4


@instruction("shfl")
def _shuffle(given: Instruction) -> Step:
    parts = check_parts(given, "sync", "b32", "bfly", "idx")
    read, by = value(given.operands[1], "b32"), value(given.operands[2], "u32")
    write = target(given.operands[0], "b32")
    if given.operands[3] != Immediate(31):
        raise Unknown("a part of a warp")

    def step(machine: Machine, lanes: Lanes) -> None:
        warps = machine.whole_warps(lanes)
        values, steps = (
            np.broadcast_to(x(machine, lanes), warps.size).reshape(warps.shape) for x in (read, by)
        )
        source = (np.arange(WARP) if "bfly" in parts else 0) ^ steps.astype(np.int64) & 31
        write(machine, lanes, np.take_along_axis(values, source, axis=1).ravel())

    return step


@instruction("redux")
def _reduce(given: Instruction) -> Step:
    kind = given.type
    check_parts(given, "sync", "max", "s32", "u32")
    read, write = value(given.operands[1], kind), target(given.operands[0], kind)

    def step(machine: Machine, lanes: Lanes) -> None:
        values = read(machine, lanes).reshape(machine.whole_warps(lanes).shape)
        write(machine, lanes, np.repeat(values.max(axis=1), WARP))

    return step


@instruction("elect")
def _elect(given: Instruction) -> Step:
    check_parts(given, "sync")
    assert isinstance(given.operands[0], tuple)
    write = target(given.operands[0][1], "pred")

    def step(machine: Machine, lanes: Lanes) -> None:
        write(machine, lanes, (machine.whole_warps(lanes) % WARP == 0).ravel())

    return step


# 8 x 8 matrices of 16 bits between shared memory and registers


def _rows(machine: Machine, addresses: Array, lanes: Lanes, count: int) -> Array:
    """Places of ``count`` matrices' numbers in shared memory, as 16 bits: (warps, count, 8, 8)."""
    warps = machine.whole_warps(lanes)
    rows = np.broadcast_to(addresses, warps.size).reshape(warps.shape)[:, : 8 * count]
    blocks = np.repeat(machine.block[warps[:, 0]], 8 * count)
    return machine.shared.places(rows.ravel(), blocks, 2, 16).reshape(-1, count, 8, 8)


def _matrix_step(given: Instruction, registers: Operand, address: Operand) -> tuple[Any, ...]:
    parts = check_parts(
        given, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared:cta", "b16"
    )
    each = registers if isinstance(registers, tuple) else (registers,)
    first, second = (GROUP, 2 * IN_GROUP), (GROUP, 2 * IN_GROUP + 1)
    if "trans" in parts:
        first, second = first[::-1], second[::-1]
    return each, value(address, "u32"), first, second


@instruction("ldmatrix")
def _load_matrix(given: Instruction) -> Step:
    registers, at, low, high = _matrix_step(given, *given.operands)
    writes = [target(register, "b32") for register in registers]

    def step(machine: Machine, lanes: Lanes) -> None:
        places = _rows(machine, at(machine, lanes), lanes, len(writes))
        warps = machine.warp[machine.whole_warps(lanes)[:, 0]]
        flat = machine.shared.load(places.reshape(places.shape[0], -1), 2, warps).reshape(
            places.shape
        )
        for i, write in enumerate(writes):
            halves = np.stack([flat[:, i][:, *low], flat[:, i][:, *high]], axis=-1)
            write(machine, lanes, halves.view(np.uint32).ravel())

    return step


@instruction("stmatrix")
def _store_matrix(given: Instruction) -> Step:
    registers, at, low, high = _matrix_step(given, given.operands[1], given.operands[0])
    reads = [value(register, "u32") for register in registers]

    def step(machine: Machine, lanes: Lanes) -> None:
        places = _rows(machine, at(machine, lanes), lanes, len(reads))
        made = np.empty(places.shape, np.uint16)
        for i, read in enumerate(reads):
            words = np.ascontiguousarray(read(machine, lanes)).reshape(-1, WARP)
            made[:, i][:, *low] = (words & np.uint32(0xFFFF)).astype(np.uint16)
            made[:, i][:, *high] = (words >> np.uint32(16)).astype(np.uint16)
        warps = machine.warp[machine.whole_warps(lanes)[:, 0]]
        flat = (places.shape[0], -1)
        machine.shared.store(places.reshape(flat), 2, made.reshape(flat), warps)

    return step


# Products


def numbers_of(bits: Array, kind: str) -> Array:
    """Numbers as float64, along a new last axis: two in 32 bits of a 16-bit type, else one."""
    if kind == "tf32":
        bits = bits & np.uint32(0xFFFFE000)
    form = {"f64": np.float64, "f16": np.uint16, "bf16": np.uint16}.get(kind, np.float32)
    numbers = np.ascontiguousarray(bits)[..., None].view(form)
    return (from_half(numbers, kind) if form is np.uint16 else numbers).astype(np.float64)


class Fragment:
    """A matrix in the registers of a warp's lanes.

    ``row`` and ``column`` are those of each number: (registers, 32, numbers in a register).
    """

    def __init__(self, registers: Operand, row: Array, column: Array, kind: str) -> None:
        assert isinstance(registers, tuple) and all(isinstance(r, Register) for r in registers)
        self._registers = np.array([r.index for r in registers])  # type: ignore[union-attr]
        self._row, self._column = np.broadcast_arrays(row, column)
        if len(registers) != self._row.shape[0]:
            raise Unknown(f"{len(registers)} registers")
        self._shape = self._row.max() + 1, self._column.max() + 1
        self._kind, self._bank = kind, dtype_of("b64" if kind == "f64" else "b32")

    def read(self, machine: Machine, lanes: Lanes) -> Array:
        """The matrices, (warps, rows, columns), float64."""
        return self.matrices(machine.registers[self._bank][self._registers][:, lanes])

    def matrices(self, bits: Array) -> Array:
        """The matrices whose bits these are, (registers, lanes)."""
        numbers = numbers_of(bits.reshape(bits.shape[0], -1, WARP), self._kind)
        made = np.empty((numbers.shape[1], *self._shape))
        made[:, self._row, self._column] = numbers.swapaxes(0, 1)
        return made

    def bits(self, matrices: Array) -> Array:
        """Each register's bits for matrices of float32 or float64: (registers, lanes)."""
        numbers = matrices.astype(f"f{self._bank.itemsize}")[
            :, self._row[..., 0], self._column[..., 0]
        ]
        return numbers.swapaxes(0, 1).reshape(len(self._registers), -1).view(self._bank)

    def same_registers(self, other: "Fragment") -> bool:
        """Whether the other one has the same registers."""
        return np.array_equal(self._registers, other._registers)

    def shares_registers(self, other: "Fragment") -> bool:
        """Whether the other one has some of the registers."""
        return bool(np.isin(self._registers, other._registers).any())

    def write(self, machine: Machine, lanes: Lanes, bits: Array) -> None:
        """Writes the registers."""
        bank = machine.registers[self._bank]
        if isinstance(lanes, slice):
            bank[self._registers] = bits
        else:
            bank[self._registers[:, None], lanes] = bits


def _operand(registers: Operand, rows: int, kind: str) -> Fragment:
    """A left operand; a right one of 8 columns is the transpose of a left one."""
    packed = 2 if kind in ("bf16", "f16") else 1
    register = np.arange(len(registers) if isinstance(registers, tuple) else 0)[:, None, None]
    row = GROUP[:, None] + 8 * (register % (rows // 8))
    column = packed * IN_GROUP[:, None] + np.arange(packed) + 4 * packed * (register // (rows // 8))
    return Fragment(registers, row, column, kind)


def _sum(registers: Operand, rows: int, kind: str) -> Fragment:
    """A sum: two neighbours of a row in a lane's successive registers."""
    register = np.arange(len(registers) if isinstance(registers, tuple) else 0)[:, None, None]
    row = GROUP[:, None] + 8 * (register // 2 % (rows // 8))
    column = register // (rows // 4) * 8 + 2 * IN_GROUP[:, None] + register % 2
    return Fragment(registers, row, column, kind)


@instruction("mma")
def _multiply(given: Instruction) -> Step:
    total, kind = given.parts[-4], given.parts[-3]
    check_parts(
        *(given, "sync", "aligned", given.parts[3], "row", "col"),
        *("f32", "f64", "tf32", "bf16", "f16"),
    )
    if given.parts[-2] != kind or given.type != total or total not in ("f32", "f64"):
        raise Unknown("types")
    rows = int(given.parts[3].split("n")[0].removeprefix("m"))
    to, left, right, added = given.operands
    a, b = _operand(left, rows, kind), _operand(right, 8, kind)
    c, d = _sum(added, rows, total), _sum(to, rows, total)

    def step(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes)
        product = a.read(machine, lanes) @ b.read(machine, lanes).swapaxes(1, 2)
        d.write(machine, lanes, d.bits(product + c.read(machine, lanes)))

    return step


# Products of a warpgroup, asynchronous: four warps, operands in shared memory

WARPGROUP = 4 * WARP


@dataclass
class Pending:
    """A wgmma: its lanes, its results and what it reads."""

    lanes: Array
    sums: Fragment
    results: Array  # bits, (registers, lanes)
    reading: list[Array]  # words of shared memory, (warpgroups, words) of each operand

    def part(self, chosen: Array) -> "Pending":
        """That of some warpgroups."""
        groups = chosen[::WARPGROUP]
        return Pending(
            self.lanes[chosen],
            self.sums,
            self.results[:, chosen],
            [words[groups] for words in self.reading],
        )

    def finish(self, machine: Machine) -> None:
        """Writes the results."""
        self.note(machine.shared, -1)
        self.sums.write(machine, self.lanes, self.results)

    def note(self, shared: SharedMemory, more: int) -> None:
        """Adds to the number of products that read each word."""
        for words in self.reading:
            for of_group in words:
                shared.read_later[of_group] += more


def described(descriptor: int, rows: int, depth: int, kind: str, by_rows: bool) -> Array:
    """Addresses of the numbers of a matrix in shared memory, (rows, depth).

    ``by_rows``: a row's numbers are neighbours ("K-major"), else a column's.
    """
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    span, size = {1: 128, 2: 64, 3: 32}.get(descriptor >> 62), 4 if kind == "tf32" else 2
    if span is None or descriptor >> 49 & 7:
        raise Unknown("a descriptor without a swizzle, or with a base offset")
    row, column = np.indices((rows, depth))
    if by_rows:
        at = start + row // 8 * stride + row % 8 * span + column * size
    else:
        per = span // size
        at = start + row // per * leading + row % per * size
        at = at + column // 8 * stride + column % 8 * span
    return at ^ (at >> 7 & span // 16 - 1) << 4


@instruction("wgmma")
def _warpgroup(given: Instruction) -> Step:
    what = given.parts[1]
    if what == "fence":
        return lambda machine, lanes: None
    if what == "commit_group":
        return lambda machine, lanes: machine.products.commit(machine, lanes)
    if what == "wait_group":
        kept = given.operands[0]
        assert isinstance(kept, Immediate)
        return lambda machine, lanes: machine.products.wait(machine, lanes, kept.value)
    return _warpgroup_product(given)


def _warpgroup_product(given: Instruction) -> Step:
    shape, total, kind = given.parts[4], given.parts[5], given.parts[6]
    check_parts(given, "mma_async", "sync", "aligned", shape, "f32", "tf32", "bf16", "f16")
    if total != "f32" or given.type != kind:
        raise Unknown("types")
    columns, depth = (int(n) for n in shape.removeprefix("m64n").split("k"))
    to, left, right, scale, *signs = given.operands
    assert isinstance(to, tuple)
    flags = [operand.value for operand in signs if isinstance(operand, Immediate)]
    if flags[:2] != [1, 1]:
        raise Unknown("a negated operand")
    transposed = [bool(flag) for flag in flags[2:]]
    adds = value(scale, "pred")
    by_rows = not (len(transposed) == 2 and transposed[0]), not (transposed and transposed[-1])
    sums = _sum(to, 16, "f32")
    fragment = _operand(left, 16, kind) if isinstance(left, tuple) else None
    descriptors = [None if fragment else value(left, "b64"), value(right, "b64")]

    def step(machine: Machine, lanes: Lanes) -> None:
        chosen = machine.lanes[lanes]
        machine.whole_warps(lanes)
        if chosen.size % WARPGROUP or (chosen[::WARPGROUP] % WARPGROUP).any():
            raise Fault("not all threads of a warpgroup execute the instruction")
        operands, reading = [], []
        for read, rows, dense in zip(descriptors, (64, columns), by_rows, strict=True):
            if read is None:
                assert fragment is not None
                operands.append(fragment.read(machine, lanes).reshape(-1, 64, depth))
                continue
            given_ = read(machine, lanes).reshape(-1, WARPGROUP)
            if (given_ != given_[:, :1]).any():
                raise Fault("the threads of a warpgroup give different descriptors")
            at = [described(int(d), rows, depth, kind, dense) for d in given_[:, 0]]
            numbers, words = in_shared_memory(machine, chosen[::WARPGROUP], np.stack(at), kind)
            operands.append(numbers)
            reading.append(words)
        product = (operands[0] @ operands[1].swapaxes(1, 2)).reshape(-1, 16, columns)
        added = np.broadcast_to(adds(machine, lanes), chosen.size).reshape(-1, WARP)[:, :1, None]
        before = _sum_before(machine, lanes, sums)
        results = sums.bits(product + np.where(added, before, 0.0))
        pending = Pending(chosen, sums, results, reading)
        pending.note(machine.shared, 1)
        machine.products.begin(pending)
        poison = np.full_like(results, POISON & 0xFFFFFFFF)
        sums.write(machine, lanes, poison)  # not readable before the wait

    return step


def in_shared_memory(
    machine: Machine, lanes: Array, addresses: Array, kind: str
) -> tuple[Array, Array]:
    """Operands that lanes read, (lanes, rows, depth), and their words of shared memory."""
    size = 4 if kind == "tf32" else 2
    blocks = np.repeat(machine.block[lanes], addresses[0].size)
    places = machine.shared.places(addresses.ravel(), blocks, size, size)
    places = places.reshape(lanes.size, -1)
    bits = machine.shared.load(places, size, machine.warp[lanes])
    return numbers_of(bits, kind)[..., 0].reshape(addresses.shape), places * size // 4


def _sum_before(machine: Machine, lanes: Lanes, sums: Fragment) -> Array:
    """The sum so far; of an earlier product that was not waited for, its results."""
    chosen = machine.lanes[lanes]
    for _, pending in reversed(machine.products.work):
        assert isinstance(pending, Pending)
        own = np.isin(chosen, pending.lanes)
        if own.all() and pending.sums.same_registers(sums):
            at = np.searchsorted(pending.lanes, chosen)
            return sums.matrices(pending.results[:, at])
        if own.any() and pending.sums.shares_registers(sums):
            raise Fault("a product writes some registers of another one that was not waited for")
    return sums.read(machine, lanes)
