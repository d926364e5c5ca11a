"""Optimizers that precondition with Kronecker factors, on the operators of ``tnt_kernels``."""

from tnt_optim.failures import PreconditionerError
from tnt_optim.fallback import with_fallback
from tnt_optim.kfac import KFAC
from tnt_optim.likelihoods import Masked
from tnt_optim.shampoo import Shampoo
from tnt_optim.tnt import TNT

__all__ = ["KFAC", "TNT", "Masked", "PreconditionerError", "Shampoo", "with_fallback"]
