"""Executes the programs of a launch: control flow, barriers, registers."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from gpu.ptx.memory import POISON, Array, GlobalMemory, SharedMemory
from gpu.ptx.program import (
    Address,
    Fault,
    Immediate,
    Instruction,
    Not,
    Operand,
    Program,
    Register,
    Special,
    Symbol,
    Unknown,
)

WARP = 32
# Where shared memory begins: a multiple of the largest pattern of wgmma's operands.
SHARED_BASE = 1024

_KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}

# All lanes, or the numbers of some.
Lanes = Any
Step = Callable[["Machine", Lanes], None]


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy type of a PTX type; bfloat16 and TF32 are their bits."""
    if name == "pred":
        return np.dtype(bool)
    if name in ("bf16", "bf16x2", "f16x2", "tf32"):
        return np.dtype(np.uint16 if name == "bf16" else np.uint32)
    try:
        return np.dtype(f"{_KINDS[name[0]]}{int(name[1:]) // 8}")
    except (KeyError, ValueError):
        raise Unknown(f"type {name}") from None


class Work(Protocol):
    """What an instruction of some lanes has begun."""

    lanes: Array

    def part(self, chosen: Array) -> "Work":
        """That of the chosen ones of its lanes."""

    def finish(self, machine: "Machine") -> None:
        """Make its results visible."""


class Groups:
    """Work that lanes commit in groups and wait for by the number of groups after it."""

    def __init__(self, lanes: int) -> None:
        self._committed = np.zeros(lanes, np.int64)  # groups of each lane
        self.work: list[tuple[Array, Work]] = []  # with the group of each of its lanes

    def begin(self, work: Work) -> None:
        """Adds work to the groups that its lanes commit next."""
        self.work.append((self._committed[work.lanes], work))

    def commit(self, machine: "Machine", lanes: Lanes) -> None:
        """Ends a group of each lane."""
        self._committed[lanes] += 1

    def wait(self, machine: "Machine", lanes: Lanes, kept: int) -> None:
        """Finishes the lanes' work but that of their last ``kept`` groups."""
        waiting = np.zeros(self._committed.size, bool)
        waiting[lanes] = True
        begun, self.work = self.work, []
        for groups, work in begun:
            due = waiting[work.lanes] & (groups < self._committed[work.lanes] - kept)
            if not due.all():
                self.work.append((groups[~due], work.part(~due)))
            if due.any():
                work.part(due).finish(machine)


