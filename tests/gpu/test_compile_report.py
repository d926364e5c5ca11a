"""The GPU kernels as the compilers make them, without a GPU, and the checks of the result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from commands import ROOT, python

from tnt_kernels.benchmark.records import read_json
from tools.compile_report import expectations
from tools.compile_report.expectations import misses
from tools.compile_report.machine_code import (
    TOOLS,
    Compiled,
    Loop,
    loops_of,
    tensor_operations,
)

COMMAND = ("-m", "tools.compile_report", "--main")

# Triton 3.8 and 3.9 spill a few registers in a few classes, and give each line of inline assembly
# a line of source of its own, so that loads are not found.
needs_tools = pytest.mark.skipif(
    not (triton.__version__.startswith(("3.6.", "3.7.")) and (TOOLS / "nvdisasm").exists()),
    reason="the rules are for Triton 3.6 and 3.7 with NVIDIA's tools",
)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The main classes for sm_80 and sm_90: some two minutes of processor time in two processes."""
    out = tmp_path_factory.mktemp("compile_report") / "report.json"
    done = python(*COMMAND, f"--out={out}")
    assert done.returncode in (0, 1), done.stderr
    found = read_json(out)
    assert done.returncode == bool(found["missed"])
    assert str(ROOT) not in out.read_text() + out.with_suffix(".md").read_text()
    return found


@needs_tools
@pytest.mark.parametrize(
    "expectation",
    [
        pytest.param(rule, id=name)
        for name, rule in zip(
            ("compiles", "spills", "products", "loads", "lean", "waits", "fits", "recorded"),
            (*expectations.EXPECTATIONS, expectations.RECORDED),
            strict=True,
        )
    ],
)
def test_kernels_are_compiled_as_expected(report: dict[str, Any], expectation: str) -> None:
    assert [m for m in report["missed"] if m["expectation"] == expectation] == []


@needs_tools
def test_every_check_had_something_to_look_at(report: dict[str, Any]) -> None:
    entries = report["rows"]
    kernels = {(e["kernel"], e["capability"]) for e in entries}
    for capability in (80, 90):
        assert ("gram_ema.gram_kernel", capability) in kernels
        assert ("product.product_kernel", capability) in kernels
        assert ("momentum.momentum_kernel", capability) in kernels
    products = {(e["capability"], p) for e in entries for p in e["products"].values()}
    assert {(80, "HMMA"), (90, "HGMMA"), (80, "DMMA"), (90, "DMMA")} <= products
    assert {e["settings"].get("VECTOR") for e in entries} >= {None, 1, 2, 4}
    for e in entries:
        if e["kernel"].endswith(("gram_kernel", ".product_kernel")):
            assert len(e["products"]) >= 1 and len(e["loads"]) >= 2, e["kernel"]
            assert all(e["loads"].values()), e
            assert len(e["loops"]) >= len(e["products"]), e
        if e["kernel"] == "product.product_kernel":
            assert len(e["products"]) == 1 and len(e["loads"]) == 2
        # The steps of a corner; in float64 their DFMA counts as a product.
        if e["kernel"] == "damped_inverse.panel_kernel" and e["settings"]["STATE"] == "fp32":
            assert any(loop["waits"] and not loop["products"] for loop in e["loops"]), e
    grams = [e for e in entries if e["kernel"] == "gram_ema.gram_kernel"]
    assert {e["settings"]["FORM"] for e in grams} == {0, 1, 2}
    assert {e["settings"]["BLOCK"] for e in grams} == {16, 32, 64, 128}
    products = [e["settings"] for e in entries if e["kernel"] == "product.product_kernel"]
    assert {(s["HEIGHT"], s["WIDTH"]) for s in products} == {
        (16, 256),
        *((n, n) for n in (32, 64, 128)),
    }
    assert {s["WRITES"] for s in products} == {0, 1, 2} and {s["FORM"] for s in products} == {
        0,
        1,
        2,
    }


