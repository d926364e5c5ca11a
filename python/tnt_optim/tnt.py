"""Tensor Normal Training (Ren & Goldfarb, NeurIPS 2021)."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tnt_kernels import damped_inverse
from tnt_optim.attach import Attachable
from tnt_optim.failures import warn_if_unbounded
from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.likelihoods import Likelihood
from tnt_optim.modes import Rows, Settings
from tnt_optim.observations import Empirical, Sampled
from tnt_optim.options import Fixed, arguments, documented
from tnt_optim.update import Local


@documented(
    damping="added to the eigenvalues of every U_i, epsilon in the paper. A fraction with "
    "``relative_damping``; else of the unit of the gradient's (2/k)-th power.",
    relative_damping="damp with ``damping`` times the average eigenvalue of the U_i instead. "
    "Directions then have the scale of 1 / gradient: a parameter whose gradient is only rounding "
    "(a convolution's bias before batch norm) takes huge steps, unless ``graft`` rescales them.",
)
class TNT(Attachable, KroneckerOptimizer):
    r"""Natural-gradient descent with a tensor-normal model of every parameter's gradient.

    The Fisher matrix of a parameter with modes of sizes d_1, ..., d_k is modelled as U_1 ⊗ … ⊗ U_k,
    from gradients at labels drawn from the model's own predictive distribution; the momentum is
    preconditioned by the damped inverses (U_i + damping I)^-1::

        opt = TNT(model.parameters())
        opt.warm_start((model(x) for x in batches), model=model)  # optional
        for x, y in loader:
            opt.zero_grad()
            out = model(x)
            opt.observe(out)  # the one extra line: nothing unless statistics are due
            loss = criterion(out, y)
            loss.backward()
            opt.step()

    The defaults train transformers and convolutional networks: relative damping,
    steps of Adam's length, intervals that grow from 1. ``TNT.paper`` has the paper's form.

    Every argument but ``likelihood``, ``fisher``, ``seed``, ``sample_scale``, ``capturable``,
    ``process_group`` and ``shard`` can be set for each parameter group. A vector has one mode, a
    matrix two, and a convolution weight two: out, and in times the kernel's positions (if at most
    ``max_factor_dim``; otherwise, and in the paper's form, three). A group's ``modes``, a function
    from a parameter's shape to mode sizes with the same product, replaces this rule.

    Args:
        params: parameters, named parameters or parameter groups, of any floating-point dtype.
        {options}

    Raises:
        ValueError: if a setting or a parameter does not fit.
    """

    _method = "TNT"
    _whitens = True

    fisher, likelihood, seed, sample_scale = Fixed(), Fixed(), Fixed(), Fixed()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.01,
        *,
        damping: float = 0.3,
        momentum: float = 0.9,
        stat_decay: float = 0.9,
        weight_decay: float = 0.0,
        stat_interval: int = 10,
        inverse_interval: int = 50,
        interval_warmup: int = 500,
        likelihood: Likelihood = "categorical",
        fisher: str = "sampled",
        estimator: str = "mle",
        max_factor_dim: int = 4096,
        relative_damping: bool = True,
        graft: str | None = "adam",
        precondition_1d: bool = False,
        seed: int = 0,
        capturable: bool = False,
        block_size: int | None = None,
        merge_small_dims: str | None = "kernel",
        maximize: bool = False,
        rounding: str = "nearest",
        kl_clip: float | None = None,
        sample_scale: float | None = None,
        process_group: Any = None,
        shard: str | None = None,
    ) -> None:
        source = Empirical() if fisher == "empirical" else Sampled()
        super().__init__(params, arguments(locals()), source)

    @classmethod
    def _table(cls, options: Mapping[str, Any]) -> str:
        return "TNT-EF" if options.get("fisher") == "empirical" else "TNT"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``KroneckerOptimizer.add_param_group``; warns of steps that have no bound."""
        super().add_param_group(param_group)
        warn_if_unbounded(self.param_groups[-1])

    @_disable_dynamo  # as for step
    @torch.enable_grad()
    def observe(self, output: Any) -> None:
        """Samples labels at the model's output and keeps the gradient of their loss for ``step``.

        Call it between the forward and the ``backward`` of the same pass: the graph is retained,
        and no ``.grad`` is touched. With gradient accumulation call it for each micro-batch: the
        gradients of one step's observations are averaged (under ``fully_shard`` only the first
        counts); so are those of a skipped step (as by ``GradScaler``), which has the same weights.
        An observation that is not finite is left out if another one, of the same parameters, is
        finite. If no statistics are due at this step, and with ``fisher="empirical"``, it returns
        at once.

        Args:
            output: of the model, as the likelihood describes it, with its graph; or ``Masked``, if
                some rows do not count.

        Raises:
            ValueError: if the output has no graph, the wrong number of dimensions, or depends on no
                parameter of this optimizer; nothing is then changed.
            RuntimeError: if the backward has run, the output is DistributedDataParallel's with
                ``static_graph=True``, or its model was compiled with donated buffers.
        """
        wanted = self._wanted()
        if wanted and isinstance(self._observed, Sampled):
            self._observed.observe(self, output, wanted, self._distribution())

    def _wanted(self) -> list[Tensor]:
        """The parameters for which an output would be observed now."""
        return self._observed.wanted(self._due())

    def _factors(self, group: Settings, stats: Rows, out: Rows) -> Tensor:
        return damped_inverse(stats, group["damping"], out, group["relative_damping"])[1]

    def _average_statistics(
        self, outputs: Iterable[Any], processes: Local
    ) -> tuple[dict[Tensor, list[Tensor]], int]:
        self._warming = True
        try:
            return super()._average_statistics(outputs, processes)
        finally:
            self._warming = False
            if self._attached is not None:  # the hook observed outputs computed before, as a list
                self._observed.use_up()
