"""The reference without enough memory changes nothing, and the call can be repeated.

tests/system/test_out_of_memory.py has the C++ kernels, tests/gpu/test_out_of_memory.py Triton.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPES, LAYOUTS, STATE_DTYPES
from failing_memory import fail_every_allocation
from operators import INVERSES, STRIDED_WRITTEN, VARIANTS, call
from torch import Tensor

from tnt_kernels import formulas, reference
from tnt_kernels.operators import OPERATORS

functions = SimpleNamespace(
    **{name: torch.no_grad()(getattr(reference, name)) for name in OPERATORS}
)


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "transposed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_allocation_fails_in_turn(
    variant: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has four dtypes, full and diagonal modes, and a factor that fails."""
    write = formulas.write

    def checked(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """PyTorch copies in place, but for another dtype, or a transpose, which takes a buffer."""
        for target, value in zip(targets, values, strict=True):
            assert value.dtype == target.dtype
            assert value.is_contiguous() or not target.is_contiguous()
        write(targets, values)

    for module in (formulas, OPERATORS[variant.split()[0]]):  # inverses write by a formula
        monkeypatch.setattr(module, "write", checked, raising=False)
    dtypes = STATE_DTYPES if variant in INVERSES else DTYPES
    given = call(variant, [(9, 5), (7,), (3, 4, 5), (65, 61)], "mixed", dtypes).map(
        lambda key, tensor: LAYOUTS[layout](tensor) if key in STRIDED_WRITTEN else tensor
    )
    if variant in INVERSES:
        given.arguments["stats"][1][0][0] = -100.0
    fail_every_allocation(given, functions)
