"""The GPU kernels as the compilers make them, without a GPU; and what checks and counts them."""

import ctypes
import doctest
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton

from bench.kernels import compile_expectations, planned_work
from bench.kernels.compile_expectations import NARROW, SUPPORTED, misses, unneeded
from bench.kernels.compile_report import class_of, loads_of
from bench.kernels.machine_code import (
    TOOLS,
    Compiled,
    Line,
    instructions_by_line,
    products_of,
    tensor_operations,
)
from bench.kernels.occupancy import ARCHITECTURES, occupancy
from bench.kernels.recorded_launches import recorded

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "bench.kernels.compile_report", "--main"]

needs_tools = pytest.mark.skipif(
    not (TOOLS / "nvdisasm").exists(), reason="this Triton comes without NVIDIA's tools"
)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The main classes for sm_80 and sm_90: 100 s of processor time, shared by two processes."""
    folder = tmp_path_factory.mktemp("compile_report")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*COMMAND, f"--output={folder}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads((folder / "compile_report.json").read_text())
    assert done.returncode == bool(found["missed"])
    text = (folder / "compile_report.md").read_text()
    assert all(m["what"] in text for m in found["missed"])
    assert str(folder) not in text and str(ROOT) not in text + json.dumps(found)
    return found


@needs_tools
@pytest.mark.parametrize(
    "expectation",
    [
        compile_expectations.COMPILES,
        compile_expectations.RECORDED,
        *compile_expectations.EXPECTATIONS,
    ],
    ids=["compiles", "recorded", "spills", "products", "loads", "fits"],
)
def test_kernels_are_compiled_as_expected(report: dict[str, Any], expectation: str) -> None:
    assert [m for m in report["missed"] if m["expectation"] == expectation] == []


@needs_tools
def test_the_report_has_what_it_is_about(report: dict[str, Any]) -> None:
    entries = [e for e in report["entries"] if not e["error"]]
    kernels = {(e["kernel"], e["capability"]) for e in entries}
    for capability in (80, 90):
        assert ("gram_ema.gram_kernel", capability) in kernels
        assert ("chain.product_kernel", capability) in kernels
        assert ("momentum.momentum_kernel", capability) in kernels
    # Every check had something to look at.
    products = {(e["capability"], p) for e in entries for p in e["products"].values()}
    assert {(80, "HMMA"), (90, "HGMMA"), (80, "DMMA"), (90, "DMMA")} <= products
    assert {e["vector"] for e in entries} >= {1, 2, 4, 8}
    for e in entries:
        if e["kernel"].endswith(("gram_kernel", ".product_kernel")):
            assert len(e["products"]) >= 1 and len(e["loads"]) >= 2, e["kernel"]
            assert all(e["loads"].values()), e
        if e["kernel"].endswith(".product_kernel") and e["kernel"].startswith("chain"):
            assert len(e["products"]) == 2 and len(e["loads"]) == 4
    narrow = [e for e in entries if e["kernel"] == "gram_ema.gram_kernel" and e["vector"] == 1]
    assert {min(map(int, w)) for e in narrow for w in e["loads"].values()} == {2, 4, 8}


@needs_tools
def test_the_roofline_model_has_the_report_s_residency(report: dict[str, Any]) -> None:
    for name, resident in planned_work.RESIDENT.items():
        blocks = [
            e["occupancy"]["blocks"]
            for e in report["entries"]
            if e["kernel"].endswith(f".{name}")
            and not e["kernel"].startswith("newton.")
            and e["capability"] == 90
            and "fp32" in (e["settings"].get("ELEMENT", "fp32"), e["settings"]["STATE"])
        ]
        assert min(blocks) == resident, name


@needs_tools
def test_an_interpreting_process_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, f"--output={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "unset TRITON_INTERPRET" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="this process does not interpret")
def test_recording_is_refused_where_nothing_would_be_recorded() -> None:
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        recorded(80)


# The checks themselves, on entries that are made up.

GOOD = Compiled(
    kernel="gram_ema.gram_kernel",
    settings={"ELEMENT": "fp32", "STATE": "fp32", "BLOCK": 64, "PRECISION": "tf32", "VECTOR": 4},
    capability=90,
    warps=4,
    registers=200,
    shared=49152,
    products={"rows_are_dense: total": "HGMMA"},
    loads={"not rows_are_dense: a": {16: 12}},
    element_bytes={"not rows_are_dense: a": 4, "rows_are_dense: a": 4},
    vector=4,
)


def said(entry: Compiled) -> list[str]:
    return [m.what for m in misses([entry], [entry.kernel])]


def test_a_good_entry_passes() -> None:
    assert said(GOOD) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"error": "no such type"}, "no such type"),
        ({"stack": 8}, "8 bytes of stack, 0 LDL, 0 STL"),
        ({"spill_loads": 1}, "0 bytes of stack, 1 LDL, 0 STL"),
        ({"spill_stores": 2}, "0 bytes of stack, 0 LDL, 2 STL"),
        ({"products": {"x": "HMMA"}}, "x is made with HMMA, not HGMMA"),
        ({"products": {"x": "none"}}, "x is made with none, not HGMMA"),
        ({"loads": {"not rows_are_dense: a": {4: 1, 16: 11}}}, "not rows_are_dense: a takes 4"),
        ({"loads": {"not rows_are_dense: a": {}}}, "not rows_are_dense: a takes 0"),
        ({"shared": 228 << 10}, "no block fits a multiprocessor: shared memory"),
        ({"registers": 256}, "no block fits a multiprocessor: registers"),
    ],
)
def test_a_bad_entry_is_told(change: dict[str, Any], what: str) -> None:
    (found,) = said(replace(GOOD, **change))
    assert what in found


@pytest.mark.parametrize("capability", SUPPORTED)
def test_products_are_wanted_on_each_architecture_s_own_units(capability: int) -> None:
    def wanted(**settings: object) -> str:
        entry = replace(GOOD, capability=capability, settings={**GOOD.settings, **settings})
        return compile_expectations.wanted_product(entry)

    assert wanted() == {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[capability]
    assert wanted(ELEMENT="bf16") == wanted()
    assert wanted(BLOCK=32) == "HMMA"  # too few rows for wgmma
    assert wanted(PRECISION="ieee") == "FFMA"
    assert wanted(STATE="fp64") == {80: "DMMA", 90: "DMMA", 100: "DFMA"}[capability]


def test_narrow_loads_are_excused_one_by_one() -> None:
    narrow = replace(GOOD, loads={"rows_are_dense: a": {4: 48}})
    assert said(narrow) == []  # G^T G in TF32
    assert said(replace(narrow, vector=1, loads={"anything": {4: 1}})) == []
    other = {**GOOD.settings, "ELEMENT": "bf16"}
    assert len(said(replace(narrow, settings=other))) == 1
    assert len(said(replace(narrow, kernel="chain.product_kernel"))) == 1
    # An element is read as far as it goes: four of bfloat16 are 8 bytes.
    short = replace(GOOD, loads={"x": {8: 1}}, element_bytes={"x": 2})
    assert said(short) == []
    assert len(said(replace(short, loads={"x": {4: 1}}))) == 1


def test_what_is_excused_in_vain_is_told() -> None:
    assert unneeded([GOOD]) == list(NARROW)
    narrow = replace(GOOD, loads={"rows_are_dense: a": {4: 48}})
    assert unneeded([narrow]) == list(NARROW[1:])


def test_a_kernel_that_no_operator_launches_is_told() -> None:
    (miss,) = misses([GOOD], [GOOD.kernel, "later.new_kernel"])
    assert miss.expectation == compile_expectations.RECORDED and miss.kernel == "later.new_kernel"


def test_instructions_are_ascribed_to_their_lines() -> None:
    listing = """
    //## File "/somewhere/gram.py", line 12
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR28][R2.64] ;
    //## File "/somewhere/tiles.py", line 3
        /*0020*/                   LDG.E.U16 R4, desc[UR28][R2.64] ;
        /*1030*/              @UP0 UTCHMMA gdesc[UR6], gdesc[UR14] ;
    """
    assert instructions_by_line(listing) == {
        Line("gram.py", 12): [("LDC", ""), ("LDGSTS", ".E.BYPASS.LTC128B.128")],
        Line("tiles.py", 3): [("LDG", ".E.U16"), ("UTCHMMA", "")],
    }


def test_triton_s_listing_says_what_is_loaded_and_multiplied() -> None:
    ttir = """
