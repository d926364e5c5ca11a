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
from tnt_kernels.schemas import SCHEMAS
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


class TestTritonInverses(Emulated, EveryOperator, Inverses, DampedInverse):
    """The kernels of the blocked Cholesky inverse."""

    functions = triton_operators
    operators = ("damped_inverse", "damped_inverse relative")
    failures_at_once = 8 if EMULATED else 24
    creates_factors = False

    @pytest.fixture(autouse=True)
    def _poisoned_workspace(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fills the workspace with NaN, or, if inverses fail, with what could pass."""
        fails = any(what in request.node.name for what in ("fail", "singular"))

        def filled(kernel: object, programs: int, *arguments: Any, **constants: object) -> None:
            if kernel is damped_inverse.begin_kernel:
                arguments[4].fill_(0.5 if fails else math.nan)
            launch.launch(kernel, programs, *arguments, **constants)

        monkeypatch.setattr(damped_inverse, "launch", filled)


class TestTritonRoots(Emulated, EveryOperator, Inverses, InverseRoot):
    """The kernels of the coupled Newton iteration."""

    functions = triton_operators
    operators = ("inverse_root",)
    shapes = [(1,), (9, 4), (33,)] if EMULATED else SHAPES
    layout_shape: ClassVar[Shape] = (5, 9, 3)
    failing_shape: ClassVar[Shape] = (3, 3, 3)
    failures_at_once = 8 if EMULATED else 24
    creates_factors = False
    rank_one_sizes: ClassVar[Sequence[int]] = (9,) if EMULATED else (2, 9, 65)

    @pytest.fixture(autouse=True)
    def _poisoned_workspace(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fills the workspace before a call with NaN, or, if roots fail, with what could pass."""
        fails = any(what in request.node.name for what in ("fail", "undamped"))

        def filled(kernel: object, programs: int, *arguments: Any, **constants: object) -> None:
            if kernel is newton.begin_kernel:
                arguments[5].fill_(0.5 if fails else math.nan)
            launch.launch(kernel, programs, *arguments, **constants)

        monkeypatch.setattr(inverse_root, "launch", filled)


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
    functions = SimpleNamespace(**{name: on_gpu(name) for name in SCHEMAS})
    # cuBLAS, for whitened Gram matrices, chooses its algorithms by batch.
    alone_to_the_bit = False