@needs_tools
def test_an_interpreting_process_is_refused(tmp_path: Path) -> None:
    done = python(*COMMAND, f"--out={tmp_path / 'report.json'}", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "unset TRITON_INTERPRET" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# The checks, on made-up entries.

GOOD = Compiled(
    kernel="gram_ema.gram_kernel",
    settings={"ELEMENT": "fp32", "STATE": "fp32", "BLOCK": 128, "FORM": 1},
    capability=90,
    registers=128,
    shared=49152,
    products={"packed_product: total": "HGMMA"},
    loads={"packed_product: a": {16: 12}},
    element_bytes={"packed_product: a": 4},
    loops=[Loop(instructions=140, products=4, loads={16: 8}, waits=2)],
)


def said(entry: Compiled) -> list[str]:
    return [m.what for m in misses([entry], [entry.kernel])]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"error": "no such type"}, "no such type"),
        ({"stack": 8}, "8 bytes of stack, 0 LDL, 0 STL"),
        ({"spill_loads": 1}, "0 bytes of stack, 1 LDL, 0 STL"),
        ({"spill_stores": 2}, "0 bytes of stack, 0 LDL, 2 STL"),
        ({"products": {"x": "HMMA"}}, "x is made with HMMA, not HGMMA"),
        ({"products": {"x": "none"}}, "x is made with none, not HGMMA"),
        ({"loads": {"packed_product: a": {4: 1, 16: 11}}}, "packed_product: a takes 4"),
        ({"loads": {"packed_product: a": {}}}, "packed_product: a takes 0"),
        ({"registers": 130}, "130 registers, 140 instructions in a step"),
        ({"loops": [Loop(141, 4, {16: 8}, 2)]}, "128 registers, 141 instructions in a step"),
        ({"shared": 228 << 10}, "a block wants more shared memory"),
        ({"tensor_memory": 513}, "a block wants more tensor memory"),
    ],
)
def test_a_bad_entry_breaks_a_rule(change: dict[str, Any], what: str) -> None:
    (found,) = said(replace(GOOD, **change))
    assert what in found


def test_a_step_of_a_corner_waits_twice() -> None:
    steps = [Loop(488, 48, {16: 2}, 6), Loop(334, 0, {}, 2)]
    panel = replace(GOOD, kernel="damped_inverse.panel_kernel", settings={"BLOCK": 64}, loops=steps)
    panel = replace(panel, products={}, loads={})
    assert said(panel) == []
    assert said(replace(panel, loops=[Loop(487, 0, {}, 5)])) == ["5 waits in a step"]


def test_loops_with_products_or_waits_are_counted() -> None:
    listing = """
.L_x_0:
        /*0000*/                   LDG.E R4, desc[UR28][R2.64] ;
        /*0010*/              @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR28][R2.64] ;
        /*0030*/                   LDGDEPBAR ;
        /*0040*/                   DEPBAR.LE SB0, 0x1 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/              @P0 BRA `(.L_x_2) ;
        /*0070*/                   HMMA.1688.F32.TF32 R4, R8, R12, R4 ;
        /*0080*/              @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0090*/                   FFMA R4, R8, R12, R4 ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00b0*/              @P1 BRA `(.L_x_2) ;
        /*00c0*/                   EXIT ;
"""
    assert loops_of(listing) == [
        Loop(instructions=7, products=1, loads={16: 1}, waits=2),
        Loop(instructions=3, products=0, loads={}, waits=1),
    ]


def test_loads_and_products_are_found_in_the_listing_of_triton() -> None:
    ttir = """
%a = tt.load %p, %m, %c : tensor<32x64x!tt.ptr<bf16>> loc(#loc3)
%n = tt.load %q : !tt.ptr<i32> loc(#loc1)
%t = tt.dot %x, %y, %z, inputPrecision = tf32 : tensor<8x8xf32> * tensor<8x8xf32> -> tensor<8x8xf64> loc(#loc4)
#loc1 = loc("/somewhere/gram.py":7:11)
#loc2 = loc("/somewhere/gram.py":9:11)
#loc3 = loc("a"(#loc1))
#loc4 = loc(callsite(#loc2 at #loc1))
"""  # noqa: E501
    assert tensor_operations(ttir) == {
        ("gram.py", 7): 2,
        ("gram.py", 9): 8,
    }
