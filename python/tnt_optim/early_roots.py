"""How long factors are inverse square roots of the statistics, before they become inverses.

The second moment E[g g^T] of training gradients is their covariance plus the square of their mean.
In the first steps the mean is nearly all of it. Its inverse then damps the direction of descent
more than any other, and the first steps follow the noise instead. Their inverse square root, as in
Adam and Shampoo, weighs both alike. Once noise dominates, E[g g^T] is close to the Fisher matrix,
and the inverse is the better power. Gradients at sampled labels have mean zero from the start.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_optim.modes import Batch, Settings, State, States, layout_of
from tnt_optim.processes import Processes

# Factors become inverses when the mean has less than this share, on average over the parameters.
LEAST_SHARE = 0.25


def takes_roots(group: Settings) -> bool:
    """Whether a group's factors are inverse square roots at this step."""
    return bool(group["early_roots"] and group["takes_roots"])


def mean_share(state: State, momentum: float) -> Tensor | None:
    """The share of the mean in the second moment of a parameter's gradients, float64, 0-dim.

    That is |m^|^2 / E[|g|^2], with the bias-corrected average m^ of the gradients in the momentum
    and the trace of the statistics, less what independent gradients of mean zero have in the long
    run, (1 - mu) / (1 + mu). NaN if all gradients were zero. 0 if mu is 0: no average shows a mean.
    None before the first update.
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
    """Whether noise dominates the gradients of parameters, in all processes; the host waits.

    That is, if the mean's share is below ``LEAST_SHARE`` on average over the parameters.
    """
    device = batches[0][1][0].device
    found = [
        mean_share(states[p], float(group["momentum"]))
        for group, params in batches
        for p in processes.owned(params)
    ]
    shares = [share.to(device) for share in found if share is not None]
    total = torch.zeros(2, dtype=torch.float64, device=device)
    if shares:
        known = torch.stack(shares)
        total = torch.stack([known.nansum(), (~known.isnan()).sum().double()])
    share, count = processes.total(total).tolist()
    return bool(count and share < LEAST_SHARE * count)


def _trace(stat: Tensor) -> Tensor:
    return (stat if stat.dim() == 1 else stat.diagonal()).sum(dtype=torch.float64)
