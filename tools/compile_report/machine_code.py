"""What Triton and ptxas make of a kernel: registers, spills, instructions, load widths.

Nothing runs and no device is needed: a kernel is compiled for an architecture, and ``cuobjdump``
and ``nvdisasm``, which come with Triton, take the result apart. Every load and every product in a
kernel's loops is found by the line of source of its instructions.
"""

from __future__ import annotations

import ast
import functools
import inspect
import multiprocessing
import os
import re
import subprocess
import tempfile
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tools.compile_report.launches import Launch, recorded

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Instructions that multiply, the fastest first: UTC.MMA on Blackwell, HGMMA on Hopper, HMMA before,
# DMMA for float64; FFMA and DFMA are the plain units.
PRODUCTS = ("UTCHMMA", "HGMMA", "DMMA", "HMMA", "DFMA", "FFMA")
LOADS = ("LDG", "LDGSTS")
WAITS = ("BAR.SYNC", "DEPBAR.LE", "WARPGROUP.DEPBAR", "SYNCS.PHASECHK")

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)")
_SOURCE_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_LABEL = re.compile(r"(\.L_\w+):")
_TARGET = re.compile(r"BRA.* `\((\.L_\w+)\)")
_TTIR_OPERATION = re.compile(
    r"= tt\.(?:load|dot) .*<[\dx]+x(?:!tt\.ptr<)?[a-z]+(\d+)>+ loc\((#loc\d*)\)"
)
_TTIR_LOCATION = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)

Line = tuple[str, int]  # the name of a file, and the number of a line


class Site(NamedTuple):
    """A product of a kernel, or a load in one of its loops."""

    name: str  # its branch and operand, as ``rows_are_dense: a``
    kind: str  # ``load`` or ``dot``
    lines: frozenset[Line]  # its lines of source


@dataclass(frozen=True)
class Loop:
    """A loop with products or waits: what one warp does in one iteration."""

    instructions: int
    products: int  # instructions of the matrix units, or DFMA for float64 without them
    loads: dict[int, int]  # instructions by their width in bytes
    waits: int  # for copies, matrix units, or other warps


@dataclass
class Compiled:
    """One kernel, compiled for one architecture."""

    kernel: str  # its name
    settings: dict[str, Any]  # its compile-time constants and options
    capability: int  # of the architecture, 80 for sm_80
    registers: int = 0  # of a thread
    stack: int = 0  # bytes of a thread's stack, which holds the spilled registers
    spill_loads: int = 0  # LDL instructions
    spill_stores: int = 0  # STL instructions
    shared: int = 0  # bytes of shared memory of a block
    tensor_memory: int = 0  # columns of a block
    products: dict[str, str] = field(default_factory=dict)  # each product's instruction
    # Every load in a loop: the number of its instructions by their width in bytes.
    loads: dict[str, dict[int, int]] = field(default_factory=dict)
    # Every load in a loop: the bytes of an element.
    element_bytes: dict[str, int] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)  # the loops with products or waits
    error: str = ""  # why it did not compile; then nothing else is known


def no_device(capability: int) -> Any:
    """A driver of a device that is not there, for which Triton compiles."""
    return SimpleNamespace(
        get_current_device=lambda: capability,  # Triton caches compiled kernels by it
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, warp_size=32),
    )


def _compile_one(job: tuple[int, int, bool]) -> Compiled:
    capability, index, main_only = job
    launch = _launches(main_only)[index]
    try:
        return _compiled(launch, capability)
    except (triton.CompilationError, RuntimeError) as failure:
        # Triton's own message is the last of a chain; the others repeat the source.
        cause: BaseException = failure
        while cause.__cause__ is not None:
            cause = cause.__cause__
        error = str(cause).strip().splitlines()[-1]
        return Compiled(launch.name, launch.settings, capability, error=error)


def _compiled(launch: Launch, capability: int) -> Compiled:
    driver.set_active(no_device(capability))
    made = launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.constants)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        usage = _run_tool("cuobjdump", "-res-usage", cubin.name)
        listing = _run_tool("nvdisasm", "-c", "-g", cubin.name)
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    by_line = instructions_by_line(listing)
    counts = Counter(name for line in by_line.values() for name, _ in line)
    present = tensor_operations(made.asm["ttir"])
    products: dict[str, str] = {}
    loads: dict[str, Counter[int]] = defaultdict(Counter)
    sizes: dict[str, int] = {}
    for site in _sites(launch.kernel):
        there = [i for line in site.lines for i in by_line.get(line, ())]
        size = next((present[line] for line in site.lines if line in present), None)
        if size is None:
            continue  # its branch is not in this version of the kernel
        if site.kind == "dot":
            products[site.name] = _product({name for name, _ in there})
        else:
            loads[site.name].update(width(i) for i in there if i[0] in LOADS)
            sizes[site.name] = size
    # ptxas gives some tensor-core instructions no line of source.
    anywhere = _product(counts.keys() - {"DFMA", "FFMA"})
    return Compiled(
        kernel=launch.name,
        settings=launch.settings,
        capability=capability,
        registers=int(registers),
        stack=int(stack),
        spill_loads=counts["LDL"],
        spill_stores=counts["STL"],
        shared=made.metadata.shared,
        tensor_memory=getattr(made.metadata, "tmem_size", 0) or 0,
        products={name: anywhere if p == "none" else p for name, p in products.items()},
        loads={name: dict(sorted(widths.items())) for name, widths in loads.items()},
        loops=loops_of(listing),
        element_bytes=sizes,
    )


