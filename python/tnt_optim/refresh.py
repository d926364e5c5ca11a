"""Refreshing statistics and factors.

Statistics take their memory before they change. Factors may be refreshed again after an error: the
same statistics give the same factors. Nothing here waits for the device or reads a value on it, so
that a CUDA graph can record it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tnt_optim.failures import Report
from tnt_optim.interfaces import Method, Source
from tnt_optim.modes import Settings, States, buckets_of, each, layout_of, rows
from tnt_optim.processes import Processes

# Parameters with the settings of one group at this step, on one device.
Resolved = tuple[Settings, Sequence[Tensor]]


def refresh_statistics(
    batch: Resolved,
    observed: Mapping[Tensor, Any],
    finite: Tensor,
    states: States,
    processes: Processes,
    source: Source,
    *,
    deliver: Callable[[Tensor], Any],
    done: set[Tensor],
) -> Report:
    """Adds the observations to statistics, if ``finite`` (a flag on the device) is set.

    ``deliver`` allocates the memory to report codes before anything is written. Parameters join
    ``done`` when their statistics are updated: a repeated step does not update them again.
    """
    settings, params = batch
    codes = deliver((~finite).to(torch.int32).expand(len(params)).contiguous())
    # Decay 1 leaves the statistics as they are, whatever the gradient holds.
    keep = torch.ones((), dtype=torch.float64, device=params[0].device)
    decay = torch.where(finite.to(keep.device), keep * settings["stat_decay"], keep)
    owned = processes.owned(params)
    owned_states = [states[p] for p in owned]
    layouts = list(map(layout_of, owned_states))
    stats, factors = each(owned_states, "stats"), each(owned_states, "factors")
    whitens = settings["estimator"] == "mle"
    # Whitening copies gradients, one bucket at a time.
    for part in buckets_of(owned) if whitens else [slice(None)]:
        values, whitening = [observed[p] for p in owned[part]], factors[part] if whitens else None
        source.accumulate_(stats[part], values, layouts[part], decay, whitening)
        done.update(owned[part])
    done.update(params)
    return Report("statistics", codes, params)


def refresh_factors(
    batches: Iterable[Resolved], states: States, processes: Processes, method: Method
) -> list[Report]:
    """Computes factors from the statistics; a factor that fails keeps its old value."""
    reports: list[Report] = []
    for settings, params in batches:
        owned = processes.owned(params)
        owned_states = [states[p] for p in owned]
        layouts = list(map(layout_of, owned_states))
        stats = rows(each(owned_states, "stats"), layouts)
        factors = rows(each(owned_states, "factors"), layouts)
        codes = torch.zeros(0, dtype=torch.int32, device=params[0].device)
        if owned:
            codes = method._factors(settings, stats, factors)
        codes = _worst_of_blocks(codes, [len(layout.cuts) for layout in layouts])
        codes = processes.codes(params, owned, codes)
        processes.send_factors(params, states)
        reports.append(Report("inverses", codes, params))
    return reports


def _worst_of_blocks(codes: Tensor, counts: Sequence[int]) -> Tensor:
    """The largest code of each parameter's blocks, on the device; ``counts`` blocks for each."""
    if all(count == 1 for count in counts):
        return codes
    return torch.stack([of_blocks.amax() for of_blocks in codes.split(list(counts))])
