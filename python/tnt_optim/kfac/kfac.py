"""KFAC (Martens & Grosse 2015; Grosse & Martens 2016), as in Ren & Goldfarb 2021."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from tnt_optim.autograd import buffers_put_back, check_static_graph, replicas_behind
from tnt_optim.checkpoint import check_method, copied_states, load_adapted
from tnt_optim.distributed.process_group import ProcessGroup, numbered, process_group_of
from tnt_optim.failures import UNOBSERVED, Failures, PreconditionerError, warn_the_caller
from tnt_optim.kfac.activations import hook_layers
from tnt_optim.kfac.checkpoint import check_kfac_state_dict
from tnt_optim.kfac.inverses import INVERSES, PARTS, Matrices
from tnt_optim.kfac.layers import Layer, is_trainable, supported_layers
from tnt_optim.kfac.observations import Observations
from tnt_optim.kfac.sampling import LayerSampling
from tnt_optim.kfac.sharing import SHARDS, make_shared
from tnt_optim.kfac.statistics import LayerSums, all_finite_statistics
from tnt_optim.kfac.step import blend, parameters, update_
from tnt_optim.likelihoods import Likelihood
from tnt_optim.modes import by_device, is_sharded, state_dtype
from tnt_optim.options import check_settings
from tnt_optim.state import COUNTERS


class KFAC(Optimizer):
    r"""Natural-gradient descent with a Kronecker-factored Fisher matrix for every layer.

    The Fisher matrix of a layer's weight and bias together, [W | b], is modelled as G ⊗ A: A from
    the layer's inputs, with a 1 for the bias, G from the gradients by its outputs at labels drawn
    from the model's own predictive distribution. The momentum is preconditioned by its inverse::

        opt = KFAC(model, lr=0.003, damping=0.3, likelihood="bernoulli")
        opt.warm_start(model(x) for x in batches)  # optional
        for x, y in loader:
            opt.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            opt.observe(out)  # the one extra line: nothing unless statistics are due
            loss.backward()
            opt.step()

    Layers are those of ``nn.Linear`` and ``nn.Conv1d`` to ``nn.Conv3d`` (any stride, padding and
    dilation), called as modules, each once in a forward pass. All other parameters (norms,
    embeddings, grouped and transposed convolutions, nn.MultiheadAttention's) take the plain
    momentum gradient. A layer's frozen part counts as zero momentum and does not move.

    Every one of the N examples, output.shape[0], has its own gradient g, N times that of the mean
    loss. Over all examples and positions of a layer, P in number (a convolution's output positions,
    a linear layer's vectors where its input has more than two dimensions):
    A = (1/N) Σ a aᵀ and G = (1/P) Σ g gᵀ, as in Grosse & Martens 2016. Where the output has a row
    for each position, as a language model's logits brought to two dimensions, N is P, and each
    position is an example.

    Where torch.distributed runs several processes, all make the same calls together, each with its
    part of the batch and samples of its own: training is that of one process which observes the
    same micro-batches in turn. ``model`` may be DistributedDataParallel or the module inside.

    There is one parameter group. Its settings may change between steps; ``damping`` shows from the
    next refresh of the inverses. The default damping is the paper's for its MNIST autoencoder, the
    default intervals are those for its CNNs, for which it takes 0.03 and the eigenbasis.

    ``torch.save(model)`` also saves the hooks, dead: loading them takes this package. Say
    ``close()`` first, or save the model's ``state_dict``.

    Args:
        model: all its parameters are optimized; layers that it gets later are not.
        lr: alpha in the paper.
        damping: lambda in the paper; of the unit of the gradient's square.
        momentum: mu in the paper: m <- mu m + g, neither dampened nor bias-corrected.
        stat_decay: beta in the paper, of the statistics' moving average.
        weight_decay: gamma in the paper, decoupled: W <- W - lr (P + weight_decay W).
        stat_interval: T1 in the paper: the statistics are refreshed every so many steps.
        inverse_interval: T2 in the paper: the inverses are refreshed every so many steps, and with
            the statistics during the first so many.
        likelihood: "categorical", "bernoulli", "gaussian", or a function from the output to the
            0-dim mean loss over its first dimension at labels it samples itself; see ``TNT``.
        inverse: "damped": (G + √damping I)^-1 M (A + √damping I)^-1, the paper's for autoencoders;
            "eigenbasis": the inverse of G ⊗ A + damping I, its for CNNs, which needs another matrix
            of the weight's size for each layer, and waits for the device where it is refreshed.
        seed: of the sampled labels; the global generators are never touched.
        process_group: the processes that train copies of one model, as under
            DistributedDataParallel; None for torch.distributed's default group, where there is one.
            The statistics are those of all their batches.
        shard: how they share the work. None: each does all of it. "inverses": each layer's inverses
            are made by one of them and sent to the others.

    Raises:
        ValueError: where a setting does not fit, the model has no layer, or layers are shared, or
            parameters are in pieces, as ``fully_shard`` leaves them.
        TypeError: where ``model`` is no module.
    """

    _method = "KFAC"

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 3e-3,
        *,
        damping: float = 0.3,
        momentum: float = 0.9,
        stat_decay: float = 0.9,
        weight_decay: float = 0.0,
        stat_interval: int = 10,
        inverse_interval: int = 100,
        likelihood: Likelihood = "categorical",
        inverse: str = "damped",
        seed: int = 0,
        process_group: Any = None,
        shard: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        check_settings({"likelihood": likelihood, "seed": seed})
        if inverse not in tuple(INVERSES):
            known = " or ".join(repr(name) for name in INVERSES)
            raise ValueError(f"inverse must be {known}, got {inverse!r}")
        if shard not in SHARDS:
            known = " or ".join(repr(name) for name in SHARDS)
            raise ValueError(f"shard must be {known}, got {shard!r}")
        settings = {
            "lr": lr,
            "damping": damping,
            "momentum": momentum,
            "stat_decay": stat_decay,
            "weight_decay": weight_decay,
            "stat_interval": stat_interval,
            "inverse_interval": inverse_interval,
        }
        check_settings(settings)
        self._names, self._layers = supported_layers(model)
        self._sampling = LayerSampling(self._names, self._layers, likelihood, seed)
        for name, param in model.named_parameters():
            if is_sharded(param):
                raise ValueError(
                    f"model must have whole parameters, and {name!r} is in pieces, as fully_shard "
                    "leaves them: use DistributedDataParallel, or TNT"
                )
            if not param.is_floating_point() or param.layout != torch.strided:
                raise ValueError(
                    "model must have dense real floating-point parameters, got "
                    f"{param.dtype}, {param.layout} for {name!r}"
                )
        self.inverse = inverse
        self.process_group = process_group
        self._group_is_lost = False  # of a copy
        self.shard = shard
        self._model = model
        self._failures = Failures(PARTS)
        self._observed = Observations()
        self._warming = self._warned = False
        super().__init__(list(model.named_parameters()), {**settings, "step": 0})
        self._attach()

    @_disable_dynamo
    def observe(self, output: Any) -> None:
        """Samples labels at the model's output and keeps the statistics of their loss for ``step``.

        To be called between the forward and the ``backward`` of the same pass, which it leaves
        possible: the graph is retained, no ``.grad`` is touched. Once for each micro-batch where
        gradients are accumulated, which together give the statistics of the whole batch; also with
        those of a step that was then skipped, as by ``GradScaler``: they are of the same weights.
        What is not finite is left out of the statistics of a layer that has others. Where no
        statistics are due at this step, it returns at once. Where there are several processes, all
        call it, and each samples for its own batch.

        Args:
            output: what the likelihood describes, with its graph. Of several tensors, in mappings
                or sequences, the first that has dimensions counts the examples by its first one.

        Raises:
            ValueError: where the output has no graph, does not fit the likelihood, depends on no
                layer of the model, or on one whose call was not captured, on two calls of one, or
                on one observed before; nothing is then changed.
            RuntimeError: where the output is DistributedDataParallel's with ``static_graph=True``.
        """
        wanted = self._all_wanted()
        if not wanted:
            return
        # A newcomer that no forward pass has used cannot be in the output.
        due = [layer for layer in wanted if self._scheduled() or layer in self._observed.called]
        sums: dict[int, LayerSums] = {}
        if due:
            number = numbered(self._observed.count, self._team())
            loss = self._sampling.loss(output, "step", self.param_groups[0]["step"], number)
            check_static_graph(replicas_behind(loss))
            sums = self._sampling.sums(loss, output, due, self._hooks, retain_graph=True)
        self._observed.add(sums, wanted)

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step.

        Args:
            closure: recomputes the loss, calls ``backward`` and ``observe``, returns the loss.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: where a setting has become wrong; nothing is then changed.
            RuntimeError: where a layer has a gradient but no statistics; nothing is then changed.
                (One that the outputs observed last did not reach sits the step out instead. One
                that they do not reach though it was called is next asked for at a multiple of T1.)
            PreconditionerError: where first statistics or inverses fail, or later ones repeatedly.
                No parameter is then changed.

        A step that raises has used up what was observed for it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        try:
            check_settings(group)  # anyone may have changed them since
            team = self._team()
            # On a GPU a report may arrive here and not yet there, and where it stops the training
            # it must stop all processes. It is a step old: hardly ever is there anything to wait.
            self._failures.read(self._layer_states(), self._name, wait=team is not None)
            if team is not None:
                held = {i: self.state[self._layers[i].weight]["stats"] for i in self._known()}
                self._observed.pool(team, self._all_wanted(), self._layers, held)
            self._warn_if_unobserved()
            layers, others = self._to_update()
            self._refresh({layer: sums.means() for layer, sums in self._observed.sums.items()})
            if team is None or not any(p.is_cuda for p in group["params"]):
                self._failures.read(self._layer_states(), self._name)
            update_(group, self.state, layers, others, INVERSES[self.inverse])
            self._observed.note_unreached(self._has_state)
        finally:
            self._observed.use_up()
        group["step"] += 1
        return loss

    def warm_start(self, outputs: Iterable[Any], *, model: nn.Module | None = None) -> None:
        """Starts the statistics from their plain average over many batches, and the inverses too.

        Best over the whole data set at the initial weights, as in the paper:
        ``opt.warm_start(model(x) for x, _ in batches)``; a generator, for the model's calls to be
        seen. Statistics that exist already start over. A layer's average is that over the batches
        that used it. The model's buffers (batch norm's running statistics) are put back afterwards.
        Where there are several processes, all call it, and it is the average over the batches of
        all, whose numbers may differ.

        Args:
            outputs: for each batch, with its graph: what ``observe`` takes.
            model: another module whose buffers are put back; as for ``TNT``.

        Raises:
            ValueError: where there is no batch, or an output does not fit; nothing is then changed.
            PreconditionerError: where no batch was finite, or an inverse could not be made;
                nothing is then changed.
        """
        if not isinstance(outputs, Iterable):
            raise TypeError(f"outputs must be iterable, got {type(outputs).__name__}")
        team = self._team()
        self._warming = True
        try:
            with buffers_put_back(self._model, *([] if model is None else [model])):
                stats, skipped = self._sampling.average(outputs, self._hooks, team)
        finally:
            self._warming = False
        fresh = self._first_states(stats)
        self._failures = Failures(PARTS)
        for weight, state in fresh.items():
            state["skipped_statistics"] = skipped
            momentum = {k: v for k, v in self.state.get(weight, {}).items() if k == "momentum"}
            self.state[weight] = {**momentum, **state}

    def failures(self) -> dict[str, int]:
        """Returns how often statistics were left out and inverses failed; waits for the device.

        "skipped_statistics" counts the refreshes left out because something was not finite (of the
        layer that lost most), "failed_inverses" the failed refreshes of all layers.
        """
        states = self._layer_states()
        self._failures.read(states, self._name, wait=True, fatal=False)
        skipped = [state["skipped_statistics"] for state in states.values()]
        failed = [state["failed_inverses"] for state in states.values()]
        return {"skipped_statistics": max(skipped, default=0), "failed_inverses": sum(failed)}

    def close(self) -> None:
        """Removes the hooks from the model; also done when the optimizer goes. No more observe."""
        self._detach()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the parameters are the model's, in one group.

        Raises:
            ValueError: always, once the optimizer is made.
        """
        if self.param_groups:
            raise ValueError("param_group cannot be added: KFAC optimizes its model, in one group")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns state and settings, loadable with ``torch.load(weights_only=True)``.

        To be taken between steps.
        """
        self._failures.read(self._layer_states(), self._name, wait=True, fatal=False)
        return {**super().state_dict(), "method": self._method}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` returned, of an optimizer of a like model.

        Hooks before it (``register_load_state_dict_pre_hook``) may adapt it to the model.

        Raises:
            ValueError: where it is of another optimizer, another model, or another ``inverse``;
                nothing is then changed.
        """

        def check(adapted: dict[str, Any]) -> None:
            check_method(self._method, adapted)
            inverse, settings = INVERSES[self.inverse], set(self.defaults)
            group = self.param_groups[0]
            check_kfac_state_dict(group, self._layers, inverse, settings, adapted)

        def finish(adapted: dict[str, Any]) -> None:
            self._failures, self._observed = Failures(PARTS), Observations()
            self.state.update(copied_states(self.param_groups, adapted, state_dtype))

        load_adapted(self, state_dict, super().load_state_dict, check, finish)

    def __getstate__(self) -> dict[str, Any]:
        self._failures.read(self._layer_states(), self._name, wait=True, fatal=False)
        own = {name: getattr(self, name) for name in _OWN}
        own["_group_is_lost"] = self._group_is_lost or self.process_group is not None
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_layers" in state:  # a copy; torch also comes here when it loads a state_dict
            self.process_group = None  # which cannot be copied
            for name, value in (("shard", None), ("_group_is_lost", False)):  # later than some
                self.__dict__.setdefault(name, value)
            self._attach()

    def __repr__(self) -> str:
        group = self.param_groups[0]
        in_layers = {id(p) for layer in self._layers for p in layer.parameters()}
        others = sum(id(p) not in in_layers for p in group["params"])
        lines = [
            f"{type(self).__name__} (",
            f"  {len(self._layers)} layers, and {others} parameters that take the momentum",
            *(f"    {key}: {group[key]}" for key in sorted(set(group) - {"params", "param_names"})),
            f"    inverse: {self.inverse}",
            f"    likelihood: {self._sampling.likelihood}",
            f"    seed: {self._sampling.seed}",
        ]
        return "\n".join([*lines, ")"])

    def _team(self) -> ProcessGroup | None:
        return process_group_of(self.process_group, is_lost=self._group_is_lost)

    # Which layers, and when.

    def _attach(self) -> None:
        self._hooks, remove = hook_layers(self._layers, self._captured)
        self._detach = weakref.finalize(self, remove)
        self._detach.atexit = False

    def _captured(self, layer: int) -> bool:
        """What its hook asks when a layer is called."""
        wanted = self._wanted(layer)
        if wanted and not self._warming:
            self._observed.called.add(layer)
        return wanted

    def _wanted(self, layer: int) -> bool:
        """Whether a layer's statistics are due, or it has none yet and may get some."""
        if not is_trainable(self._layers[layer]):
            return False
        new = not self._has_state(layer) and not self._observed.unreached.get(layer, False)
        return self._warming or self._scheduled() or new

    def _all_wanted(self) -> list[int]:
        """The same in all processes, between one forward pass and the end of the step."""
        return [layer for layer in range(len(self._layers)) if self._wanted(layer)]

    def _scheduled(self) -> bool:
        group = self.param_groups[0]
        return bool(group["step"] % group["stat_interval"] == 0)

    def _has_state(self, layer: int) -> bool:
        # The layer's state is its weight's. Not `in`: looking at opt.state[p] leaves an entry.
        return "stats" in self.state.get(self._layers[layer].weight, {})

    def _known(self) -> list[int]:
        return [layer for layer in range(len(self._layers)) if self._has_state(layer)]

    def _layer_states(self) -> dict[Tensor, dict[str, Any]]:
        weights = [self._layers[layer].weight for layer in self._known()]
        return {weight: self.state[weight] for weight in weights}

    def _name(self, weight: Tensor) -> str:
        for name, layer in zip(self._names, self._layers, strict=True):
            if layer.weight is weight:
                return f"layer {name!r}, {layer}"
        raise KeyError("not a layer of this optimizer")

    # Statistics.

    def _refresh(self, observed: Mapping[int, list[Tensor]]) -> None:
        """Takes in what was observed, and makes the inverses that are due."""
        group = self.param_groups[0]
        t, interval = group["step"], group["inverse_interval"]
        first = {i: pair for i, pair in observed.items() if not self._has_state(i)}
        if first and not all_finite_statistics(first.values()):
            worst = next(i for i, pair in first.items() if not all_finite_statistics([pair]))
            raise PreconditionerError(
                "the first inputs or gradients for the statistics are not finite: there are no "
                f"earlier statistics to go on with, for {self._name(self._layers[worst].weight)}"
            )
        states = self._layer_states()  # those that were there before
        self.state.update(self._first_states(first))
        later = {self._layers[i].weight: pair for i, pair in observed.items() if i not in first}
        if later:
            codes = blend(states, later, group["stat_decay"])
            self._failures.report_statistics(codes, list(later))
        young = [w for w in later if t - states[w]["first_step"] < interval]
        for weights in by_device(states if t % interval == 0 else young):
            stats = {w: states[w]["stats"] for w in weights}
            codes = self._inverses(stats, [states[w]["factors"] for w in weights])[1]
            self._failures.report_inverses(codes, weights)

    def _first_states(self, stats: Mapping[int, list[Tensor]]) -> dict[Tensor, dict[str, Any]]:
        """Whole states around first statistics. Waits for the inverses: there are no earlier."""
        group, states = self.param_groups[0], {}
        by_weight = {self._layers[layer].weight: pair for layer, pair in stats.items()}
        for weights in by_device(by_weight):
            factors, codes = self._inverses({w: by_weight[w] for w in weights}, None)
            for weight, made, code in zip(weights, factors, codes.tolist(), strict=True):
                if code != 0:
                    name = self._name(weight)
                    raise self._failures.first_inverse(code, name, group["damping"])
                states[weight] = {
                    "stats": by_weight[weight],
                    "factors": made,
                    "first_step": group["step"],
                    **dict.fromkeys(COUNTERS, 0),
                }
        return states

    def _inverses(
        self, stats: Mapping[Tensor, list[Tensor]], out: Matrices | None
    ) -> tuple[Matrices, Tensor]:
        """Makes the inverses of statistics by weight, on one device; see ``Inverse.make``."""
        inverse, damping, team = INVERSES[self.inverse], self.param_groups[0]["damping"], None
        if self.shard is not None:
            team = self._team()
        if team is None:
            return inverse.make(list(stats.values()), damping, out)
        return make_shared(team, inverse, stats, damping, out)

    # The update.

    def _to_update(self) -> tuple[list[Layer], list[Tensor]]:
        """The layers that this step moves, and the parameters outside of all layers."""
        group = self.param_groups[0]
        layers, rest = [], {p for p in group["params"] if p.grad is not None}
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if param in rest and param.grad.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of {name!r} must be dense, got {param.grad.layout}"
                )
        for index, layer in enumerate(self._layers):
            own = rest.intersection(parameters(layer))
            rest -= own
            if own and not self._has_state(index) and index not in self._observed.sums:
                if self._observed.may_wait(index):
                    continue  # the outputs did not reach it, the loss does
                raise RuntimeError(
                    f"step() has no statistics for {self._name(layer.weight)}, which has a "
                    "gradient: call observe(output) between the forward and step(), or "
                    "warm_start() before training, with outputs that depend on every layer the "
                    "loss depends on"
                )
            if own:
                layers.append(layer)
        return layers, [p for p in group["params"] if p in rest]

    def _warn_if_unobserved(self) -> None:
        if self._scheduled() and not self._observed.count and not self._warned:
            self._warned = any(w.grad is not None for w in self._layer_states())
            if self._warned:
                warn_the_caller(UNOBSERVED)


_OWN = (
    "inverse",
    "shard",
    "_model",
    "_names",
    "_layers",
    "_sampling",
    "_failures",
    "_observed",
    "_warming",
    "_warned",
)
