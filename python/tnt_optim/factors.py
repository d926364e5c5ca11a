"""Factors: they are computed from the statistics, as inverses or roots.

With ``early_roots`` they begin as inverse square roots. The second moment E[g g^T] of training
gradients is their covariance plus the square of their mean. In the first steps the mean is nearly
all of it. The inverse of E[g g^T] would then damp the direction of descent more than any other, and
steps would follow the noise. The inverse square root, as in Adam and Shampoo, weighs both alike.
Once noise dominates, E[g g^T] is close to the Fisher matrix, and the inverse is the better power.
Gradients at sampled labels have mean zero from the start.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tnt_optim.failures import Report
from tnt_optim.interfaces import Method
from tnt_optim.modes import Batch, Settings, State, States, each, layout_of, rows
from tnt_optim.processes import Processes

# Factors become inverses when the mean's share, averaged over the parameters, is below this.
LEAST_SHARE = 0.25


def refresh_factors(
    batches: Iterable[tuple[Settings, Sequence[Tensor]]],
    states: States,
    processes: Processes,
    method: Method,
) -> list[Report]:
    """Computes factors from the statistics; a factor that fails keeps its old value.

    ``batches`` are parameters with their settings at this step. An error may come at any point: the
    same statistics give the same factors again.
    """
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


def takes_roots(group: Settings) -> bool:
    """Whether a group's factors are inverse square roots at this step."""
    return bool(group["early_roots"] and group["takes_roots"])


def mean_share(state: State, momentum: float) -> Tensor | None:
    """The share of the mean in the second moment of a parameter's gradients, float64, 0-dim.

    The share is |m^|^2 / E[|g|^2]: m^ is the momentum as a bias-corrected average of gradients, and
    E[|g|^2] the trace of the statistics. Independent gradients of mean zero reach (1 - mu) /
    (1 + mu) in the long run; the result is scaled so that this counts as 0. It is NaN if all
    gradients were zero, 0 if mu is 0 (then nothing averages), None before the first update.
    """
    if not state.get("stats") or float(state["updates"]) == 0:
        return None
    if momentum == 0:
        return torch.zeros((), dtype=torch.float64, device=state["momentum"].device)
    blocks = layout_of(state).rows(state["stats"])
    trace = torch.stack([_trace(modes[0]) for modes in blocks]).sum()
    average = (1 - momentum) / (1 - momentum ** float(state["updates"]))
    share: Tensor = (average * state["momentum"].double().norm()).square() / trace
    noise = (1 - momentum) / (1 + momentum)
    return (share - noise) / (1 - noise)


def mean_is_small(batches: Sequence[Batch], states: States, processes: Processes) -> bool:
    """Whether the mean's share is below ``LEAST_SHARE``; the host waits.

    The share is averaged over the parameters of all processes.
    """
    device = batches[0][1][0].device
    per_param = [
        mean_share(states[p], float(group["momentum"]))
        for group, params in batches
        for p in processes.owned(params)
    ]
    shares = [share.to(device) for share in per_param if share is not None]
    total = torch.zeros(2, dtype=torch.float64, device=device)
    if shares:
        known = torch.stack(shares)
        total = torch.stack([known.nansum(), (~known.isnan()).sum().double()])
    share, count = processes.total(total).tolist()
    return bool(count and share < LEAST_SHARE * count)


def _trace(stat: Tensor) -> Tensor:
    return (stat if stat.dim() == 1 else stat.diagonal()).sum(dtype=torch.float64)
