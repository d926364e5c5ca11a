"""First states: statistics of one step's gradients, or of many batches, and their factors.

There are no earlier factors to go on with, so the host waits for the device, and a failure raises.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_optim.factors import refresh_factors
from tnt_optim.failures import Failures, PreconditionerError, diverged
from tnt_optim.groups import Groups
from tnt_optim.interfaces import Method
from tnt_optim.modes import States, is_plain, layout_for
from tnt_optim.observations import Empirical
from tnt_optim.processes import Processes
from tnt_optim.state import new_state, zero_statistics

Statistics = dict[Tensor, list[Tensor]]


@dataclass
class FirstStates:
    """Makes states for parameters that have none.

    Args:
        groups: the optimizer's.
        processes: how they divide the step.
        method: computes factors.
        source: adds gradients to statistics.
    """

    groups: Groups
    processes: Processes
    method: Method
    source: Empirical

    def from_gradients(self, observed: Mapping[Tensor, Any]) -> States:
        """States around the statistics of one step's gradients.

        Raises:
            PreconditionerError: if a gradient is not finite, or a factor cannot be computed.
        """
        if observed and not self._are_finite(observed.values()):
            worst = next(p for p, g in observed.items() if not self._are_finite([g]))
            raise PreconditionerError(
                "the first gradient for the statistics is not finite, or its squares are not, or "
                "no row of the output counts: there are no earlier statistics to go on with, for "
                f"{self.groups.name(worst)}{diverged(self.groups.all)}"
            )
        stats: Statistics = {}
        self._accumulate(stats, observed, 0.0)
        return self._around(stats)

    def from_batches(self, gradients: Iterable[dict[Tensor, Tensor]]) -> States:
        """States around the plain average over batches; a batch that is not finite is left out.

        Raises:
            ValueError: if there is no batch.
            PreconditionerError: if no batch is finite, or a factor cannot be computed.
        """
        stats: Statistics = {}
        batches = skipped = 0
        for observed in gradients:
            if not self._are_finite(observed.values()):
                skipped += 1
                continue
            for p in stats.keys() - observed.keys():
                observed[p] = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
            self._accumulate(stats, observed, batches / (batches + 1))
            batches += 1
        if skipped and not batches:
            raise PreconditionerError(f"outputs: none of {skipped} batches gave a finite gradient")
        if not batches:
            raise ValueError("outputs must hold at least one batch, got none")
        states = self._around(stats)
        for state in states.values():
            state["skipped_statistics"] = skipped
        return states

    def without_statistics(self, params: Iterable[Tensor], plain: Container[Tensor]) -> States:
        """Zeros to load into; parameters in ``plain`` have no statistics at all."""
        return {
            p: new_state(p, group, self.processes.kept(p), plain=p in plain or is_plain(p, group))
            for group, new in self.groups.batches(params)
            for p in new
        }

    def _are_finite(self, observed: Iterable[Any]) -> Tensor:
        return self.processes.all_finite(self.source.witnesses(observed))

    def _accumulate(self, stats: Statistics, observed: Mapping[Tensor, Any], decay: float) -> None:
        """Adds gradients to statistics; a parameter with another owner rank gets an empty list."""
        for group, params in self.groups.batches(observed):
            for param in params:
                if param not in stats:
                    is_owner = bool(self.processes.owned([param]))
                    stats[param] = zero_statistics(param, group) if is_owner else []
            owned = [p for p in params if stats[p]]
            layouts = [layout_for(p, group) for p in owned]
            averages, new = [stats[p] for p in owned], [observed[p] for p in owned]
            self.source.accumulate_(averages, new, layouts, decay, None)

    def _around(self, stats: Statistics) -> States:
        """Complete states around statistics."""
        batches, states = list(self.groups.batches(stats)), {}
        for group, params in batches:
            for p in params:
                states[p] = new_state(p, group, self.processes.kept(p), stats=stats[p])
        reports = refresh_factors(batches, states, self.processes, self.method)
        for (group, params), report in zip(batches, reports, strict=True):
            for p, code in zip(params, report.codes.tolist(), strict=True):
                if code != 0:
                    failures = Failures(self.method._parts)
                    raise failures.first_inverse(code, self.groups.name(p), group["damping"])
        return states
