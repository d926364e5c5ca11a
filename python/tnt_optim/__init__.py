"""Optimizers that precondition with Kronecker factors, on the operators of ``tnt_kernels``."""

from tnt_optim.failures import PreconditionerError
from tnt_optim.tnt import TNT

__all__ = ["TNT", "PreconditionerError"]
