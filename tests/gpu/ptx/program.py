"""Parses the PTX of one kernel."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class Unknown(Exception):
    """The machine does not know an instruction, or a form of it."""


class Fault(Exception):
    """The program does what the manual forbids or leaves undefined."""


@dataclass(frozen=True)
class Register:
    """A register: its bits (1 for a predicate) and its place among registers of as many bits."""

    bits: int
    index: int


@dataclass(frozen=True)
class Special:
    """A register that tells a thread its place, as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A number in the program: the bits of a float (16 digits: float64), else an integer."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Address:
    """Memory at a base and an offset in bytes."""

    base: "Operand"
    offset: int


@dataclass(frozen=True)
class Symbol:
    """A parameter, or shared memory."""

    name: str


@dataclass(frozen=True)
class Not:
    """A negated predicate."""

    of: Register


Operand = Register | Special | Immediate | Address | Symbol | Not | tuple["Operand", ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``guard`` is the predicate without which a thread skips it."""

    text: str
    parts: tuple[str, ...]  # of the opcode: ("ld", "global", "b32")
    operands: tuple[Operand, ...]
    guard: Register | Not | None = None
    target: int = -1  # of a branch: the instruction's number

    @property
    def type(self) -> str:
        """The last part of the opcode."""
        return self.parts[-1]


@dataclass
class Program:
    """A kernel."""

    name: str = ""
    threads: int = 0  # of a block
    parameters: dict[str, int] = field(default_factory=dict)  # bytes, in order
    registers: dict[int, int] = field(default_factory=dict)  # how many, by bits
    instructions: list[Instruction] = field(default_factory=list)


_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<open>\{)|(?P<close>\})"
    r"|(?P<note>\.(?:loc|file)\b[^\n]*)|(?P<label>[$\w]+):(?!:)|(?P<statement>[^;]*);"
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_BITS = {"pred": 1, **{f"{kind}{n}": n for kind in "busf" for n in (8, 16, 32, 64, 128)}}


def parse(ptx: str) -> Program:
    """The only kernel of a module."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    entry = _ENTRY.search(text)
    if entry is None:
        raise Unknown("a module without a kernel")
    program = Program(name=entry[1])
    for declared in filter(None, map(str.strip, entry[2].split(","))):
        words = declared.split()
        program.parameters[words[-1]] = _BITS[words[1].removeprefix(".")] // 8
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    program.threads = int(threads[1]) if threads else 0
    _Body(program).read(text[entry.end() :])
    return program


class _Body:
    """The statements of a kernel. A pair of braces is a scope of registers and labels."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes: list[dict[str, Register]] = [{}]
        self.labels: list[dict[str, int]] = [{}]
        self.branches: list[tuple[int, str, list[dict[str, int]]]] = []

    def read(self, text: str) -> None:
        at = 0
        while self.scopes:
            token = _TOKEN.match(text, at)
            if token is None:
                raise Unknown(f"text {text[at : at + 80]!r}")
            at = token.end()
            match token.lastgroup:
                case "open":
                    self.scopes.append({})
                    self.labels.append({})
                case "close":
                    self.scopes.pop()
                    self.labels.pop()
                case "label":
                    self.labels[-1][token["label"]] = len(self.program.instructions)
                case "statement":
                    self._statement(" ".join(token["statement"].split()))
        for number, label, labels in self.branches:
            old = self.program.instructions[number]
            target = next(scope[label] for scope in reversed(labels) if label in scope)
            self.program.instructions[number] = Instruction(
                old.text, old.parts, old.operands, old.guard, target
            )

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare(*text.split(None, 2)[1:])
        elif not text or text.startswith(".pragma"):  # a hint: a load's bytes that nobody reads
            return
        elif text.startswith("."):
            raise Unknown(text)
        else:
            self._instruction(text)

    def _declare(self, kind: str, names: str) -> None:
        bits = _BITS[kind.removeprefix(".")]
        for name in names.split(","):
            stem, _, count = name.strip().removesuffix(">").partition("<")
            for declared in [f"{stem}{i}" for i in range(int(count))] if count else [stem]:
                index = self.program.registers.get(bits, 0)
                self.program.registers[bits] = index + 1
                self.scopes[-1][declared] = Register(bits, index)

    def _instruction(self, text: str) -> None:
        guard = None
        body = text
        if text.startswith("@"):
            said, body = text[1:].split(None, 1)
            guard = self._operand(said)
            assert isinstance(guard, Register | Not)
        opcode, _, rest = body.partition(" ")
        parts = tuple(opcode.replace("::", ":").split("."))
        if parts[0] == "bra":
            number = len(self.program.instructions)
            self.branches.append((number, rest.strip(), list(self.labels)))
            operands: tuple[Operand, ...] = ()
        else:
            operands = tuple(self._operand(part) for part in _split(rest))
        self.program.instructions.append(Instruction(text, parts, operands, guard))

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return tuple(self._operand(part) for part in _split(text[1:-1]))
        if text.startswith("["):
            base, sign, offset = re.fullmatch(
                r"\[\s*([%$\w.]+)\s*(?:([+-])\s*(-?\w+)\s*)?\]", text
            ).groups()
            shift = int(offset, 0) if offset else 0
            return Address(self._operand(base), -shift if sign == "-" else shift)
        if text.startswith("!"):
            register = self._operand(text[1:])
            assert isinstance(register, Register)
            return Not(register)
        if "|" in text:
            return tuple(self._operand(part.strip()) for part in text.split("|"))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Immediate(int(text[2:], 16), 32)
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16), 64)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.removesuffix("U"), 0))
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        return Special(text) if text.startswith("%") else Symbol(text)


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside of brackets."""
    depth, part = 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += character
    if part.strip():
        yield part.strip()
