"""The PTX machine: the edge cases of instructions, and that each rule, once broken, is noticed.

Expected values are worked out from the manual by hand, or by torch where it has the operation.
"""

import struct
from collections.abc import Sequence

import pytest
import torch
from gpu.ptx.launch import run
from gpu.ptx.memory import GlobalMemory
from gpu.ptx.program import Fault, Unknown
from torch import Tensor

REGISTERS = """
.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .f32 %f<99>; .reg .b64 %rd<40>;
.reg .f64 %fd<9>;
"""
# Thread t's 4 bytes of each parameter: the addresses are in %rd0, %rd1, ...; t is in %r0.
PLACES = "mov.u32 %r0, %tid.x; mul.wide.u32 %rd30, %r0, 4;"


def execute(body: str, *tensors: Tensor, threads: int = 32, grid: int = 1, shared: int = 0) -> None:
    """Runs a kernel whose parameters are the tensors' addresses, here %rd0, %rd1, ..."""
    names = [f"p{i}" for i in range(len(tensors))]
    declared = ", ".join(f".param .u64 .ptr .global .align 1 {name}" for name in names)
    loads = "".join(f"ld.param.u64 %rd{i}, [{name}];" for i, name in enumerate(names))
    each = "".join(f"add.s64 %rd{i + 10}, %rd{i}, %rd30;" for i in range(len(tensors)))
    ptx = f"""
    .version 8.5 .target sm_90a .address_size 64
    .extern .shared .align 16 .b8 global_smem[];
    .visible .entry kernel({declared}) .reqntid {threads}
    {{ {REGISTERS} {loads} {PLACES} {each} {body} ret; }}"""
    memory = GlobalMemory(tensors)
    run(ptx, memory, [t.data_ptr() for t in tensors], grid, shared)


def bits(value: float | int, kind: str) -> int:
    """A number as the unsigned integer of its bits."""
    form = {"f32": "<f", "f64": "<d"}.get(kind)
    if form is None:
        return int(value) & (1 << int(kind[1:])) - 1
    raw = struct.pack(form, value)
    return int.from_bytes(raw, "little")


NAN = float("nan")
# Opcode, operands, result.
CASES: list[tuple[str, Sequence[float], float]] = [
    ("div.s32", (-7, 2), -3),
    ("div.u32", (2**32 - 1, 2), 2**31 - 1),
    ("min.u32", (-1, 1), 1),
    ("shl.b32", (1, 32), 0),
    ("shr.u32", (-1, 40), 0),
    ("shr.s32", (-256, 40), -1),
    ("add.f32", (1.0, 2.0**-24), 1.0),
    ("fma.rn.f32", (1 + 2.0**-12, 1 + 2.0**-12, -1.0), 2.0**-11 + 2.0**-24),
    ("max.f32", (NAN, 1.0), 1.0),
    ("min.f32", (-1.0, NAN), -1.0),
    ("abs.ftz.f32", (-(2.0**-130),), 0.0),
    ("add.f64", (1.0, 2.0**-52), 1 + 2.0**-52),
    ("fma.rn.f64", (3.0, 4.0, 5.0), 17.0),
]


@pytest.mark.parametrize(("opcode", "operands", "expected"), CASES)
def test_arithmetic(opcode: str, operands: Sequence[float], expected: float) -> None:
    kind = opcode.rpartition(".")[2]
    wide = kind == "f64"
    stem = "%fd" if wide else "%f" if kind == "f32" else "%r"
    prefix, digits = ("0d", 16) if wide else ("0f", 8)
    moves = []
    for i, operand in enumerate(operands, 1):
        as_count = opcode.startswith("sh") and i == 2
        said = (
            str(int(operand))
            if kind[0] in "bus" or as_count
            else f"{prefix}{bits(operand, kind):0{digits}X}"
        )
        moves.append(f"mov.{kind if not as_count else 'b32'} {stem}{i}, {said};")
    names = ", ".join(f"{stem}{i}" for i in range(len(operands) + 1))
    size = 8 if wide else 4
    result = torch.zeros(32, dtype=torch.int64 if wide else torch.int32)
    place = f"mul.wide.u32 %rd31, %r0, {size}; mov.b32 %r40, %r0; add.s64 %rd32, %rd0, %rd31;"
    execute(
        f"{place} {' '.join(moves)} {opcode} {names}; st.global.b{8 * size} [%rd32], {stem}0;",
        result,
    )
    assert {int(x) & (1 << 8 * size) - 1 for x in result} == {bits(expected, kind)}


