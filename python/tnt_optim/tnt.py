"""Tensor Normal Training (Ren & Goldfarb, NeurIPS 2021)."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from tnt_kernels import damped_inverse
from tnt_optim.attach import attach
from tnt_optim.autograd import check_graph_lasts, check_reached, shows_float16
from tnt_optim.distributed.process_group import (
    Gradients,
    Team,
    check_static_graph,
    numbered,
    replicas_behind,
)
from tnt_optim.failures import UNOBSERVED, warn_the_caller
from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.likelihoods import (
    LARGEST_SCALE,
    Likelihood,
    check_sampling,
    loss_at_samples,
    sample_scale,
)
from tnt_optim.observations import Observations
from tnt_optim.update import Settings

FISHERS = ("sampled", "empirical")


class TNT(KroneckerOptimizer):
    r"""Natural-gradient descent with a tensor-normal model of every parameter's gradient.

    The Fisher matrix of a parameter with modes of sizes d_1, ..., d_k is modelled as U_1 ⊗ … ⊗ U_k,
    from the Gram matrices of gradients at labels drawn from the model's own predictive
    distribution; the momentum is preconditioned by the damped inverses (U_i + damping I)^-1::

        opt = TNT(model.parameters(), lr=1e-4, damping=0.1, likelihood="bernoulli")
        opt.warm_start((model(x) for x in batches), model=model)  # optional
        for x, y in loader:
            opt.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            opt.observe(out)  # the one extra line: nothing unless statistics are due
            loss.backward()
            opt.step()

    Every argument but ``likelihood``, ``fisher``, ``seed``, ``sample_scale``, ``capturable``,
    ``process_group`` and ``shard`` can be set for each parameter group.
    A group's ``modes``, a function from a parameter's shape to mode sizes with the same product,
    re-views its parameters; by default a vector has one mode, a matrix two, and a convolution
    weight three: out, in, and the kernel's positions.

    Args:
        params: parameters, named parameters or parameter groups, of any floating-point dtype.
        lr: alpha in the paper; tied to ``damping``, the batch size and the loss's scale.
        damping: epsilon in the paper, added to every U_i; of the unit of the gradient's
            (2/k)-th power.
        momentum: mu in the paper: m <- mu m + g, neither dampened nor bias-corrected.
        stat_decay: beta in the paper, of the statistics' moving average.
        weight_decay: gamma in the paper, decoupled: W <- W - lr (P + weight_decay W).
        stat_interval: T1 in the paper: the statistics are refreshed every so many steps.
        inverse_interval: T2 in the paper: the inverses are refreshed every so many steps, and with
            the statistics during the first so many.
        likelihood: what the model's output parametrises: "categorical" (logits (N, classes); cross
            entropy, mean), "bernoulli" (logits (N, ...); binary cross entropy, summed over
            outputs, mean over N), "gaussian" (means (N, ...), unit variance; half the squared
            error, summed over outputs, mean over N), or a function from the output to the 0-dim
            loss at labels that it samples itself, from torch's global generator (seeded for it, and
            put back).
        fisher: "sampled" as above; "empirical" takes the training gradients themselves (TNT-EF in
            the paper), needs no ``observe`` and no likelihood.
        max_factor_dim: a mode larger than this keeps only the diagonal of its statistic.
        relative_damping: damp with ``damping`` times the average eigenvalue of the U_i instead.
            Directions then have the scale of 1 / gradient: a parameter whose gradient is nothing
            but rounding (a convolution's bias before batch norm) takes huge steps, unless
            ``graft`` rescales them.
        graft: "adam" or "sgd": rescale each parameter's direction to the norm of that method's.
        seed: of the sampled labels; the global generators are never touched.
        capturable: run the steps as CUDA graphs, one for each kind of step, each from the second of
            its kind on. All parameters must be on one CUDA device. Gradients that do not lie where
            they lay are copied there: ``zero_grad(set_to_none=False)`` saves the copies. Learning
            rate and the other numbers may change at every step.
        block_size: a mode larger than this is cut into pieces of this size and a rest; each block
            of a parameter is then treated as a parameter of its own. None: no mode is cut.
        merge_small_dims: neighbouring modes are merged while their product is at most this, so that
            a convolution with few channels has fewer, larger factors. None: none are.
        maximize: go up the objective instead of down.
        rounding: of parameters in half precision after a step that is computed in float32.
            "nearest"; "stochastic" (bfloat16 only): up or down at random, so that steps smaller
            than half a spacing are made on average; "master": they are rounded from a float32 copy
            that the state keeps.
        kl_clip: shorten the directions P of a group's parameters on one device alike, by min(1,
            sqrt(kl_clip / (lr^2 sum s^2 P . m))), s from ``graft``: the sum is twice the divergence
            of the step in the model that the factors are. Takes memory for all directions at once.
            None: no bound.
        sample_scale: what the loss at sampled labels is multiplied by before its backward, and the
            gradients divided by in float32, as GradScaler does for the training's loss; a power of
            two. None: where something is in float16 the number of examples, up to 2^15, since the
            gradients of a mean over many are too small for it; 1 elsewhere, and for a likelihood
            that is a function.
        process_group: the processes that train copies of one model, as under
            DistributedDataParallel; None for torch.distributed's default group, where there is one.
            The statistics are those of all their batches.
        shard: how they share the work. None: each does all of it. Otherwise every parameter has one
            owner that keeps its statistics and makes its factors; with "inverses" it sends them to
            the others whenever it has made them, with "directions", which takes the least memory,
            it alone keeps them and the momentum, and sends the direction at every step.

    Raises:
        ValueError: where a setting or a parameter does not fit.
    """

    _method = "TNT"
    _shared = (
        "capturable",
        "fisher",
        "likelihood",
        "process_group",
        "sample_scale",
        "seed",
        "shard",
    )

    # Of the model whose outputs it observes: a copy of the optimizer is attached to none.
    _attached: RemovableHandle | None = None
    _warming = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        *,
        damping: float = 0.01,
        momentum: float = 0.9,
        stat_decay: float = 0.9,
        weight_decay: float = 0.0,
        stat_interval: int = 10,
        inverse_interval: int = 100,
        likelihood: Likelihood = "categorical",
        fisher: str = "sampled",
        max_factor_dim: int = 8192,
        relative_damping: bool = False,
        graft: str | None = None,
        seed: int = 0,
        capturable: bool = False,
        block_size: int | None = None,
        merge_small_dims: int | None = None,
        maximize: bool = False,
        rounding: str = "nearest",
        kl_clip: float | None = None,
        sample_scale: float | None = None,
        process_group: Any = None,
        shard: str | None = None,
    ) -> None:
        check_sampling(likelihood, seed, sample_scale)
        if fisher not in FISHERS:
            raise ValueError(f"fisher must be 'sampled' or 'empirical', got {fisher!r}")
        self.likelihood = likelihood
        self.fisher = fisher
        self.seed = seed
        self.sample_scale = sample_scale
        self._observed = Observations()
        self._warned = False
        super().__init__(
            params,
            {
                "lr": lr,
                "damping": damping,
                "momentum": momentum,
                "stat_decay": stat_decay,
                "weight_decay": weight_decay,
                "stat_interval": stat_interval,
                "inverse_interval": inverse_interval,
                "max_factor_dim": max_factor_dim,
                "block_size": block_size,
                "merge_small_dims": merge_small_dims,
                "relative_damping": relative_damping,
                "graft": graft,
                "maximize": maximize,
                "rounding": rounding,
                "kl_clip": kl_clip,
            },
            capturable=capturable,
            process_group=process_group,
            shard=shard,
        )

    @_disable_dynamo  # as for step: pieces of it would be compiled, to no use
    def observe(self, output: Any) -> None:
        """Samples labels at the model's output and keeps the gradient of their loss for ``step``.

        To be called between the forward and the ``backward`` of the same pass, which it leaves
        possible: the graph is retained, no ``.grad`` is touched. Once for each micro-batch where
        gradients are accumulated: the sampled gradients are averaged, also with those of a step
        that was then skipped, as by ``GradScaler``: they are of the same weights. An observation
        that is not finite is left out where another reached the same parameters. Where no
        statistics are due at this step, and with ``fisher="empirical"``, it returns at once.

        Args:
            output: what the likelihood describes, with its graph.

        Raises:
            ValueError: where the output has no graph, the wrong number of dimensions, or depends on
                no parameter of this optimizer; nothing is then changed.
            RuntimeError: where the output is DistributedDataParallel's with ``static_graph=True``,
                or its model was compiled with donated buffers.
        """
        if self.fisher == "empirical":
            return
        due = self._due()
        if not due:
            return
        if self._observed.count and self._is_sharded():
            return
        number = numbered(self._observed.count, self._team())
        loss = self._sampled_loss(output, "step", self.param_groups[0]["step"], number)
        replicas = replicas_behind(loss)
        check_static_graph(replicas)
        if any(replica.find_unused_parameters for replica in replicas):
            self._observed.partial = True
        check_graph_lasts(loss)
        scale = self._scale(loss, output)
        observed = self._gradients(loss, due, retain_graph=True, scale=scale)
        if len(due) == sum(p.requires_grad for g in self.param_groups for p in g["params"]):
            check_reached(observed)  # of a few newcomers it may well miss all
        self._observed.add(observed, due)

    def attach(
        self, model: nn.Module, output: Callable[[Any], Any] | None = None
    ) -> RemovableHandle:
        """Observes what ``model`` returns from now on, for trainers that own the training loop.

        A forward hook then does what ``observe`` in the loop would::

            opt.attach(model)
            trainer = Trainer(model=model, optimizers=(opt, None), ...)

        Every call of the model in training mode and with gradients enabled, while statistics are
        due, counts as a micro-batch, also one whose output no loss is made of: put that under
        ``torch.no_grad()``, or after ``model.eval()``. Calls for ``warm_start`` do not count, nor
        do those that activation checkpointing repeats in the backward. An output that requires no
        gradient is passed over. Under autocast the output is observed as after it.

        An optimizer is attached to one model at a time: attaching it again replaces what was. Two
        optimizers may be attached to one model. Neither keeps the other alive; copies of the model
        have a hook that does nothing, copies of the optimizer are not attached.

        Under DistributedDataParallel attach to the wrapped module or to the one inside, whichever
        is at hand; with ``static_graph=True`` to the one inside. What ``fully_shard`` cuts is to be
        attached to afterwards. A model may be compiled before or after; with ``fullgraph=True``
        attach to what ``torch.compile`` returned. Compile it with
        ``torch._functorch.config.donated_buffer = False``: its graph has two backwards to serve.

        Args:
            model: whose outputs depend on this optimizer's parameters.
            output: from what the model returns to what ``observe`` takes, as
                ``lambda out: out.logits.flatten(0, 1)`` for a language model; None: the tensor it
                returns, or its ``logits``.

        Returns:
            A handle whose ``remove`` ends it, also at the end of a ``with``.

        Raises:
            TypeError: where ``model`` is no module, or ``output`` no function. A forward raises
                what ``observe`` raises, TypeError where ``output`` is missing, and RuntimeError
                where the model was compiled with donated buffers or sharded since.
        """
        # Lightning's wrappers borrow the methods of what they wrap: the hook is not of theirs.
        own: TNT = getattr(self, "optimizer", self)
        handle = attach(own, model, output)
        if own._attached is not None:
            own._attached.remove()
        own._attached = handle
        return handle

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state; see ``KroneckerOptimizer.load_state_dict``."""
        super().load_state_dict(state_dict)
        self._observed.start_over()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN}}

    def _wants_output(self) -> bool:
        """Whether an output would be observed now: what the hook of ``attach`` asks."""
        return self.fisher != "empirical" and not self._warming and bool(self._due())

    def _due(self) -> list[Tensor]:
        """Trainable parameters whose statistics are due, and those that still have none."""
        due = []
        for group in self.param_groups:
            scheduled = self._statistics_due(group)
            for param in group["params"]:
                new = not self._has_state(param) and param not in self._observed.unreached
                if param.requires_grad and (scheduled or new):
                    due.append(param)
        return due

    def _sampled_loss(self, output: Any, *key: int | str) -> Tensor:
        """-log p at labels drawn from the stream named by the seed and ``key``."""
        devices = {p.device for group in self.param_groups for p in group["params"]}
        return loss_at_samples(self.likelihood, output, self.seed, key, devices)

    # What KroneckerOptimizer asks for.

    def _factors(
        self,
        group: Settings,
        stats: Sequence[Sequence[Tensor]],
        out: Sequence[Sequence[Tensor]] | None = None,
    ) -> tuple[list[list[Tensor]], Tensor]:
        return damped_inverse(stats, group["damping"], out, group["relative_damping"])

    def _statistic_gradients(self, team: Team | None, moving: Container[Tensor]) -> Gradients:
        if self.fisher == "empirical":
            return super()._statistic_gradients(team, moving)
        if team is not None:
            self._observed.pool(team, self._due(), self._has_state, is_sharded=self._is_sharded())
        if not self._observed.count and not self._warned and self._missed_observation():
            self._warned = True
            warn_the_caller(UNOBSERVED)
        return self._observed.means()

    def _missed_observation(self) -> bool:
        return any(
            self._has_state(p) and p.grad is not None
            for group in self.param_groups
            if self._statistics_due(group)
            for p in group["params"]
        )

    def _statistic_loss(self, output: Any, index: int, team: Team | None) -> Tensor:
        if self.fisher == "empirical":
            return super()._statistic_loss(output, index, team)
        return self._sampled_loss(output, "warm start", numbered(index, team))

    def _scale(self, loss: Tensor, output: Any) -> float:
        if self.fisher == "empirical":
            return super()._scale(loss, output)
        if self.sample_scale is not None:
            return self.sample_scale
        if callable(self.likelihood) or not shows_float16(loss):
            return 1.0
        # Sharded gradients are averaged over processes, whose batches may differ.
        return sample_scale(LARGEST_SCALE if self._is_sharded() else output.shape[0])

    def _average_statistics(self, outputs: Iterable[Any]) -> tuple[dict[Tensor, list[Tensor]], int]:
        self._warming = True
        try:
            return super()._average_statistics(outputs)
        finally:
            self._warming = False
            if self._attached is not None:  # of outputs that were made before, as in a list
                self._forget_observations()

    def _may_wait(self, param: Tensor) -> bool:
        return self._observed.may_wait(param)

    def _note_unreached(self) -> None:
        self._observed.note_unreached(self._has_state)

    def _forget_observations(self) -> None:
        self._observed.use_up()


_OWN = ("likelihood", "fisher", "seed", "sample_scale", "_observed", "_warned")
