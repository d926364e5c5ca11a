"""The part of a step that runs on the device: what the host has decided, as calls of operators.

Nothing here waits for the device or looks at a value on it, so a CUDA graph can capture it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import gram_ema_, preconditioned_step_
from tnt_optim.gradients import all_finite
from tnt_optim.graft import grafted_step_

Group = dict[str, Any]
Settings = Mapping[str, Any]
States = Mapping[Tensor, dict[str, Any]]
# Parameters of one group on one device: what one call of an operator can serve.
Batch = tuple[Group, list[Tensor]]
# "statistics" or "inverses", a code for each of some parameters (0: all went well), and those.
Report = tuple[str, Tensor, Sequence[Tensor]]
MakeFactors = Callable[[Settings, list[list[Tensor]], list[list[Tensor]]], Tensor]


@dataclass
class DeviceStep:
    """What one step does on the device.

    Attributes:
        blended: whose statistics take in what was observed.
        remade: whose factors are made anew, after that.
        updated: who moves, at last.
        observed: the gradients for the statistics.
        grads: the gradients of the loss.
    """

    blended: list[Batch]
    remade: list[Batch]
    updated: list[Batch]
    observed: dict[Tensor, Tensor]
    grads: dict[Tensor, Tensor]

    def blend(self, states: States, settings: Callable[[Group], Settings]) -> list[Report]:
        """Blends what was observed into the statistics, if all of it is finite."""
        if not self.blended:
            return []
        reports: list[Report] = []
        finite = all_finite(self.observed.values())
        for group, params in self.blended:
            # Decay 1 leaves the statistics alone, whatever the gradient holds.
            keep = torch.ones((), dtype=torch.float64, device=params[0].device)
            decay = keep * settings(group)["stat_decay"]
            decay = torch.where(finite.to(keep.device), decay, keep)
            kept = [states[p] for p in params]
            gradients = viewed([self.observed[p] for p in params], mode_sizes(kept))
            gram_ema_([state["stats"] for state in kept], gradients, decay)
            codes = (~finite).to(torch.int32).expand(len(params)).contiguous()
            reports.append(("statistics", codes, params))
        return reports

    def remake(
        self, states: States, settings: Callable[[Group], Settings], make: MakeFactors
    ) -> list[Report]:
        """Makes the factors that are due; those that fail stay what they were."""
        reports: list[Report] = []
        for group, params in self.remade:
            stats = [states[p]["stats"] for p in params]
            info = make(settings(group), stats, [states[p]["factors"] for p in params])
            reports.append(("inverses", info, params))
        return reports

    def update(self, states: States, settings: Callable[[Group], Settings]) -> None:
        """Moves momenta and parameters."""
        for group, params in self.updated:
            _update(params, [self.grads[p] for p in params], states, settings(group))


def _update(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: States, settings: Settings
) -> None:
    own = [states[p] for p in params]
    sizes = mode_sizes(own)
    weights, directions = viewed(params, sizes), viewed(grads, sizes)
    _count(own, "updates")
    if settings["graft"] == "adam":
        _count(own, "second_moment_updates")
    if settings["graft"] is None:
        preconditioned_step_(
            weights,
            [state["momentum"] for state in own],
            directions,
            [state["factors"] for state in own],
            settings["lr"],
            settings["momentum"],
            settings["weight_decay"],
        )
    else:
        grafted_step_(weights, directions, own, settings)
    for param, weight in zip(params, weights, strict=True):
        if weight is not param and weight.data_ptr() != param.data_ptr():
            # Strides that no view could merge.
            param.copy_(weight.view(param.shape))


def _count(states: Sequence[dict[str, Any]], what: str) -> None:
    """One more of each; a count is a tensor where a CUDA graph has to find it."""
    counts = [state[what] for state in states]
    if counts and isinstance(counts[0], Tensor):
        torch._foreach_add_(counts, 1)
        return
    for state in states:
        state[what] += 1


def mode_sizes(states: Sequence[Mapping[str, Any]]) -> list[torch.Size]:
    """The shapes of parameters seen as tensors of modes."""
    return [state["momentum"].shape for state in states]


def viewed(tensors: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors in the shapes of their modes; those that have them already are not copied."""
    return [
        tensor if tensor.shape == shape else tensor.reshape(shape)
        for tensor, shape in zip(tensors, sizes, strict=True)
    ]


def by_device(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Splits parameters by device."""
    lists: dict[torch.device, list[Tensor]] = {}
    for param in params:
        lists.setdefault(param.device, []).append(param)
    return list(lists.values())