# Instructions that leave a number in %r1.
OTHERS = [
    ("cvt.rn.bf16.f32 %rs1, 0f3F808000; cvt.u32.u16 %r1, %rs1;", 0x3F80),  # ties to even
    ("cvt.rn.bf16.f32 %rs1, 0f3F818000; cvt.u32.u16 %r1, %rs1;", 0x3F82),
    ("cvt.rn.f16.f32 %rs1, 0f3F800000; cvt.u32.u16 %r1, %rs1;", 0x3C00),
    ("mov.b16 %rs1, 16256; cvt.f32.bf16 %r1, %rs1;", 0x3F800000),
    ("cvt.rna.tf32.f32 %r1, 0f3F801000;", 0x3F802000),  # ties away from zero
    ("cvt.rna.tf32.f32 %r1, 0fBF800FFF;", 0xBF800000),
    ("mov.b32 %r2, 0xABCD1234; bfe.u32 %r1, %r2, 8, 8;", 0x12),
    ("mov.b32 %r2, 0x0000F000; bfe.s32 %r1, %r2, 12, 4;", -1),
    (
        "mov.b32 %r2, 0x33221100; mov.b32 %r3, 0x77665544; prmt.b32 %r1, %r2, %r3, 0x7250U;",
        0x77225500,
    ),
    ("setp.lt.f32 %p1, 0f7FC00000, 0f00000000; selp.b32 %r1, 1, 2, %p1;", 2),
    ("setp.ltu.f32 %p1, 0f7FC00000, 0f00000000; selp.b32 %r1, 1, 2, %p1;", 1),
    ("setp.neu.f32 %p1, 0f7FC00000, 0f7FC00000; selp.b32 %r1, 1, 2, %p1;", 1),
    ("setp.num.f32 %p1, 0f3F800000, 0f3F800000; selp.b32 %r1, 1, 2, %p1;", 1),
    (
        "mov.b64 %rd20, {0f3F800000, 0f40000000}; mov.b64 %rd21, {0f40400000, 0f40800000}; "
        "fma.rn.f32x2 %rd22, %rd20, %rd21, %rd20; mov.b64 {%r3, %r1}, %rd22;",
        0x41200000,
    ),
    ("mov.b16 %rs1, 16448; sub.rn.f32.bf16 %r1, %rs1, 0f3F800000;", 0x40000000),
    # The manual leaves the quotient open; it must not end the program.
    ("mov.b32 %r2, 0; div.s32 %r3, 7, %r2; mov.b32 %r1, 3;", 3),
]


@pytest.mark.parametrize(("body", "expected"), OTHERS)
def test_other_instructions(body: str, expected: int) -> None:
    result = torch.zeros(32, dtype=torch.int32)
    execute(f"{body} st.global.b32 [%rd10], %r1;", result)
    assert {int(x) & 0xFFFFFFFF for x in result} == {expected & 0xFFFFFFFF}


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("shfl.sync.idx.b32 %r1, %r0, 3, 31, -1;", [3] * 32),
        ("redux.sync.max.s32 %r1, %r0, -1;", [31] * 32),
        ("sub.s32 %r2, %r0, 9; redux.sync.max.s32 %r1, %r2, -1;", [22] * 32),
        ("sub.s32 %r2, %r0, 9; redux.sync.max.u32 %r1, %r2, -1;", [-1] * 32),
        ("elect.sync %r2|%p1, -1; selp.b32 %r1, 1, 0, %p1;", [1, *[0] * 31]),
    ],
)
def test_warps(instruction: str, expected: list[int]) -> None:
    result = torch.zeros(32, dtype=torch.int32)
    execute(f"{instruction} st.global.b32 [%rd10], %r1;", result)
    assert result.tolist() == expected


# Rules of memory


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r1, [%rd10+4];", "outside of all tensors: 1"),
        ("ld.global.b32 %r1, [%rd10+-4];", "outside of all tensors: 1"),
        ("st.global.b32 [%rd0+128], %r0;", "outside of all tensors: 32"),
        ("ld.global.v2.b32 {%r1, %r2}, [%rd0+124];", "not a multiple"),
        ("ld.global.v2.b32 {%r1, %r2}, [%rd0+128];", "outside of all tensors"),
        ("st.global.b32 [%rd0], %r0;", "different numbers to one address"),
        ("st.shared.b32 [global_smem+64], %r0;", "outside of shared memory"),
        ("st.shared.b32 [global_smem+2], %r0;", "multiple of 4"),
        ("st.shared.b32 [global_smem], %r0;", "different numbers to one place"),
    ],
)
def test_wrong_accesses(body: str, message: str) -> None:
    memory = torch.zeros(64, dtype=torch.int32)  # the tensor begins and ends within it
    with pytest.raises(Fault, match=message):
        execute(body, memory[16:48], shared=64)


