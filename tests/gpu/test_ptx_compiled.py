"""The PTX machine on compiled kernels: a barrier or a wait that is taken out is noticed."""

import re

import pytest
import torch
from cases import GPU
from gpu.ptx import launch
from gpu.ptx.program import Fault

from tnt_kernels.triton import gram_ema
from tools.compile_report.launches import at_once

pytestmark = pytest.mark.skipif(GPU.type == "cuda", reason="kernels run on the GPU")

BARRIER = r"\bbar(rier)?\.sync\s+0;"
COPIES = r"cp\.async\.wait_group\s+\d+;"
PRODUCTS = r"wgmma\.wait_group\.sync\.aligned\s+\d+;"
STORES = r"tcgen05\.wait::st\.sync\.aligned;"
# A loop that ends when the products that were committed are done.
COMMITTED = r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;"


@pytest.fixture(autouse=True)
def machine() -> None:
    """These tests choose their architectures."""


def check_gram(architecture: int) -> None:
    """Gram matrices of several tiles, of integers: every order of their sums is exact."""
    tensor = torch.arange(128 * 96, dtype=torch.float32).view(128, 96) % 7
    stats = [torch.zeros(d, d) for d in tensor.shape]
    with launch.on_machine(architecture), at_once(4):
        gram_ema.gram_ema_(stats, [tensor], torch.tensor(0.0))
    assert torch.equal(stats[0], tensor @ tensor.mT)
    assert torch.equal(stats[1], tensor.mT @ tensor)


@pytest.mark.parametrize(
    ("architecture", "pattern", "share", "message"),
    [
        (80, BARRIER, 0.5, "without a barrier"),
        (80, COPIES, 1, "before an asynchronous copy to it was waited for"),
        (90, BARRIER, 0.5, "without a barrier"),
        (90, COPIES, 1, "before an asynchronous copy to it was waited for"),
        (90, PRODUCTS, 0.3, "before the product that reads it was waited for"),
        (100, BARRIER, 0.25, "without a barrier"),
        (100, COPIES, 1, "before an asynchronous copy to it was waited for"),
        (100, STORES, 0.5, "before the store to it was waited for"),
        (100, COMMITTED, 1, "before its products were waited for"),
    ],
)
def test_what_is_taken_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, architecture: int, pattern: str, share: float, message: str
) -> None:
    """One match at a time. Unless it is noticed, the result is right: not all of the code runs."""
    decoded, removed, total = launch.decoded, 0, 0

    def without(ptx: str) -> object:
        nonlocal total
        matches = list(re.finditer(pattern, ptx))
        total = len(matches)
        first, end = matches[removed].span()
        return decoded(ptx[:first] + ptx[end:])

    check_gram(architecture)
    monkeypatch.setattr(launch, "decoded", without)
    noticed = 0
    while removed == 0 or removed < total:
        try:
            check_gram(architecture)
        except Fault as fault:
            assert message in str(fault)
            noticed += 1
        removed += 1
    assert noticed >= share * total > 0
