"""What is preconditioned as one tensor: a parameter, or the weight and bias of a layer, [W | b].

The weight stands for its layer, which has the weight's state and settings. Only the learning rate
and the weight decay differ: weight and bias take them from their own groups.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Units:
    """The layers whose weight and bias are preconditioned together.

    Args:
        biases: the bias of each weight, or None.
        has_spectra: whether a layer's factors end with one more matrix like [W | b].
    """

    def __init__(
        self, biases: Mapping[Tensor, Tensor | None], *, has_spectra: bool = False
    ) -> None:
        self._biases = dict(biases)
        self._weights = {bias: weight for weight, bias in biases.items() if bias is not None}
        self.has_spectra = has_spectra

    def __reduce__(self) -> Any:
        """Saves no parameters, as a part of a saved group; the optimizer has its own units."""
        return Units, ({},)

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._biases)

    def __contains__(self, param: object) -> bool:
        return param in self._biases

    def key(self, param: Tensor) -> Tensor:
        """The parameter that has the state: the weight for a bias, else the parameter itself."""
        return self._weights.get(param, param)

    def members(self, key: Tensor) -> list[Tensor]:
        """The parameters of a unit."""
        bias = self._biases.get(key)
        return [key] if bias is None else [key, bias]

    def is_trainable(self, key: Tensor) -> bool:
        """Whether a parameter of a unit requires a gradient."""
        return any(p.requires_grad for p in self.members(key))

    def sizes(self, weight: Tensor) -> tuple[int, int]:
        """The shape of [W | b]."""
        has_bias = self._biases[weight] is not None
        return weight.shape[0], math.prod(weight.shape[1:]) + has_bias

    def columns(self, key: Tensor) -> list[slice | None]:
        """Which columns of a unit's matrix belong to each member; None for all of a tensor."""
        return [None] if len(self.members(key)) == 1 else [slice(-1), slice(-1, None)]

    def joined(self, key: Tensor, values: Mapping[Tensor, Tensor]) -> Tensor:
        """A unit's tensor from values by parameter: at least one; a missing one counts as 0."""
        if key not in self:
            return values[key]
        rows, columns = self.sizes(key)
        members = self.members(key)
        if len(members) == 1:
            return values[key].reshape(rows, columns)
        like = next(values[p] for p in members if p in values)
        parts = [
            values[p].reshape(rows, width) if p in values else like.new_zeros(rows, width)
            for p, width in zip(members, (columns - 1, 1), strict=True)
        ]
        return torch.cat(parts, dim=1)


NOTHING = Units({})  # no parameter has statistics, as for Muon
torch.serialization.add_safe_globals([Units])  # a wrapper may save the groups as they are


def units_of(groups: Sequence[Mapping[str, Any]]) -> Units:
    """The layers of an optimizer: all groups have the same, or none have any."""
    units: Units = groups[0].get("units", NOTHING) if groups else NOTHING
    return units


class Member(NamedTuple):
    """A parameter, and which columns of its unit's direction update it."""

    param: Tensor
    settings: Mapping[str, Any]  # its own group's at this step
    columns: slice | None  # None: the whole direction, which may be no matrix

    def part(self, direction: Tensor) -> Tensor:
        """Its part of the direction, in its own shape; (1,) for a scalar."""
        part = direction if self.columns is None else direction[:, self.columns]
        return part.reshape(self.param.shape or (1,))