def _product(names: Collection[str]) -> str:
    return next((name for name in PRODUCTS if name in names), "none")


def _run_tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions_by_line(listing: str) -> dict[Line, list[tuple[str, str]]]:
    """The instructions of a listing, (name, suffixes), by their line of source."""
    found: dict[Line, list[tuple[str, str]]] = {}
    here = ("", 0)
    for text in listing.splitlines():
        if marked := _SOURCE_LINE.search(text):
            here = (Path(marked[1]).name, int(marked[2]))
        elif instruction := _INSTRUCTION.search(text):
            found.setdefault(here, []).append((instruction[1], instruction[2]))
    return found


def loops_of(listing: str) -> list[Loop]:
    """The loops of a listing that have products or waits, in order."""
    made: list[tuple[str, str]] = []
    starts: dict[str, int] = {}  # of labels
    loops: dict[int, list[tuple[str, str]]] = {}
    for text in listing.splitlines():
        if label := _LABEL.match(text):
            starts[label[1]] = len(made)
        elif instruction := _INSTRUCTION.search(text):
            made.append((instruction[1], instruction[2]))
            target = _TARGET.search(text)
            if target and target[1] in starts:  # a branch back
                loops[starts[target[1]]] = made[starts[target[1]] :]
    found = []
    for loop in loops.values():
        names = Counter(name for name, _ in loop)
        products = sum(names[name] for name in PRODUCTS if name != "FFMA")
        waits = sum((name + suffixes).startswith(WAITS) for name, suffixes in loop)
        # Code after the exit waits for the code before it.
        if (products or waits) and "EXIT" not in names:
            loads = Counter(width(i) for i in loop if i[0] in LOADS)
            found.append(Loop(len(loop), products, dict(sorted(loads.items())), waits))
    return found


def width(instruction: tuple[str, str]) -> int:
    """The bytes that one thread loads with an instruction.

    >>> width(("LDGSTS", ".E.BYPASS.LTC128B.128")), width(("LDG", ".E")), width(("LDG", ".E.U16"))
    (16, 4, 2)
    """
    bits = re.search(r"\.[US]?(128|64|16|8)(?=\.|$)", instruction[1])
    return int(bits[1]) // 8 if bits else 4


def tensor_operations(ttir: str) -> dict[Line, int]:
    """Lines of Triton's listing with a load or product of tensors, and the bytes of an element."""
    locations: dict[str, str] = dict(_TTIR_LOCATION.findall(ttir))
    found = {}
    for bits, where in _TTIR_OPERATION.findall(ttir):
        while (text := locations.get(where, "")) and not re.search(r'":\d+:\d+$', text):
            # A name or an inlined call holds other locations, the callee's first.
            inner = re.search(r"#loc\d*", text)
            where = inner[0] if inner else ""
        if place := re.match(r'"([^"]+)":(\d+)', text):
            found[Path(place[1]).name, int(place[2])] = int(bits) // 8
    return found


def _sites(function: Any, in_loop: bool = False, prefix: tuple[str, ...] = ()) -> Iterator[Site]:
    """The products of a kernel and the loads in its loops, also in the functions that it calls."""
    # The source as Triton read it: the file may have changed since.
    first = function.starting_line_number
    tree = ast.parse(textwrap.dedent("".join(function.raw_src))).body[0]
    file = Path(inspect.getsourcefile(function.fn) or "").name
    names = function.fn.__globals__

    def walk(node: ast.AST, in_loop: bool, where: tuple[str, ...], of: str) -> Iterator[Site]:
        if isinstance(node, ast.If):
            text = ast.unparse(node.test)
            for branch, said in ((node.body, text), (node.orelse, f"not {text}")):
                for statement in branch:
                    yield from walk(statement, in_loop, (*where, said), of)
            return
        if isinstance(node, ast.stmt):
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            of = ast.unparse(targets[0]) if targets[0] is not None else ""
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "tl.dot" or called == "tl.load" and in_loop:
                place = ", ".join((*prefix, *where))
                what = of or ast.unparse(node.args[0])
                last = first - 1 + (node.end_lineno or node.lineno)
                yield Site(
                    f"{place}: {what}" if place else what,
                    called.removeprefix("tl."),
                    frozenset((file, n) for n in range(first - 1 + node.lineno, last + 1)),
                )
            helper = names.get(called)
            if isinstance(helper, JITFunction) and called not in prefix:
                yield from _sites(helper, in_loop, (*prefix, *where, called))
        in_loop = in_loop or isinstance(node, ast.For | ast.While)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, in_loop, where, of)

    yield from walk(tree, in_loop, (), "")


@functools.cache
def _launches(main_only: bool) -> list[Launch]:
    return [launch for launch in recorded() if launch.is_main or not main_only]


def compile_all(capabilities: Sequence[int], *, main_only: bool) -> list[Compiled]:
    """Every class for every architecture, with a fresh cache, in the order of the launches."""
    indices = range(len(_launches(main_only)))
    jobs = [(capability, index, main_only) for capability in capabilities for index in indices]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # the processes inherit it
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(_compile_one, jobs))
