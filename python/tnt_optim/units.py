"""What is preconditioned as one tensor: a parameter, or the weight and bias of a layer, [W | b].

The weight stands for its layer: the state is the weight's, and so are the settings, but for the
learning rate and the weight decay, which each of the two has from its own group.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Units:
    """The layers whose weight and bias are preconditioned together.

    Args:
        biases: by weight; None for a layer without.
    """

    def __init__(self, biases: Mapping[Tensor, Tensor | None]) -> None:
        self._biases = dict(biases)
        self._weights = {bias: weight for weight, bias in biases.items() if bias is not None}

    def __contains__(self, param: object) -> bool:
        return param in self._biases

    def key(self, param: Tensor) -> Tensor:
        """The parameter in whose state a parameter's is: the weight for a bias, else itself."""
        return self._weights.get(param, param)

    def members(self, key: Tensor) -> list[Tensor]:
        """The parameters of a unit."""
        bias = self._biases.get(key)
        return [key] if bias is None else [key, bias]

    def sizes(self, weight: Tensor) -> tuple[int, int]:
        """The shape of [W | b]."""
        has_bias = self._biases[weight] is not None
        return weight.shape[0], math.prod(weight.shape[1:]) + has_bias

    def joined(self, weight: Tensor, values: Mapping[Tensor, Tensor]) -> Tensor:
        """[W | b] of values by parameter, of which one is there; a missing one counts as zero."""
        rows, columns = self.sizes(weight)
        members = self.members(weight)
        if len(members) == 1:
            return values[weight].reshape(rows, columns)
        some = next(values[p] for p in members if p in values)
        return torch.cat(
            [
                values[p].reshape(rows, width) if p in values else some.new_zeros(rows, width)
                for p, width in zip(members, (columns - 1, 1), strict=True)
            ],
            dim=1,
        )

    def parts(self, weight: Tensor) -> list["Part"]:
        """Where W, and b if there is one, are in [W | b]."""
        rows, columns = self.sizes(weight)
        if len(self.members(weight)) == 1:
            return [Part((rows, columns), slice(None))]
        return [Part((rows, columns - 1), slice(-1)), Part((rows, 1), slice(-1, None))]


class Part(NamedTuple):
    """Some columns of [W | b], and their shape."""

    sizes: tuple[int, int]
    columns: slice


NO_LAYERS = Units({})


def units_of(groups: Sequence[Mapping[str, Any]]) -> Units:
    """The units of an optimizer: all groups have the same, or none have any."""
    found: Units = groups[0].get("units", NO_LAYERS) if groups else NO_LAYERS
    return found
