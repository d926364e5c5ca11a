"""Optimizers that precondition with Kronecker factors, on the operators of ``tnt_kernels``.

TNT:                 Tensor Normal Training; ``TNT(model.parameters())`` needs no other argument.
Shampoo, KFAC:       its rivals, in the same form.
with_fallback:       one optimizer made of two, for different parameters.
Masked:              an output with the rows that count, for ``observe`` and ``attach``.
PreconditionerError: raised if statistics or inverses fail at first, or five times in a row.

``help(tnt_optim.TNT)`` explains every argument; ``TNT(...).memory_estimate()`` says how many bytes
the state of a model will take. ``tnt_optim.kronecker.KroneckerOptimizer`` is the base of an
optimizer of your own; the guide "Your own optimizer" names what it may import. Everything else in
this package may change.
"""

from tnt_kernels import __version__ as __version__  # both packages are one distribution
from tnt_optim.failures import PreconditionerError
from tnt_optim.fallback import with_fallback
from tnt_optim.kfac import KFAC
from tnt_optim.likelihoods import Masked
from tnt_optim.shampoo import Shampoo
from tnt_optim.tnt import TNT

__all__ = ["KFAC", "TNT", "Masked", "PreconditionerError", "Shampoo", "with_fallback"]
