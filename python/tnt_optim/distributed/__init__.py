"""How processes divide an optimizer's step.

``distribution`` returns an object for one process (``Processes``), for processes with copies of the
model (``Replicated``: DDP), or with pieces of it (``Sharded``: FSDP2). All have the interface of
``Processes``.
"""

from collections.abc import Sequence
from typing import Any

from tnt_optim.distributed.ownership import Owners
from tnt_optim.distributed.process_group import process_group_of
from tnt_optim.distributed.replicated import Replicated
from tnt_optim.modes import are_sharded
from tnt_optim.processes import Processes

__all__ = ["Owners", "distribution"]


def distribution(
    groups: Sequence[dict[str, Any]],
    process_group: Any,
    shard: str | None,
    owners: Owners,
    *,
    is_lost: bool,
) -> Processes:
    """The distribution of a step over the processes that run now.

    ``owners`` keeps the owner ranks from step to step. A copy of an optimizer with a process group
    has lost it (``is_lost``).
    """
    if are_sharded(groups):
        # Imported here because it takes most of a second.
        from tnt_optim.distributed.fsdp import Sharded, process_group_of_shards

        params = [p for group in groups for p in group["params"]]
        mesh = process_group_of_shards(params)
        return Sharded(mesh, lambda param: owners.of(param, groups, mesh.size))
    replicas = process_group_of(process_group, is_lost=is_lost)
    if replicas is None:
        return Processes()
    return Replicated(replicas, shard, lambda param: owners.of(param, groups, replicas.size))
