"""Parameters in pieces over processes, as ``torch.distributed.fsdp.fully_shard`` leaves them.

Every process has a piece of each parameter and of its gradient. A preconditioner needs them whole:
the pieces of a gradient go to the parameter's owner, who alone has statistics, factors and moments,
and pieces of the direction come back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from tnt_optim.autograd import all_finite, graph_nodes, unscaled, without_autocast
from tnt_optim.directions import move_
from tnt_optim.distributed.process_group import Gradients, Team
from tnt_optim.distributed.replicated import Group, Sharing, by_kind
from tnt_optim.rounding import to_be_moved
from tnt_optim.state import TENSORS, State, state_dtype


def shard_dim(param: Tensor) -> int:
    """The dimension along which a parameter is cut.

    Raises:
        ValueError: where it is not cut along one dimension over one dimension of the mesh.
    """
    placements = param.placements  # type: ignore[attr-defined]
    cuts = [p.dim for p in placements if isinstance(p, Shard)]
    others = [p for p in placements if not isinstance(p, Shard | Replicate)]
    if len(cuts) != 1 or others:
        raise ValueError(
            "params must be sharded along one dimension of the mesh and replicated along the "
            f"others, as fully_shard does, got placements {placements}"
        )
    return int(cuts[0])


def team_of_shards(params: Sequence[Tensor]) -> Team:
    """The processes that have the pieces of sharded parameters.

    Raises:
        ValueError: where not all parameters are sharded, and over the same processes.
    """
    first = params[0]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in params}
    if len(meshes) != 1 or not isinstance(first, DTensor):
        raise ValueError(
            "params must all be sharded over one device mesh, or none: got "
            f"{sum(isinstance(p, DTensor) for p in params)} sharded ones of {len(params)}, over "
            f"{len(meshes - {None})} meshes"
        )
    mesh = first.device_mesh
    along = {_mesh_dim(p) for p in params}
    if len(along) != 1:
        raise ValueError(
            f"params must be sharded along one dimension of the mesh, got dimensions {along}"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("params must be on a device mesh that this process is part of")
    place = 0
    for size, index in zip(mesh.shape, coordinate, strict=True):
        place = place * size + index
    return Team(mesh.get_group(along.pop()), place, mesh.size())


def _mesh_dim(param: Tensor) -> int:
    """The dimension of the mesh over which a parameter is cut."""
    shard_dim(param)  # checks that there is one
    placements = param.placements  # type: ignore[attr-defined]
    return [isinstance(p, Shard) for p in placements].index(True)


def length(size: int, pieces: int, index: int) -> int:
    """How long one of some pieces of a dimension is; the last ones may be shorter, or empty.

    >>> [length(5, 4, index) for index in range(4)]
    [2, 2, 1, 0]
    """
    full = -(-size // pieces)
    return max(0, min(full, size - index * full))


class Shards(Sharing):
    """How steps are shared by processes that each have a piece of every parameter.

    Args:
        team: the processes.
        owner: who owns a parameter.
    """

    def __init__(self, team: Team, owner: Callable[[Tensor], int]) -> None:
        super().__init__(team, "directions", owner)

    def whole(self, gradients: Gradients) -> dict[Tensor, Tensor]:
        """The whole gradients of what this process owns, of the others nothing (0-dim zeros).

        Args:
            gradients: this process's pieces, of the same parameters in the same order in all
                processes; None for zeros.
        """
        found: dict[Tensor, Tensor] = {}
        for alike in by_kind(gradients):
            dtype = state_dtype(alike[0])
            own, ranks = self.owned(alike), range(self.team.size)
            pieces = {p: _piece(p, gradients[p]).to(dtype) for p in alike}
            arrived = self.team.all_to_all(
                {owner: [pieces[p] for p in self._of(owner, alike)] for owner in ranks},
                {source: [self._shape(p, source) for p in own] for source in ranks},
            )
            for index, param in enumerate(own):
                parts = [arrived[source][index] for source in ranks]
                found[param] = torch.cat(parts, dim=shard_dim(param))
        nothing = {p: torch.zeros((), device=p.device) for p in gradients if p not in found}
        return {p: found.get(p, nothing.get(p)) for p in gradients}  # type: ignore[misc]

    def all_finite(self, gradients: Iterable[Tensor]) -> Tensor:
        """Whether all gradients are finite, in all processes."""
        own = list(gradients)
        bad = (~all_finite(own)).to(own[0].device, torch.int32)
        return self.team.worst(bad) == 0

    def keeps(self, param: Tensor) -> frozenset[str]:
        """Which tensors of a parameter's state this process keeps."""
        return TENSORS if self.owner(param) == self.team.rank else frozenset()

    def move(
        self,
        group: Group,
        grads: Gradients,
        states: Mapping[Tensor, State],
        number: int,
    ) -> bool:
        """One group's step: gradients to the owners, directions back, each piece moved."""
        made = self.directions_(grads, states, group)
        for alike in by_kind(grads):
            own, ranks = self.owned(alike), range(self.team.size)
            pieces = [made[p].view(p.shape).split(self._lengths(p), dim=shard_dim(p)) for p in own]
            by_owner = {owner: self._of(owner, alike) for owner in ranks}
            # Who owns none of these sends nothing, but sends it.
            nothing = torch.empty(0, dtype=state_dtype(alike[0]), device=alike[0].device)
            arrived = self.team.all_to_all(
                {target: [nothing, *(cut[target] for cut in pieces)] for target in ranks},
                {o: [self._shape(p, self.team.rank) for p in by_owner[o]] for o in ranks},
            )
            for owner in ranks:
                local, key = [_local(p) for p in by_owner[owner]], (number, owner, self.team.rank)
                with to_be_moved(local, {}, group, key=key) as weights:
                    move_(weights, arrived[owner], group)
        return True

    def _of(self, owner: int, params: Iterable[Tensor]) -> list[Tensor]:
        return [p for p in params if self.owner(p) == owner]

    def _lengths(self, param: Tensor) -> list[int]:
        size = param.shape[shard_dim(param)]
        return [length(size, self.team.size, rank) for rank in range(self.team.size)]

    def _shape(self, param: Tensor, rank: int) -> tuple[int, ...]:
        """Of the piece that a process has."""
        shape = list(param.shape)
        dim = shard_dim(param)
        shape[dim] = length(shape[dim], self.team.size, rank)
        return tuple(shape)


