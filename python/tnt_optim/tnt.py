"""Tensor Normal Training (Ren & Goldfarb, NeurIPS 2021)."""

from collections.abc import Mapping
from typing import Any, Never, Self

from torch import Tensor

from tnt_kernels import damped_inverse, inverse_root
from tnt_optim.checks import pop_fisher, refuse_unknown
from tnt_optim.factors import takes_roots
from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.likelihoods import Likelihood
from tnt_optim.messages import warn_if_unbounded
from tnt_optim.modes import Rows, Settings
from tnt_optim.observations import Empirical, Sampled
from tnt_optim.options import (
    Estimator,
    Fixed,
    Graft,
    MergedDims,
    Rounding,
    Shard,
    arguments,
    documented,
)
from tnt_optim.paper import paper_settings


@documented(
    damping="added to the eigenvalues of every U_i, epsilon in the paper. A fraction with "
    "``relative_damping``; without it, in units of the gradient's (2/k)-th power.",
    nesterov="precondition mu m + g, the next step's momentum if its gradient were g again, in "
    "place of m; ``graft`` looks ahead in the same way. None: only without a ``likelihood``. With "
    "one it lowers the loss on most tasks, but early steps may be too long.",
    relative_damping="damp with ``damping`` times the average eigenvalue of the U_i instead. "
    "Directions then have the scale of 1 / gradient: a parameter whose gradient is only rounding "
    "(a convolution's bias before batch norm) takes huge steps, unless ``graft`` rescales them.",
)
class TNT(KroneckerOptimizer):
    r"""Momentum preconditioned by a tensor-normal model of every parameter's gradient.

    It replaces AdamW, and nothing else changes::

        opt = TNT(model.parameters())

    The second moment of a gradient with modes of sizes d_1, ..., d_k is modelled as U_1 ⊗ … ⊗ U_k,
    one matrix for each mode, and the momentum is preconditioned by their damped inverses. With a
    ``likelihood`` the gradients are taken at labels drawn from the model's own predictive
    distribution: the U_i then model the Fisher matrix, as in the paper, and the loop has one more
    line::

        opt = TNT(model.parameters(), likelihood="categorical")
        opt.warm_start((model(x) for x in batches), model=model)  # optional
        for x, y in loader:
            opt.zero_grad()
            out = model(x)
            opt.observe(out)  # nothing unless statistics are due
            loss = criterion(out, y)
            loss.backward()
            opt.step()

    The defaults train transformers and convolutional networks: relative damping,
    steps of Adam's length, intervals that grow from 1. ``TNT.paper`` has the paper's form.

    Every argument but ``likelihood``, ``seed``, ``capturable``, ``process_group`` and ``shard`` can
    be set for each parameter group. A vector has one mode, a matrix two, and a convolution weight
    two: out, and in times the kernel's positions (if at most ``max_factor_dim``; otherwise, and in
    the paper's form, three). A group's ``modes``, a function from a parameter's shape to mode sizes
    with the same product, replaces this rule.

    Args:
        params: parameters, named parameters or parameter groups, of any floating-point dtype.
        {options}

    Raises:
        ValueError: if a setting or a parameter does not fit.
    """

    _method = "TNT"
    _whitens = True

    likelihood, seed = Fixed(), Fixed()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.01,
        *,
        likelihood: Likelihood | None = None,
        damping: float = 0.3,
        momentum: float = 0.9,
        nesterov: bool | None = None,
        stat_decay: float = 0.9,
        weight_decay: float = 0.0,
        stat_interval: int = 10,
        inverse_interval: int = 50,
        interval_warmup: int | None = None,
        estimator: Estimator = "mle",
        max_factor_dim: int = 4096,
        relative_damping: bool = True,
        early_roots: bool | None = None,
        graft: Graft | None = "adam",
        precondition_1d: bool = False,
        seed: int = 0,
        capturable: bool = False,
        block_size: int | None = None,
        merge_small_dims: MergedDims | None = "kernel",
        maximize: bool = False,
        rounding: Rounding = "nearest",
        process_group: Any = None,
        shard: Shard | None = None,
        **unknown: Never,
    ) -> None:
        likelihood = pop_fisher("TNT", unknown, likelihood)
        refuse_unknown("TNT", unknown)
        nesterov = likelihood is None if nesterov is None else nesterov
        if interval_warmup is None:  # sampled labels cost a second backward at each refresh
            interval_warmup = 2000 if likelihood is None else 500
        if early_roots is None:  # without grafting, roots take steps of another unit
            early_roots = likelihood is None and graft is not None and relative_damping
        source = Empirical() if likelihood is None else Sampled()
        super().__init__(params, arguments(locals()), source)

    @classmethod
    def paper(cls, params: Any, problem: str | None = None, **options: Any) -> Self:
        """The optimizer in the form of Ren & Goldfarb 2021, with their settings.

        Every parameter is preconditioned, the damping is absolute, and steps are not grafted.

        Args:
            params: as for the constructor.
            problem: "mnist", "faces", "resnet32" or "vgg16", for the settings of the paper's
                experiment, with its likelihood; None for ``lr=1e-4, damping=0.01,
                stat_interval=10, inverse_interval=100``.
            options: replace these settings. Without a problem ``likelihood`` is needed; None is
                the paper's TNT-EF, whose statistics are of the training gradients.
        """
        if "fisher" in options:
            default = paper_settings("TNT", problem).get("likelihood", "categorical")
            given = options.get("likelihood")
            options["likelihood"] = pop_fisher("TNT.paper", options, given, default)
        if problem is None and "likelihood" not in options:
            raise ValueError(
                "likelihood must be given for TNT.paper without a problem: the distribution of the "
                "model's output ('categorical' for a cross entropy), or None for TNT-EF"
            )
        return super().paper(params, problem, **options)

    @classmethod
    def _table(cls, options: Mapping[str, Any]) -> str:
        return "TNT-EF" if options.get("likelihood", ...) is None else "TNT"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``KroneckerOptimizer.add_param_group``; warns of steps that have no bound."""
        super().add_param_group(param_group)
        warn_if_unbounded(self.param_groups[-1])

    def _factors(self, group: Settings, stats: Rows, out: Rows) -> Tensor:
        damping = group["damping"]
        if takes_roots(group):
            return inverse_root(stats, damping, 2, out, relative=True)[1]
        return damped_inverse(stats, damping, out, group["relative_damping"])[1]
