"""Kronecker-factored preconditioning as operators on lists of tensors.

Linear algebra only: no parameters, no schedule, no state. ``tnt_optim`` builds optimizers on it;
anyone writing another Kronecker-factored optimizer can do the same. The contract of each operator
is in its docstring, the conventions they share in ``tnt_kernels.ops``, their definitions in
``tnt_kernels.reference``.
"""

import importlib
import warnings

from tnt_kernels import schemas

_library = schemas.define()

try:
    importlib.import_module("tnt_kernels._C")  # registers the C++ operators
except ImportError as error:
    warnings.warn(
        "tnt_kernels runs on its reference implementation, with the same results: its extension "
        f"could not be loaded ({error}). To have it, build it from the source folder with a C++ "
        "compiler, against the PyTorch that is installed now: "
        "pip install --no-build-isolation --no-deps --force-reinstall -e .",
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
)

register_reference(_library)
register_triton(_library)

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
]