def _local(param: Tensor) -> Tensor:
    local: Tensor = param.to_local()  # type: ignore[attr-defined]
    return local


def _piece(param: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros_like(_local(param))
    return _local(gradient) if isinstance(gradient, DTensor) else gradient


# The sampled gradient. FSDP takes gradients of what it has gathered for the pass, and averages them
# in a backward's own hooks: no gradient can be asked for by itself.


def sharded_gradients(
    loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, scale: float = 1.0
) -> dict[Tensor, Tensor]:
    """The gradients of ``loss`` for those of ``params`` it depends on, every ``.grad`` put back.

    Averaged over all processes.

    Raises:
        RuntimeError: where gradients of this step wait to be averaged, which a backward beside the
            user's would join.
    """
    leaves = _leaves(loss)
    modules = _modules_of([*params, *leaves])
    if any(_holds_back(module) for module in modules):
        raise RuntimeError(
            "observe must be called at the first micro-batch of a step under fully_shard: later "
            "ones hold gradients that wait to be averaged"
        )
    # A backward leaves gradients with all parameters, not only with those that are asked for.
    cut = [p.sharded_param for module in modules for g in _groups(module) for p in g.fsdp_params]
    with _put_back([*params, *cut, *leaves]), _synchronised(modules):
        with without_autocast(loss):
            loss.backward(torch.full_like(loss, scale), retain_graph=retain_graph)
        return unscaled({p: p.grad for p in params if p.grad is not None}, scale)


@contextmanager
def _put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """On leaving, the tensors' gradients are what they were."""
    kept = {t: t.grad for t in tensors}
    for tensor in kept:
        tensor.grad = None  # or the backward would add to it in place
    try:
        yield
    finally:
        for tensor, grad in kept.items():
            tensor.grad = grad


def _leaves(loss: Tensor) -> set[Tensor]:
    """What a backward of ``loss`` leaves a gradient with, beside FSDP's parameters."""
    variables = [getattr(node, "variable", None) for node in graph_nodes(loss)]
    return {variable for variable in variables if variable is not None}


def _modules_of(params: Sequence[Tensor]) -> Sequence[FSDPModule]:
    """The modules that FSDP has wrapped and that have one of ``params``."""
    # FSDP keeps no way from a parameter to its module; torch keeps one from module to state.
    from torch.distributed._composable_state import _module_state_mapping

    wanted = set(map(id, params))
    found = []
    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            cut = [param for group in _groups(module) for param in group.fsdp_params]
            own = [(p.sharded_param, getattr(p, "_unsharded_param", None)) for p in cut]
            if any(id(tensor) in wanted for pair in own for tensor in pair):
                found.append(module)
    return found


def _groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _holds_back(module: FSDPModule) -> bool:
    """Whether gradients of earlier micro-batches wait to be averaged."""
    if any(getattr(g, "_partial_reduce_output", None) is not None for g in _groups(module)):
        return True
    for param in [param for group in _groups(module) for param in group.fsdp_params]:
        gathered = getattr(param, "_unsharded_param", None)
        if param.unsharded_accumulated_grad is not None:
            return True
        if gathered is not None and gathered.grad is not None:
            return True
    return False


@contextmanager
def _synchronised(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Within it every backward averages gradients, whatever the user has set for his."""
    groups = [group for module in modules for group in _groups(module)]
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = True
    try:
        yield
    finally:
        for group, reduce_grads, all_reduce_grads in before:
            group.reduce_grads, group.all_reduce_grads = reduce_grads, all_reduce_grads
