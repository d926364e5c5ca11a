"""The Triton operators without enough memory change nothing, and the call can be repeated.

Most tests replace the launches, so that the plans may be large: an allocation that fails after a
launch is then seen by what was launched.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton_operators
from cases import DTYPES, GPU, STATE_DTYPES, normal, unchanged
from failing_memory import Memory, fail_every_allocation
from operators import INVERSES, ROOTED, STEPS, VARIANTS, Call, call, flat_arguments
from torch import Tensor

from tnt_kernels.triton import chain, factors, gram_ema, launch
from tools.compile_report.launches import at_once, modules

# Matrices for cuBLAS, or not; split-K; odd sizes; a vector; a copy; no elements.
SHAPES = [(72, 64), (64, 40), (9, 2000), (33, 9), (65,), (6, 4, 5, 3), (3, 0)]


def forget() -> None:
    """Empties the caches of plans, addresses and numbers."""
    launch._plans.clear()
    launch._sent.cache_clear()
    launch._number.cache_clear()


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small workspaces, which several parts of a call use in turn."""
    monkeypatch.setattr(gram_ema, "WHITENED_BYTES", 1 << 14)
    monkeypatch.setattr(chain, "PACKED_BYTES", 1 << 14)
    monkeypatch.setattr(gram_ema, "PACKED_BYTES", 1 << 14)
    monkeypatch.setattr(factors, "SCRATCH_BYTES", 1 << 14)
    forget()
    yield
    forget()


@pytest.fixture(params=[False, True], ids=["Triton", "cuBLAS"])
def engine(request: pytest.FixtureRequest) -> None:
    """Large matrices are multiplied by one or by the other."""
    if request.param:
        request.getfixturevalue("by_cublas")


def case(variant: str, shapes: list[tuple[int, ...]] = SHAPES) -> Call:
    """A call of all dtypes and kinds of modes, with a tensor that has to be copied."""
    dtypes = STATE_DTYPES if variant in INVERSES else DTYPES
    # Every dtype has each shape, full and diagonal.
    given = call(variant, [s for s in shapes for _ in dtypes], "mixed", dtypes).copy(GPU)

    def laid_out(key: str, tensor: Tensor) -> Tensor:
        if tensor.dim() != 4 or key == "out":
            return tensor
        order = (2, 0, 3, 1)
        view = torch.empty([2 * tensor.shape[i] for i in order], dtype=tensor.dtype, device=GPU)
        sliced = view[::2, ::2, ::2, ::2].permute(1, 3, 0, 2)
        return sliced.copy_(tensor)

    return given.map(laid_out)


class Launches:
    """Stands in for the launches of kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: list[tuple[str, int]] = []  # and programs
        for module in modules():
            if getattr(module, "launch", None) is launch.launch and module is not launch:
                monkeypatch.setattr(module, "launch", self._launch)

    def _launch(self, kernel: Any, programs: int, *_: object, **__: object) -> None:
        self.kernels.append((kernel.fn.__name__, programs))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    if GPU.type != "cpu":
        pytest.skip("no launch writes, so results are compared as the CPU's new memory is filled")
    return Launches(monkeypatch)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_launch_comes_before_an_allocation(variant: str, launches: Launches) -> None:
    """Every allocation of a call fails in turn, with cold caches and with warm ones."""
    given = case(variant)

    class Functions:
        """The launcher, of which a failed call has launched nothing."""

        @staticmethod
        def start(*arguments: Any, **named: Any) -> Any:
            launches.kernels.clear()
            try:
                return getattr(triton_operators, given.name)(*arguments, **named)
            except torch.OutOfMemoryError:
                assert not launches.kernels
                raise

    setattr(Functions, given.name, staticmethod(Functions.start))
    given(Functions)
    wanted = list(launches.kernels)
    counts = [fail_every_allocation(given.copy(GPU), Functions, forget)]
    assert launches.kernels == wanted
    counts.append(fail_every_allocation(given.copy(GPU), Functions))
    assert launches.kernels == wanted
    assert counts[0] > counts[1]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_allocation_fails_in_turn(variant: str) -> None:
    """On few tensors, with kernels that run: the call that succeeds at last has the usual bits."""
    shapes = [(72, 64), (33, 9)] if variant not in ROOTED else [(9, 4), (5,)]
    dtypes = STATE_DTYPES if variant in INVERSES else (torch.float32, torch.bfloat16)
    given = call(variant, shapes, "full", dtypes).copy(GPU)
    fail_every_allocation(given, triton_operators, forget)


@pytest.mark.usefixtures("by_cublas")
@pytest.mark.parametrize("variant", ["mode_products", *STEPS])
def test_a_product_that_cublas_refuses(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses all of them under deterministic algorithms without its variable."""
    given = call(variant, [(72, 64), (9, 5)], "full").copy(GPU)
    again = given.copy(GPU)

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("deterministic behavior was enabled, CUBLAS_WORKSPACE_CONFIG is not set")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "mm", refused)
        with unchanged(given.arguments), pytest.raises(RuntimeError, match="CUBLAS_WORKSPACE"):
            given(triton_operators)
    results, wanted = given(triton_operators), again(triton_operators)
    for new, expected in zip(results.values(), wanted.values(), strict=True):
        torch.testing.assert_close(new, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_share_their_memory(launches: Launches, dtype: torch.dtype) -> None:
    """Four times as many whitened tensors, each in a part of its own, take no more workspace.

    Copies in float32 are in it, too.
    """
    module = gram_ema.gram_ema_
    taken = []
    for repeats in (1, 4):
        given = call("gram_ema_ whitened", [(130, 200)] * repeats, "full", dtype).copy(GPU)
        with at_once(1), torch.no_grad():
            module(*flat_arguments(given))  # makes the plans
            with Memory() as memory:
                module(*flat_arguments(given))
        assert launches.kernels.count(("scale_kernel", 1)) >= 2 * repeats
        taken.append(sum(size for size in memory.sizes if size > 1 << 12))
    assert taken[0] == taken[1] >= normal((130, 200)).nbytes


def test_a_plan_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error leaves no entry in the cache."""
    tensors = [normal((9, 5))]
    before = dict(launch._plans)
    made = []

    def plan(*_: object) -> str:
        made.append(1)
        if len(made) == 1:
            raise torch.OutOfMemoryError("a table")
        return "plan"

    with pytest.raises(torch.OutOfMemoryError):
        launch.planned(plan, tensors)
    assert launch._plans == before
    assert launch.planned(plan, tensors) == launch.planned(plan, tensors) == "plan"
    assert len(made) == 2