%a = tt.load %p, %m, %c : tensor<32x64x!tt.ptr<bf16>> loc(#loc3)
%n = tt.load %q : !tt.ptr<i32> loc(#loc1)
%t = tt.dot %x, %y, %z, inputPrecision = tf32 : tensor<8x8xf32> * tensor<8x8xf32> -> tensor<8x8xf64> loc(#loc4)
#loc1 = loc("/somewhere/gram.py":7:11)
#loc2 = loc("/somewhere/gram.py":9:11)
#loc3 = loc("a"(#loc1))
#loc4 = loc(callsite(#loc2 at #loc1))
"""  # noqa: E501
    assert tensor_operations(ttir) == {Line("gram.py", 7): 2, Line("gram.py", 9): 8}
    assert products_of(ttir) == [Line("gram.py", 9)]


def test_classes_and_loads_are_readable() -> None:
    assert class_of({"UPDATE": False, "LAST": True, "BLOCK": 64}) == "LAST, BLOCK 64"
    entry = replace(GOOD, loads={"dense: a": {4: 1, 16: 2}, "dense: b": {16: 1}, "g": {8: 1}})
    assert loads_of(entry) == "dense: a 4/16, b 16; g 8"


# Occupancy.


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "blocks"),
    [
        # CUDA C++ Programming Guide, "Multiprocessor Level": 64 registers and 512 threads let two
        # blocks reside (2 x 512 x 64 are the 65536 there are), one register more only one.
        (80, 512, 64, 0, 2),
        (80, 512, 65, 0, 1),
        # The tuning guides of Ampere and Hopper: 64 warps and 32 blocks; of 164 and 228 KB a block
        # can have 163 and 227, as 1 KB is reserved for each.
        (80, 32, 32, 0, 32),
        (90, 1024, 32, 0, 2),
        (80, 128, 32, 163 << 10, 1),
        (80, 128, 32, (163 << 10) + 1, 0),
        (90, 128, 32, 227 << 10, 1),
        (90, 128, 32, 113 << 10, 2),
        # Ada's: 48 warps, 24 blocks, 100 KB.
        (89, 64, 16, 0, 24),
        (89, 1024, 32, 0, 1),
        (89, 128, 32, 49 << 10, 2),
    ],
)
def test_published_occupancies(
    capability: int, threads: int, registers: int, shared: int, blocks: int
) -> None:
    assert occupancy(capability, threads // 32, registers, shared).blocks == blocks


def test_tensor_memory_limits_blocks() -> None:
    held = occupancy(100, 4, 64, 0, tensor_memory=256)
    assert (held.blocks, held.limit) == (2, "tensor memory")


_CALCULATOR = """
#include <cuda_occupancy.h>
extern "C" int blocks(int major, int minor, int warps, int of_sm, int of_block, int reserved,
                      int shared_of_sm, int threads, int registers, long shared) {
  cudaOccDeviceProp p;
  p.computeMajor = major; p.computeMinor = minor;
  p.maxThreadsPerBlock = 1024; p.maxThreadsPerMultiprocessor = 32 * warps;
  p.regsPerBlock = 65536; p.regsPerMultiprocessor = 65536; p.warpSize = 32;
  p.sharedMemPerBlock = 49152; p.sharedMemPerMultiprocessor = shared_of_sm; p.numSms = 100;
  p.sharedMemPerBlockOptin = of_block; p.reservedSharedMemPerBlock = reserved;
  cudaOccFuncAttributes a;
  a.maxThreadsPerBlock = 1024; a.numRegs = registers; a.sharedSizeBytes = 0;
  a.partitionedGCConfig = PARTITIONED_GC_OFF; a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  a.maxDynamicSharedSizeBytes = of_block; a.numBlockBarriers = 1;
  cudaOccDeviceState s;
  s.cacheConfig = CACHE_PREFER_SHARED; s.carveoutConfig = 100;
  cudaOccResult r;
  int failed = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, shared);
  return failed ? -failed : r.activeBlocksPerMultiprocessor;
}
"""


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """NVIDIA's own calculator, as it comes with Triton."""
    compiler, include = shutil.which("c++"), TOOLS.parent / "include"
    if compiler is None or not (include / "cuda_occupancy.h").exists():
        pytest.skip("no C++ compiler, or a Triton without cuda_occupancy.h")
    folder = tmp_path_factory.mktemp("calculator")
    source, library = folder / "calculator.cpp", folder / "calculator.so"
    source.write_text(_CALCULATOR)
    command = [compiler, "-shared", "-fPIC", "-w", f"-I{include}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    yield ctypes.CDLL(str(library))


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_nvidia_s_calculator_agrees(calculator: ctypes.CDLL, capability: int) -> None:
    a = ARCHITECTURES[capability]
    for warps in (1, 2, 3, 4, 5, 8, 16, 32):
        for registers in (16, 32, 40, 63, 64, 65, 96, 128, 168, 200, 255):
            if warps * registers * 32 > 65536:
                continue  # what no launch may ask for: the calculator calls it an error
            for shared in (0, 1, 1024, 16384, 49152, 49168, 65536, 98304, a.shared_of_block):
                if shared > a.shared_of_block:
                    continue
                theirs = calculator.blocks(
                    *(capability // 10, capability % 10, a.warps, a.blocks, a.shared_of_block),
                    *(a.reserved, a.shared, 32 * warps, registers, ctypes.c_long(shared)),
                )
                ours = occupancy(capability, warps, registers, shared).blocks
                assert ours == theirs, (warps, registers, shared)


@pytest.mark.parametrize("module", ["compile_report", "cuda_code", "machine_code", "occupancy"])
def test_examples(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"bench.kernels.{module}"))
    assert attempted > 0 and failed == 0
