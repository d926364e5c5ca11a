"""Shampoo (Gupta, Koren & Singer 2018), as in Algorithm 4 of Ren & Goldfarb 2021."""

from typing import Any, Never

from torch import Tensor

from tnt_kernels import inverse_root
from tnt_optim.checks import refuse_unknown
from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.modes import Rows, Settings
from tnt_optim.options import (
    Graft,
    MergedDims,
    Rounding,
    Shard,
    arguments,
    documented,
)


@documented(
    damping="added to the eigenvalues of every S_i, epsilon in the paper. A fraction with "
    "``relative_damping``; without it, in units of the squared gradient.",
    relative_damping="damp each S_i with ``damping`` times its own average eigenvalue, "
    "tr(S_i) / d_i, instead; it differs from mode to mode. If S_i is zero, or would be but for "
    "rounding (an average below 1e-31 in float32), its root is the identity. Directions then do "
    "not depend on the gradients' scale: a parameter whose gradient is only rounding moves as far "
    "as any other.",
)
class Shampoo(KroneckerOptimizer):
    r"""Momentum preconditioned by roots of the second moments of the training gradients.

    A parameter with k modes has, for each, the moving average S_i of the Gram matrices of its
    gradients' unfoldings; the momentum is multiplied by A_i = (S_i + damping I)^(-1 / 2k) in every
    mode i, modes of size 1 included. It differs from ``TNT`` in two things: the gradients are those
    of the training loss, so that there is nothing to observe, and the S_i are not rescaled.
    ``Shampoo.paper`` has the form of the paper's experiments::

        opt = Shampoo(model.parameters())
        opt.warm_start((criterion(model(x), y) for x, y in batches), model=model)  # optional
        for x, y in loader:
            opt.zero_grad()
            criterion(model(x), y).backward()
            opt.step()

    Every argument but ``capturable``, ``process_group`` and ``shard`` can be set for each parameter
    group. A group's ``modes`` replaces the rule for modes, as for ``TNT``.

    The C++ operator computes the roots from eigenvalues; GPUs and the reference use the coupled
    Newton iteration. In float32 the error of both grows with the condition number of
    S_i + damping I, which the damping bounds.

    Args:
        params: parameters, named parameters or parameter groups, of any floating-point dtype.
        {options}

    Raises:
        ValueError: if a setting or a parameter does not fit.
    """

    _method = "Shampoo"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.01,
        *,
        damping: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        stat_decay: float = 0.9,
        weight_decay: float = 0.0,
        stat_interval: int = 10,
        inverse_interval: int = 50,
        interval_warmup: int = 500,
        max_factor_dim: int = 4096,
        relative_damping: bool = True,
        graft: Graft | None = "adam",
        precondition_1d: bool = False,
        capturable: bool = False,
        block_size: int | None = None,
        merge_small_dims: MergedDims | None = "kernel",
        maximize: bool = False,
        rounding: Rounding = "nearest",
        process_group: Any = None,
        shard: Shard | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown("Shampoo", unknown)
        super().__init__(params, arguments(locals()))

    def _factors(self, group: Settings, stats: Rows, out: Rows) -> Tensor:
        roots = [2 * len(modes) for modes in stats]
        return inverse_root(stats, group["damping"], roots, out, group["relative_damping"])[1]
