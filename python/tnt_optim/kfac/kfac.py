"""KFAC (Martens & Grosse 2015; Grosse & Martens 2016), as in Ren & Goldfarb 2021."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Never, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tnt_optim.autograd import buffers_put_back
from tnt_optim.checks import refuse_unknown
from tnt_optim.directions import directions_
from tnt_optim.fit import REPAIR
from tnt_optim.kfac.activations import hook_layers
from tnt_optim.kfac.earlier import converted
from tnt_optim.kfac.inverses import PARTS, damped, eigenbasis, rotated
from tnt_optim.kfac.layers import named_groups, preconditioned
from tnt_optim.kfac.observations import LayerStatistics, TrainingLayers
from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.likelihoods import Likelihood
from tnt_optim.messages import warn_if_unbounded, warn_the_caller
from tnt_optim.modes import Group, Layout, Rows, Settings, State, check_dense, is_sharded
from tnt_optim.options import (
    OPTIONS,
    Fixed,
    Graft,
    Inverse,
    Shard,
    arguments,
    check_settings,
    documented,
)
from tnt_optim.paper import paper_settings
from tnt_optim.processes import Processes
from tnt_optim.schedule import is_due
from tnt_optim.state import has_statistics
from tnt_optim.units import Units


@documented(
    weight_decay="gamma in the paper, decoupled: W <- W - lr (P + weight_decay W); with ``graft`` "
    "not of biases and norms.",
    damping="added to the eigenvalues of G ⊗ A, lambda in the paper. A fraction with "
    "``relative_damping``; without it, in units of the squared gradient.",
    relative_damping="damp with ``damping`` times the average eigenvalue of G ⊗ A.",
    max_factor_dim="a layer with a larger factor takes the momentum, without a preconditioner.",
    likelihood="None: the statistics come from the training's backward. Otherwise from a backward "
    'at sampled labels: "categorical", "bernoulli", "gaussian", a tuple of these, or a function '
    "from the output to the 0-dim mean loss over its first dimension at labels it samples itself; "
    "see ``TNT``.",
)
class KFAC(KroneckerOptimizer):
    r"""Natural-gradient descent with a Kronecker-factored Fisher matrix for every layer.

    It replaces AdamW, and nothing else changes::

        opt = KFAC(model)

    The second moment of the gradient of a layer's weight and bias, [W | b], is modelled as G ⊗ A: A
    from the layer's inputs, with a 1 for the bias, and G from the gradients by its outputs. Its
    inverse preconditions the momentum. With a ``likelihood`` the gradients are taken at labels
    drawn from the model's own predictive distribution: G ⊗ A then models the Fisher matrix, as in
    the paper, and the loop has one more line::

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
    positions. All other parameters are updated with the momentum: norms, embeddings, recurrent
    networks, grouped and transposed convolutions, nn.MultiheadAttention, and layers that share a
    parameter or have a factor above ``max_factor_dim``. ``repr`` counts them; if they are many, a
    warning at construction does, too. A frozen weight or bias of a layer is not updated;
    its momentum counts as zero.

    A = (1/N) Σ a aᵀ and G = (1/P) Σ g gᵀ over the P positions in the N examples of a batch, as in
    Grosse & Martens 2016. Each gradient g is of one example's own loss. Positions are a
    convolution's output positions, or a linear layer's input vectors; N is the number of rows of
    "categorical" logits, else output.shape[0]. Without a likelihood N is the first dimension of a
    layer's input, over which the training loss is taken to be a mean: this and ``GradScaler`` scale
    G, which relative damping cancels. Rows that ``Masked`` leaves out do not count, nor do
    positions on which only such rows depend, such as padding: positions whose g is zero.

    Without a likelihood every backward through a layer counts until the step, also one whose
    gradients are not used; ``zero_grad`` forgets it. A weight that is used outside of its layer's
    calls, too, is not noticed.

    If torch.distributed runs several processes, all make the same calls, each with its part of the
    batch and its own samples. The training equals that of one process that observes the same
    micro-batches in turn. ``model`` may be DistributedDataParallel or the module inside.

    With the defaults every layer's [W | b], and every other parameter, moves by the norm of Adam's
    direction, so that one learning rate serves all; ``KFAC.paper`` has the paper's form. Settings
    of parameter groups may change between steps, except ``max_factor_dim``; ``graft`` cannot become
    "adam" later. ``damping`` takes effect at the next refresh of the inverses.

    ``torch.save(model)`` also saves the hooks, which do nothing when loaded but need this package.
    Call ``close()`` first, or save the model's ``state_dict``.

    Args:
        model: layers added later are not optimized.
        params: some of its parameters, or parameter groups, as any optimizer takes them; None for
            all in one group. A layer has the settings of its weight's group; only ``lr`` and
            ``weight_decay`` of the bias come from the bias's group. ``max_factor_dim=1`` takes a
            group's weights out of the layers.
        {options}

    Raises:
        ValueError: if a setting does not fit, the model has no layer or not these parameters, or
            they are sharded, as by ``fully_shard``.
        TypeError: if ``model`` is no module.
    """

    _method = "KFAC"
    _parts = PARTS
    _is_share_checked = True  # the constructor says what has no preconditioner

    _observed: LayerStatistics
    _units: Units
    inverse, likelihood, seed = Fixed(), Fixed(), Fixed()

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
        inverse: Inverse = "damped",
        max_factor_dim: int = 8192,
        relative_damping: bool = True,
        graft: Graft | None = "adam",
        seed: int = 0,
        process_group: Any = None,
        shard: Shard | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown("KFAC", unknown)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        options, groups = arguments(locals()), named_groups(model, params)
        check_settings(options)
        largest = {}
        for group in groups:
            check_settings(group)
            for name, param in group["params"]:
                if is_sharded(param):
                    raise ValueError(
                        f"model must have whole parameters, and {name!r} is in pieces, as "
                        "fully_shard leaves them: use DistributedDataParallel, or TNT"
                    )
                check_dense(param, repr(name))
                largest[param] = group.get("max_factor_dim", max_factor_dim)
        layers, self._reasons = preconditioned(model, largest)
        self._model = model
        chosen = list(layers.values())
        weights = [layer.weight for layer in chosen]
        kind = TrainingLayers if likelihood is None else LayerStatistics
        source = kind(names=list(layers), layers=chosen, weights=weights)
        self._units = _units_of(source, inverse)
        super().__init__(groups, {**options, "precondition_1d": False}, source)
        self._largest = [group["max_factor_dim"] for group in self.param_groups]
        share, others = self._without_factors()
        if share > WARNED_SHARE:
            warn_the_caller(f"KFAC updates {others}")
        self._hook()

    @classmethod
    def paper(  # type: ignore[override]
        cls, model: nn.Module, problem: str | None = None, **options: Any
    ) -> Self:
        """KFAC as in Ren & Goldfarb 2021: absolute damping, no grafting, fixed intervals.

        Args:
            model: as for the class.
            problem: "mnist", "faces", "resnet32" or "vgg16", for the settings of the paper's
                experiment; None for ``lr=0.003, damping=0.3, stat_interval=10,
                inverse_interval=100``.
            options: replace these settings.
        """
        settings = {**_PAPER, **paper_settings("KFAC", problem), **options}
        if "likelihood" not in settings:
            raise ValueError(
                "likelihood must be given for KFAC.paper without a problem: the distribution of "
                "the model's output ('categorical' for a cross entropy), or None for the training "
                "gradients"
            )
        return cls(model, **settings)

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
        super().observe(output)

    def warm_start(self, outputs: Iterable[Any], *, model: nn.Module | None = None) -> None:
        """Starts the statistics from their plain mean over many batches, and makes the inverses.

        Best over the whole data set at the initial weights, as in the paper:
        ``opt.warm_start(model(x) for x, _ in batches)``; a generator, because the model must be
        called while this runs. Existing statistics are replaced. A layer's mean is over the batches
        that used it. The model's buffers (batch norm's running statistics) are put back afterwards.
        All processes call it, with any number of batches each, for the mean over all batches.

        Args:
            outputs: for each batch, with its graph: what ``observe`` takes.
            model: another module whose buffers are put back; as for ``TNT``.

        Raises:
            ValueError: if there is no batch, an output does not fit, or none depends on a layer;
                nothing is then changed.
            PreconditionerError: if no batch was finite, or an inverse could not be made;
                nothing is then changed.
        """
        if not self._groups.modelled:
            raise ValueError("outputs must depend on a layer that requires a gradient: none does")
        if isinstance(outputs, Sequence):
            outputs = iter(outputs)
        with buffers_put_back(*([] if model is None else [self._model])):
            super().warm_start(outputs, model=self._model if model is None else model)

    def close(self) -> None:
        """Removes the hooks from the model, as ``del opt`` does. Nothing can be observed then."""
        self._unhook()
        if self._attached is not None:
            self._attached()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the constructor takes all parameters.

        Raises:
            ValueError: always, once the optimizer is made.
        """
        if hasattr(self, "_largest"):
            raise ValueError("param_group cannot be added: give the constructor all, as params")
        super().add_param_group({**param_group, "units": self._units})
        warn_if_unbounded(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the ``state_dict`` of a KFAC with the same layers and the same ``inverse``.

        See ``TNT.load_state_dict``.
        """
        super().load_state_dict(state_dict)
        self._largest = [group["max_factor_dim"] for group in self.param_groups]

    def _converted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return converted(state_dict, self._groups.all, self._observed.weights)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See ``torch.optim.Optimizer.zero_grad``; forgets statistics of earlier backwards."""
        super().zero_grad(set_to_none)
        if isinstance(self._observed, TrainingLayers):
            self._observed.forget()

    def _factors(self, group: Settings, stats: Rows, out: Rows) -> Tensor:
        make = damped if self.inverse == "damped" else eigenbasis
        return make(stats, group["damping"], group["relative_damping"], out)

    def _directions(
        self,
        group: Settings,
        states: Sequence[State],
        grads: Sequence[Tensor],
        layouts: Sequence[Layout],
    ) -> tuple[list[Tensor], Tensor | None]:
        """See ``KroneckerOptimizer._directions``; eigenvectors take two more products."""
        if self.inverse == "damped":
            return super()._directions(group, states, grads, layouts)
        directions, plain = [], []
        for state, grad, layout in zip(states, grads, layouts, strict=True):
            momentum = group["momentum"] * state["momentum"] + layout.view(grad)
            is_layer = state["factors"][0].dim() == 2
            directions.append(rotated(momentum, state["factors"]) if is_layer else momentum)
            ones = [torch.ones(d, dtype=momentum.dtype, device=grad.device) for d in layout.sizes]
            plain.append({**state, "factors": ones})
        lengths = torch.stack(torch._foreach_norm(directions, 2, torch.float64))
        # Last, because this call writes the moments. It also gives the norms to graft.
        _, norms = directions_(grads, plain, layouts, group)
        if norms is not None:
            norms[:, 1].copy_(lengths)
        return directions, norms

    def _check_settings(self, group: Group) -> list[str]:
        names = super()._check_settings(group)
        for name in _LACKS:
            if group[name] != OPTIONS[name].default:
                raise ValueError(f"{name} cannot be set for a parameter group of KFAC: remove it")
        return names

    def _checked_processes(self) -> Processes:
        for group in self._groups.all:
            check_settings(group)
        for group, largest in zip(self.param_groups, self._largest, strict=False):
            if group["max_factor_dim"] != largest:
                raise RuntimeError(
                    f"max_factor_dim must stay {largest}, as the layers were chosen with, got "
                    f"{group['max_factor_dim']}: set it back, or make the optimizer anew"
                )
        known = {p for group in self.param_groups for p in group["params"]}
        for name, layer in zip(self._observed.names, self._observed.layers, strict=True):
            if layer.weight not in known:
                raise RuntimeError(
                    f"layer {name!r} must keep its weight, but it was replaced (as by "
                    "load_state_dict(assign=True)): make the optimizer after that"
                )
        processes = super()._checked_processes()
        for layer in self._observed.layers:
            bias, wanted = layer.bias, layer.weight.shape[:1]
            if bias is not None and bias.shape != wanted:
                raise RuntimeError(
                    f"{self._name(bias)} must have the shape that its state was made for, "
                    f"{tuple(wanted)}: {REPAIR}"
                )
        return processes

    @property
    def multiplies(self) -> bool:
        """See ``KroneckerOptimizer.multiplies``."""
        return bool(self.inverse == "damped")

    # The hooks.

    def _hook(self) -> None:
        layers = self._observed.layers
        # The index of each parameter's group: every call of a layer needs it.
        groups = enumerate(self.param_groups)
        self._group_index = {p: index for index, group in groups for p in group["params"]}
        training = isinstance(self._observed, TrainingLayers)
        arrived = self._arrived if training else None
        self._observed.hooks, handles = hook_layers(layers, self._captures, arrived)
        self._unhook = weakref.finalize(self, _remove, handles)
        self._unhook.atexit = False

    def _captures(self, index: int, has_rows: bool) -> bool:
        """Whether the hook of a layer that is called keeps its input."""
        weight = self._observed.weights[index]
        replaced = self._observed.layers[index].weight is not weight
        if replaced and isinstance(self._observed, TrainingLayers):
            return False  # torch.func.functional_call with other weights
        trains = self._units.is_trainable(weight)
        wanted = trains and (self._warming or self._is_wanted(weight))
        if wanted and has_rows and not self._warming:
            self._observed.called.add(weight)
        return wanted

    def _arrived(self, index: int, inputs: Tensor, gradient: Tensor) -> None:
        if isinstance(self._observed, TrainingLayers) and not self._warming:
            self._observed.arrived(index, inputs, gradient)

    def _is_wanted(self, weight: Tensor) -> bool:
        """Whether a layer's statistics are due, or its next call may give it missing ones."""
        index, groups = self._group_index[weight], self._groups.all
        if index >= len(groups):  # the group was removed: ``step`` raises
            return False
        is_new = not has_statistics(self.state.get(weight, {}))
        scheduled = is_due(groups[index], "stat_interval")
        return scheduled or self._observed.waits_for(weight, is_new=is_new)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_model", "_reasons", "_largest")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_model" in state:  # a copy; torch also calls this when it loads a state_dict
            self._units = _units_of(self._observed, self.inverse)
            self._hook()

    def __repr__(self) -> str:
        lines = super().__repr__().splitlines()
        layers = f"  {len(self._observed.layers)} layers, and {self._without_factors()[1]}"
        return "\n".join([lines[0], layers, *lines[1:]])

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


def _units_of(source: LayerStatistics, inverse: str) -> Units:
    biases = {w: layer.bias for w, layer in zip(source.weights, source.layers, strict=True)}
    return Units(biases, has_spectra=inverse == "eigenbasis")


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


_PAPER: dict[str, Any] = {
    **{"lr": 3e-3, "damping": 0.3, "stat_interval": 10, "inverse_interval": 100},
    **{"interval_warmup": 0, "relative_damping": False, "graft": None},
}

# Group options that KFAC does not have.
_LACKS = (
    *("nesterov", "maximize", "rounding", "estimator", "early_roots"),
    *("block_size", "merge_small_dims", "modes"),
)
# The constructor warns if a larger share of the trainable parameters has no preconditioner.
WARNED_SHARE = 0.1
