"""KFAC (Martens & Grosse 2015; Grosse & Martens 2016), as in Ren & Goldfarb 2021."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Never, Self

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tnt_optim import checkpoint
from tnt_optim.attach import Attachable
from tnt_optim.attempt import Attempt
from tnt_optim.autograd import buffers_put_back
from tnt_optim.checks import refuse_unknown
from tnt_optim.distributed.process_group import ProcessGroup, process_group_of
from tnt_optim.failures import Delivery, Failures, PreconditionerError, diverged
from tnt_optim.fit import Fit
from tnt_optim.kfac.activations import hook_layers
from tnt_optim.kfac.inverses import (
    INVERSES,
    PARTS,
    SHARDS,
    add_moments,
    made_by_owners,
    update,
)
from tnt_optim.kfac.layers import (
    Layer,
    is_trainable,
    matrix_shape,
    named_groups,
    parameters,
    preconditioned,
)
from tnt_optim.kfac.observations import Observations, Sampling
from tnt_optim.kfac.statistics import LayerSums, all_finite_statistics, blend
from tnt_optim.likelihoods import Likelihood
from tnt_optim.messages import (
    UNFINISHED,
    UNOBSERVED,
    warn_if_twice,
    warn_if_unbounded,
    warn_the_caller,
)
from tnt_optim.mismatch import warn_of_mismatch, watched
from tnt_optim.modes import Settings, by_device, check_dense, is_sharded, state_dtype
from tnt_optim.options import (
    OPTIONS,
    Graft,
    arguments,
    check_settings,
    documented,
    factors_due,
    is_due,
    repeated_options,
)
from tnt_optim.paper import paper_settings
from tnt_optim.state import ALLOCATED, COUNTERS, check_keys, has_statistics, is_allocated
from tnt_optim.wrappers import Wrappable


@documented(
    weight_decay="gamma in the paper, decoupled: W <- W - lr (P + weight_decay W); with ``graft`` "
    "not of biases and norms.",
    damping="added to the eigenvalues of G ⊗ A, lambda in the paper. A fraction with "
    "``relative_damping``; else of the unit of the squared gradient.",
    relative_damping="damp with ``damping`` times the average eigenvalue of G ⊗ A.",
    max_factor_dim="a layer with a larger factor takes the momentum, without a preconditioner.",
    likelihood='required: "categorical", "bernoulli", "gaussian", a tuple of these, or a function '
    "from the output to the 0-dim mean loss over its first dimension at labels it samples itself; "
    "see ``TNT``.",
    shard='None: each process computes all inverses. "inverses": each layer\'s inverses are '
    "computed by one owner rank and sent to the others.",
)
class KFAC(Attachable, Wrappable, Optimizer):
    r"""Natural-gradient descent with a Kronecker-factored Fisher matrix for every layer.

    The model of the Fisher matrix of a layer's weight and bias, [W | b], is G ⊗ A: A from the
    layer's inputs, with a 1 for the bias, and G from the gradients by its outputs, at labels drawn
    from the model's own predictive distribution. Its inverse preconditions the momentum::

        opt = KFAC(model, likelihood="categorical")
        opt.warm_start(model(x) for x in batches)  # optional
        for x, y in loader:
            opt.zero_grad()
            out = model(x)
            opt.observe(out)  # the one extra line: nothing unless statistics are due
            loss = criterion(out, y)
            loss.backward()
            opt.step()

    Layers are ``nn.Linear`` and ``nn.Conv1d`` to ``nn.Conv3d`` (any stride, padding and dilation),
    called as modules (``layer(x)``). If a forward pass calls a layer several times, each call adds
    positions. All other parameters are updated with the momentum: those of norms, embeddings,
    recurrent networks, grouped and transposed convolutions, nn.MultiheadAttention, and layers that
    share a parameter or have a factor above ``max_factor_dim``. ``repr`` counts them; if they are
    many, a warning at construction does, too. A frozen weight or bias of a layer is not updated;
    its momentum counts as zero.

    A = (1/N) Σ a aᵀ and G = (1/P) Σ g gᵀ over the P positions in the N examples of a batch, as in
    Grosse & Martens 2016. Each gradient g is of one example's own loss. Positions are a
    convolution's output positions, or a linear layer's input vectors; N is the number of rows of
    "categorical" logits, else output.shape[0]. Rows that ``Masked`` leaves out do not count, nor
    positions that only these depend on, such as padding: those whose g is zero.

    If torch.distributed runs several processes, all make the same calls, each with its part of the
    batch and its own samples. The training equals that of one process that observes the same
    micro-batches in turn. ``model`` may be DistributedDataParallel or the module inside.

    With the defaults every parameter moves by the norm of Adam's direction, so that one learning
    rate serves layers and other parameters; ``KFAC.paper`` has the paper's form. Settings of
    parameter groups may change between steps, but for ``max_factor_dim`` and to ``graft="adam"``;
    ``damping`` takes effect at the next refresh of the inverses.

    ``torch.save(model)`` also saves the hooks, which do nothing when loaded but need this package.
    Call ``close()`` first, or save the model's ``state_dict``.

    Args:
        model: layers added later are not optimized.
        params: some of its parameters, or parameter groups, as any optimizer takes them; None for
            all in one group. A layer's damping, intervals and ``stat_decay`` are those of its
            weight's group; ``max_factor_dim=1`` takes a group's weights out of the layers.
        {options}
        inverse: "damped": (G + √damping I)^-1 M (A + √damping I)^-1, the paper's for autoencoders,
            with √damping in units of each factor's average eigenvalue if it is relative;
            "eigenbasis": the inverse of G ⊗ A + damping I, the paper's for CNNs, which keeps one
            more matrix like each weight, and waits for the device when it is refreshed.

    Raises:
        ValueError: if a setting does not fit, the model has no layer or not these parameters, or
            they are sharded, as by ``fully_shard``.
        TypeError: if ``model`` is no module.
    """

    _method = "KFAC"

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-2,
        *,
        params: Iterable[Any] | None = None,
        damping: float = 0.01,
        momentum: float = 0.9,
        stat_decay: float = 0.9,
        weight_decay: float = 0.0,
        stat_interval: int = 10,
        inverse_interval: int = 50,
        interval_warmup: int = 500,
        likelihood: Likelihood | None = None,
        inverse: Literal["damped", "eigenbasis"] = "damped",
        max_factor_dim: int = 8192,
        relative_damping: bool = True,
        graft: Graft | None = "adam",
        seed: int = 0,
        process_group: Any = None,
        shard: Literal["inverses"] | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown("KFAC", unknown)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if likelihood is None:
            raise ValueError(
                "likelihood must be given for KFAC: the distribution that the model's output "
                "parametrises, 'categorical' for a cross entropy, 'bernoulli' for a binary one, "
                "'gaussian' for a squared error; see docs/likelihoods.md"
            )
        options, groups = arguments(locals()), named_groups(model, params)
        for name, value, known in (("inverse", inverse, tuple(INVERSES)), ("shard", shard, SHARDS)):
            if value not in known:
                raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}")
        check_settings(options)
        settings = {name: value for name, value in options.items() if OPTIONS[name].per_group}
        for name, param in (pair for group in groups for pair in group["params"]):
            if is_sharded(param):
                raise ValueError(
                    f"model must have whole parameters, and {name!r} is in pieces, as fully_shard "
                    "leaves them: use DistributedDataParallel, or TNT"
                )
            check_dense(param, repr(name))
        self.inverse = inverse
        self.process_group = process_group
        self._group_is_lost = False  # in a copy
        self.shard = shard
        self._model = model
        self._failures = Failures(PARTS)
        self._observed = Observations()
        self._fit = Fit(_ENTRIES)
        self._attempt = Attempt()  # by weight
        self._warned = False
        self._named: set[int] = set()  # layers that a warning said the outputs do not reach
        super().__init__(groups, {**settings, "step": 0})
        whole = {**options, "inverse": inverse}
        for group in self.param_groups:
            check_settings(group)
            for name in repeated_options(group, self.defaults, whole, "KFAC"):
                del group[name]
            warn_if_unbounded(group)
            group["step"] = 0  # a group of another optimizer may bring that one's
        number = {p: n for n, group in enumerate(self.param_groups) for p in group["params"]}
        self._largest = [group["max_factor_dim"] for group in self.param_groups]
        largest = {p: self._largest[n] for p, n in number.items()}
        layers, self._reasons = preconditioned(model, largest)
        self._names, self._layers = list(layers), list(layers.values())
        self._group_numbers = [number[layer.weight] for layer in self._layers]
        self._sampling = Sampling(self._names, self._layers, list(number), likelihood, seed)
        share, others = self._without_factors()
        if share > WARNED_SHARE:
            warn_the_caller(f"KFAC updates {others}")
        self._attach()

    @classmethod
    def paper(cls, model: nn.Module, problem: str | None = None, **options: Any) -> Self:
        """KFAC as in Ren & Goldfarb 2021: absolute damping, no grafting, fixed intervals.

        Args:
            model: as for the class.
            problem: "mnist", "faces", "resnet32" or "vgg16", for the settings of the paper's
                experiment; None for ``lr=0.003, damping=0.3, stat_interval=10,
                inverse_interval=100``.
            options: replace these.
        """
        return cls(model, **{**_PAPER, **paper_settings("KFAC", problem), **options})

    @_disable_dynamo
    @torch.enable_grad()
    def observe(self, output: Any) -> None:
        """Samples labels at the model's output and keeps the statistics of their loss for ``step``.

        Call it between the forward and the ``backward`` of the same pass: the graph is retained and
        no ``.grad`` changes. If gradients are accumulated, call it for each micro-batch: together
        they give the statistics of the whole batch. The observations of a skipped step, as by
        ``GradScaler``, count for the next one: the weights are the same. A layer's observation that
        is not finite is left out if another one is finite. If no statistics are due, observe
        returns at once. All processes call it, and each samples for its own batch.

        Args:
            output: what the likelihood describes, with its graph. If it is a mapping or sequence of
                tensors, the first one with dimensions has the examples as its first dimension.

        Raises:
            ValueError: if the output has no graph, does not fit the likelihood, depends on no
                parameter of this optimizer, or on a layer's call that was not captured or was
                observed before; nothing is then changed.
            RuntimeError: if the output is DistributedDataParallel's with ``static_graph=True``.
        """
        wanted = self._wanted()
        if not wanted:
            return
        # A layer without statistics that no forward pass has called cannot be in the output.
        called = self._observed.called
        due = [layer for layer in wanted if self._scheduled(layer) or layer in called]
        sums: dict[int, LayerSums] = {}
        if due:
            number, processes = self._observed.count, self._processes()
            number = number if processes is None else processes.number(number)
            key = "step", self.param_groups[0]["step"], number
            sums = self._sampling.sums(output, key, due, self._hooks, retain_graph=True)
            self._observed.partial |= self._sampling.partial
            if not self.param_groups[0]["step"]:  # after a skipped step once more
                self._observed.comparisons = watched(
                    self._sampling.likelihood, output, self.param_groups
                )
        self._observed.add(sums, wanted)

    @property
    def has_unfinished_update(self) -> bool:
        """See ``TNT.has_unfinished_update``."""
        return self._attempt.update is not None

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step, which uses up all observations even if it raises.

        A step that raises, for example because memory runs out, can be repeated from the forward
        on: see ``TNT.step``.

        A layer that has a gradient, but no statistics because the observed outputs did not reach
        it, is updated like the parameters outside of layers; a warning names it. If the forward
        pass called it, the optimizer asks again when statistics are next due; otherwise when a
        forward pass calls it.

        Args:
            closure: recomputes the loss, calls ``backward`` and ``observe``, returns the loss.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: if a setting has become wrong; nothing is then changed.
            RuntimeError: if a layer has a gradient, and nothing was observed that could give it
                statistics, or a parameter's state or gradient does not fit its shape or dtype;
                nothing is then changed.
            PreconditionerError: if first statistics or inverses fail, or later ones repeatedly.
                No parameter is then changed.
        """
        if closure is None and self._asks_for_state(self.param_groups):
            self.allocate_state()
            return None
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if self._attempt.update is None:
                self._run()
            else:
                self._attempt.update.run()
        except PreconditionerError:
            self._attempt.forget()  # a retry does not help: the next step has new observations
            raise
        except BaseException as error:
            self._attempt.stop(error, [p for g in self.param_groups for p in g["params"]])
            raise
        finally:
            self._observed.use_up()
        self._attempt.forget()
        for group in self.param_groups:
            group["step"] += 1
        return loss

    def _run(self) -> None:
        """An attempt at a step, from the checks on."""
        for group, largest in zip(self.param_groups, self._largest, strict=False):
            check_settings(group)
            repeated_options(group, self.defaults, self._whole, "KFAC")
            if group["max_factor_dim"] != largest:
                raise RuntimeError(
                    f"max_factor_dim must stay {largest}, as the layers were chosen with, got "
                    f"{group['max_factor_dim']}: set it back, or make the optimizer anew"
                )
        self._check_weights()
        self._check_fit()
        warn_of_mismatch(self._observed.comparisons, self._observed.count)
        warn_if_twice(self._observed)
        processes = self._processes()
        # On a GPU a report arrives one step late, and not everywhere at once. If it stops the
        # training, it must stop all processes at the same step: they wait for it.
        groups, wait = self.param_groups, processes is not None
        self._failures.read(self._layer_states(), self._name, wait=wait, groups=groups)
        if processes is not None or self._observed.sums:
            weights = {i: layer.weight for i, layer in enumerate(self._layers)}
            held = {i: self.state[w]["stats"] for i, w in weights.items() if self._has_state(i)}
            if processes is None:
                self._observed.leave_out_empty(held)
            else:
                self._observed.pool(processes, self._wanted(), self._layers, held)
        self._warn_if_unobserved()
        layers, others = self._to_update()
        self._refresh({layer: sums.means() for layer, sums in self._observed.sums.items()})
        if processes is None or not any(layer.weight.is_cuda for layer in self._layers):
            self._failures.read(self._layer_states(), self._name, groups=groups)
        inverse = INVERSES[self.inverse]
        stages = update(self.param_groups, self.state, layers, others, inverse)
        # A frozen layer that is used later gets its statistics then, like one not used.
        self._observed.asked.update(
            i
            for i, layer in enumerate(self._layers)
            if not is_trainable(layer) and self._has_state(i) and self._scheduled(i)
        )
        unreached = self._observed.unreached_after()
        stages.append(functools.partial(setattr, self._observed, "unreached", unreached))
        self._attempt.finish(stages, resumable=processes is None)

    def warm_start(self, outputs: Iterable[Any], *, model: nn.Module | None = None) -> None:
        """Starts the statistics from their plain mean over many batches, and makes the inverses.

        Best over the whole data set at the initial weights, as in the paper:
        ``opt.warm_start(model(x) for x, _ in batches)``; a generator, because the model must be
        called while this runs. Existing statistics are replaced. A layer's mean is over the batches
        that used it. The model's buffers (batch norm's running statistics) are put back afterwards.
        All processes call it, for the mean over the batches of all, whose numbers may differ.

        Args:
            outputs: for each batch, with its graph: what ``observe`` takes.
            model: another module whose buffers are put back; as for ``TNT``.

        Raises:
            ValueError: if there is no batch, an output does not fit, or none depends on a layer;
                nothing is then changed.
            PreconditionerError: if no batch was finite, or an inverse could not be made;
                nothing is then changed.
        """
        if not isinstance(outputs, Iterable) or isinstance(outputs, Tensor):
            raise TypeError(f"outputs must be an iterable of outputs, got {type(outputs).__name__}")
        processes = self._processes()
        self._check_fit()
        self._warming = True
        try:
            with buffers_put_back(self._model, *([] if model is None else [model])):
                stats, skipped = self._sampling.averages(outputs, self._hooks, processes)
        finally:
            self._warming = False
        fresh = self._first_states(stats)
        self._failures = Failures(PARTS)
        for weight, state in fresh.items():
            state["skipped_statistics"] = skipped
            self._keep(weight, state)

    def allocate_state(self, unreached: Iterable[Tensor] = ()) -> None:
        """Gives every trainable parameter without state a new one, to load into.

        See ``TNT.allocate_state``.

        Args:
            unreached: weights of layers without statistics in the saved state, because no output
                had reached them.
        """
        self._check_fit()
        plain = set(unreached)
        known = {p: group for group in self.param_groups for p in group["params"]}
        if others := [tuple(p.shape) for p in plain - known.keys()]:
            raise ValueError(f"unreached must be parameters of this optimizer, got {others[0]}")
        for param, group in known.items():
            if param.requires_grad:
                add_moments(self.state[param], param, group)
        for layer in self._layers:
            weight = layer.weight
            is_new = "stats" not in self.state.get(weight, {}) and weight not in plain
            if is_trainable(layer) and is_new:
                like: dict[str, Any] = {"dtype": state_dtype(weight), "device": weight.device}
                pair = [torch.zeros(size, size, **like) for size in matrix_shape(layer)]
                factors = [f.zero_() for f in INVERSES[self.inverse].allocated(*pair)]
                state = {"stats": pair, "factors": factors, "first_step": ALLOCATED}
                self._keep(weight, {**state, **dict.fromkeys(COUNTERS, 0)})

    def failures(self) -> dict[str, int]:
        """Returns how often statistics were left out and inverses failed; waits for the device.

        "skipped_statistics" counts the refreshes left out because something was not finite (the
        largest count of a layer), "failed_inverses" the failed refreshes of all layers, "unreached"
        the layers that moved without a preconditioner because no observed output has reached them.
        """
        unreached = sum(
            "stats" not in self.state.get(layer.weight, {})
            and any("momentum" in self.state.get(p, {}) for p in parameters(layer))
            for layer in self._layers
        )
        return self._failures.totals(self._layer_states(), self._name) | {"unreached": unreached}

    def close(self) -> None:
        """Removes the hooks from the model, as ``del opt`` does. Nothing can be observed then."""
        self._detach()
        if self._attached is not None:
            self._attached()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the parameters are the model's that the constructor was given.

        Raises:
            ValueError: always, once the optimizer is made.
        """
        if hasattr(self, "_layers"):
            raise ValueError("param_group cannot be added: give the constructor all, as params")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns state and settings, loadable with ``torch.load(weights_only=True)``.

        Call it between steps.
        """
        if self.has_unfinished_update:
            warn_the_caller(UNFINISHED)
        self._failures.read(self._layer_states(), self._name, wait=True, fatal=False)
        own: dict[str, Any] = {"method": self._method}
        own["sampling"] = checkpoint.sampling_of(self._sampling)
        if self._observed.unreached:
            own["missed"] = self._observed.unreached
        if self._observed.count and self._processes() is None:
            own["observed"] = self._observed.saved()
        if done := self._attempt.accumulated:
            weights = [layer.weight for layer in self._layers]
            own["accumulated"] = [i for i, w in enumerate(weights) if w in done]
        return checkpoint.save_completed(self, super().state_dict, lambda s: s.update(own))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the ``state_dict`` of a KFAC with the same layers and the same ``inverse``.

        Hooks before it (``register_load_state_dict_pre_hook``) may adapt it to the model.

        Raises:
            ValueError: if it is of another optimizer, another model, layers in another order, or
                another ``inverse``; nothing is then changed.
        """
        observed = Observations()
        accumulated: set[Tensor] = set()

        def check(adapted: dict[str, Any]) -> None:
            nonlocal observed
            self._check_state_dict(adapted)
            if self._processes() is None and "observed" in adapted:
                observed = Observations.loaded(adapted["observed"], self._layers)
            known = range(len(self._layers))
            missed = checkpoint.missed_in(adapted, known)
            observed.unreached = {layer: bool(called) for layer, called in missed.items()}
            done = checkpoint.accumulated_in(adapted, known)
            accumulated.update(self._layers[layer].weight for layer in done)

        def finish(adapted: dict[str, Any]) -> None:
            self._failures, self._observed, self._fit = Failures(PARTS), observed, Fit(_ENTRIES)
            self._largest = [group["max_factor_dim"] for group in self.param_groups]
            self._attempt = Attempt(accumulated)
            for param, state in checkpoint.copied_states(self.param_groups, adapted):
                self.state[param].update(state)
            checkpoint.warn_of_other_sampling(self._sampling, adapted)

        checkpoint.load_adapted(self, state_dict, super().load_state_dict, check, finish)

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, settings = self.param_groups, set(self.defaults)
        checkpoint.check_groups(self._method, groups, state_dict, settings)
        layers = {layer.weight: layer for layer in self._layers}
        for name, _, param, state in checkpoint.saved_states(groups, state_dict):
            if param in layers:
                if state.keys() & _OF_LAYERS:  # not a layer that no output has reached
                    check_keys(name, state, _OF_LAYERS)
            elif of_layers := sorted(state.keys() & _OF_LAYERS):
                raise ValueError(f"{name} must hold moments only, got {of_layers}")
            self._check_shapes(name, param, state, layers.get(param))

    def _check_shapes(
        self, name: str, param: Tensor, state: Mapping[str, Any], layer: Layer | None
    ) -> None:
        """Refuses a parameter's state of other shapes; ``layer``: of which it is the weight."""
        moments: list[Any] = [tuple(param.shape)]
        shapes = {"momentum": moments, "second_moment": moments}
        if layer is not None:
            rows, columns = matrix_shape(layer)
            shapes["stats"] = [(rows, rows), (columns, columns)]
            shapes["factors"] = INVERSES[self.inverse].shapes(rows, columns)
        for key in [key for key in shapes if key in state]:
            held = [state[key]] if key in _MOMENTS else state[key]
            got = [tuple(t.shape) if isinstance(t, Tensor) else type(t) for t in held]
            if got != shapes[key]:
                raise ValueError(
                    f"{name}: {key} must have shapes {shapes[key]}, got {got}; is it of "
                    "another model, or with another inverse?"
                )

    def __getstate__(self) -> dict[str, Any]:
        self._failures.read(self._layer_states(), self._name, wait=True, fatal=False)
        own = {name: getattr(self, name) for name in _COPIED}
        own["_group_is_lost"] = self._group_is_lost or self.process_group is not None
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_layers" in state:  # a copy; torch also calls this when it loads a state_dict
            self.process_group = None  # a process group cannot be copied
            self._attach()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        lines.append(f"  {len(self._layers)} layers, and {self._without_factors()[1]}")
        sampling = self._sampling
        lines += [f"  inverse: {self.inverse}", f"  likelihood: {sampling.likelihood}"]
        lines += [f"  seed: {sampling.seed}", f"  shard: {self.shard}"]
        for number, group in enumerate(self.param_groups):
            lines.append(f"  group {number}: {len(group['params'])} parameters")
            # Loading adds torch's own settings to the defaults.
            lines += [f"    {key}: {group[key]}" for key in sorted(self.defaults.keys() & group)]
        return "\n".join([*lines, ")"])

    def _without_factors(self) -> tuple[float, str]:
        """The share of the trainable parameters outside of layers, and what they are."""
        trainable = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        counts: dict[str, int] = {}
        for param in trainable:
            if param in self._reasons:
                why = self._reasons[param]
                counts[why] = counts.get(why, 0) + param.numel()
        share = sum(counts.values()) / max(1, sum(p.numel() for p in trainable))
        kinds = sorted(counts.items(), key=lambda kind: -kind[1])
        listed = ", ".join(f"{count:,} in {why}" for why, count in kinds) or "none"
        return share, f"{share:.1%} of the trainable parameters without preconditioning: {listed}"

    @property
    def _whole(self) -> Settings:
        """The options of the optimizer as a whole."""
        own = {name: getattr(self, name) for name in ("inverse", "process_group", "shard")}
        return own | {name: getattr(self._sampling, name) for name in ("likelihood", "seed")}

    def _processes(self) -> ProcessGroup | None:
        return process_group_of(self.process_group, is_lost=self._group_is_lost)

    # Which layers, and when.

    def _attach(self) -> None:
        self._hooks, handles = hook_layers(self._layers, self._captures)
        self._detach = weakref.finalize(self, _remove, handles)
        self._detach.atexit = False

    def _captures(self, layer: int, has_rows: bool) -> bool:
        """Whether the hook of a layer that is called keeps its input."""
        wanted = self._is_wanted(layer)
        if wanted and has_rows and not self._warming:
            self._observed.called.add(layer)
        return wanted

    def _check_weights(self) -> None:
        known = {p for group in self.param_groups for p in group["params"]}
        for name, layer in zip(self._names, self._layers, strict=True):
            if layer.weight not in known:
                raise RuntimeError(
                    f"layer {name!r} must keep its weight, but it was replaced (as by "
                    "load_state_dict(assign=True)): make the optimizer after that"
                )

    def _check_fit(self) -> None:
        """Refuses states and observations that do not fit parameters, which the user may change."""
        params = [p for group in self.param_groups for p in group["params"]]

        def name(param: Tensor) -> str:
            names = [n for group in self.param_groups for n in group["param_names"]]
            return next(repr(n) for n, p in zip(names, params, strict=True) if p is param)

        def check(param: Tensor, state: dict[str, Any]) -> None:
            layer = next((one for one in self._layers if one.weight is param), None)
            self._check_shapes(name(param), param, state, layer)

        self._fit.check(params, self.state, name, check, {})
        for index, sums in self._observed.sums.items():
            layer = self._layers[index]
            if (len(sums.gradients), len(sums.inputs)) != matrix_shape(layer):
                raise RuntimeError(
                    f"{name(layer.weight)} must keep its shape from observe() to step(), and is "
                    f"now {tuple(layer.weight.shape)}: observe an output again"
                )

    def _asks_for_state(self, groups: Sequence[Settings]) -> bool:
        """Whether torch takes this step to get a new state."""
        is_new = not self.state and checkpoint.has_zero_rates(groups)
        return is_new and checkpoint.has_zero_gradients(groups)

    def _is_wanted(self, layer: int) -> bool:
        """Whether a layer's statistics are due, or its next call may give it missing ones."""
        if not is_trainable(self._layers[layer]):
            return False
        missing = not self._observed.unreached.get(layer, self._has_state(layer))
        return self._warming or self._scheduled(layer) or missing

    def _wanted(self) -> list[int]:
        """The layers that are wanted: the same in all processes from the forward to the step."""
        return [layer for layer in range(len(self._layers)) if self._is_wanted(layer)]

    def _scheduled(self, layer: int) -> bool:
        return is_due(self.param_groups[self._group_numbers[layer]], "stat_interval")

    def _has_state(self, layer: int) -> bool:
        # The layer's state is its weight's. Not self.state[weight], which would add an entry.
        return has_statistics(self.state.get(self._layers[layer].weight, {}))

    def _layer_states(self) -> dict[Tensor, dict[str, Any]]:
        weights = [layer.weight for i, layer in enumerate(self._layers) if self._has_state(i)]
        return {weight: self.state[weight] for weight in weights}

    def _name(self, weight: Tensor) -> str:
        pairs = zip(self._names, self._layers, strict=True)
        return next(f"layer {name!r}, {layer}" for name, layer in pairs if layer.weight is weight)

    # Statistics and inverses.

    def _refresh(self, observed: Mapping[int, list[Tensor]]) -> None:
        """Refreshes the statistics with the observations, then the inverses that are due."""
        first = {i: pair for i, pair in observed.items() if not self._has_state(i)}
        if first and not all_finite_statistics(first.values()):  # waits for the device once
            worst = next(i for i, pair in first.items() if not all_finite_statistics([pair]))
            raise PreconditionerError(
                "the first inputs or gradients for the statistics are not finite, or no row of the "
                "output counts: there are no earlier ones to go on with, for "
                f"{self._name(self._layers[worst].weight)}{diverged(self.param_groups)}"
            )
        states = self._layer_states()  # without those that are new
        for weight, state in self._first_states(first).items():
            self._keep(weight, state)
            self._attempt.accumulated.add(weight)
        done = self._attempt.accumulated
        later = {self._layers[i].weight: pair for i, pair in observed.items()}
        later = {w: pair for w, pair in later.items() if w not in done}
        if later:
            groups = self.param_groups
            decays = {p: group["stat_decay"] for group in groups for p in group["params"]}
            finite = all_finite_statistics(later.values())
            codes = Delivery((~finite).to(torch.int32).expand(len(later)).contiguous())
            blend(states, later, decays, finite)
            done.update(later)
            self._failures.report("statistics", codes, list(later))
        inverted = []
        for group in self.param_groups:
            due = [w for w in factors_due(group, states, done) if w not in self._attempt.inverted]
            for weights in by_device(due):
                codes = Delivery(self._inverses(group, {w: states[w] for w in weights}))
                inverted.append((codes, weights))
        for codes, weights in inverted:
            self._failures.report("inverses", codes, weights)
            self._attempt.inverted.update(weights)

    def _keep(self, weight: Tensor, state: dict[str, Any]) -> None:
        """Replaces a layer's statistics and factors; its moments, and entries of wrappers, stay."""
        others = {k: v for k, v in self.state.get(weight, {}).items() if k not in _OF_LAYERS}
        self.state[weight] = {**others, **state}

    def _first_states(self, stats: Mapping[int, list[Tensor]]) -> dict[Tensor, dict[str, Any]]:
        """Whole states around first statistics. Waits for the inverses: there are no earlier."""
        states: dict[Tensor, dict[str, Any]] = {}
        by_weight = {self._layers[layer].weight: pair for layer, pair in stats.items()}
        batches = [
            (group, weights)
            for group in self.param_groups
            for weights in by_device([p for p in group["params"] if p in by_weight])
        ]
        for group, weights in batches:
            for weight in weights:
                pair = by_weight[weight]
                factors = INVERSES[self.inverse].allocated(*pair)
                state = {"stats": pair, "factors": factors, "first_step": group["step"]}
                states[weight] = {**state, **dict.fromkeys(COUNTERS, 0)}
            codes = self._inverses(group, {w: states[w] for w in weights})
            for weight, code in zip(weights, codes.tolist(), strict=True):
                if code != 0:
                    name, damping = self._name(weight), group["damping"]
                    if self.inverse == "eigenbasis" and damping > 0:
                        raise PreconditionerError(
                            f"the eigenvalues of the {PARTS[code - 1]} of {name} could not be "
                            "computed in float64 either, though its numbers are finite: try "
                            "inverse='damped'"
                        )
                    raise self._failures.first_inverse(code, name, damping)
        return states

    def _inverses(self, group: Settings, states: Mapping[Tensor, dict[str, Any]]) -> Tensor:
        """Computes the factors of states by weight, on one device; see ``Inverse.make``."""
        inverse, how = INVERSES[self.inverse], (group["damping"], group["relative_damping"])
        processes = None if self.shard is None else self._processes()
        if processes is None:
            stats, factors = ([s[key] for s in states.values()] for key in ("stats", "factors"))
            return inverse.make(stats, *how, factors)
        return made_by_owners(processes, inverse, states, *how)

    # The update.

    def _to_update(self) -> tuple[list[Layer], list[Tensor]]:
        """The layers that this step preconditions, and the other parameters that it updates."""
        layers, missed = [], []
        names = {
            p: name
            for group in self.param_groups
            for p, name in zip(group["params"], group["param_names"], strict=True)
            if p.grad is not None
        }
        rest = set(names)
        grafted = {p for g in self.param_groups if g["graft"] == "adam" for p in g["params"]}
        for param, name in names.items():
            if param.grad.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of {name!r} must be dense, got {param.grad.layout}"
                )
            state = self.state.get(param, {})
            if param in grafted and "momentum" in state and "second_moment" not in state:
                raise RuntimeError(
                    f"graft='adam' must be set before the first step: {name!r} has no "
                    "second_moment in its state"
                )
        for index, layer in enumerate(self._layers):
            own = rest.intersection(parameters(layer))
            if not own:
                continue
            if self._has_state(index) or index in self._observed.sums:
                layers.append(layer)
            elif index in self._observed.asked or index in self._observed.unreached:
                missed.append(index)
                continue
            elif not is_trainable(layer):  # frozen, with a gradient of zero that zero_grad left
                continue
            else:
                raise RuntimeError(
                    f"step() has no statistics for {self._name(layer.weight)}, which has a "
                    "gradient: call observe(output) before loss.backward(), or attach(model) "
                    "once, with outputs that depend on every layer the loss depends on"
                    f"{self._observed.hint}"
                )
            rest -= own
        for weight in (self._layers[index].weight for index in missed):
            if is_allocated(self.state.get(weight, {})):
                self._keep(weight, {})
        self._warn_of_missed(missed)
        return layers, [p for p in names if p in rest]

    def _warn_of_missed(self, layers: Iterable[int]) -> None:
        new = [layer for layer in layers if layer not in self._named]
        self._named.update(new)
        if new:
            warn_the_caller(
                "the loss depends on layers that the observed outputs do not depend on: "
                f"{', '.join(repr(self._names[layer]) for layer in new)}; they are updated without "
                "preconditioning, like parameters outside of layers, until an observed output "
                "reaches them (warned once)"
            )

    def _warn_if_unobserved(self) -> None:
        if not self._observed.count and not self._warned:
            self._warned = any(
                self._has_state(i) and layer.weight.grad is not None and self._scheduled(i)
                for i, layer in enumerate(self._layers)
            )
            if self._warned:
                warn_the_caller(UNOBSERVED + self._observed.hint)


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


# Attributes that a copy keeps besides the state and the groups. The copy adds its own hooks.
_COPIED = (
    "inverse shard _model _names _layers _sampling _failures _observed _attempt _warned _named "
    "_group_numbers _reasons _largest _fit".split()
)

# Entries of the state of a layer's weight, and of any parameter's.
_OF_LAYERS = {"stats", "factors", "first_step", *COUNTERS}
_MOMENTS = {"momentum", "second_moment", "updates"}
_ENTRIES = frozenset({*_MOMENTS, "stats"})

_PAPER: dict[str, Any] = {
    **{"lr": 3e-3, "damping": 0.3, "stat_interval": 10, "inverse_interval": 100},
    **{"interval_warmup": 0, "relative_damping": False, "graft": None},
}

# The constructor warns if a larger share of the trainable parameters has no preconditioner.
WARNED_SHARE = 0.1