def test_shared_memory_starts_as_nan() -> None:
    result = torch.zeros(32)
    execute("ld.shared.b32 %r1, [global_smem]; st.global.b32 [%rd10], %r1;", result, shared=16)
    assert result.isnan().all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%rd10], %r1;", "store different numbers"),
        (
            "ld.global.b32 %r2, [%rd10]; setp.eq.s32 %p1, %r1, 0; @%p1 st.global.b32 [%rd10], 1;",
            "a store and a load",
        ),
        (
            "setp.eq.s32 %p1, %r1, 0; @%p1 st.global.b32 [%rd10], 1; "
            "atom.global.gpu.acq_rel.max.s32 %r3, [%rd0], 1;",
            "a store and an atomic update",
        ),
    ],
)
def test_programs_use_the_same_memory(body: str, message: str) -> None:
    with pytest.raises(Fault, match=message):
        execute(f"mov.u32 %r1, %ctaid.x; {body}", torch.zeros(32, dtype=torch.int32), grid=2)


def test_a_missing_barrier() -> None:
    with pytest.raises(Fault, match="without a barrier"):
        execute(
            """
            shl.b32 %r1, %r0, 2; mov.b32 %r2, global_smem; add.s32 %r3, %r2, %r1;
            st.shared.b32 [%r3], %r0;
            xor.b32 %r4, %r1, 128; add.s32 %r5, %r2, %r4; ld.shared.b32 %r6, [%r5];
            """,
            torch.zeros(1),
            threads=64,
            shared=256,
        )


def test_a_barrier_that_some_threads_never_reach() -> None:
    with pytest.raises(Fault, match="wait for what never comes"):
        execute(
            """
            setp.lt.s32 %p1, %r0, 32; @%p1 bra first; bar.sync 0; bra.uni last;
            first: bar.sync 0; bar.sync 0; last: mov.b32 %r1, 0;
            """,
            torch.zeros(1),
            threads=64,
        )


COPY = """
shl.b32 %r1, %r0, 4; mov.b32 %r2, global_smem; add.s32 %r3, %r2, %r1;
mul.wide.u32 %rd20, %r0, 16; add.s64 %rd21, %rd0, %rd20; add.s64 %rd22, %rd1, %rd20;
cp.async.cg.shared.global [%r3], [%rd21], 16; cp.async.commit_group;
{then}
ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3];
st.global.v4.b32 [%rd22], {{%r4, %r5, %r6, %r7}};
"""


@pytest.mark.parametrize("then", ["", "cp.async.wait_group 1;", "st.shared.b32 [%r3], 0;"])
def test_a_copy_that_was_not_waited_for(then: str) -> None:
    with pytest.raises(Fault, match="before an asynchronous copy to it was waited for"):
        execute(COPY.format(then=then), torch.randn(128), torch.randn(128), shared=512)


def test_a_warp_waits_for_itself() -> None:
    result = torch.zeros(64)
    then = 'bar.warp.sync -1; .pragma "used_bytes_mask 0xf"; st.global.b32 [%rd10], 0f3F800000;'
    execute(then, result, threads=64)
    assert result.sum() == 64
    half = "setp.lt.s32 %p1, %r0, 16; @%p1 bra waits; bra.uni last; waits: bar.warp.sync -1; last:"
    with pytest.raises(Fault, match="not all threads of a warp"):
        execute(f"{half} mov.b32 %r1, 0;", result, threads=64)


def test_a_tf32_product_ignores_the_last_bits() -> None:
    one_and_a_half_steps = 1 + 2.0**-10 + 2.0**-11
    result = torch.zeros(32)
    execute(
        f"""
        mov.b32 %r1, 0f{bits(one_and_a_half_steps, "f32"):08X}; mov.b32 %r2, 0f3F800000;
        mov.b32 %r3, 0;
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%r4, %r5, %r6, %r7}},
            {{%r1, %r1, %r1, %r1}}, {{%r2, %r2}}, {{%r3, %r3, %r3, %r3}};
        st.global.b32 [%rd10], %r4;
        """,
        result,
    )
    assert set(result.tolist()) == {8 * (1 + 2.0**-10)}


@pytest.mark.parametrize(
    "body",
    [
        "sin.approx.f32 %f1, %f2;",
        "add.sat.f32 %f1, %f2, %f3;",
        "ld.local.b32 %r1, [%r2];",
        "bar.sync 1, 32;",
        "barrier.cluster.arrive;",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r1, %r2}, {%r3}, {%r4}, {%r5, %r6};",
    ],
)
def test_unknown_instructions_are_errors(body: str) -> None:
    with pytest.raises(Unknown):
        execute(body, torch.zeros(1))
