"""Statistics of all layers at labels sampled from a model's output."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_optim.autograd import check_reached, check_static_graph, replicas_behind, without_autocast
from tnt_optim.distributed.process_group import ProcessGroup, numbered
from tnt_optim.failures import PreconditionerError
from tnt_optim.kfac.activations import LayerHook, check_uses, walk
from tnt_optim.kfac.layers import Layer, is_trainable
from tnt_optim.kfac.pooling import pooled_averages
from tnt_optim.kfac.statistics import LayerSums, all_finite_statistics, batch_size, layer_sums
from tnt_optim.likelihoods import Likelihood, loss_at_samples


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

    def loss(self, output: Any, *key: int | str) -> Tensor:
        """The loss of an output at labels drawn from the stream named by the seed and ``key``.

        Raises:
            ValueError: where the output does not fit the likelihood.
        """
        devices = {layer.weight.device for layer in self.layers}
        return loss_at_samples(self.likelihood, output, self.seed, key, devices)

    def sums(
        self,
        loss: Tensor,
        output: Any,
        due: Sequence[int],
        hooks: Sequence[LayerHook],
        *,
        retain_graph: bool,
    ) -> dict[int, LayerSums]:
        """The sums over the batch of those due layers that the output depends on.

        Args:
            loss: at sampled labels.
            output: what the likelihood describes, with its graph.
            due: the layers' numbers.
            hooks: those of the layers.
            retain_graph: whether a backward is to follow.

        Raises:
            ValueError: where the output does not fit; see ``KFAC.observe``.
        """
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
        self, outputs: Iterable[Any], hooks: Sequence[LayerHook], team: ProcessGroup | None
    ) -> tuple[dict[int, list[Tensor]], int]:
        """[G, A] of each layer, averaged plainly over the batches that used it, of all processes.

        Returns:
            The averages, and how many batches were left out for not being finite.

        Raises:
            ValueError: where there is no batch, or an output does not fit.
            PreconditionerError: where no batch was finite.
            RuntimeError: where DistributedDataParallel has a static graph.
        """
        stats: dict[int, list[Tensor]] = {}
        counts: dict[int, int] = {}
        batches = skipped = 0
        due = [number for number, layer in enumerate(self.layers) if is_trainable(layer)]
        for index, output in enumerate(outputs):
            loss = self.loss(output, "warm start", numbered(index, team))
            check_static_graph(replicas_behind(loss))
            sums = self.sums(loss, output, due, hooks, retain_graph=False)
            batch = {number: each.means() for number, each in sums.items()}
            batches += 1
            if batch and not all_finite_statistics(batch.values()):
                skipped += 1
                continue
            for number, pair in batch.items():
                counts[number] = counts.get(number, 0) + 1
                for old, new in zip(stats.setdefault(number, pair), pair, strict=True):
                    old.lerp_(new, 1 / counts[number])
        if team is not None:
            layers = {number: self.layers[number] for number in due}
            numbers = batches, skipped
            stats, (batches, skipped) = pooled_averages(team, layers, stats, counts, numbers)
        if not batches:
            raise ValueError("outputs must hold at least one batch, got none")
        if skipped == batches:
            raise PreconditionerError(f"outputs: none of {skipped} batches was finite")
        return stats, skipped
