"""KFAC's statistics of a layer, G and A: their sums, means, moving average and all-reduce."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tnt_kernels import gram_ema_
from tnt_optim.distributed.process_group import ProcessGroup
from tnt_optim.kfac.layers import Layer, input_rows, matrix_shape, output_rows
from tnt_optim.modes import state_dtype


@dataclass(frozen=True)
class LayerSums:
    """The sums of one layer over the examples of one or more batches.

    Counts are 0-dim tensors if only the device knows them.
    """

    gradients: Tensor  # Σ g gᵀ, (out, out), with g the gradients of each example's own loss
    inputs: Tensor  # Σ a aᵀ, (in * kernel + 1, in * kernel + 1)
    examples: int | Tensor
    positions: int | Tensor  # the number of terms of each sum: one or more for each example

    def __add__(self, other: "LayerSums") -> "LayerSums":
        """Both sums; if one is not finite, the other one. Does not wait for the device."""
        first_good, second_good = (
            all_finite_statistics([[sums.gradients, sums.inputs]]) for sums in (self, other)
        )

        def chosen(first: Any, second: Any) -> Tensor:
            return torch.where(second_good, torch.where(first_good, first + second, second), first)

        return LayerSums(*map(chosen, vars(self).values(), vars(other).values()))

    def with_call(self, other: "LayerSums") -> "LayerSums":
        """These sums and those of another call for the same examples, which adds positions."""
        return LayerSums(
            self.gradients + other.gradients,
            self.inputs + other.inputs,
            self.examples,
            self.positions + other.positions,
        )

    def if_reached(self, reached: Tensor, earlier: Sequence[Tensor] | None) -> "LayerSums":
        """These sums, or earlier means if ``reached`` is 0. Does not wait for the device.

        None stands for zeros, in a process that does not keep the statistics.
        """

        def chosen(now: Any, before: Any) -> Tensor:
            return torch.where(reached > 0, now, before)

        kept = [0.0, 0.0] if earlier is None else earlier
        return LayerSums(*map(chosen, vars(self).values(), [*kept, 1, 1]))

    def means(self) -> list[Tensor]:
        """[G, A]: G is a mean over positions, A a mean over examples of sums over positions."""
        return [self.gradients / self.positions, self.inputs / self.examples]


@torch.no_grad()
def layer_sums(layer: Layer, inputs: Tensor, gradient: Tensor, examples: int | Tensor) -> LayerSums:
    """The sums over a batch, from the gradient of the sum of its losses by the layer's output.

    ``examples`` is a tensor if a mask decides which examples count. Positions with a zero gradient
    are then left out: only examples that do not count depend on them.
    """
    dtype = state_dtype(layer.weight)
    rows, gradients = input_rows(layer, inputs), output_rows(layer, gradient)
    count: int | Tensor = len(rows)
    if isinstance(examples, Tensor):
        examples = examples.to(rows.device)
        reached = (gradients != 0).any(1, keepdim=True)
        # If no position has a gradient, all count, as below a layer whose weights are still zero.
        reached = (reached | ~reached.any()) & (examples > 0)
        rows, count = rows.where(reached, 0.0), reached.sum()
    # One layer at a time: a convolution's patches are larger than its input.
    sum_g, sum_a = _grams([gradients, rows], dtype)
    if layer.bias is not None:
        # Σ [x 1]ᵀ [x 1] from Σ x xᵀ and Σ x: the rows, 302 MB in a layer of VGG16, are not copied.
        sum_a = F.pad(sum_a, (0, 1, 0, 1))
        sum_a[-1, :-1] = sum_a[:-1, -1] = rows.sum(0, dtype=dtype)
        sum_a[-1, -1].fill_(count)  # an assignment would wait for the device
    return LayerSums(sum_g, sum_a, examples, count)


def _grams(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Σ x xᵀ over the rows x of each matrix, symmetric to the bit.

    The rows are a mode too, here with a diagonal statistic. ``gram_ema_`` computes one triangle,
    ``addmm`` both.
    """
    stats = [
        [torch.empty(shape, dtype=dtype, device=rows.device) for shape in ((n,), (d, d))]
        for rows in matrices
        for n, d in [rows.shape]
    ]
    gram_ema_(stats, matrices, 0.0)
    return [gram for _, gram in stats]


def all_finite_statistics(stats: Iterable[Sequence[Tensor]]) -> Tensor:
    """Whether all Gram matrices are finite: no entry is larger than the largest of the diagonal."""
    traces = [matrix.trace() for pair in stats for matrix in pair]
    return torch.stack([trace.to(traces[0].device) for trace in traces]).isfinite().all()


def pooled_sums(
    processes: ProcessGroup,
    layers: Mapping[Tensor, Layer],
    sums: Mapping[Tensor, LayerSums],
    held: Mapping[Tensor, Sequence[Tensor] | None],
    counters: Sequence[int],
) -> tuple[dict[Tensor, LayerSums], Tensor]:
    """The sums over the examples of all processes. Does not wait for the device.

    A process's sums are left out if they are not finite. If all are left out, the means are NaN.

    Args:
        processes: the processes that train copies of the model.
        layers: by weight, the same in all processes.
        sums: this process's sums, for the layers that its outputs reached.
        held: earlier means by weight, returned for a layer that no process has reached.
        counters: their sums over all processes are returned, too.
    """
    device = next(iter(layers.values())).weight.device

    def on_device(count: int | Tensor) -> Tensor:
        if isinstance(count, Tensor):
            return count.to(device, torch.int64)
        return torch.full((), count, dtype=torch.int64, device=device)

    counts, triangles = [on_device(counter) for counter in counters], []
    for weight, layer in layers.items():
        local = sums.get(weight)
        if local is None:
            counts += [on_device(0)] * 3
            empty = layer.weight.new_zeros(0, dtype=state_dtype(layer.weight))
            triangles += [empty.new_zeros(packed_size(size)) for size in matrix_shape(layer)]
            continue
        pair = [local.gradients, local.inputs]
        finite = all_finite_statistics([pair])
        triangles += [torch.where(finite, packed(matrix), 0.0) for matrix in pair]
        terms = [on_device(local.examples), on_device(local.positions)]
        # The layer counts as reached if one of its positions counts.
        counts += [terms[1], *(term * finite.to(device) for term in terms)]
    totals, *triangles = processes.sums([torch.stack(counts), *triangles])
    pooled, rest = {}, iter(triangles)
    by_layer = totals[len(counters) :].view(-1, 3).unbind()
    for (weight, layer), of_layer in zip(layers.items(), by_layer, strict=True):
        matrices = [unpacked(next(rest), size) for size in matrix_shape(layer)]
        reached, *terms = of_layer.to(matrices[0].device).unbind()
        pooled[weight] = LayerSums(*matrices, *terms)
        if weight in held:
            pooled[weight] = pooled[weight].if_reached(reached, held[weight])
    return pooled, totals[: len(counters)]


# Symmetric matrices are sent as triangles. So they are symmetric to the bit after an all-reduce,
# whatever its order of summation.


def packed_size(size: int) -> int:
    """The entries of a packed symmetric matrix with ``size`` rows."""
    return size * (size + 1) // 2


def packed(matrix: Tensor) -> Tensor:
    """The lower triangle of a square matrix, row by row."""
    rows, columns = torch.tril_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def unpacked(flat: Tensor, size: int) -> Tensor:
    """The symmetric matrix, (size, size), from its ``packed`` triangle."""
    rows, columns = torch.tril_indices(size, size, device=flat.device)
    matrix = flat.new_empty(size, size)
    matrix[rows, columns] = matrix[columns, rows] = flat
    return matrix
