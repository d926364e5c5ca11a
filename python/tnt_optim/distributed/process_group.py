"""Collectives of a process group.

Every process must make the same calls in the same order. Decide on a call only from facts that all
processes know: settings, schedule, and earlier collectives.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tnt_optim.modes import is_sharded

if dist.is_available():
    # PyTorch imports this module with the first optimizer, and default arguments of its functions
    # hold the default process group of that moment. `destroy_process_group` then leaves gloo's
    # threads running, and a thread that drops a tensor while Python exits aborts the process
    # (pytorch#190489). Imported here, before there is a group, the module holds none.
    import torch.distributed.nn  # noqa: F401

# Tensors are sent in buckets of this many bytes: large enough for the network's full rate, small
# enough that sending one bucket overlaps with computing the next.
BUCKET_BYTES = 25 << 20


class ProcessGroup:
    """The processes that train together.

    ``data_rank`` and ``data_size`` count all processes that have a part of a batch; by default they
    are the processes of ``group``.
    """

    def __init__(
        self, group: Any = None, data_rank: int | None = None, data_size: int | None = None
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.data_rank = self.rank if data_rank is None else data_rank
        self.data_size = self.size if data_size is None else data_size

    def global_index(self, index: int) -> int:
        """The index of an observation among those of all processes, counted round-robin."""
        return index * self.data_size + self.data_rank

    def sums(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """All-reduces each tensor to its sum, with the same bits in all processes."""
        sent = []
        for bucket in buckets(tensors):
            flat, shapes = flattened(bucket), [tensor.shape for tensor in bucket]
            sent.append((flat, shapes, dist.all_reduce(flat, group=self.group, async_op=True)))
        results: list[Tensor] = []
        for flat, shapes, work in sent:
            work.wait()
            results += unflattened(flat, shapes)
        return results

    def anywhere(self, flags: Sequence[int], device: torch.device) -> list[int]:
        """Whether each flag is set in any process; the host waits for the answer.

        It uses the CPU if the group has a CPU backend (gloo), otherwise ``device``.
        """
        if "cpu" in dist.get_backend_config(self.group):
            device = torch.device("cpu")
        reduced = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self.group)
        set_anywhere: list[int] = reduced.tolist()
        return set_anywhere

    def check_alike(self, params: Sequence[Tensor]) -> None:
        """Refuses processes with different parameters, whose statistics would be mixed up.

        Different layers may have the same shapes, so the first entries are compared, too.
        """
        content = [(tuple(p.shape), _first_entries(p)) for p in params]
        key = zlib.crc32(repr(content).encode()) >> 1
        if self.anywhere([key, -key], params[0].device) != [key, -key]:
            raise ValueError(
                "process_group must hold only processes with copies of one model, but some have "
                f"parameters of other shapes or values than the {len(params)} here: leave those "
                "processes out. ZeroRedundancyOptimizer gives every process other parameters: use "
                "TNT(model.parameters(), shard='directions') instead of it"
            )

    def largest(self, codes: Tensor) -> Tensor:
        """All-reduces each entry to its maximum, on the device."""
        reduced = codes.clone()
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self.group)
        return reduced

    def broadcast(self, flat: Tensor, owner: int) -> Any:
        """Starts to send the owner's tensor to all; returns the work to wait for."""
        return dist.broadcast(flat, group=self.group, group_src=owner, async_op=True)

    def hand_over(self, content: Any, source: int, target: int) -> Any:
        """Sends a picklable object to another process; returns it there, and None elsewhere."""
        box = [content]
        if self.rank == source:
            dist.send_object_list(box, group=self.group, group_dst=target)
        elif self.rank == target:
            dist.recv_object_list(box, group=self.group, group_src=source)
        return box[0] if self.rank == target else None

    def all_to_all(
        self, out: Mapping[int, Sequence[Tensor]], into: Mapping[int, Sequence[Sequence[int]]]
    ) -> dict[int, list[Tensor]]:
        """Sends tensors of one dtype and device; returns the received ones, of shapes ``into``.

        Arguments and results have a list for each rank.
        """
        sent = [tensor for rank in range(self.size) for tensor in out[rank]]
        sizes = [sum(tensor.numel() for tensor in out[rank]) for rank in range(self.size)]
        incoming = [sum(map(math.prod, into[rank])) for rank in range(self.size)]
        flat = flattened(sent)
        arrived = flat.new_empty(sum(incoming))
        dist.all_to_all_single(arrived, flat, incoming, sizes, group=self.group)
        pieces = arrived.split(incoming)
        return {rank: unflattened(piece, into[rank]) for rank, piece in enumerate(pieces)}


def process_group_of(group: Any, *, is_lost: bool) -> ProcessGroup | None:
    """The processes of a group, or of the default group; None for a single process.

    Raises for several processes if a copied optimizer has lost its group.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return None
    if dist.get_rank(group) < 0:
        raise ValueError("process_group must contain this process")
    if is_lost and group is None:
        raise RuntimeError(
            "process_group of a copied optimizer must be set again, because it cannot be copied: "
            "opt.process_group = ..."
        )
    return ProcessGroup(group)


def _first_entries(param: Tensor) -> list[float]:
    """A few entries, the same in all copies; empty for a sharded parameter."""
    if is_sharded(param):
        return []
    entries: list[float] = param.detach().reshape(-1)[:16].tolist()
    return entries


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, in buckets of one dtype and device and of up to ``BUCKET_BYTES``.

    A larger tensor is a bucket of its own.
    """
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        alike = not bucket or (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The entries of all tensors, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflattened(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a flat tensor with the given shapes, one after the other."""
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
