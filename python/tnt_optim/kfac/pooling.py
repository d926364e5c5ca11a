"""KFAC's statistics of all processes, from those of each."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tnt_optim.distributed.process_group import ProcessGroup
from tnt_optim.kfac.layers import Layer, matrix_shape
from tnt_optim.kfac.statistics import LayerSums, all_finite_statistics
from tnt_optim.kfac.triangles import packed, packed_size, unpacked
from tnt_optim.modes import state_dtype

Layers = Mapping[int, Layer]


def summed_matrices(
    team: ProcessGroup, layers: Layers, pairs: Mapping[int, Sequence[Tensor]], counts: Tensor
) -> tuple[dict[int, list[Tensor]], Tensor]:
    """The sums over all processes of each layer's two symmetric matrices, and of some counts.

    Args:
        team: the processes.
        layers: by number, the same in all.
        pairs: of each layer, packed; those that are missing count as zero.
        counts: (n,), of integers.

    Returns:
        The matrices, symmetric to the bit, and the counts; both of the same bits everywhere.
    """
    sent = [counts]
    for number, layer in layers.items():
        if number in pairs:
            sent += pairs[number]
            continue
        dtype, device = state_dtype(layer.weight), layer.weight.device
        for size in matrix_shape(layer):
            sent.append(torch.zeros(packed_size(size), dtype=dtype, device=device))
    total, *triangles = team.sums(sent)
    rest = iter(triangles)
    return {
        number: [unpacked(next(rest), size) for size in matrix_shape(layer)]
        for number, layer in layers.items()
    }, total


def pooled_sums(
    team: ProcessGroup,
    layers: Layers,
    sums: Mapping[int, LayerSums],
    number: int,
    held: Mapping[int, Sequence[Tensor]],
) -> tuple[dict[int, LayerSums], Tensor]:
    """The sums over the examples of all processes. Does not wait for the device.

    Those of a process that are not finite are left out; where that is so in all of them, the means
    are NaN.

    Args:
        team: the processes.
        layers: whose sums, by number, the same in all.
        sums: this process's, of those layers that its outputs reached.
        number: how many outputs those were.
        held: earlier statistics of layers that perhaps no process has reached: such a layer's mean
            is what it has.

    Returns:
        The sums, and how many processes observed anything, on the device.
    """
    device = next(iter(layers.values())).weight.device
    counts, pairs = [_count(int(number > 0), device)], {}
    for layer in layers:
        own = sums.get(layer)
        if own is None:
            counts += [_count(0, device)] * 3
            continue
        pair = [own.gradients, own.inputs]
        finite = all_finite_statistics([pair])
        pairs[layer] = [torch.where(finite, packed(matrix), 0.0) for matrix in pair]
        terms = [_count(own.examples, device), _count(own.positions, device)]
        counts += [_count(1, device), *(term * finite.to(device) for term in terms)]
    matrices, totals = summed_matrices(team, layers, pairs, torch.stack(counts))
    pooled = {}
    for layer, of_layer in zip(layers, totals[1:].view(-1, 3).unbind(), strict=True):
        gradients, inputs = matrices[layer]
        reached, examples, positions = of_layer.to(gradients.device).unbind()
        pooled[layer] = LayerSums(gradients, inputs, examples, positions)
        if layer in held:
            pooled[layer] = pooled[layer].where(reached > 0, held[layer])
    return pooled, totals[0]


def _count(number: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, torch.int64)
    return torch.full((), number, dtype=torch.int64, device=device)


def pooled_averages(
    team: ProcessGroup,
    layers: Layers,
    averages: Mapping[int, Sequence[Tensor]],
    weights: Mapping[int, int],
    numbers: Sequence[int],
) -> tuple[dict[int, list[Tensor]], list[int]]:
    """The averages over the batches of all processes, and sums of some numbers. Waits for both.

    Args:
        team: the processes.
        layers: by number, the same in all.
        averages: [G, A] of each layer, over this process's batches.
        weights: over how many.
        numbers: to be added up.

    Returns:
        The averages of the layers that some batch used, and the sums.
    """
    pairs = {i: [packed(matrix) * weights[i] for matrix in averages[i]] for i in averages}
    counts = [*numbers, *(weights.get(i, 0) for i in layers)]
    device = next(iter(layers.values())).weight.device
    matrices, totals = summed_matrices(team, layers, pairs, torch.tensor(counts, device=device))
    summed = totals.tolist()
    shares = zip(layers, summed[len(numbers) :], strict=True)
    return {
        i: [matrix / weight for matrix in matrices[i]] for i, weight in shares if weight
    }, summed[: len(numbers)]
