"""Kronecker-factored preconditioning as operators on lists of tensors.

Linear algebra only: no parameters, no schedule, no state. ``tnt_optim`` builds its optimizers on
it, and so can other Kronecker-factored optimizers. Docstrings state each operator's contract, and
``tnt_kernels.reference`` has the definitions.

All operators work on lists, because one call must handle the hundred small parameters of a model.
Conventions of every operator:

- ``tensors[t]`` is a tensor G of shape (d_1, ..., d_k), 1 <= k <= 64, with any strides and of dtype
  float32, float64, bfloat16 or float16.
- ``stats[t][i]`` and ``factors[t][i]`` belong to mode i of tensor t: shape (d_i, d_i) and symmetric
  for a full mode, (d_i,) for a diagonal one. They are float64 for float64 tensors, else float32.
  They may have any strides if they are only read, and are contiguous if they are written.
- ``decay``, ``damping``, ``lr``, ``momentum`` and ``weight_decay`` are numbers or 0-dim tensors; a
  tensor may be on the lists' device, so that a captured graph can change it. Their ranges are
  checked; that of a tensor by the C++ operators only, because a check may wait for a device. From
  PyTorch 2.15 on, what only C++ refuses is a ``RuntimeError``.
- All tensors of one call are on one device. Written memory must not appear twice in a call. Empty
  lists are allowed.
- A ``ValueError`` or ``TypeError`` names the argument that does not fit; the call then changes
  nothing.
- On the CPU, subnormal numbers may count as zero: arithmetic on them would be many times slower.
- Nothing here is differentiable.
"""

import importlib
import warnings
from importlib import metadata

from tnt_kernels import reference
from tnt_kernels.backends import Backends, backends, register, signatures
from tnt_kernels.operators.damped_inverse import damped_inverse
from tnt_kernels.operators.grafted_directions import grafted_directions_
from tnt_kernels.operators.gram_ema import gram_ema_
from tnt_kernels.operators.inverse_root import inverse_root
from tnt_kernels.operators.mode_products import mode_products
from tnt_kernels.operators.preconditioned_step import preconditioned_step_
from tnt_kernels.operators.scaled_step import scaled_step_

_library = register()

try:
    _ops = importlib.import_module("tnt_kernels._ops")
    if _ops.signatures != signatures():
        raise ImportError("it was built for another version of this package")
    _ops.register_operators()
except ImportError as error:
    warnings.warn(
        "tnt_kernels runs on its reference implementation, with the same results up to rounding: "
        f"its C++ operators could not be loaded ({error}). They need PyTorch 2.11 or later. Build "
        "them in the source folder, with a C++ compiler: "
        "pip install --no-deps --force-reinstall -e . (If it is installed elsewhere, start Python "
        "outside the source folder.)",
        RuntimeWarning,
        stacklevel=2,
    )

try:
    __version__ = metadata.version("tnt_kernels")
except metadata.PackageNotFoundError:  # a clone that is not installed
    __version__ = "unknown"

__all__ = [
    "Backends",
    "backends",
    "damped_inverse",
    "grafted_directions_",
    "gram_ema_",
    "inverse_root",
    "mode_products",
    "preconditioned_step_",
    "reference",
    "scaled_step_",
]
