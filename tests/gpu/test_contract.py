"""The contract of the operators, over the Triton kernels and over the public functions on a GPU.

Without a GPU the compiled kernels run on the CPU, on few and small shapes.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import triton_operators
from cases import GPU, SHAPES
from contract import DampedInverse, EveryOperator, Gram, InverseRoot, Inverses, Shape, Steps

import tnt_kernels
from tnt_kernels.operators import OPERATORS
from tnt_kernels.triton import damped_inverse, inverse_root, launch, newton

EMULATED = GPU.type == "cpu"
# One tile and several, the last of every fullness; 64 rows and columns in float32, 32 in float64.
SMALL = [(1,), (33, 9), (65,), (2, 3, 5, 4)]


class Emulated:
    """Fewer arguments where the CPU runs the kernels."""

    shapes: ClassVar[Sequence[Shape]] = SMALL if EMULATED else SHAPES
    kinds: ClassVar[Sequence[str]] = ("mixed",) if EMULATED else ("full", "diagonal", "mixed")


class TestTriton(Emulated, EveryOperator, Gram, Steps):
    """The kernels of products and sums."""

    functions = triton_operators
    operators = (
        *("gram_ema_", "mode_products", "preconditioned_step_", "scaled_step_"),
        "grafted_directions_",
    )


class Poisoned:
    """Fills the workspace before a call with NaN, or, if factors fail, with what could pass."""

    launcher: ClassVar[Any]
    first_kernel: ClassVar[object]
    workspace: ClassVar[int]  # its place among the first kernel's arguments
    failing: ClassVar[Sequence[str]]  # in the names of tests

    @pytest.fixture(autouse=True)
    def _poisoned_workspace(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fails = any(what in request.node.name for what in self.failing)

        def filled(kernel: object, programs: int, *arguments: Any, **constants: object) -> None:
            if kernel is self.first_kernel:
                arguments[self.workspace].fill_(0.5 if fails else math.nan)
            launch.launch(kernel, programs, *arguments, **constants)

        monkeypatch.setattr(self.launcher, "launch", filled)


class TestTritonInverses(Poisoned, Emulated, EveryOperator, Inverses, DampedInverse):
    """The kernels of the blocked Cholesky inverse."""

    functions = triton_operators
    operators = ("damped_inverse", "damped_inverse relative")
    failures_at_once = 8 if EMULATED else 24
    creates_factors = False
    launcher, first_kernel, workspace = damped_inverse, damped_inverse.begin_kernel, 4
    failing = ("fail", "singular")


class TestTritonRoots(Poisoned, Emulated, EveryOperator, Inverses, InverseRoot):
    """The kernels of the coupled Newton iteration."""

    functions = triton_operators
    operators = ("inverse_root",)
    shapes = [(1,), (9, 4), (33,)] if EMULATED else SHAPES
    layout_shape: ClassVar[Shape] = (5, 9, 3)
    failing_shape: ClassVar[Shape] = (3, 3, 3)
    failures_at_once = 8 if EMULATED else 24
    creates_factors = False
    rank_one_sizes: ClassVar[Sequence[int]] = (9,) if EMULATED else (2, 9, 65)
    launcher, first_kernel, workspace = inverse_root, newton.begin_kernel, 5
    failing = ("fail", "undamped")


def on_gpu(name: str) -> Any:
    """The public function, on copies of its arguments on the GPU."""
    public = getattr(tnt_kernels, name)

    def call(*arguments: Any, **named: Any) -> Any:
        gpu = triton_operators.OnGpu()

        def there(nested: Any) -> Any:
            if isinstance(nested, torch.Tensor):
                return gpu.copy(nested)
            return [there(entry) for entry in nested] if isinstance(nested, list) else nested

        out = named.get("out")
        returned = public(*map(there, arguments), **{k: there(a) for k, a in named.items()})
        gpu.back()
        return here(returned, out)

    return call


def here(returned: Any, out: Any) -> Any:
    """The results on the CPU; ``out`` itself where it was given."""
    if isinstance(returned, tuple):
        return (here(returned[0], None) if out is None else out), returned[1].cpu()
    if isinstance(returned, list):
        return [here(entry, None) for entry in returned]
    return None if returned is None else returned.cpu()


class TestPublic(EveryOperator, Gram, Inverses, DampedInverse, InverseRoot, Steps):
    """The public functions on a GPU, whatever serves there."""

    __test__ = not EMULATED
    functions = SimpleNamespace(**{name: on_gpu(name) for name in OPERATORS})
    # cuBLAS and cuSOLVER choose their algorithms by batch.
    alone_to_the_bit = False
