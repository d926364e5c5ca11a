"""Statistics of all layers at labels sampled from a model's output."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_optim.capture import LayerHook, check_uses, walk
from tnt_optim.failures import PreconditionerError
from tnt_optim.fisher import Likelihood, check_single_process, loss_at_samples
from tnt_optim.gradients import check_reached, without_autocast
from tnt_optim.layer_statistics import LayerSums, all_finite_statistics, batch_size, layer_sums
from tnt_optim.layers import Layer, is_trainable

Key = tuple[int | str, ...]


@dataclass
class LayerSampling:
    """Samples labels and takes the statistics of their loss.

    Attributes:
        names: the layers' names.
        layers: the layers.
        likelihood: see ``KFAC``.
        seed: see ``KFAC``.
    """

    names: Sequence[str]
    layers: Sequence[Layer]
    likelihood: Likelihood
    seed: int

    def sums(
        self,
        output: Any,
        due: Sequence[int],
        key: Key,
        hooks: Sequence[LayerHook],
        *,
        retain_graph: bool,
    ) -> dict[int, LayerSums]:
        """The sums over the batch of those due layers that the output depends on.

        Args:
            output: what the likelihood describes, with its graph.
            due: the layers' numbers.
            key: names the stream of draws, with the seed.
            hooks: those of the layers.
            retain_graph: whether a backward is to follow.

        Raises:
            ValueError: where the output does not fit; see ``KFAC.observe``.
            RuntimeError: where torch.distributed runs more than one process.
        """
        check_single_process("train in one process, or with TNT and fisher='empirical'")
        devices = {layer.weight.device for layer in self.layers}
        loss = loss_at_samples(self.likelihood, output, self.seed, key, devices)
        graph = walk(loss, hooks)
        reached = check_uses(graph, due, self.names, self.layers)
        if not reached:
            if len(due) == sum(is_trainable(layer) for layer in self.layers):
                check_reached({})  # of a few newcomers it may well miss all
            return {}
        examples = batch_size(output)
        with without_autocast(loss):
            gradients = torch.autograd.grad(
                loss,
                graph.edges(reached),
                # Of the sum of the examples' losses: in float16 those of the mean may underflow.
                torch.full_like(loss, examples),
                retain_graph=retain_graph,
                allow_unused=True,
            )
            uses = [graph.uses[number][0][1] for number in reached]
            sums = {
                number: layer_sums(self.layers[number], use.inputs, g, examples)
                for number, use, g in zip(reached, uses, gradients, strict=True)
                if g is not None
            }
        graph.release(reached, hooks)
        return sums

    def average(
        self, outputs: Iterable[Any], hooks: Sequence[LayerHook]
    ) -> tuple[dict[int, list[Tensor]], int]:
        """[G, A] of each layer, averaged plainly over the batches that used it.

        Returns:
            The averages, and how many batches were left out for not being finite.

        Raises:
            ValueError: where there is no batch, or an output does not fit.
            PreconditionerError: where no batch was finite.
        """
        stats: dict[int, list[Tensor]] = {}
        counts: dict[int, int] = {}
        batches = skipped = 0
        due = [number for number, layer in enumerate(self.layers) if is_trainable(layer)]
        for index, output in enumerate(outputs):
            sums = self.sums(output, due, ("warm start", index), hooks, retain_graph=False)
            batch = {number: each.means() for number, each in sums.items()}
            batches += 1
            if batch and not all_finite_statistics(batch.values()):
                skipped += 1
                continue
            for number, pair in batch.items():
                counts[number] = counts.get(number, 0) + 1
                for old, new in zip(stats.setdefault(number, pair), pair, strict=True):
                    old.lerp_(new, 1 / counts[number])
        if not batches:
            raise ValueError("outputs must hold at least one batch, got none")
        if skipped == batches:
            raise PreconditionerError(f"outputs: none of {skipped} batches was finite")
        return stats, skipped