class Machine:
    """Some programs of a launch, executed together.

    A lane is a thread of a program: lane = (program's number here) * threads + thread. Lanes that
    branch apart are executed in turn, those at the lowest instruction first, so that they meet
    again where loops and branches end.
    """

    def __init__(
        self,
        program: Program,
        steps: Sequence[Step | None],
        memory: GlobalMemory,
        arguments: Sequence[int],
        programs: range,
        shared_bytes: int,
    ) -> None:
        self.program, self.steps, self.memory = program, steps, memory
        threads, blocks = program.threads, len(programs)
        self.lanes = np.arange(threads * blocks)
        self.block, self.thread = self.lanes // threads, self.lanes % threads
        self.warp = self.thread // WARP
        self.number = self.block + programs.start  # of each lane's program in the launch
        self.arguments = dict(zip(program.parameters, arguments, strict=True))
        self.shared = SharedMemory(blocks, shared_bytes, SHARED_BASE)
        self.registers: dict[np.dtype[Any], Array] = {}
        for bits, count in program.registers.items():
            if bits == 1:
                self.registers[dtype_of("pred")] = np.zeros((count, self.lanes.size), bool)
                continue
            poison = np.uint64(POISON >> (64 - bits) if bits < 64 else POISON)
            bank = np.full((count, self.lanes.size), poison, f"u{bits // 8}")
            for kind in "uif" if bits > 8 else "ui":
                view = bank.view(f"{kind}{bits // 8}")
                self.registers[view.dtype] = view
        self.special = {
            "%tid.x": self.thread.astype(np.uint32),
            "%ctaid.x": self.number.astype(np.uint32),
        }
        # The guard of each instruction, if it has one.
        self._guards = [i.guard and value(i.guard, "pred") for i in program.instructions]
        # cp.async and wgmma have groups of their own.
        self.copies, self.products = (Groups(self.lanes.size) for _ in range(2))
        self.tensor_memory: Any = None  # of sm_100, once it is used
        self.executed = 0  # instructions, each counted once for the lanes that execute it together
        self._at: dict[int, Array] = {0: self.lanes}  # the lanes that execute each instruction next
        self._waiting: dict[int, Array] = {}  # lanes at a barrier, by the instruction after it
        self._alive = np.full(blocks, threads)
        self._asleep: list[tuple[int, Array]] = []
        self._stopped: Array | None = None

    def run(self, most: int = 2_000_000) -> None:
        """Execute all lanes to their end; a Fault names the instruction."""
        instructions, last = self.program.instructions, len(self.program.instructions)
        while self._at:
            number = min(self._at)
            lanes = self._at.pop(number)
            selected = slice(None) if lanes.size == self.lanes.size else lanes
            while number < last and number not in self._at:
                instruction = instructions[number]
                self.executed += 1
                if self.executed > most:
                    raise Fault(f"no end after {most} instructions")
                try:
                    if instruction.parts[0] in CONTROL:
                        CONTROL[instruction.parts[0]](self, instruction, number, lanes)
                        break
                    chosen = selected
                    if guard := self._guards[number]:
                        holds = guard(self, selected)
                        chosen = selected if holds.all() else lanes[holds]
                        if not isinstance(chosen, slice) and not chosen.size:
                            number += 1
                            continue
                    step = self.steps[number]
                    assert step is not None
                    step(self, chosen)
                    if self._stopped is not None:
                        stopped, self._stopped = self._stopped, None
                        self._asleep.append((number, stopped))
                        self._go(number + 1, lanes[~np.isin(lanes, stopped)])
                        break
                except Fault as fault:
                    raise Fault(f"{self.program.name}, {instruction.text!r}: {fault}") from None
                number += 1
            else:
                self._go(number, lanes)
        if self._waiting or self._asleep:
            raise Fault(f"{self.program.name}: threads wait for what never comes")

    def sleep(self, lanes: Array) -> None:
        """Stops lanes at the current instruction, until ``wake``."""
        self._stopped = lanes

    def wake(self) -> None:
        """Lets all lanes that sleep try their instruction again."""
        asleep, self._asleep = self._asleep, []
        for number, lanes in asleep:
            self._go(number, lanes)

    def whole_warps(self, lanes: Lanes) -> Array:
        """The selected lanes, (warps, 32).

        Raises:
            Fault: a warp is not complete.
        """
        chosen = self.lanes[lanes]
        if isinstance(lanes, slice):
            return chosen.reshape(-1, WARP)
        if (
            chosen.size % WARP
            or (chosen.reshape(-1, WARP)[:, 0] % WARP).any()
            or (np.diff(chosen.reshape(-1, WARP)) != 1).any()
        ):
            raise Fault("not all threads of a warp execute the instruction")
        return chosen.reshape(-1, WARP)

    def _go(self, number: int, lanes: Array) -> None:
        """Lets lanes go on at an instruction; past the last one they end."""
        if number >= len(self.program.instructions):
            self._end(lanes)
        elif lanes.size:
            met = self._at.get(number)
            self._at[number] = lanes if met is None else np.sort(np.concatenate([met, lanes]))

    def _branch(self, instruction: Instruction, number: int, lanes: Array) -> None:
        guard = self._guards[number]
        if guard is None:
            self._go(instruction.target, lanes)
            return
        taken = guard(self, lanes)
        self._go(instruction.target, lanes[taken])
        self._go(number + 1, lanes[~taken])

    def _return(self, instruction: Instruction, number: int, lanes: Array) -> None:
        if instruction.guard is not None:
            raise Unknown(instruction.text)
        self._end(lanes)

    def _end(self, lanes: Array) -> None:
        self._alive -= np.bincount(self.block[lanes], minlength=self._alive.size)
        self._pass_barriers()

    def _barrier(self, instruction: Instruction, number: int, lanes: Array) -> None:
        if instruction.parts[1:] == ("warp", "sync") and instruction.operands == (Immediate(-1),):
            self.whole_warps(lanes)  # which execute every instruction together
            self._go(number + 1, lanes)
            return
        if instruction.guard is not None or instruction.operands != (Immediate(0),):
            raise Unknown(instruction.text)
        waiting = self._waiting.get(number + 1, lanes[:0])
        self._waiting[number + 1] = np.sort(np.concatenate([waiting, lanes]))
        self._pass_barriers()

    def _pass_barriers(self) -> None:
        """Lets the blocks go on whose threads all wait at one barrier or have ended."""
        for number, lanes in list(self._waiting.items()):
            arrived = np.bincount(self.block[lanes], minlength=self._alive.size)
            passes = (arrived == self._alive) & (arrived > 0)
            if not passes.any():
                continue
            for block in passes.nonzero()[0]:
                self.shared.barrier(int(block))
                if self.tensor_memory is not None:
                    self.tensor_memory.barrier(int(block))
            going = passes[self.block[lanes]]
            self._waiting[number] = lanes[~going]
            if going.all():
                del self._waiting[number]
            self._go(number, lanes[going])


