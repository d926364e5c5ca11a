"""KFAC's observations: statistics at labels sampled from a model's output, kept until the step.

Layers are known by their numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

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
from tnt_optim.distributed.process_group import ProcessGroup
from tnt_optim.failures import PreconditionerError
from tnt_optim.kfac.activations import LayerHook, captured_calls
from tnt_optim.kfac.layers import Layer, is_trainable, matrix_shape
from tnt_optim.kfac.statistics import LayerSums, all_finite_statistics, layer_sums, pooled_sums
from tnt_optim.likelihoods import (
    Likelihood,
    example_count,
    loss_at_samples,
    share_counted,
    with_rows,
)
from tnt_optim.mismatch import Comparison
from tnt_optim.modes import state_dtype


@dataclass
class Observations:
    """The observations since the last step, and the layers that the outputs did not reach."""

    # Over the examples of all outputs that reached a layer.
    sums: dict[int, LayerSums] = field(default_factory=dict)
    count: int = 0  # outputs observed while any statistics were wanted; it numbers the draws
    # Layers whose statistics were wanted when an output was observed, and when they were called.
    asked: set[int] = field(default_factory=set)
    called: set[int] = field(default_factory=set)
    # Layers that got no statistics in a step that asked for them. True: the forward called the
    # layer, and the output did not depend on it, so later outputs will not either; it is asked for
    # when statistics are due. False: it was not called; its next call gives its statistics.
    unreached: dict[int, bool] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)  # at the first step
    attached: int = 0  # the outputs that the hook of ``attach`` observed
    hint: str = ""  # why nothing is observed at this step, if that is known
    partial: bool = False  # whether outputs may reach other layers in another process
    agreed: bool = False  # whether all processes know of ``partial``, and have the same layers
    warned_twice: bool = False

    def add(self, found: Mapping[int, LayerSums], asked: Iterable[int]) -> None:
        """Adds the sums of one output, which was asked for the layers ``asked``."""
        self.sums |= {
            layer: self.sums[layer] + sums if layer in self.sums else sums
            for layer, sums in found.items()
        }
        self.asked.update(asked)
        self.count += 1

    def leave_out_empty(self, held: Mapping[int, Sequence[Tensor]]) -> None:
        """Puts earlier means in place of sums without a row that counts; as ``pool`` does."""
        for layer, sums in self.sums.items():
            if layer in held and isinstance(sums.positions, Tensor):
                self.sums[layer] = sums.if_reached(sums.positions, held[layer])

    def pool(
        self,
        processes: ProcessGroup,
        wanted: Sequence[int],
        layers: Sequence[Layer],
        held: Mapping[int, Sequence[Tensor]],
    ) -> None:
        """Replaces the sums by the sums over all processes.

        ``wanted`` is the same in all processes, ``held`` are the statistics of layers that have
        some. While a wanted layer has none, and where DistributedDataParallel looks for unused
        parameters, the processes first exchange which layers their outputs reached, and wait.
        Otherwise the pooled counts tell, on the device.
        """
        if not wanted:
            return
        reached = list(wanted)
        if not self.agreed:
            processes.check_alike([layers[layer].weight for layer in wanted])
        if self.partial or not self.agreed or any(layer not in held for layer in wanted):
            flags = [layer in group for group in (self.sums, self.called) for layer in wanted]
            device = layers[0].weight.device
            anyone, partial, *found = processes.anywhere(
                [self.count > 0, self.partial, *flags], device
            )
            if not anyone:
                return
            self.partial, self.agreed = bool(partial), True
            reached = list(compress(wanted, found[: len(wanted)]))
            self.called = set(compress(wanted, found[len(wanted) :]))
            held = {}  # some process has reached each of them
        sums: dict[int, LayerSums] = {}
        if reached:
            chosen = {layer: layers[layer] for layer in reached}
            sums, observers = pooled_sums(processes, chosen, self.sums, held, [int(self.count > 0)])
            if not self.count and not observers[0]:  # waits for the device only if count is 0
                return
        self.sums, self.count = sums, max(self.count, 1)
        self.asked.update(wanted)

    def unreached_after(self) -> dict[int, bool]:
        """What ``unreached`` is after this step, if it succeeds."""
        known = {**self.unreached, **{layer: layer in self.called for layer in self.asked}}
        return {i: called for i, called in known.items() if i not in self.sums}

    def saved(self) -> dict[str, Any]:
        """The observations, for a checkpoint made between ``observe`` and ``step``."""
        sums = {number: list(vars(each).values()) for number, each in self.sums.items()}
        layers = {"asked": sorted(self.asked), "called": sorted(self.called)}
        return {"sums": sums, **layers, "count": self.count, "attached": self.attached}

    @classmethod
    def loaded(cls, saved: Any, layers: Sequence[Layer]) -> "Observations":
        """A copy of what was saved.

        Raises:
            ValueError: if an entry does not fit the layers.
        """
        place, known = "['observed']", range(len(layers))
        names = ("sums", "asked", "called", "count", "attached")
        all_sums, asked, called, count, attached = checkpoint.entries_of(place, saved, names)
        sums = {}
        for number, values in checkpoint.by_number(f"{place}['sums']", all_sums, known).items():
            weight, sizes = layers[number].weight, matrix_shape(layers[number])
            parts = values if isinstance(values, list) else [values]
            got = [tuple(part.shape) if isinstance(part, Tensor) else part for part in parts]
            if len(got) != 4 or got[:2] != [(d, d) for d in sizes]:
                raise ValueError(
                    f"state_dict['observed'] must have sums of sizes {sizes} for layer {number}, "
                    f"got {got[:2]}, and two counts, got {got[2:]}"
                )
            grams = checkpoint.copied(values[:2], weight.device, state_dtype(weight))
            where = f"{place}['sums'][{number}]"
            counts = [checkpoint.checked_count(where, n) for n in values[2:]]
            on_device = [n.to(weight.device) if isinstance(n, Tensor) else n for n in counts]
            sums[number] = LayerSums(*grams, *on_device)
        return cls(
            sums,
            count=int(checkpoint.checked_count(f"{place}['count']", count)),
            asked=set(checkpoint.numbers_in(f"{place}['asked']", asked, known)),
            called=set(checkpoint.numbers_in(f"{place}['called']", called, known)),
            attached=int(checkpoint.checked_count(f"{place}['attached']", attached)),
        )

    def use_up(self) -> None:
        """Forgets the observations."""
        self.sums, self.count, self.asked, self.called = {}, 0, set(), set()
        self.comparisons, self.attached, self.hint = [], 0, ""


@dataclass
class Sampling:
    """Samples labels and computes the statistics of their loss."""

    names: Sequence[str]
    layers: Sequence[Layer]
    params: Sequence[Tensor]  # the optimizer's
    likelihood: Likelihood
    seed: int
    partial: bool = False  # see ``Observations.partial``

    def sums(
        self,
        output: Any,
        key: tuple[int | str, ...],
        due: Sequence[int],
        hooks: Sequence[LayerHook],
        *,
        retain_graph: bool,
    ) -> dict[int, LayerSums]:
        """The sums over a batch, of the due layers that its output depends on.

        ``key`` names the stream of the draws. Raises what ``KFAC.observe`` does.
        """
        devices = {layer.weight.device for layer in self.layers}
        loss = loss_at_samples(self.likelihood, output, self.seed, key, devices)
        self.partial |= any(r.find_unused_parameters for r in checked_replicas(loss))
        reached = captured_calls(loss, due, self.names, self.layers, hooks)
        if not reached:  # it may miss every layer, as with layer drop, but not every parameter
            check_reached(leaves_of(loss).intersection(self.params))
            return {}
        likelihood = self.likelihood
        examples = batch_size(output) if callable(likelihood) else example_count(likelihood, output)
        share = share_counted(likelihood, output)
        counted = (share * examples).round() if isinstance(share, Tensor) else examples
        calls = [(number, *each) for number, found in reached.items() for each in found]
        with without_autocast(loss), before_backward():
            gradients = torch.autograd.grad(
                loss,
                [edge for _, edge, _ in calls],
                # Of the sum of the examples' losses: in float16 those of the mean may underflow.
                torch.ones_like(loss).mul_(counted),
                retain_graph=retain_graph,
                allow_unused=True,
            )
            sums: dict[int, LayerSums] = {}
            for (number, _, call), gradient in zip(calls, gradients, strict=True):
                if gradient is not None and gradient.numel():
                    new = layer_sums(self.layers[number], call.inputs, gradient, counted)
                    sums[number] = sums[number].with_call(new) if number in sums else new
        for _, _, call in calls:
            # The graph lives on through the user's backward; the input need not.
            call.inputs, call.observed = call.inputs.new_empty(0), True
        return sums

    def averages(
        self, outputs: Iterable[Any], hooks: Sequence[LayerHook], processes: ProcessGroup | None
    ) -> tuple[dict[int, list[Tensor]], int]:
        """[G, A] of each layer: the plain mean over the batches of all processes that used it.

        Also returns the number of batches left out because they were not finite.
        """
        stats: dict[int, list[Tensor]] = {}
        counts: dict[int, int] = {}
        batches = skipped = 0
        due = [number for number, layer in enumerate(self.layers) if is_trainable(layer)]
        for index, output in enumerate(with_rows(self.likelihood, outputs)):
            key = "warm start", index if processes is None else processes.number(index)
            sums = self.sums(output, key, due, hooks, retain_graph=False)
            batch = {number: each.means() for number, each in sums.items()}
            batches += 1
            if batch and not all_finite_statistics(batch.values()):
                skipped += 1
                continue
            for number, pair in batch.items():
                counts[number] = counts.get(number, 0) + 1
                for old, new in zip(stats.setdefault(number, pair), pair, strict=True):
                    old.lerp_(new, 1 / counts[number])
        if processes is not None and due:
            weighted = {
                i: LayerSums(g * counts[i], a * counts[i], counts[i], counts[i])
                for i, (g, a) in stats.items()
            }
            layers = {number: self.layers[number] for number in due}
            processes.check_alike([layer.weight for layer in layers.values()])
            pooled, totals = pooled_sums(processes, layers, weighted, {}, [batches, skipped])
            batches, skipped = totals.tolist()
            stats = {
                i: [sums.gradients / count, sums.inputs / count]
                for i, sums in pooled.items()
                if (count := int(sums.examples))
            }
        if not batches:
            raise ValueError("outputs must hold at least one batch, got none")
        if skipped == batches:
            raise PreconditionerError(f"outputs: none of {skipped} batches was finite")
        if not stats:
            raise ValueError("outputs must depend on a layer that requires a gradient, and none do")
        return stats, skipped


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
