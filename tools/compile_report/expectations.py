"""What compiled kernels must fulfil (``EXPECTATIONS``), and the known exceptions (``NARROW``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tools.compile_report.machine_code import Compiled

WIDEST = 16  # bytes that one instruction loads
LARGE_TILE = 64  # rows: wgmma and tcgen05 work on no fewer
TENSOR_MEMORY = 512  # columns of a multiprocessor

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
    is_double = c.settings.get("STATE") == "fp64"
    if c.settings.get("PRECISION") == "ieee" and not is_double:
        return "FFMA"
    if is_double:
        return FLOAT64_UNITS[c.capability]
    return MATRIX_UNITS[c.capability if int(c.settings["BLOCK"]) >= LARGE_TILE else 80]


@dataclass(frozen=True)
class Narrow:
    """Loads of wide classes that are known to be narrow, and why."""

    kernel: str  # module and name
    loads: tuple[str, ...]  # their names
    settings: Mapping[str, tuple[str, ...]]  # constants that the class must have
    capabilities: tuple[int, ...]  # of the architectures
    reason: str  # why they are narrow

    def covers(self, c: Compiled, load: str) -> bool:
        """Whether this exception holds for a load."""
        return (
            c.kernel == self.kernel
            and load in self.loads
            and c.capability in self.capabilities
            and all(str(c.settings.get(name)) in given for name, given in self.settings.items())
        )


_K_MAJOR = (
    "Hopper's and Blackwell's matrix units take 32-bit operands only with the summed index dense, "
    "so an operand that is dense along the other index is transposed element by element"
)
_FRAGMENTS = (
    "the transposed operand is read from shared memory element by element (ldmatrix transposes "
    "16-bit elements only)"
)
_GRAM = "gram_ema.gram_kernel"
_A = ("rows_are_dense: a",)
_SINGLE: Mapping[str, tuple[str, ...]] = {"ELEMENT": ("fp32",)}
_TF32, _TF32X3 = {"PRECISION": ("tf32",)}, {"PRECISION": ("tf32x3",)}
NARROW = (
    Narrow(
        _GRAM, (*_A, "rows_are_dense: b"), {**_SINGLE, **_TF32}, (90, 100), f"G^T G: {_K_MAJOR}."
    ),
    Narrow(
        _GRAM,
        _A,
        {**_SINGLE, **_TF32X3},
        (90,),
        "G^T G in 3xTF32: the first operand is transposed in registers; the second keeps 16 bytes.",
    ),
    Narrow(_GRAM, _A, {**_SINGLE, "PRECISION": ("tf32", "tf32x3")}, (80,), f"G^T G: {_FRAGMENTS}."),
    Narrow(_GRAM, _A, {"ELEMENT": ("fp64",)}, (80, 90), f"G^T G, 8 bytes: {_FRAGMENTS}."),
)


def _spills(c: Compiled) -> str:
    if c.stack or c.spill_loads or c.spill_stores:
        return f"{c.stack} bytes of stack, {c.spill_loads} LDL, {c.spill_stores} STL"
    return ""


def _products(c: Compiled) -> str:
    wanted = wanted_product(c) if c.products else ""
    wrong = [f"{name} is made with {p}" for name, p in c.products.items() if p != wanted]
    return f"{'; '.join(wrong)}, not {wanted}" if wrong else ""


def _loads(c: Compiled) -> str:
    vector = c.settings.get("VECTOR", 1)
    found = []
    for load, widths in c.loads.items():
        wanted = min(WIDEST, vector * c.element_bytes[load])
        least = min(widths, default=0)
        if vector > 1 and least < wanted and not any(known.covers(c, load) for known in NARROW):
            found.append(f"{load} takes {least} bytes")
    return "; ".join(found)


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
    "wide classes load 16 bytes at a time, or VECTOR elements if these are shorter, except for "
    "the loads listed below": _loads,
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