CONTROL = {
    "bra": Machine._branch,
    "ret": Machine._return,
    "bar": Machine._barrier,
    "barrier": Machine._barrier,
}


def value(operand: Operand, kind: str) -> Callable[[Machine, Lanes], Array]:
    """Reads an operand as a type: the selected lanes' numbers, or one for all of them."""
    wanted = dtype_of(kind)
    match operand:
        case Register(bits, index):
            own = np.dtype(bool) if bits == 1 else np.dtype(f"u{bits // 8}")
            if bits == wanted.itemsize * 8 or bits == 1:
                own = wanted
                return lambda machine, lanes: machine.registers[own][index][lanes]
            # As a narrower type its low bits, as a wider one its bits and zeros.
            bare = np.dtype(f"u{wanted.itemsize}")
            return lambda machine, lanes: (
                machine.registers[own][index][lanes].astype(bare).view(wanted)
            )
        case Not(register):
            read = value(register, kind)
            return lambda machine, lanes: ~read(machine, lanes)
        case Special(name):
            return lambda machine, lanes: machine.special[name][lanes].astype(wanted)
        case Immediate(number, float_bits):
            constant = _constant(number, float_bits, wanted)
            return lambda machine, lanes: constant
        case Symbol("global_smem"):
            return lambda machine, lanes: np.full(machine.lanes[lanes].size, SHARED_BASE, wanted)
        case Address(Symbol("global_smem"), offset):
            place = wanted.type(SHARED_BASE + offset)
            return lambda machine, lanes: np.full(machine.lanes[lanes].size, place)
        case Address(Register() as base, offset):
            read = value(base, kind)
            shift = np.array(offset & (1 << wanted.itemsize * 8) - 1, wanted)
            return lambda machine, lanes: read(machine, lanes) + shift
    raise Unknown(f"operand {operand}")


def _constant(number: int, float_bits: int, wanted: np.dtype[Any]) -> Any:
    bits = wanted.itemsize * 8
    if float_bits:
        return (
            np.array(number, f"u{float_bits // 8}")
            .view(f"f{float_bits // 8}")
            .astype(wanted if wanted.kind == "f" else f"f{float_bits // 8}")
            .view(wanted)[()]
        )
    if wanted.kind == "b":
        return np.bool_(number)
    return np.array(number & (1 << bits) - 1, f"u{bits // 8}").view(wanted)[()]


Write = Callable[[Machine, Lanes, Array], None]


def target(operand: Operand, kind: str) -> Write:
    """Writes a register from numbers of a type; a wider one gets zeros, or the sign, above."""
    if operand in (Symbol("_"), Special("_")):
        return lambda machine, lanes, values: None
    if not isinstance(operand, Register):
        raise Unknown(f"result {operand}")
    bits, index = operand.bits, operand.index
    given = dtype_of(kind)
    own = (
        np.dtype(bool) if bits == 1 else np.dtype(f"{'i' if given.kind == 'i' else 'u'}{bits // 8}")
    )
    if given.kind == "f":
        if bits != given.itemsize * 8:
            raise Unknown(f"a result of {given} in {bits} bits")
        own = given

    def write(machine: Machine, lanes: Lanes, values: Array) -> None:
        if values.dtype != given:
            raise TypeError(f"{values.dtype} for {kind}")
        machine.registers[own][index][lanes] = values

    return write
