"""Kronecker-factored preconditioning as operators on lists of tensors.

Linear algebra only: no parameters, no schedule, no state. ``tnt_optim`` builds its optimizers on
it, and so can other Kronecker-factored optimizers. Docstrings state each operator's contract,
``tnt_kernels.ops`` the common conventions, and ``tnt_kernels.reference`` the definitions.
"""

import importlib
import warnings
from importlib import metadata

from tnt_kernels import schemas

_library = schemas.define()

try:
    _ops = importlib.import_module("tnt_kernels._ops")
    if _ops.signatures != schemas.signatures():
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

from tnt_kernels import reference
from tnt_kernels.backends import Backends, backends, register_reference, register_triton
from tnt_kernels.ops import (
    damped_inverse,
    grafted_directions_,
    gram_ema_,
    inverse_root,
    mode_products,
    preconditioned_step_,
    scaled_step_,
)

register_reference(_library)
register_triton(_library)

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
