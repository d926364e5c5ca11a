"""The parameter groups of an optimizer: their parameters, names and batches."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from tnt_optim.messages import names_of
from tnt_optim.modes import Batch, Group, by_device, is_plain
from tnt_optim.options import as_they_are, same_settings
from tnt_optim.state import statistic_shapes
from tnt_optim.units import Member, Units, units_of


class Groups:
    """The groups of ``optimizer.param_groups``."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups

    @property
    def all(self) -> Sequence[Group]:
        """The groups themselves."""
        return self._groups

    @property
    def params(self) -> list[Tensor]:
        """All parameters."""
        return [p for group in self._groups for p in group["params"]]

    @property
    def units(self) -> Units:
        """What is preconditioned as one tensor."""
        return units_of(self._groups)

    @property
    def keys(self) -> list[Tensor]:
        """The parameters with a state of their own: all but the biases of layers."""
        units = self.units
        return [p for p in self.params if units.key(p) is p]

    @property
    def modelled(self) -> list[Tensor]:
        """The trainable parameters that can have statistics."""
        pairs = ((p, group) for group in self._groups for p in group["params"])
        trains = self.units.is_trainable
        return [p for p, group in pairs if not is_plain(p, group) and trains(p)]

    def gradients(self, batches: Iterable[Batch]) -> dict[Tensor, Tensor | None]:
        """What to descend along, by parameter with a state: the gradient, negated to maximize."""
        units = self.units
        whole = [(group, group["params"]) for group in self._groups] if units else batches
        grads = {
            p: -p.grad if group["maximize"] and p.grad is not None else p.grad
            for group, params in whole
            for p in params
        }
        if not units:
            return grads
        given = {p: grad for p, grad in grads.items() if grad is not None}
        return {p: units.joined(p, given) for _, params in batches for p in params}

    def members(self, keys: Iterable[Tensor]) -> dict[Tensor, list[Member]]:
        """The parameters that the direction of each unit moves, if some units are layers."""
        units = self.units
        if not units:
            return {}
        # As they are: no CUDA graph records a step of such units.
        resolved = [(group["params"], as_they_are(group)) for group in self._groups]
        settings = {p: group_settings for params, group_settings in resolved for p in params}
        return {
            key: [
                Member(p, settings[p], columns)
                for p, columns in zip(units.members(key), units.columns(key), strict=True)
                if p in settings and p.grad is not None
            ]
            for key in keys
        }

    def batches(self, params: Iterable[Tensor]) -> Iterator[Batch]:
        """Batches of the given parameters; groups with equal settings share a batch."""
        wanted = params if isinstance(params, Mapping) else set(params)
        shared: dict[Any, tuple[Group, list[Tensor]]] = {}
        for index, group in enumerate(self._groups if wanted else ()):
            if chosen := [p for p in group["params"] if p in wanted]:
                # Each group draws its random roundings from a stream of its own.
                is_alone = group["rounding"] == "stochastic"
                key = index if is_alone else same_settings(group)
                shared.setdefault(key, (group, []))[1].extend(chosen)
        for group, members in shared.values():
            for batch in by_device(members):
                yield group, batch

    def name(self, param: Tensor) -> str:
        """A parameter as messages name it."""
        for index, group in enumerate(self._groups):
            for name, other in zip(names_of(group), group["params"], strict=False):
                if other is param:
                    return f"parameter {name!r} of group {index}, shape {tuple(param.shape)}"
        raise KeyError("not a parameter of this optimizer")

    def described(self) -> list[str]:
        """Lines for ``repr``: each group's size and settings."""
        lines = []
        for index, group in enumerate(self._groups):
            params = group["params"]
            shapes = [s for p in params for s in statistic_shapes(p, group)]
            full = sum(len(shape) == 2 for shape in shapes)
            lines.append(
                f"  group {index}: {len(params)} parameters, "
                f"{sum(p.numel() for p in params):,} numbers, {full} full and "
                f"{len(shapes) - full} diagonal modes"
            )
            settings = sorted(set(group) - {"params", "param_names", "units"})
            lines += [f"    {key}: {group[key]}" for key in settings]
        return lines

    def unique_names(self) -> dict[Tensor, str]:
        """A name for each parameter, as ``KroneckerOptimizer.diagnostics`` describes it."""
        used = Counter(n for group in self._groups for n in group.get("param_names", ()))
        unique = {}
        for group_index, group in enumerate(self._groups):
            names = names_of(group)
            for index, (p, name) in enumerate(zip(group["params"], names, strict=False)):
                part = name if names.count(name) == 1 else index
                unique[p] = name if used[name] == 1 else f"{group_index}.{part}"
        return unique
