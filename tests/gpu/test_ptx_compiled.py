"""The PTX machine on a compiled kernel: a barrier or a wait that is taken out is noticed.

Each is taken out alone. The few that are not noticed are known (``SPARE``): another barrier or wait
does the same, or there is nothing to order. Everything else must be noticed.
"""

import re
from collections import Counter

import pytest
import torch
import triton
from cases import GPU
from gpu.ptx import launch
from gpu.ptx.program import Fault
from torch import Tensor

from tnt_kernels.triton import gram_ema
from tools.compile_report.launches import at_once

pytestmark = pytest.mark.skipif(GPU.type == "cuda", reason="kernels run on the GPU")

BARRIER = r"\bbar(rier)?\.sync\s+0;"
COPIES = r"cp\.async\.wait_group\s+\d+;"
PRODUCTS = r"wgmma\.wait_group\.sync\.aligned\s+\d+;"
STORES = r"tcgen05\.wait::st\.sync\.aligned;"
# A loop that ends when the products that were committed are done.
COMMITTED = r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;"


# Barriers and waits without which a kernel is right, by the last instruction of ORDERED before them
# and the next ones after them, and why.
FIRST_COPIES = "the first copies to a second buffer, which nothing has used"
AFTER_LOOP = "after the loop, whose last barrier comes after its last load"
TWICE = "one of two barriers in a row"
NEXT = "one more barrier follows before the product"
MADE = "an earlier barrier comes after the initialisation of the mbarrier"
FREED = "before tensor memory is freed, whose last use other barriers follow"
IN_ORDER = "the next product adds to the same registers, in order"
NEXT_WAIT = "one more wait follows before the product"
WAITED = "every warp has waited for the products itself"
SPARE = (
    (BARRIER, r"(cp\.async\.commit_group|tcgen05\.commit) ! cp\.async\.c[ag]", FIRST_COPIES),
    (BARRIER, r"(wgmma\.wait_group|mbarrier\.try_wait) ! cp\.async\.c[ag]", WAITED),
    (BARRIER, r"tcgen05\.wait::st ! mbarrier\.init", NEXT),
    (BARRIER, r"cp\.async\.wait_group ! st\.shared", AFTER_LOOP),
    (BARRIER, r"bar\.sync !|\S+ ! bar\.sync", TWICE),
    (
        BARRIER,
        r"\S+ ! (tcgen05\.relinquish_alloc_permit )?(tcgen05\.st tcgen05\.wait::st )*"
        r"(fence\.proxy mbarrier\.init )?bar\.sync",
        NEXT,
    ),
    (BARRIER, r"(cp\.async\.commit_group|tcgen05\.commit) ! mbarrier\.try_wait", MADE),
    (BARRIER, r"\S+ ! tcgen05\.dealloc", FREED),
    (
        PRODUCTS,
        r"wgmma\.commit_group ! ((ld\.shared|ldmatrix) )*fence\.proxy wgmma\.fence wgmma\.mma",
        IN_ORDER,
    ),
    (STORES, r"tcgen05\.st ! (bar\.sync )?tcgen05\.st tcgen05\.wait::st", NEXT_WAIT),
)
# How many there are, by Triton's version. In another version each must have a reason.
COUNTS: dict[str, dict[tuple[int, str], dict[str, int]]] = {
    "3.7": {
        (80, BARRIER): {FIRST_COPIES: 1},
        (90, BARRIER): {FIRST_COPIES: 1, WAITED: 1},
        (100, BARRIER): {FIRST_COPIES: 2, NEXT: 2, WAITED: 1, FREED: 1},
    },
}
# Instructions on shared memory, tensor memory and wgmma's registers.
ORDERED = re.compile(
    r"(cp\.async\.\w+|bar\.sync|fence\.proxy|mbarrier\.\w+|(?:ld|st)\.shared|ldmatrix|setp\.num"
    r"|tcgen05\.[\w:]+|wgmma\.\w+)[\w.:]*[\s;]"
)

WIDE = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
TALL = torch.randn(90, 70, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def machine() -> None:
    """These tests choose their architectures."""


def check_gram(architecture: int) -> None:
    """Gram matrices of several tiles and of split columns: every branch of the kernel runs.

    The bound is below the error of one product in TF32: its corrections count.
    """

    def close(found: Tensor, panel: Tensor) -> None:
        wanted = panel.double() @ panel.double().mT
        assert (found - wanted).abs().max() < 2e-6 * wanted.abs().max()

    with launch.on_machine(architecture), at_once(4):
        stats = [torch.zeros(d, d) for d in TALL.shape]
        gram_ema.gram_ema_(stats, [TALL], torch.tensor(0.0))
        close(stats[0], TALL)
        close(stats[1], TALL.mT)
        stats = [torch.zeros(64, 64), torch.zeros(1024)]
        gram_ema.gram_ema_(stats, [WIDE], torch.tensor(0.0))
        close(stats[0], WIDE)


def reason_of(pattern: str, ptx: str, first: int, end: int) -> str:
    """Why what stands at [first, end) is not needed; "" if it should be."""
    text = re.sub(r"//[^\n]*", "", ptx[:first]), re.sub(r"//[^\n]*", "", ptx[end:])
    before, after = ([m[1] for m in ORDERED.finditer(part)] for part in text)
    context = f"{before[-1]} ! {' '.join(after)}"
    reasons = [why for kind, known, why in SPARE if kind == pattern and re.match(known, context)]
    return reasons[0] if reasons else ""


@pytest.mark.parametrize(
    ("architecture", "pattern", "message"),
    [
        (80, BARRIER, "without a barrier"),
        (80, COPIES, "before an asynchronous copy to it was waited for"),
        (90, BARRIER, "without a barrier"),
        (90, COPIES, "before an asynchronous copy to it was waited for"),
        (90, PRODUCTS, "before the product that reads it was waited for"),
        (100, BARRIER, "without a barrier"),
        (100, COPIES, "before an asynchronous copy to it was waited for"),
        (100, STORES, "before the store to it was waited for"),
        (100, COMMITTED, "waited for"),
    ],
)
def test_what_is_taken_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, architecture: int, pattern: str, message: str
) -> None:
    """By a fault, or by a wrong result where the registers of a product are read too early."""
    decoded, versions = launch.decoded, set()

    def kept(ptx: str) -> object:
        if ".entry gram_kernel" in ptx:
            versions.add(ptx)
        return decoded(ptx)

    monkeypatch.setattr(launch, "decoded", kept)
    check_gram(architecture)
    (whole,) = versions  # both calls run one kernel
    unnoticed: Counter[str] = Counter()
    faults = 0
    for match in re.finditer(pattern, whole):
        first, end = match.span()
        less = whole[:first] + whole[end:]
        monkeypatch.setattr(
            launch, "decoded", lambda ptx, less=less: decoded(less if ptx == whole else ptx)
        )
        try:
            check_gram(architecture)
        except Fault as fault:
            assert message in str(fault)
            faults += 1
        except AssertionError:
            assert pattern == PRODUCTS
        else:
            reason = reason_of(pattern, whole, first, end)
            assert reason, f"line {whole.count(chr(10), 0, first) + 1} is not noticed"
            unnoticed[reason] += 1
    assert faults
    counts = COUNTS.get(".".join(triton.__version__.split(".")[:2]))
    assert counts is None or unnoticed == counts.get((architecture, pattern), {})
