"""One file an operator, read from top to bottom.

- ``SCHEMA``: its types for PyTorch's dispatcher, which has no nested lists: ``stats[t][i]`` is flat
  here, tensor after tensor, mode after mode, and ``orders`` gives each tensor's number of modes if
  nothing else does. Numbers that a captured graph must be able to change are 0-dim tensors; the
  dispatcher selects a device by them if every list is empty. Written lists come first.
- The public function: the contract, checked, and one call.
- ``definition``: the same in plain torch. It calls no operator, only ``formulas`` and other
  definitions, and computes all new values before it writes the first.
- ``fake``: the results without data, of an operator that returns any.
- ``from_flat``: the definition on the arguments of the schema.

The files of ``csrc/cpu`` and ``tnt_kernels/triton`` have the same names.
"""

from types import ModuleType

from tnt_kernels.operators import (
    damped_inverse,
    grafted_directions,
    gram_ema,
    inverse_root,
    mode_products,
    preconditioned_step,
    scaled_step,
)

# In the order of csrc/cpu/register.cpp.
OPERATORS: dict[str, ModuleType] = {
    "gram_ema_": gram_ema,
    "damped_inverse": damped_inverse,
    "inverse_root": inverse_root,
    "mode_products": mode_products,
    "preconditioned_step_": preconditioned_step,
    "scaled_step_": scaled_step,
    "grafted_directions_": grafted_directions,
}
