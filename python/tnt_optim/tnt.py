"""Tensor Normal Training (Ren & Goldfarb, NeurIPS 2021)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from tnt_kernels import damped_inverse
from tnt_optim.attach import attach
from tnt_optim.failures import warn_the_caller
from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.likelihoods import Likelihood
from tnt_optim.modes import Factors, Rows, Settings
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
class TNT(KroneckerOptimizer):
    r"""Natural-gradient descent with a tensor-normal model of every parameter's gradient.

    The Fisher matrix of a parameter with modes of sizes d_1, ..., d_k is modelled as U_1 ⊗ … ⊗ U_k,
    from gradients at labels drawn from the model's own predictive distribution; the momentum is
    preconditioned by the damped inverses (U_i + damping I)^-1::

        opt = TNT(model.parameters())
        opt.warm_start((model(x) for x in batches), model=model)  # optional
        for x, y in loader:
            opt.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            opt.observe(out)  # the one extra line: nothing unless statistics are due
            loss.backward()
            opt.step()

    The defaults train a transformer and a convolutional network as they stand: relative damping,
    steps of Adam's length, intervals that grow from 1. ``TNT.paper`` has the paper's form.

    Every argument but ``likelihood``, ``fisher``, ``seed``, ``sample_scale``, ``capturable``,
    ``process_group`` and ``shard`` can be set for each parameter group. A vector has one mode, a
    matrix two, and a convolution weight two: out, and in times the kernel's positions; in the
    paper's form three. A group's ``modes``, a function from a parameter's shape to mode sizes with
    the same product, replaces this rule.

    Args:
        params: parameters, named parameters or parameter groups, of any floating-point dtype.
        {options}

    Raises:
        ValueError: if a setting or a parameter does not fit.
    """

    _method = "TNT"
    _whitens = True

    # The hook on the observed model; a copy of the optimizer has none.
    _attached: RemovableHandle | None = None
    _warming = False

    fisher = Fixed()
    likelihood: Likelihood
    seed: int
    sample_scale: float | None

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
        merge_small_dims: int | str | None = "kernel",
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
        group = self.param_groups[-1]
        if group["relative_damping"] and group["graft"] is None:
            warn_the_caller(
                "relative_damping=True with graft=None has directions of the scale of 1 / gradient,"
                " without bound: a parameter whose gradient is zero or only rounding at times (a "
                "bias before batch norm, LoRA's A) grows until training diverges. Set graft='adam'"
            )

    @property
    def observing(self) -> bool:
        """Whether ``observe`` would use an output now, because statistics are due."""
        return self._wants_output()

    @_disable_dynamo  # as for step
    def observe(self, output: Any) -> None:
        """Samples labels at the model's output and keeps the gradient of their loss for ``step``.

        Call it between the forward and the ``backward`` of the same pass: the graph is retained,
        and no ``.grad`` is touched. With gradient accumulation call it for each micro-batch: the
        gradients of one step's observations are averaged; so are those of a skipped step (as by
        ``GradScaler``), which has the same weights. An observation that is not finite is left out
        if another is finite. If no statistics are due at this step, and with
        ``fisher="empirical"``, it returns at once.

        Args:
            output: of the model, as the likelihood describes it, with its graph; or ``Masked``, if
                some rows do not count.

        Raises:
            ValueError: if the output has no graph, the wrong number of dimensions, or depends on no
                parameter of this optimizer; nothing is then changed.
            RuntimeError: if the output is DistributedDataParallel's with ``static_graph=True``, or
                its model was compiled with donated buffers.
        """
        wanted = self._wanted()
        if wanted:
            self._observed.observe(self, output, wanted, self._distribution())

    def attach(self, model: nn.Module, output: Callable[..., Any] | None = None) -> RemovableHandle:
        """Observes every output of ``model`` from now on, for trainers that own the training loop.

        A forward hook then replaces the call of ``observe`` in the loop::

            opt.attach(model)
            trainer = Trainer(model=model, optimizers=(opt, None), ...)

        While statistics are due, every call of the model in training mode with gradients enabled
        counts as a micro-batch. Put calls without a loss under ``torch.no_grad()``, or after
        ``model.eval()``. Calls for ``warm_start`` do not count, nor calls that activation
        checkpointing repeats in the backward, nor outputs that require no gradient. Under autocast
        the output is observed as if autocast had ended.

        An optimizer is attached to one model at a time; a second ``attach`` replaces the first. Two
        optimizers may be attached to one model. Neither keeps the other alive; copies of the model
        have a hook that does nothing, copies of the optimizer are not attached.

        Under DistributedDataParallel attach to the wrapped module or to the one inside; with
        ``static_graph=True`` to the one inside. Attach after ``fully_shard``. A model may be
        compiled before or after; with ``fullgraph=True`` attach to the result of ``torch.compile``.
        Compile with ``torch._functorch.config.donated_buffer = False``: the graph serves two
        backwards.

        Args:
            model: a module whose outputs depend on this optimizer's parameters.
            output: from the model's result to the argument of ``observe``, as
                ``lambda out: out.logits[:, :-1]`` for a language model; None: the tensor it
                returns, or its ``logits``. A function of three arguments, ``lambda out, args,
                kwargs: ...``, also gets those of the forward, such as labels that say what is
                padding. If it leaves no row, the call does not count.

        Returns:
            A handle; its ``remove`` ends the observation, as does the end of a ``with``.

        Raises:
            TypeError: if ``model`` is no module, or ``output`` no function. A forward raises the
                errors of ``observe``, TypeError if ``output`` is missing, and RuntimeError if the
                model was compiled with donated buffers or sharded since.
        """
        # Lightning's wrapper borrows this method: attach the wrapped optimizer.
        own: TNT = getattr(self, "optimizer", self)
        handle = attach(own, model, output)
        if own._attached is not None:
            own._attached.remove()
        own._attached = handle
        return handle

    def _wanted(self) -> list[Tensor]:
        """The parameters for which an output would be observed now."""
        return self._observed.wanted(self._due())

    def _wants_output(self) -> bool:
        """Whether an output would be observed now; the hook of ``attach`` asks."""
        return not self._warming and bool(self._wanted())

    def _factors(self, group: Settings, stats: Rows, out: Rows | None = None) -> Factors:
        return damped_inverse(stats, group["damping"], out, group["relative_damping"])

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
