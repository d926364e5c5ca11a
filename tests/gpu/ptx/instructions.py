"""Instructions on the registers of one lane, and loads and stores."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu.ptx.machine import Lanes, Machine, Step, dtype_of, target, value
from gpu.ptx.memory import POISON, Array
from gpu.ptx.program import Address, Fault, Immediate, Instruction, Operand, Symbol, Unknown

Function = Callable[..., Any]
_DECODERS: dict[str, Callable[[Instruction], Step]] = {}


def instruction(*names: str) -> Callable[[Callable[[Instruction], Step]], Any]:
    """Registers what decodes instructions whose opcode starts with one of the names."""

    def register(decode: Callable[[Instruction], Step]) -> Callable[[Instruction], Step]:
        _DECODERS.update(dict.fromkeys(names, decode))
        return decode

    return register


def decode(given: Instruction) -> Step:
    """What executes an instruction.

    Raises:
        Unknown: the machine does not know it.
    """
    try:
        return _DECODERS[given.parts[0]](given)
    except (KeyError, ValueError, Unknown) as error:
        raise Unknown(f"{given.text!r}: {error!r}") from None


def check_parts(given: Instruction, *known: str) -> set[str]:
    """The parts of the opcode after the first.

    Raises:
        Unknown: one is not known.
    """
    parts = set(given.parts[1:])
    if unknown := parts - set(known):
        raise Unknown(", ".join(sorted(unknown)))
    return parts


def numbers(given: Instruction, kind: str) -> list[Callable[..., Array]]:
    """Readers of all operands but the result, as one type."""
    return [value(operand, kind) for operand in given.operands[1:]]


# Registers

_ROUNDING = ("rn", "ftz", "approx", "full", "lo")


def flushed(values: Array) -> Array:
    """Subnormal float32 numbers become zeros of their sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def rounded_to_bfloat16(values: Array) -> Array:
    """The bits of the nearest bfloat16, ties to even; NaN is 0x7fff."""
    bits = values.view(np.uint32)
    up = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    nearest = (bits + up >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), nearest)


