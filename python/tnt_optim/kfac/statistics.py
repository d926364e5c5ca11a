"""KFAC's statistics of one layer: A from its inputs, G from the gradients by its outputs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tnt_kernels import gram_ema_
from tnt_optim.kfac.layers import Layer, input_rows, output_rows
from tnt_optim.modes import state_dtype


@dataclass(frozen=True)
class LayerSums:
    """Sums over the examples of a batch, or of several that are to count as one.

    Attributes:
        gradients: Σ g gᵀ, (out, out), g being gradients of each example's own loss.
        inputs: Σ a aᵀ, (in * kernel + 1, the same).
        examples: how many there are; a 0-dim tensor where only the device knows.
        positions: how many terms each sum has: one or more for each example.
    """

    gradients: Tensor
    inputs: Tensor
    examples: int | Tensor
    positions: int | Tensor

    def __add__(self, other: "LayerSums") -> "LayerSums":
        """Both as one; where one is not finite, the other alone. Does not wait for the device."""
        mine, others = (
            all_finite_statistics([[sums.gradients, sums.inputs]]) for sums in (self, other)
        )

        def chosen(earlier: Any, later: Any) -> Tensor:
            return torch.where(others, torch.where(mine, earlier + later, later), earlier)

        return LayerSums(
            chosen(self.gradients, other.gradients),
            chosen(self.inputs, other.inputs),
            chosen(self.examples, other.examples),
            chosen(self.positions, other.positions),
        )

    def where(self, known: Tensor, means: Sequence[Tensor]) -> "LayerSums":
        """These sums where ``known`` is true, a 0-dim tensor; else such as have those means."""
        gradients, inputs = means
        return LayerSums(
            torch.where(known, self.gradients, gradients),
            torch.where(known, self.inputs, inputs),
            torch.where(known, self.examples, 1),
            torch.where(known, self.positions, 1),
        )

    def means(self) -> list[Tensor]:
        """[G, A]: the gradients' mean over positions, the inputs' sum over those of an example."""
        return [self.gradients / self.positions, self.inputs / self.examples]


@torch.no_grad()
def layer_sums(layer: Layer, inputs: Tensor, gradient: Tensor, examples: int) -> LayerSums:
    """The sums of one layer.

    Args:
        layer: the layer.
        inputs: its input.
        gradient: that of the sum of the examples' losses, by its output.
        examples: how many there are.
    """
    dtype = state_dtype(layer.weight)
    # One matrix at a time: a convolution's patches are as many times its input as it has weights.
    sum_g = _gram(output_rows(layer, gradient), dtype)
    rows = input_rows(layer, inputs)
    sum_a = _gram(rows, dtype)
    if layer.bias is not None:
        sum_a = _bordered(sum_a, rows.sum(0, dtype=dtype), len(rows))
    return LayerSums(sum_g, sum_a, examples, len(rows))


def _bordered(gram: Tensor, total: Tensor, count: int) -> Tensor:
    """Σ [x 1]ᵀ [x 1] from Σ x xᵀ and Σ x: the rows, 302 MB in a layer of VGG16, are not copied."""
    bordered = F.pad(gram, (0, 1, 0, 1), value=count)
    bordered[-1, :-1] = bordered[:-1, -1] = total
    return bordered


def _gram(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ x xᵀ over the rows x, symmetric to the bit.

    The rows are a mode themselves, kept as a diagonal: of the other mode's Gram matrix one triangle
    is computed, where ``addmm`` computes both.
    """
    gram = torch.zeros(rows.shape[1], rows.shape[1], dtype=dtype, device=rows.device)
    gram_ema_([[torch.zeros(len(rows), dtype=dtype, device=rows.device), gram]], [rows], 0.0)
    return gram


def all_finite_statistics(stats: Iterable[list[Tensor]]) -> Tensor:
    """Whether all Gram matrices are finite: no entry is larger than the largest of the diagonal."""
    traces = [matrix.trace() for pair in stats for matrix in pair]
    return torch.stack([trace.to(traces[0].device) for trace in traces]).isfinite().all()


def batch_size(output: Any) -> int:
    """How many examples an output describes: the first dimension of its first tensor with one.

    Raises:
        ValueError: where no tensor in it has a dimension.
    """
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
