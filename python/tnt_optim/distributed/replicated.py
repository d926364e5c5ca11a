"""Processes that each have every parameter, as under DistributedDataParallel.

With ``shard`` every parameter has an owner rank, which refreshes its statistics and factors:

- "directions": only the owner keeps factors and moments; it sends the direction of every step.
- "inverses": the owner sends refreshed factors; every process has all moments and computes all
  directions.

The first takes the least memory. The second sends nothing in most steps.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from tnt_optim.attempt import Stage
from tnt_optim.autograd import Gradients, all_finite
from tnt_optim.distributed.ownership import OwnerRanks
from tnt_optim.distributed.process_group import BUCKET_BYTES, ProcessGroup, flattened, unflattened
from tnt_optim.modes import States, by_device, layout_for, state_dtype
from tnt_optim.processes import Processes
from tnt_optim.update import Part


class Replicated(OwnerRanks, Processes):
    """A step divided by processes that each have every parameter.

    With ``shard`` None no parameter has an owner: each process does all of the step.
    """

    def __init__(
        self, processes: ProcessGroup, shard: str | None, owner: Callable[[Tensor], int]
    ) -> None:
        super().__init__(processes, owner)
        self.shard = shard

    def is_owner(self, param: Tensor) -> bool:
        """See ``OwnerRanks.is_owner``."""
        return self.shard is None or super().is_owner(param)

    def total(self, value: Tensor) -> Tensor:
        """See ``Processes.total``."""
        return value if self.shard is None else super().total(value)

    def codes(self, params: Sequence[Tensor], owned: Sequence[Tensor], codes: Tensor) -> Tensor:
        """See ``Processes.codes``."""
        return codes if self.shard is None else super().codes(params, owned, codes)

    def batch_mean(
        self, params: Sequence[Tensor], gradients: Gradients | None, count: int | Tensor
    ) -> dict[Tensor, Tensor] | None:
        """See ``Processes.batch_mean``."""
        here = {} if gradients is None else self.whole(gradients)
        flags = [gradients is not None, int(count), *(p in here for p in params)]
        has_more, counts, *flags = self.anywhere(flags, params[0].device)
        if not has_more:
            return None
        reached = [p for p, is_reached in zip(params, flags, strict=True) if is_reached and counts]
        return self.mean(reached, here, count)[0] if reached else {}

    def mean(
        self, params: Sequence[Tensor], gradients: Mapping[Tensor, Tensor], count: int | Tensor
    ) -> tuple[dict[Tensor, Tensor], Tensor]:
        """See ``Processes.mean``. A process whose gradients are not finite does not count.

        If no process counts, the means are NaN.
        """
        device = params[0].device
        finite = torch.ones((), dtype=torch.bool, device=device)
        if gradients:
            finite = all_finite(gradients.values()).to(device)
        if isinstance(count, Tensor):
            on_device = count.to(device, torch.float32)
        else:  # filled in on the device: no copy to wait for
            on_device = torch.full((), float(count), device=device)

        def sent() -> Iterable[Tensor]:  # each tensor is made when it is sent, to save memory
            yield torch.stack([on_device * finite, on_device])
            for param in params:
                dtype = state_dtype(param)
                if param in gradients:
                    yield torch.where(finite.to(param.device), gradients[param].to(dtype), 0.0)
                else:
                    yield torch.zeros_like(param, dtype=dtype)

        (finite_count, total_count), *totals = self.processes.sums(sent())
        return {
            p: total.div_(finite_count.to(p.device, total.dtype))
            for p, total in zip(params, totals, strict=True)
        }, total_count

    def send_factors(self, params: Iterable[Tensor], states: States) -> None:
        """See ``Processes.send_factors``."""
        if self.shard != "inverses":
            return

        def factors_of(bucket: Iterable[Tensor]) -> list[Tensor]:
            return [factor for p in bucket for factor in states[p]["factors"]]

        def receive(bucket: list[Tensor], flat: Tensor) -> None:
            factors = factors_of(bucket)
            if not self.is_owner(bucket[0]):
                arrived = unflattened(flat, [f.shape for f in factors])
                for factor, sent in zip(factors, arrived, strict=True):
                    factor.copy_(sent)

        for alike in by_device(params, by_dtype=True):
            self._exchange(
                alike,
                lambda p: sum(factor.numel() for factor in states[p]["factors"]),
                lambda bucket: flattened(factors_of(bucket)),
                receive,
            )

    def update(self, part: Part) -> list[Stage]:
        """With "directions" each owner computes its directions, and every process applies all."""
        if self.shard != "directions":
            return super().update(part)
        return [lambda: self._update(part)]

    def _update(self, part: Part) -> None:
        places = {p: place for place, p in enumerate(part.grads)}
        sizes = {p: layout_for(p, part.group).sizes for p in places}

        def compute(bucket: list[Tensor]) -> Tensor:
            directions = part.directions(self.whole({p: part.grads[p] for p in bucket}))
            return flattened([directions[p] for p in bucket])

        def receive(bucket: list[Tensor], flat: Tensor) -> None:
            arrived = unflattened(flat, [sizes[p] for p in bucket])
            part.move(bucket, arrived, places[bucket[0]])

        for alike in by_device(places, by_dtype=True):
            self._exchange(alike, lambda p: math.prod(sizes[p]), compute, receive)

    def _exchange(
        self,
        params: Sequence[Tensor],
        numel: Callable[[Tensor], int],
        compute: Callable[[list[Tensor]], Tensor],
        receive: Callable[[list[Tensor], Tensor], None],
    ) -> None:
        """Broadcasts one bucket of each owner at a time, while the next ones are computed.

        Args:
            params: in the same order in every process, of one device and one state dtype.
            numel: the number of entries sent of a parameter.
            compute: gives the entries of a bucket that this process owns.
            receive: takes the entries of a bucket, also of one that this process owns.
        """
        by_owner: list[list[list[Tensor]]] = [[] for _ in range(self.size)]
        dtype, device = state_dtype(params[0]), params[0].device
        for param in params:
            buckets = by_owner[self.owner(param)]
            size = numel(param) + (sum(map(numel, buckets[-1])) if buckets else 0)
            if not buckets or size > BUCKET_BYTES // dtype.itemsize:
                buckets.append([])
            buckets[-1].append(param)
        pending: list[tuple[list[Tensor], Tensor, Any]] = []
        for round_ in zip_longest(*by_owner):
            bucket_here = round_[self.processes.rank]
            computed = None if bucket_here is None else compute(bucket_here)
            sent = []
            for owner, bucket in enumerate(round_):
                if bucket is not None:
                    flat = computed if owner == self.processes.rank else None
                    if flat is None:
                        flat = torch.empty(sum(map(numel, bucket)), dtype=dtype, device=device)
                    sent.append((bucket, flat, self.processes.broadcast(flat, owner)))
            _receive_all(pending, receive)
            pending = sent
        _receive_all(pending, receive)


def _receive_all(
    sent: Sequence[tuple[list[Tensor], Tensor, Any]],
    receive: Callable[[list[Tensor], Tensor], None],
) -> None:
    for bucket, flat, work in sent:
        work.wait()
        receive(bucket, flat)