def from_half(bits: Array, kind: str) -> Array:
    """The float32 of the bits of a bfloat16 or float16."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _fma(x: Array, y: Array, z: Array) -> Array:
    # Twice the precision, then rounded: the product is exact for float32; for float64 the sum's
    # last bit may differ.
    wide = np.float64 if x.dtype == np.float32 else np.longdouble
    return (x.astype(wide) * y.astype(wide) + z.astype(wide)).astype(x.dtype)


def _divided(x: Array, y: Array) -> Array:
    if np.asarray(x).dtype.kind == "f":
        return x / y
    quotient = np.abs(x) // np.abs(y) if np.asarray(x).dtype.kind == "i" else x // y
    signed = np.where((x < 0) != (y < 0), -quotient, quotient).astype(x.dtype)
    return np.where(y == 0, np.array(POISON, np.uint64).astype(x.dtype), signed)  # unspecified


def _shifted_left(x: Array, by: Array) -> Array:
    bits = x.dtype.itemsize * 8
    return np.where(by >= bits, x.dtype.type(0), x << np.minimum(by, bits - 1).astype(x.dtype))


def _shifted_right(x: Array, by: Array) -> Array:
    bits = x.dtype.itemsize * 8
    moved = x >> np.minimum(by, bits - 1).astype(x.dtype)
    return moved if x.dtype.kind == "i" else np.where(by >= bits, x.dtype.type(0), moved)


def _smaller(x: Array, y: Array) -> Array:
    return np.fmin(x, y) if x.dtype.kind == "f" else np.minimum(x, y)


def _larger(x: Array, y: Array) -> Array:
    return np.fmax(x, y) if x.dtype.kind == "f" else np.maximum(x, y)


def _relu(function: Function) -> Function:
    return lambda x, y: np.maximum(function(x, y), np.int32(0))


_ARITHMETIC: dict[str, Function] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divided,
    "min": _smaller,
    "max": _larger,
    "neg": operator.neg,
    "abs": np.abs,
    "not": np.invert,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": _shifted_left,
    "shr": _shifted_right,
    "sqrt": np.sqrt,
    "rcp": lambda x: 1 / x,
    "fma": _fma,
    "mad": lambda x, y, z: x * y + z,
}


@instruction(*_ARITHMETIC)
def _arithmetic(given: Instruction) -> Step:
    name, kind = given.parts[0], given.type
    parts = check_parts(given, kind, *_ROUNDING, "wide", "f32", "relu")
    function = _ARITHMETIC[name]
    if "relu" in parts:
        if kind != "s32":
            raise Unknown("relu")
        function = _relu(function)
    if kind == "f32x2":
        return _arithmetic_of_pairs(given, function)
    result = kind
    if kind in ("bf16", "f16") and "f32" in parts:  # all operands but the last one are halves
        result, *halves = "f32", *(value(x, "b16") for x in given.operands[1:-1])
        reads = [
            *(lambda m, lanes, read=read: from_half(read(m, lanes), kind) for read in halves),
            value(given.operands[-1], "f32"),
        ]
    elif kind in ("bf16", "bf16x2", "f16x2") or ("f32" in parts and kind != "f32"):
        raise Unknown(kind)
    else:
        reads = numbers(given, kind)
    if name in ("shl", "shr"):
        reads[1] = value(given.operands[2], "u32")
    if "wide" in parts:
        result = f"{kind[0]}{int(kind[1:]) * 2}"
        wide = dtype_of(result)
        reads[:2] = [lambda m, lanes, read=read: read(m, lanes).astype(wide) for read in reads[:2]]
        if name == "mad":
            reads[2] = value(given.operands[3], result)
    write, ftz, type_ = target(given.operands[0], result), "ftz" in parts, dtype_of(result)

    def step(machine: Machine, lanes: Lanes) -> None:
        given_ = [read(machine, lanes) for read in reads]
        if ftz:
            given_ = [flushed(x) for x in given_]
        made = function(*given_)
        write(machine, lanes, flushed(made) if ftz else np.asarray(made, type_))

    return step


def _arithmetic_of_pairs(given: Instruction, function: Function) -> Step:
    """On two float32 in 64 bits each."""
    reads, write = numbers(given, "b64"), target(given.operands[0], "b64")

    def step(machine: Machine, lanes: Lanes) -> None:
        bits = np.broadcast_arrays(machine.lanes[lanes], *(read(machine, lanes) for read in reads))
        pairs = [np.ascontiguousarray(x).view(np.float32) for x in bits[1:]]
        write(machine, lanes, function(*pairs).view(np.uint64))

    return step


_COMPARISONS: dict[str, Function] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _compared(name: str, kind: str) -> Function:
    if dtype_of(kind).kind != "f":
        return _COMPARISONS[name]
    either = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
    if name in ("nan", "num"):
        return either if name == "nan" else lambda x, y: ~either(x, y)
    if len(name) == 3:  # unordered: true with NaN
        compare = _COMPARISONS[name[:2]]
        return lambda x, y: compare(x, y) | either(x, y)
    compare = _COMPARISONS[name]
    return lambda x, y: compare(x, y) & ~either(x, y)


@instruction("setp")
def _set_predicate(given: Instruction) -> Step:
    name, kind = given.parts[1], given.type
    check_parts(given, name, kind)
    compare, write = _compared(name, kind), target(given.operands[0], "pred")
    left, right = numbers(given, kind)

    def step(machine: Machine, lanes: Lanes) -> None:
        write(machine, lanes, np.asarray(compare(left(machine, lanes), right(machine, lanes))))

    return step


@instruction("selp")
def _select(given: Instruction) -> Step:
    kind = given.type
    check_parts(given, kind)
    first, second = numbers(given, kind)[:2]
    holds, write = value(given.operands[3], "pred"), target(given.operands[0], kind)

    def step(machine: Machine, lanes: Lanes) -> None:
        chosen = np.where(holds(machine, lanes), first(machine, lanes), second(machine, lanes))
        write(machine, lanes, chosen.astype(dtype_of(kind), copy=False))

    return step


@instruction("mov")
def _move(given: Instruction) -> Step:
    kind = given.type
    check_parts(given, kind)
    to, source = given.operands
    if isinstance(to, tuple):  # the parts of one number, the lowest first
        part = f"u{int(kind[1:]) // len(to)}"
        read, writes = value(source, f"u{kind[1:]}"), [target(x, part) for x in to]

        def unpack(machine: Machine, lanes: Lanes) -> None:
            parts = np.ascontiguousarray(read(machine, lanes)).view(dtype_of(part))
            for i, write in enumerate(writes):
                write(machine, lanes, parts.reshape(-1, len(writes))[:, i])

        return unpack
    write = target(to, kind)
    if isinstance(source, tuple):
        part = f"u{int(kind[1:]) // len(source)}"
        reads = [value(x, part) for x in source]

        def pack(machine: Machine, lanes: Lanes) -> None:
            parts = np.broadcast_arrays(*(read(machine, lanes) for read in reads))
            packed = np.stack(parts, axis=-1)
            write(machine, lanes, packed.view(dtype_of(kind))[..., 0])

        return pack
    read = value(source, kind)
    return lambda machine, lanes: write(machine, lanes, read(machine, lanes))


def _rounded_to_tf32(values: Array) -> Array:
    """The nearest number with ten bits of mantissa, ties away from zero."""
    bits = values.view(np.uint32)
    nearest = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), nearest.view(np.float32), values)


@instruction("cvt")
def _convert(given: Instruction) -> Step:
    to, source = given.parts[-2:]
    parts = check_parts(given, to, source, "rn", "rna")
    if to == "tf32":
        if "rna" not in parts:
            raise Unknown("rounding")
        read, write = value(given.operands[1], "f32"), target(given.operands[0], "b32")
        return lambda m, lanes: write(m, lanes, _rounded_to_tf32(read(m, lanes)).view(np.uint32))
    if to in ("bf16x2", "f16x2"):
        high, low = numbers(given, source)
        write = target(given.operands[0], "b32")

        def pair(machine: Machine, lanes: Lanes) -> None:
            halves = [_half(read(machine, lanes), to[:-2]) for read in (low, high)]
            write(machine, lanes, np.stack(halves, axis=-1).view(np.uint32)[..., 0])

        return pair
    read = value(given.operands[1], source)
    write = target(given.operands[0], to)

    def step(machine: Machine, lanes: Lanes) -> None:
        given_ = read(machine, lanes)
        if source == "bf16":
            given_ = from_half(np.asarray(given_), source)
        if to == "bf16":
            write(machine, lanes, _half(np.asarray(given_, np.float32), "bf16"))
            return
        write(machine, lanes, np.asarray(given_).astype(dtype_of(to)))

    return step


def _half(values: Array, kind: str) -> Array:
    if kind == "bf16":
        return rounded_to_bfloat16(np.ascontiguousarray(values))
    return values.astype(np.float16).view(np.uint16)


@instruction("bfe")
def _bit_field(given: Instruction) -> Step:
    kind = given.type
    check_parts(given, kind)
    read = value(given.operands[1], kind)
    start, length = (x.value for x in given.operands[2:] if isinstance(x, Immediate))
    write, type_ = target(given.operands[0], kind), dtype_of(kind)
    up = type_.itemsize * 8 - start - length
    if length == 0 or up < 0:
        raise Unknown(f"bits {start} to {start + length}")

    def step(machine: Machine, lanes: Lanes) -> None:
        write(machine, lanes, read(machine, lanes) << type_.type(up) >> type_.type(up + start))

    return step


@instruction("prmt")
def _permute_bytes(given: Instruction) -> Step:
    check_parts(given, "b32")
    low, high = numbers(given, "u32")[:2]
    choice = given.operands[3]
    if not isinstance(choice, Immediate):
        raise Unknown("a permutation in a register")
    nibbles = [choice.value >> 4 * i & 15 for i in range(4)]
    write = target(given.operands[0], "b32")

    def step(machine: Machine, lanes: Lanes) -> None:
        pair = np.broadcast_arrays(low(machine, lanes), high(machine, lanes))
        raw = np.stack(pair, axis=-1).view(np.uint8)
        made = np.stack([raw[..., n & 7] for n in nibbles], axis=-1)
        for i, n in enumerate(nibbles):
            if n & 8:  # the sign of the byte
                made[..., i] = np.where(made[..., i] & 0x80, 0xFF, 0)
        write(machine, lanes, np.ascontiguousarray(made).view(np.uint32)[..., 0])

    return step


# Memory

_SHARED = ("shared", "shared:cta")


def _vector(operand: Operand) -> tuple[Operand, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


@instruction("ld")
def _load(given: Instruction) -> Step:
    space, kind = given.parts[1], given.type
    check_parts(given, space, kind, "v2", "v4")
    place = given.operands[1]
    assert isinstance(place, Address)
    writes = [target(x, kind) for x in _vector(given.operands[0])]
    width, type_ = dtype_of(kind).itemsize, dtype_of(kind)
    if space == "param":
        assert isinstance(place.base, Symbol)
        name = place.base.name

        def parameter(machine: Machine, lanes: Lanes) -> None:
            bits = machine.arguments[name] & (1 << width * 8) - 1
            writes[0](machine, lanes, np.array(bits, f"u{width}").view(type_))

        return parameter
    if space in _SHARED:
        at = value(place, "u32")

        def shared(machine: Machine, lanes: Lanes) -> None:
            places = machine.shared.places(
                _all(at(machine, lanes), machine, lanes),
                *(machine.block[lanes], width, width * len(writes)),
            )
            loaded = machine.shared.load(places, width, machine.warp[lanes])
            for i, write in enumerate(writes):
                write(machine, lanes, loaded[:, i].view(type_))

        return shared
    if space != "global":
        raise Unknown(space)
    at_global = value(place, "u64")

    def load(machine: Machine, lanes: Lanes) -> None:
        addresses = _all(at_global(machine, lanes), machine, lanes)
        machine.memory.check(addresses, width * len(writes), machine.number[lanes], "load")
        for i, write in enumerate(writes):
            loaded = machine.memory.load(addresses + np.uint64(i * width), width)
            write(machine, lanes, loaded.view(type_))

    return load


def _all(array: Array, machine: Machine, lanes: Lanes) -> Array:
    """One number for each selected lane."""
    return np.broadcast_to(array, machine.lanes[lanes].shape)


@instruction("st")
def _store(given: Instruction) -> Step:
    space, kind = given.parts[1], given.type
    check_parts(given, space, kind, "v2", "v4")
    bits = f"u{dtype_of(kind).itemsize * 8}"
    width = dtype_of(kind).itemsize
    reads = [value(x, bits) for x in _vector(given.operands[1])]
    if space in _SHARED:
        at = value(given.operands[0], "u32")

        def shared(machine: Machine, lanes: Lanes) -> None:
            places = machine.shared.places(
                _all(at(machine, lanes), machine, lanes),
                *(machine.block[lanes], width, width * len(reads)),
            )
            values = [_all(read(machine, lanes), machine, lanes) for read in reads]
            machine.shared.store(places, width, np.stack(values, 1), machine.warp[lanes])

        return shared
    if space != "global":
        raise Unknown(space)
    at_global = value(given.operands[0], "u64")

    def store(machine: Machine, lanes: Lanes) -> None:
        addresses = _all(at_global(machine, lanes), machine, lanes)
        machine.memory.check(addresses, width * len(reads), machine.number[lanes], "store")
        for i, read in enumerate(reads):
            values = _all(read(machine, lanes), machine, lanes)
            machine.memory.store(
                addresses + np.uint64(i * width), width, values, machine.number[lanes]
            )

    return store


@instruction("atom")
def _atomic(given: Instruction) -> Step:
    kind = given.type
    check_parts(given, "global", "gpu", "acq_rel", "max", kind)
    at, read = value(given.operands[1], "u64"), value(given.operands[2], kind)
    write = target(given.operands[0], kind)

    def step(machine: Machine, lanes: Lanes) -> None:
        addresses = _all(at(machine, lanes), machine, lanes)
        values = np.ascontiguousarray(_all(read(machine, lanes), machine, lanes))
        machine.memory.check(addresses, values.itemsize, machine.number[lanes], "atomic")
        write(machine, lanes, machine.memory.maximum(addresses, values))

    return step


@instruction("fence")
def _fence(given: Instruction) -> Step:
    check_parts(given, "proxy", "async", "shared:cta")
    return lambda machine, lanes: None


# Asynchronous copies to shared memory


@dataclass
class Copy:
    """A cp.async: its lanes, and the words of shared memory that it will write."""

    lanes: Array
    places: Array  # (lanes, words)
    words: Array

    def part(self, chosen: Array) -> "Copy":
        """That of some lanes."""
        return Copy(self.lanes[chosen], self.places[chosen], self.words[chosen])

    def finish(self, machine: Machine) -> None:
        """Writes."""
        np.subtract.at(machine.shared.written_later, self.places, 1)
        machine.shared.store(self.places, 4, self.words, machine.warp[self.lanes])


@instruction("cp")
def _copy(given: Instruction) -> Step:
    if given.parts[:2] != ("cp", "async"):
        raise Unknown("a bulk copy")
    if given.parts[2] == "commit_group":
        return lambda machine, lanes: machine.copies.commit(machine, lanes)
    if given.parts[2] == "wait_group":
        kept = given.operands[0].value  # type: ignore[union-attr]
        return lambda machine, lanes: machine.copies.wait(machine, lanes, kept)
    check_parts(given, "async", "ca", "cg", "shared", "global")
    size = given.operands[2]
    assert isinstance(size, Immediate)
    n = size.value
    to, source = value(given.operands[0], "u32"), value(given.operands[1], "u64")
    sizes = value(given.operands[3], "u32") if len(given.operands) > 3 else value(size, "u32")

    def step(machine: Machine, lanes: Lanes) -> None:
        copied = _all(sizes(machine, lanes), machine, lanes)
        if ((copied != 0) & (copied != n)).any():
            raise Fault("a copy of a part")
        places = machine.shared.places(
            _all(to(machine, lanes), machine, lanes), machine.block[lanes], 4, n
        )
        machine.shared.use(places, machine.warp[lanes], writes=True)
        reading = copied != 0
        addresses = _all(source(machine, lanes), machine, lanes)[reading]
        machine.memory.check(addresses, n, machine.number[lanes][reading], "load")
        words = np.zeros(places.shape, np.uint32)
        for i in range(n // 4):
            words[reading, i] = machine.memory.load(addresses + np.uint64(4 * i), 4)
        np.add.at(machine.shared.written_later, places, 1)
        machine.copies.begin(Copy(machine.lanes[lanes], places, words))

    return step
