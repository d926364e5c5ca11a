"""Several processes that train copies of one model: sums over them, and decisions in common.

Every process makes the same calls in the same order. What decides whether there is a call at all
must therefore be the same everywhere: settings, schedule, and what was agreed on before.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tnt_optim.autograd import all_finite, graph_nodes
from tnt_optim.state import state_dtype

# By parameter; None where this process has none, but another one may.
Gradients = Mapping[Tensor, Tensor | None]

# Tensors are sent together, up to so many bytes: large enough for the network's full rate, small
# enough that one lot is on its way while the next is made.
LOT_BYTES = 25 << 20


class Team:
    """The processes of one group.

    Args:
        group: a process group that this process is in; None for the default one.
        place: this process's number among all that see a part of a batch.
        places: how many those are; the group's by default.
    """

    def __init__(
        self, group: Any = None, place: int | None = None, places: int | None = None
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.place = self.rank if place is None else place
        self.places = self.size if places is None else places

    def sums(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The sum of each tensor over all processes, of the same bits in all of them."""
        sent = []
        for lot in lots(tensors):
            flat, shapes = flattened(lot), [tensor.shape for tensor in lot]
            sent.append((flat, shapes, dist.all_reduce(flat, group=self.group, async_op=True)))
        results: list[Tensor] = []
        for flat, shapes, work in sent:
            work.wait()
            results += parts(flat, shapes)
        return results

    def anywhere(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Which flags are set in some process; waits for the answer, but for no device if it can.

        Args:
            flags: this process's.
            device: of the parameters, where the group has no backend for the CPU, such as gloo.
        """
        if "cpu" in dist.get_backend_config(self.group):
            device = torch.device("cpu")
        told = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in told.tolist()]

    def worst(self, codes: Tensor) -> Tensor:
        """The largest of each of some codes over all processes, on the device."""
        shared = codes.clone()
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return shared

    def broadcast(self, flat: Tensor, owner: int) -> Any:
        """Begins to send what ``owner`` has to all; returns what to wait for."""
        return dist.broadcast(flat, group=self.group, group_src=owner, async_op=True)

    def all_to_all(
        self, out: Mapping[int, Sequence[Tensor]], into: Mapping[int, Sequence[Sequence[int]]]
    ) -> dict[int, list[Tensor]]:
        """Sends each process some tensors, all of one dtype and device.

        Args:
            out: what each process is sent.
            into: the shapes of what each process sends.

        Returns:
            What each process has sent.
        """
        sent = [tensor for rank in range(self.size) for tensor in out[rank]]
        sizes = [sum(tensor.numel() for tensor in out[rank]) for rank in range(self.size)]
        incoming = [sum(map(math.prod, into[rank])) for rank in range(self.size)]
        flat = flattened(sent)
        arrived = flat.new_empty(sum(incoming))
        dist.all_to_all_single(arrived, flat, incoming, sizes, group=self.group)
        pieces = arrived.split(incoming)
        return {rank: parts(piece, into[rank]) for rank, piece in enumerate(pieces)}


def team_of(group: Any, *, is_lost: bool = False) -> Team | None:
    """The processes that train together; None for a single one.

    Args:
        group: a process group; None for the default one, where there is one.
        is_lost: whether None stands for another one, which a copied optimizer could not have.

    Raises:
        RuntimeError: where it is lost, and there are several processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_world_size(group) == 1:
        return None
    if is_lost and group is None:
        raise RuntimeError(
            "process_group of a copied optimizer must be set again, which a copy cannot have: "
            "opt.process_group = ..."
        )
    return Team(group)


def numbered(index: int, team: Team | None) -> int:
    """The number of an observation among those of all processes, which take turns."""
    return index if team is None else index * team.places + team.place


def is_sharded(param: Tensor) -> bool:
    """Whether a parameter's pieces are in several processes, as ``fully_shard`` leaves them."""
    # Without an import: that takes most of a second, and who has such a parameter has made it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(param, module.DTensor)


def lots(tensors: Iterable[Tensor], limit: int = LOT_BYTES) -> Iterator[list[Tensor]]:
    """Tensors in their order, in lots of one kind, of up to ``limit`` bytes or a single one."""
    lot: list[Tensor] = []
    size = 0
    for tensor in tensors:
        alike = not lot or (tensor.dtype, tensor.device) == (lot[0].dtype, lot[0].device)
        if lot and (not alike or size + tensor.nbytes > limit):
            yield lot
            lot, size = [], 0
        lot.append(tensor)
        size += tensor.nbytes
    if lot:
        yield lot


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of some tensors, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a flat tensor's pieces, of the given shapes, one after the other."""
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def pooled(
    team: Team,
    params: Sequence[Tensor],
    gradients: Mapping[Tensor, Tensor],
    number: int | Tensor,
) -> tuple[dict[Tensor, Tensor], Tensor]:
    """The means of gradients over the observations of all processes.

    What one process has is left out where it is not finite; where that is so in all of them, the
    means are NaN.

    Args:
        team: the processes.
        params: whose gradients, the same in every process.
        gradients: sums over this process's observations; zero for those that are missing.
        number: of this process's observations.

    Returns:
        The means, and how many processes observed anything, on the device.
    """
    # Nothing here waits for a device: numbers are filled in there, not sent.
    device = params[0].device
    finite = torch.ones((), dtype=torch.bool, device=device)
    if gradients:
        finite = all_finite(gradients.values()).to(device)

    def sent() -> Iterator[Tensor]:  # made as they are sent, so that few exist at a time
        yield torch.stack([_float(number, device) * finite, _float(number, device) > 0])
        for param in params:
            dtype = state_dtype(param)
            if param in gradients:
                yield torch.where(finite.to(param.device), gradients[param].to(dtype), 0.0)
            else:
                yield torch.zeros_like(param, dtype=dtype)

    totals = team.sums(sent())
    count, observed = totals[0]
    return {
        p: total.div_(count.to(p.device, total.dtype))
        for p, total in zip(params, totals[1:], strict=True)
    }, observed


def _float(number: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, torch.float32)
    return torch.full((), float(number), device=device)


def replicas_behind(loss: Tensor) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules that show in the graph of a loss.

    One shows where it has to look for unused parameters, or has a static graph and has had no
    backward yet.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    found = [
        node.ddp_weakref()  # type: ignore[attr-defined]
        for node in graph_nodes(loss)
        if node.name() == "_DDPSinkBackward"
    ]
    return [module for module in found if module is not None]


def check_static_graph(replicas: Sequence[DistributedDataParallel]) -> None:
    """Checks that one more backward leaves the gradients of ``replicas`` alone.

    With ``static_graph=True`` their first backward queues the averaging of all gradients, be it
    the user's or another one: the gradients are then wrong, without an error.

    Raises:
        RuntimeError: where one has a static graph.
    """
    if any(replica.static_graph for replica in replicas):
        raise RuntimeError(
            "output must not come from DistributedDataParallel with static_graph=True, whose "
            "gradients a backward beside the user's makes wrong: leave static_graph off"
        )
