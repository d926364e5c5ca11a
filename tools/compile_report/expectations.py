"""What compiled kernels must fulfil (``EXPECTATIONS``), and the known exceptions (``NARROW``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tools.compile_report.machine_code import Compiled

WIDEST = 16  # bytes that one instruction loads
LARGE_TILE = 64  # rows: wgmma and tcgen05 work on no fewer

# The architectures that the kernels are made for.
SUPPORTED = (80, 90, 100)
MATRIX_UNITS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
# Triton has no float64 products for Blackwell's matrix units.
FLOAT64_UNITS = {80: "DMMA", 90: "DMMA", 100: "DFMA"}


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
_GRAM, _PRODUCT = "gram_ema.gram_kernel", "chain.product_kernel"
_A = ("rows_are_dense: a",)
_FACTOR = "rows_are_dense, not is_diagonal: a"
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
    Narrow(
        _PRODUCT,
        (_FACTOR, "not rows_are_dense, not is_diagonal: x"),
        {**_SINGLE, **_TF32},
        (90, 100),
        f"The second operand: {_K_MAJOR}.",
    ),
    Narrow(
        _PRODUCT,
        (_FACTOR,),
        {"ELEMENT": ("bf16", "fp16"), **_TF32},
        (90, 100),
        f"The factor as second operand: {_K_MAJOR}.",
    ),
)


def too_narrow(c: Compiled) -> dict[str, int]:
    """Loads of a wide class that take fewer bytes than they could, and their least bytes."""
    if c.vector == 1:
        return {}
    least = {load: min(widths, default=0) for load, widths in c.loads.items()}
    return {
        load: found
        for load, found in least.items()
        if found < min(WIDEST, c.vector * c.element_bytes[load])
    }


def _spills(c: Compiled) -> str:
    if c.stack or c.spill_loads or c.spill_stores:
        return f"{c.stack} bytes of stack, {c.spill_loads} LDL, {c.spill_stores} STL"
    return ""


def _products(c: Compiled) -> str:
    wanted = wanted_product(c) if c.products else ""
    wrong = [f"{name} is made with {p}" for name, p in c.products.items() if p != wanted]
    return f"{'; '.join(wrong)}, not {wanted}" if wrong else ""


def _loads(c: Compiled) -> str:
    found = {
        load: least
        for load, least in too_narrow(c).items()
        if not any(known.covers(c, load) for known in NARROW)
    }
    return "; ".join(f"{load} takes {least} bytes" for load, least in found.items())


def _fits(c: Compiled) -> str:
    return f"no block fits a multiprocessor: {c.too_large}" if c.too_large else ""


# The rule, and a function that says how a compiled kernel breaks it ("" if it does not).
EXPECTATIONS: dict[str, Callable[[Compiled], str]] = {
    "nothing is spilled: no stack, no LDL, no STL": _spills,
    "products use the matrix units: float32 and half precision HMMA on sm_80, HGMMA on sm_90, "
    "UTCHMMA on sm_100 (HMMA if a tile has fewer than 64 rows); float64 DMMA, on sm_100 "
    "DFMA": _products,
    "wide classes load 16 bytes at a time, or VECTOR elements if these are shorter, except for "
    "the loads listed below": _loads,
    "a block fits a multiprocessor": _fits,
}
COMPILES = "every kernel compiles in every class"
RECORDED = "every kernel is launched by some operator"


@dataclass(frozen=True)
class Miss:
    """A rule that one class of one kernel breaks."""

    expectation: str
    kernel: str
    settings: Mapping[str, object]
    capability: int
    what: str


def misses(entries: Iterable[Compiled], kernels: Iterable[str]) -> list[Miss]:
    """All rules that compiled kernels break; ``kernels`` are the names of all Triton kernels."""
    found = []
    compiled: set[str] = set()
    for c in entries:
        compiled.add(c.kernel)
        if c.error:
            found.append(Miss(COMPILES, c.kernel, c.settings, c.capability, c.error))
            continue
        for said, check in EXPECTATIONS.items():
            if what := check(c):
                found.append(Miss(said, c.kernel, c.settings, c.capability, what))
    for kernel in sorted(set(kernels) - compiled):
        what = "add a call of its operator to CALLS in launches.py"
        found.append(Miss(RECORDED, kernel, {}, 0, what))
    return found


def unneeded(entries: Iterable[Compiled]) -> list[Narrow]:
    """Exceptions that no load needs any more."""
    narrow = [(c, load) for c in entries for load in too_narrow(c)]
    return [known for known in NARROW if not any(known.covers(c, load) for c, load in narrow)]
