"""KFAC's source of statistics: [G, A] of each layer, from its inputs and output gradients.

A weight stands for its layer. The hooks of ``activations`` keep the inputs. The gradients are taken
at labels sampled from the model's output, or from the training's backward (``TrainingLayers``).
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tnt_optim import checkpoint
from tnt_optim.autograd import (
    before_backward,
    check_reached,
    checked_replicas,
    leaves_of,
    without_autocast,
)
from tnt_optim.groups import Groups
from tnt_optim.kfac.activations import LayerHook, captured_calls
from tnt_optim.kfac.layers import Layer, is_trainable, matrix_shape
from tnt_optim.kfac.statistics import LayerSums, all_finite_statistics, layer_sums, pooled_sums
from tnt_optim.likelihoods import (
    check_scalar_loss,
    example_count,
    loss_at_samples,
    share_counted,
    with_rows,
)
from tnt_optim.mismatch import watched
from tnt_optim.modes import Layout, state_dtype
from tnt_optim.observations import LOSS_ONLY, PATIENCE, Observed
from tnt_optim.processes import Processes
from tnt_optim.schedule import is_due

Pair = list[Tensor]  # [G, A]


@dataclass(kw_only=True)
class LayerStatistics(Observed):
    """The statistics of layers since the last step."""

    names: Sequence[str]
    layers: Sequence[Layer]
    weights: Sequence[Tensor]  # torch.func.functional_call may replace a layer's for one call
    hooks: Sequence[LayerHook] = ()
    # By weight, over the examples of all outputs that reached the layer.
    sums: dict[Tensor, LayerSums] = field(default_factory=dict)
    called: set[Tensor] = field(default_factory=set)  # layers whose input a forward pass kept

    @property
    def by_weight(self) -> dict[Tensor, Layer]:
        """The layers by weight."""
        return dict(zip(self.weights, self.layers, strict=True))

    def wanted(self, due: Sequence[Tensor]) -> list[Tensor]:
        """See ``Empirical.wanted``."""
        layers = self.by_weight
        return [weight for weight in due if is_trainable(layers[weight])]

    def observe(
        self, optimizer: Any, output: Any, wanted: list[Tensor], processes: Processes
    ) -> None:
        """Samples labels at an output; keeps the sums of the layers that it depends on."""
        groups = optimizer.param_groups
        scheduled = {p for g in groups if is_due(g, "stat_interval") for p in g["params"]}
        # A layer without statistics that no forward pass has called cannot be in the output.
        due = [weight for weight in wanted if weight in scheduled or weight in self.called]
        sums: dict[Tensor, LayerSums] = {}
        if due:
            key = "step", groups[0]["step"], processes.global_index(self.count)
            sums = self._sums(optimizer, output, key, due, retain_graph=True)
            if not groups[0]["step"]:  # a skipped first step compares again
                self.comparisons = watched(optimizer.likelihood, output, groups)
        self.sums |= {w: self.sums[w] + s if w in self.sums else s for w, s in sums.items()}
        self.asked.update(wanted)
        self.count += 1

    def _sums(
        self,
        optimizer: Any,
        output: Any,
        key: tuple[int | str, ...],
        due: Sequence[Tensor],
        *,
        retain_graph: bool,
    ) -> dict[Tensor, LayerSums]:
        """The sums over a batch, for the due layers that its output depends on.

        ``key`` names the random stream of the labels.
        """
        loss, examples = self._loss(optimizer, output, key)
        layers = self.layers
        self.partial |= any(r.find_unused_parameters for r in checked_replicas(loss))
        wanted = set(due)
        indices = [i for i, weight in enumerate(self.weights) if weight in wanted]
        reached = captured_calls(loss, indices, self.names, layers, self.hooks)
        if not reached:  # with layer drop it may miss every layer, but never every parameter
            check_reached(leaves_of(loss).intersection(Groups(optimizer.param_groups).params))
            return {}
        calls = [(index, *pair) for index, pairs in reached.items() for pair in pairs]
        with without_autocast(loss), before_backward():
            gradients = torch.autograd.grad(
                loss,
                [edge for _, edge, _ in calls],
                # Gradients of the sum of the losses: those of the mean may underflow in float16.
                torch.ones_like(loss).mul_(examples),
                retain_graph=retain_graph,
                allow_unused=True,
            )
            sums: dict[Tensor, LayerSums] = {}
            for (index, _, call), gradient in zip(calls, gradients, strict=True):
                if gradient is not None and gradient.numel():
                    of_call = self._of_call(layers[index], call.inputs, gradient, examples)
                    weight = self.weights[index]
                    sums[weight] = sums[weight].with_call(of_call) if weight in sums else of_call
        for _, _, call in calls:
            # The graph lives until the user's backward, but the input is not needed any more.
            call.inputs, call.observed = call.inputs.new_empty(0), True
        return sums

    def _loss(
        self, optimizer: Any, output: Any, key: tuple[int | str, ...]
    ) -> tuple[Tensor, int | Tensor]:
        """The mean loss over examples, and how many examples count."""
        likelihood, devices = optimizer.likelihood, {weight.device for weight in self.weights}
        loss = loss_at_samples(likelihood, output, optimizer.seed, key, devices)
        examples = batch_size(output) if callable(likelihood) else example_count(likelihood, output)
        share = share_counted(likelihood, output)
        return loss, (share * examples).round() if isinstance(share, Tensor) else examples

    def _of_call(
        self, layer: Layer, inputs: Tensor, gradient: Tensor, examples: int | Tensor
    ) -> LayerSums:
        """The sums of one call, from the gradient of the sum of the examples' losses."""
        return layer_sums(layer, inputs, gradient, examples)

    def gradients(
        self,
        processes: Processes,
        due: Sequence[Tensor],
        with_gradients: Container[Tensor],
        held: Container[Tensor],
    ) -> Mapping[Tensor, Any]:
        """See ``Empirical.gradients``: [G, A] of layers; ``held`` has their states, if any."""
        self._check_sizes()
        return super().gradients(processes, due, with_gradients, held)

    def means(self, held: Container[Tensor]) -> dict[Tensor, Pair]:
        """See ``Observed.means``. A layer without a position that counts keeps earlier means."""
        for weight, sums in self.sums.items():
            if weight in held and isinstance(sums.positions, Tensor):
                self.sums[weight] = sums.if_reached(sums.positions, _earlier(weight, held))
        return {weight: sums.means() for weight, sums in self.sums.items()}

    def _check_sizes(self) -> None:
        layers = self.by_weight
        for weight, sums in self.sums.items():
            if (len(sums.gradients), len(sums.inputs)) != matrix_shape(layers[weight]):
                name = next(n for n, w in zip(self.names, self.weights, strict=True) if w is weight)
                raise RuntimeError(
                    f"layer {name!r} must keep its shape from observe() to step(), and is now "
                    f"{tuple(weight.shape)}: observe an output again"
                )

    def pooled(
        self, processes: Any, wanted: Sequence[Tensor], held: Container[Tensor]
    ) -> dict[Tensor, Pair]:
        """See ``Observed.pooled``. Without asking, layers not reached keep earlier means."""
        reached, earlier = list(wanted), {}
        if self.asks(wanted, held):
            observed, (reached, called) = self.anywhere(processes, wanted, self.sums, self.called)
            self.called = set(called)
            if not observed:
                return {}
        else:
            earlier = {weight: _earlier(weight, held) for weight in wanted}
        sums: dict[Tensor, LayerSums] = {}
        if reached:
            by_weight, has_observed = self.by_weight, int(self.count > 0)
            layers = {weight: by_weight[weight] for weight in reached}
            counters = [has_observed]
            sums, totals = pooled_sums(processes.processes, layers, self.sums, earlier, counters)
            if not has_observed and not totals[0]:  # only such a process waits for the device
                return {}
        self.sums, self.count = sums, max(self.count, 1)
        self.asked.update(wanted)
        return {weight: each.means() for weight, each in sums.items()}

    def witnesses(self, observed: Iterable[Any]) -> list[Tensor]:
        """Roots of traces: no entry of a Gram matrix is larger than the largest of its diagonal."""
        return [matrix.trace().sqrt() for pair in observed for matrix in pair]

    def accumulate_(
        self,
        stats: Sequence[list[Tensor]],
        observed: Sequence[Any],
        layouts: Sequence[Layout],
        decay: float | Tensor,
        factors: Sequence[list[Tensor]] | None,
    ) -> None:
        """S <- decay S + (1 - decay) M for the observed means M, which are overwritten.

        All memory is allocated before the first S changes.
        """
        pairs = zip(stats, observed, strict=True)
        matrices = [sm for pair, means in pairs for sm in zip(pair, means, strict=True)]
        decays = [torch.ones((), dtype=s.dtype, device=s.device).mul_(decay) for s, _ in matrices]
        changes = [d < 1 for d in decays]  # with decay 1 nothing changes, whatever M holds
        for (stat, mean), d in zip(matrices, decays, strict=True):
            mean.lerp_(stat, d)
        for (stat, mean), change in zip(matrices, changes, strict=True):
            torch.where(change, mean, stat, out=stat)

    def batch_gradients(
        self, optimizer: Any, outputs: Iterable[Any], processes: Any
    ) -> Iterator[dict[Tensor, Any]]:
        """[G, A] of each layer: the plain mean over the batches of all processes that used it.

        First yields a pair that is not finite for each batch that was left out.
        """
        stats: dict[Tensor, Pair] = {}
        counts: dict[Tensor, int] = {}
        batches = skipped = 0
        due = self.wanted(self.weights)
        for index, output in enumerate(self.batches(optimizer, outputs, processes)):
            key = "warm start", processes.global_index(index)
            sums = self._sums(optimizer, output, key, due, retain_graph=False)
            batch = {weight: each.means() for weight, each in sums.items()}
            batches += 1
            if batch and not all_finite_statistics(batch.values()):
                skipped += 1
                continue
            for weight, pair in batch.items():
                counts[weight] = counts.get(weight, 0) + 1
                for mean, matrix in zip(stats.setdefault(weight, pair), pair, strict=True):
                    mean.lerp_(matrix, 1 / counts[weight])
        if processes.is_distributed and due:
            weighted = {
                w: LayerSums(g * counts[w], a * counts[w], counts[w], counts[w])
                for w, (g, a) in stats.items()
            }
            by_weight, counters = self.by_weight, [batches, skipped]
            layers = {weight: by_weight[weight] for weight in due}
            pooled, totals = pooled_sums(processes.processes, layers, weighted, {}, counters)
            batches, skipped = totals.tolist()
            stats = {
                w: [sums.gradients / count, sums.inputs / count]
                for w, sums in pooled.items()
                if (count := int(sums.examples))
            }
        for _ in range(skipped):
            yield {due[0]: [torch.full((1, 1), torch.nan, device=due[0].device)] * 2}
        if batches > skipped:
            if not stats:
                raise ValueError(
                    "outputs must depend on a layer that requires a gradient, and none do"
                )
            yield stats

    def requires(self, param: Tensor) -> bool:
        """See ``Empirical.requires``: a layer that was not called has nothing to observe."""
        return param not in self.missed

    def overlooked(self) -> set[Tensor]:
        """See ``Empirical.overlooked``."""
        return self.asked | self.missed.keys()

    def batches(
        self, optimizer: Any, outputs: Iterable[Any], processes: Processes
    ) -> Iterator[Any]:
        """See ``Empirical.batches``."""
        return with_rows(optimizer.likelihood, outputs)

    def missed_after(
        self, reached: Container[Tensor], grads: Any, *, is_sharded: bool
    ) -> dict[Tensor, int]:
        """See ``Empirical.missed_after``.

        If a forward pass called a layer, but the observed output does not depend on it, the layer
        is asked for when statistics are due. If none called it, its next call is asked for.
        """
        asked = {w: LOSS_ONLY if w in self.called else PATIENCE for w in self.asked}
        return {w: status for w, status in (self.missed | asked).items() if w not in reached}

    def saved(self, numbers: Mapping[Tensor, int]) -> dict[str, Any]:
        """See ``Empirical.saved``."""
        sums = {numbers[weight]: list(vars(s).values()) for weight, s in self.sums.items()}
        sets = {name: sorted(numbers[w] for w in getattr(self, name)) for name in _SETS}
        return {"sums": sums, **sets, "count": self.count, "attached": self.attached}

    def loaded(self, saved: Any, params: Mapping[int, Tensor]) -> dict[str, Any]:
        """See ``Empirical.loaded``."""
        place, layers = "['observed']", self.by_weight
        known = {index: p for index, p in params.items() if p in layers}
        entries = checkpoint.entries_of(place, saved, ("sums", *_SETS, "count", "attached"))
        fields: dict[str, Any] = {"sums": {}}
        for index, values in checkpoint.by_number(f"{place}['sums']", entries[0], known).items():
            weight, sizes = known[index], matrix_shape(layers[known[index]])
            parts = values if isinstance(values, list) else [values]
            got = [tuple(part.shape) if isinstance(part, Tensor) else part for part in parts]
            if len(got) != 4 or got[:2] != [(d, d) for d in sizes]:
                raise ValueError(
                    f"state_dict['observed'] must have sums of sizes {sizes} for parameter "
                    f"{index}, got {got[:2]}, and two counts, got {got[2:]}"
                )
            grams = checkpoint.copied(values[:2], weight.device, state_dtype(weight))
            where = f"{place}['sums'][{index}]"
            counts = [checkpoint.checked_count(where, n) for n in values[2:]]
            on_device = [n.to(weight.device) if isinstance(n, Tensor) else n for n in counts]
            fields["sums"][weight] = LayerSums(*grams, *on_device)
        for name, given in zip(_SETS, entries[1:3], strict=True):
            indices = checkpoint.numbers_in(f"{place}['{name}']", given, known)
            fields[name] = {known[index] for index in indices}
        for name, count in zip(("count", "attached"), entries[3:], strict=True):
            fields[name] = int(checkpoint.checked_count(f"{place}['{name}']", count))
        return fields

    def use_up(self) -> None:
        """See ``Empirical.use_up``."""
        super().use_up()
        self.sums, self.called = {}, set()


