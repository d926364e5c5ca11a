"""The device's part of a step: refresh statistics, refresh factors, update the parameters.

The host plans a step (``step``); here it becomes calls of operators. Nothing waits for
the device or reads a value on it, so that a CUDA graph can record a step.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import gram_ema_, preconditioned_step_, scaled_step_
from tnt_optim.attempt import Stage
from tnt_optim.autograd import Gradients, all_finite, gradients_of
from tnt_optim.directions import (
    Weights,
    clipped,
    decayed,
    directions_,
    graft_scales,
    preconditioned_momenta,
)
from tnt_optim.modes import (
    Batch,
    Group,
    Layout,
    Rows,
    Settings,
    State,
    States,
    blocks,
    each,
    layout_of,
    rows,
)
from tnt_optim.state import NAMES

# The entries of one bucket, on the CPU and on a GPU: its directions, or its float32 copies, are in
# memory together. A larger parameter is a bucket of its own.
_BUCKET, _LARGE_BUCKET = 1 << 22, 1 << 28

MakeFactors = Callable[[Settings, Rows, Rows], Tensor]


class Local:
    """How processes divide a step: here a single process does all of it.

    The classes in ``distributed`` override the methods whose work is divided or sent.
    """

    is_distributed = False  # whether torch.distributed runs the step, even in a single process
    is_sharded = False  # whether parameters are cut into pieces, as ``fully_shard`` does
    shard: str | None = None  # what is divided among the processes

    def number(self, index: int) -> int:
        """The number of this process's observation among those of all processes."""
        return index

    def gradients(
        self, loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, scale: float
    ) -> Gradients:
        """The gradients of a loss; see ``autograd.gradients_of``."""
        return gradients_of(loss, params, retain_graph=retain_graph, scale=scale)

    def with_gradients(self, params: Sequence[Tensor]) -> set[Tensor]:
        """The parameters with a gradient; of sharded ones, in any process."""
        return {p for p in params if p.grad is not None}

    def anywhere(self, flags: Sequence[int], device: torch.device) -> list[int]:
        """Whether each flag is set in any process; the host waits for the answer."""
        return list(flags)

    def check_alike(self, params: Sequence[Tensor]) -> None:
        """Refuses processes with other parameters; the host waits for the answer."""

    def mean(
        self, params: Sequence[Tensor], gradients: Mapping[Tensor, Tensor], number: int | Tensor
    ) -> tuple[Gradients, int | Tensor]:
        """The mean gradients over the observations of all processes; the host does not wait.

        ``params`` are the same in every process; ``gradients`` are sums over the ``number`` of
        observations of this one, zero if missing. Also returns the sum of all numbers.
        """
        return {p: gradients.get(p) for p in params}, 1

    def batch_mean(
        self, params: Sequence[Tensor], observed: Gradients | None, number: int | Tensor
    ) -> dict[Tensor, Tensor] | None:
        """The mean gradients of one batch in each process; None if no process has more batches.

        ``params`` may have gradients; ``observed`` is None if this process has no more batches,
        ``number`` is 0 if no row of its batch counts. The result is empty if no row counts in any
        process.
        """
        return None if observed is None else self.whole(observed)

    def whole(self, gradients: Gradients) -> dict[Tensor, Tensor]:
        """The gradients as the owner ranks need them."""
        return {p: g for p, g in gradients.items() if g is not None}

    def all_finite(self, gradients: Iterable[Tensor]) -> Tensor:
        """Whether all gradients are finite, in all processes."""
        return all_finite(gradients)

    def owned(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The parameters whose statistics and factors this process refreshes."""
        return list(params)

    def kept(self, param: Tensor) -> frozenset[str]:
        """The entries of a parameter's state that this process keeps."""
        return NAMES

    def total(self, value: Tensor) -> Tensor:
        """The sum of the owner ranks' values."""
        return value

    def codes(self, params: Sequence[Tensor], owned: Sequence[Tensor], own: Tensor) -> Tensor:
        """The owners' error codes of ``params``, from this process's ``own`` codes of ``owned``."""
        return own

    def send_factors(self, params: Iterable[Tensor], states: States) -> None:
        """Sends refreshed factors from the owners to the processes that keep them."""

    def others_parts(
        self, params: Iterable[Tensor], states: States, to: int
    ) -> dict[Tensor, State]:
        """Sends entries that only owners keep to process ``to``; returns them there."""
        return {}

    def update(self, grads: Gradients, states: States, group: Settings, number: int) -> list[Stage]:
        """The stages that update momenta and parameters of one group on one device.

        ``number`` counts the updates of a step, alike in every process.
        """
        params, gradients = list(grads), [g for g in grads.values() if g is not None]
        own = [states[p] for p in params]
        seen = list(map(layout_of, own))
        clips = group["kl_clip"] is not None
        is_plain = not (clips or group["nesterov"] or group["graft"] is not None)
        # kl_clip needs all directions at once, the plain step none in memory.
        in_buckets = not (clips or is_plain) or (is_plain and group["rounding"] == "stochastic")
        stages: list[Stage] = []
        for index, part in enumerate(buckets_of(params) if in_buckets else [slice(None)]):
            weights = Weights(params[part], states, group, seen[part], key=(number, index))
            bucket = _Bucket(weights, own[part], gradients[part], seen[part], group)
            stages += bucket.plain_stages() if is_plain else bucket.stages()
        return stages


class _Bucket:
    """The update of some parameters, whose directions are in memory together."""

    def __init__(
        self,
        weights: Weights,
        states: Sequence[State],
        grads: Sequence[Tensor],
        layouts: Sequence[Layout],
        group: Settings,
    ) -> None:
        self.weights, self.states, self.grads = weights, states, grads
        self.layouts, self.group = layouts, group
        self.directions: list[Tensor] = []
        self.norms: Tensor | None = None  # as ``directions_`` returns them

    def stages(self) -> list[Stage]:
        """Moments and directions; weights; with rounding, the parameters."""
        return [self._make_directions, self._move, self.weights.write]

    def plain_stages(self) -> list[Stage]:
        """Momenta and weights: one call for parameters with weight decay, one for the others."""
        decays = decayed(self.weights.params, self.group)
        moves = [functools.partial(self._step, decays, value) for value in set(decays)]
        return [*moves, self.weights.write]

    def _make_directions(self) -> None:
        self.weights.take()
        found = directions_(self.grads, self.states, self.layouts, self.group)
        self.directions, self.norms = found

    def _move(self) -> None:
        group = self.group
        scales = graft_scales(self.norms, self.directions, group)
        if group["kl_clip"] is not None:
            momenta = preconditioned_momenta(self.grads, self.states, self.layouts, group)
            scales = clipped(self.directions, momenta, scales, group)
        counted = zip(decayed(self.weights.params, group), self.layouts, strict=True)
        decays = [value for value, look in counted for _ in look.cuts]
        weights = blocks(self.weights.take(), self.layouts)
        rates = group["lr"], group["weight_decay"]
        scaled_step_(weights, self.directions, *rates, decays, scales)

    def _step(self, decays: Sequence[bool], value: bool) -> None:
        same = [decay == value for decay in decays]
        looks, own = list(compress(self.layouts, same)), list(compress(self.states, same))
        preconditioned_step_(
            blocks(compress(self.weights.take(), same), looks),
            blocks(each(own, "momentum"), looks),
            blocks(compress(self.grads, same), looks),
            rows(each(own, "factors"), looks),
            self.group["lr"],
            self.group["momentum"],
            self.group["weight_decay"] if value else 0.0,
        )


@dataclass(frozen=True)
class Report:
    """The outcome of a refresh."""

    kind: str  # "statistics" or "inverses"
    codes: Any  # one for each parameter, on the device, 0 for success; or their delivery
    params: Sequence[Tensor]


@dataclass
class DeviceStep:
    """The work of one step on the device."""

    statistics: list[Batch]  # refreshed first
    factors: list[Batch]  # refreshed after that
    updated: list[Batch]  # updated at last
    observed: dict[Tensor, Tensor]  # gradients for the statistics
    grads: Gradients  # of the loss; of sharded parameters this process's pieces
    distribution: Local
    # Parameters whose statistics have this step's observations: a step that is repeated after a
    # failure does not add them again.
    accumulated: set[Tensor]

    @property
    def batches(self) -> list[Batch]:
        """All batches."""
        return [*self.statistics, *self.factors, *self.updated]

    def refresh_statistics(
        self,
        states: States,
        settings: Callable[[Group], Settings],
        deliver: Callable[[Tensor], Any] = lambda codes: codes,
    ) -> Iterator[Report]:
        """Adds the observations to the statistics, if all of them are finite.

        ``deliver`` takes the memory to report codes before anything is written.
        """
        if not self.statistics:
            return
        finite = self.distribution.all_finite(self.observed.values())
        for group, params in self.statistics:
            codes = deliver((~finite).to(torch.int32).expand(len(params)).contiguous())
            # Decay 1 leaves the statistics as they are, whatever the gradient holds.
            keep = torch.ones((), dtype=torch.float64, device=params[0].device)
            decay = keep * settings(group)["stat_decay"]
            decay = torch.where(finite.to(keep.device), decay, keep)
            owned = self.distribution.owned(params)
            own = [states[p] for p in owned]
            seen = list(map(layout_of, own))
            stats, factors = each(own, "stats"), each(own, "factors")
            whitens = settings(group)["estimator"] == "mle"
            # Whitening copies gradients: those of a bucket at a time.
            for part in buckets_of(owned) if whitens else [slice(None)]:
                whitening = factors[part] if whitens else None
                accumulate_(owned[part], stats[part], self.observed, seen[part], decay, whitening)
                self.accumulated.update(owned[part])
            self.accumulated.update(params)
            yield Report("statistics", codes, params)

    def update(self, states: States, settings: Callable[[Group], Settings]) -> list[Stage]:
        """The stages that update momenta and parameters."""
        stages: list[Stage] = []
        for number, (group, params) in enumerate(self.updated):
            grads = {p: self.grads[p] for p in params}
            stages += self.distribution.update(grads, states, settings(group), number)
            stages.append(functools.partial(_count, [states[p] for p in params], group["graft"]))
        return stages


def refresh_factors(
    batches: Iterable[Batch],
    states: States,
    processes: Local,
    settings: Callable[[Group], Settings],
    make: MakeFactors,
) -> list[Report]:
    """Computes factors from the statistics; a factor that fails keeps its old value."""
    reports: list[Report] = []
    for group, params in batches:
        owned = processes.owned(params)
        own = [states[p] for p in owned]
        seen = list(map(layout_of, own))
        stats, factors = rows(each(own, "stats"), seen), rows(each(own, "factors"), seen)
        info = make(settings(group), stats, factors)
        codes = _worst_of_blocks(info, [len(look.cuts) for look in seen])
        codes = processes.codes(params, owned, codes)
        processes.send_factors(params, states)
        reports.append(Report("inverses", codes, params))
    return reports


def accumulate_(
    params: Sequence[Tensor],
    stats: Sequence[list[Tensor]],
    observed: Mapping[Tensor, Tensor],
    layouts: Sequence[Layout],
    decay: float | Tensor,
    factors: Sequence[list[Tensor]] | None = None,
) -> None:
    """Statistics <- decay * statistics + (1 - decay) * Gram matrices of ``observed``.

    With ``factors`` the other modes of each Gram matrix are whitened by them.
    """
    gradients: list[Tensor] = []
    own_rows: list[list[Tensor]] = []
    for p, entries, look in zip(params, stats, layouts, strict=True):
        gradients += look.blocks(observed[p])
        own_rows += look.rows(entries)
    others = None if factors is None else rows(factors, layouts)
    gram_ema_(own_rows, gradients, decay, others)


def buckets_of(params: Sequence[Tensor]) -> list[slice]:
    """Buckets of neighbouring parameters.

    On the CPU a bucket's directions are still in the cache when the parameters are updated. On a
    GPU larger buckets need fewer launches.
    """
    limit = _BUCKET if params and params[0].is_cpu else _LARGE_BUCKET
    bounds, size = [0], 0
    for index, param in enumerate(params):
        if size and size + param.numel() > limit:
            bounds.append(index)
            size = 0
        size += param.numel()
    bounds.append(len(params))
    return [slice(first, last) for first, last in pairwise(bounds)]


def _count(states: Sequence[State], graft: str | None) -> None:
    """Adds one to the counts of updates; with CUDA graphs a count is a tensor."""
    for name in ("updates", "second_moment_updates")[: 2 if graft == "adam" else 1]:
        if states and isinstance(states[0][name], Tensor):
            torch._foreach_add_(each(states, name), 1)
            continue
        for state in states:
            state[name] += 1


def _worst_of_blocks(codes: Tensor, counts: Sequence[int]) -> Tensor:
    """The largest code of each parameter's blocks, on the device; ``counts`` are their numbers."""
    if all(count == 1 for count in counts):
        return codes
    return torch.stack([own.amax() for own in codes.split(list(counts))])
