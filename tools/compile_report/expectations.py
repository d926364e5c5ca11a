"""What compiled kernels must fulfil (``EXPECTATIONS``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tnt_kernels.triton.tiles import LARGE_BLOCK
from tools.compile_report.machine_code import Compiled

WIDEST = 16  # bytes that one instruction loads
LARGE_TILE = 64  # rows: wgmma and tcgen05 work on no fewer
TENSOR_MEMORY = 512  # columns of a multiprocessor
LEAN_REGISTERS, LEAN_LOOP = 128, 140
MOST_WAITS = 2  # to hand numbers to other warps: after writing, and before writing again

# The architectures that the kernels are made for.
SUPPORTED = (80, 90, 100)
MATRIX_UNITS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
# Triton has no float64 products for Blackwell's matrix units.
FLOAT64_UNITS = {80: "DMMA", 90: "DMMA", 100: "DFMA"}
# The bytes of shared memory that one block may have (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability").
SHARED_OF_BLOCK = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def wanted_product(c: Compiled) -> str:
    """The instruction that a kernel's products must use."""
    if c.settings.get("STATE") == "fp64":
        return FLOAT64_UNITS[c.capability]
    return MATRIX_UNITS[c.capability if _height(c) >= LARGE_TILE else 80]


def _height(c: Compiled) -> int:
    """Rows of a tile."""
    return int(c.settings.get("HEIGHT") or c.settings["BLOCK"])


def _spills(c: Compiled) -> str:
    if c.stack or c.spill_loads or c.spill_stores:
        return f"{c.stack} bytes of stack, {c.spill_loads} LDL, {c.spill_stores} STL"
    return ""


def _products(c: Compiled) -> str:
    wanted = wanted_product(c) if c.products else ""
    wrong = [f"{name} is made with {p}" for name, p in c.products.items() if p != wanted]
    return f"{'; '.join(wrong)}, not {wanted}" if wrong else ""


def _is_packed(c: Compiled) -> bool:
    """Whether a kernel multiplies packed operands, whose loads are wide for all sizes."""
    return "FORM" in c.settings and bool(c.products)


def _loads(c: Compiled) -> str:
    vector = WIDEST if _is_packed(c) else c.settings.get("VECTOR", 1)
    found = []
    for load, widths in c.loads.items():
        wanted = min(WIDEST, vector * c.element_bytes[load])
        least = min(widths, default=0)
        if vector > 1 and least < wanted:
            found.append(f"{load} takes {least} bytes")
    return "; ".join(found)


def _is_lean(c: Compiled) -> str:
    if not _is_packed(c) or c.capability != 90 or _height(c) != LARGE_BLOCK:
        return ""
    longest = max(loop.instructions for loop in c.loops if loop.products)
    if c.registers > LEAN_REGISTERS or longest > LEAN_LOOP:
        return f"{c.registers} registers, {longest} instructions in a step"
    return ""


def _waits(c: Compiled) -> str:
    if c.kernel != "damped_inverse.panel_kernel" or c.capability not in (80, 90):
        return ""
    most = max((loop.waits for loop in c.loops if not loop.products), default=0)
    return f"{most} waits in a step" if most > MOST_WAITS else ""


def _fits(c: Compiled) -> str:
    if c.shared > SHARED_OF_BLOCK[c.capability]:
        return "a block wants more shared memory than there is"
    if c.tensor_memory > TENSOR_MEMORY:
        return "a block wants more tensor memory than there is"
    return ""


# The rule, and a function that says how a compiled kernel breaks it ("" if it does not).
EXPECTATIONS: dict[str, Callable[[Compiled], str]] = {
    "every kernel compiles in every class": lambda c: c.error,
    "nothing is spilled: no stack, no LDL, no STL": _spills,
    "products use the matrix units: float32 and half precision HMMA on sm_80, HGMMA on sm_90, "
    "UTCHMMA on sm_100 (HMMA if a tile has fewer than 64 rows); float64 DMMA, on sm_100 "
    "DFMA": _products,
    "wide classes and loops over packed operands load 16 bytes at a time, or VECTOR elements if "
    "these are shorter": _loads,
    "on sm_90 loops over packed operands with large tiles have at most 140 instructions a step and "
    "128 registers, so that two programs share a multiprocessor": _is_lean,
    "on sm_80 and sm_90 a step of the Cholesky factorization of a corner waits at most "
    "twice": _waits,
    "a block fits a multiprocessor": _fits,
}
RECORDED = "every kernel is launched by some operator"


@dataclass(frozen=True)
class Miss:
    """A rule that one class of one kernel breaks."""

    expectation: str
    kernel: str
    settings: Mapping[str, object]
    capability: int
    what: str


def misses(entries: Sequence[Compiled], kernels: Iterable[str]) -> list[Miss]:
    """All rules that compiled kernels break; ``kernels`` are the names of all Triton kernels."""
    found = [
        Miss(said, c.kernel, c.settings, c.capability, what)
        for c in entries
        for said, check in EXPECTATIONS.items()
        if (what := check(c))
    ]
    for kernel in sorted(set(kernels) - {c.kernel for c in entries}):
        what = "add a call of its operator to CALLS in launches.py"
        found.append(Miss(RECORDED, kernel, {}, 0, what))
    return found