@dataclass(kw_only=True)
class TrainingLayers(LayerStatistics):
    """The statistics of layers from the training's backward, whose loss is a batch mean.

    A layer's first call in a backward counts the examples. Further calls add positions only.
    """

    partial: bool = True  # which layers another process's loss reaches is not known
    passes: dict[Tensor, int] = field(default_factory=dict)  # the last backward of each layer
    samples: ClassVar[bool] = False
    text_of_missed: ClassVar[str] = (
        "no call of its layer gave statistics for {name}, which has a gradient of the loss: is "
        "the model compiled, or the weight used outside of its layer? It is updated with plain "
        "momentum until a call does (warned once; failures() counts such parameters)"
    )

    def arrived(self, index: int, inputs: Tensor, gradient: Tensor) -> None:
        """Takes one call of a layer, in a backward."""
        of_call = self._of_call(self.layers[index], inputs, gradient, 1)
        weight, backward = self.weights[index], torch._C._current_graph_task_id()
        if weight not in self.sums:
            self.sums[weight] = of_call
        elif self.passes.get(weight) == backward:
            self.sums[weight] = self.sums[weight].with_call(of_call)
        else:
            self.sums[weight] = self.sums[weight] + of_call
        self.passes[weight] = backward

    def _loss(
        self, optimizer: Any, output: Any, key: tuple[int | str, ...]
    ) -> tuple[Tensor, int | Tensor]:
        """The training loss itself."""
        return check_scalar_loss("outputs (here: training losses)", output), 1

    def _of_call(
        self, layer: Layer, inputs: Tensor, gradient: Tensor, examples: int | Tensor
    ) -> LayerSums:
        """The sums of one call, from the gradient of the mean loss."""
        count = len(inputs) if inputs.dim() > layer.weight.dim() - 1 else 1  # else no batch
        sums = layer_sums(layer, inputs, gradient, count)
        return replace(sums, gradients=sums.gradients * count**2)

    def gradients(
        self,
        processes: Processes,
        due: Sequence[Tensor],
        with_gradients: Container[Tensor],
        held: Container[Tensor],
    ) -> Mapping[Tensor, Any]:
        """See ``LayerStatistics.gradients``."""
        self.count, self.warned = int(bool(self.sums)), True
        self.asked.update(self.wanted(due))
        pairs, wanted = super().gradients(processes, due, with_gradients, held), set(due)
        return {weight: pair for weight, pair in pairs.items() if weight in wanted}

    def batches(
        self, optimizer: Any, outputs: Iterable[Any], processes: Processes
    ) -> Iterator[Any]:
        """See ``Empirical.batches``."""
        return iter(outputs)

    def requires(self, param: Tensor) -> bool:
        """See ``Empirical.requires``: a layer that no call reached moves with the momentum."""
        return False

    def forget(self) -> None:
        """Forgets what backwards have given since the last step."""
        self.sums, self.passes = {}, {}

    def use_up(self) -> None:
        """See ``Empirical.use_up``."""
        super().use_up()
        self.passes = {}


_SETS = ("asked", "called")


def _earlier(weight: Tensor, held: Any) -> Pair | None:
    """The statistics that a layer has; None if its owner rank has them."""
    stats: Pair | None = held[weight].get("stats")
    return stats


def batch_size(output: Any) -> int:
    """The number of examples of an output: the first dimension of its first tensor that has one."""
    waiting = [output]
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, Tensor) and item.dim() > 0:
            return item.shape[0]
        if isinstance(item, Mapping):
            item = list(item.values())
        if isinstance(item, list | tuple):
            waiting = [*item, *waiting]
    raise ValueError(
        "output must be a tensor with the batch as its first dimension, or hold one in tuples, "
        f"lists and mappings, got {type(output).__name__}"
    )
