"""Parameters cut into pieces over processes, as ``torch.distributed.fsdp.fully_shard`` does.

Every process has a piece of each parameter and of its gradient, but a preconditioner needs whole
gradients. Each parameter has one owner rank, which alone has its statistics, factors and moments:
all processes send their pieces of the gradient to it, and it sends pieces of the direction back.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from tnt_optim.attempt import Stage
from tnt_optim.autograd import (
    Gradients,
    all_finite,
    before_backward,
    leaves_of,
    unscaled,
    without_autocast,
)
from tnt_optim.distributed.ownership import OwnerRanks
from tnt_optim.distributed.process_group import ProcessGroup
from tnt_optim.modes import by_device, state_dtype
from tnt_optim.processes import Processes
from tnt_optim.update import Part


def shard_dim(param: Tensor) -> int:
    """The dimension along which a parameter is cut, over one dimension of the mesh."""
    placements = param.placements  # type: ignore[attr-defined]
    cuts = [p.dim for p in placements if isinstance(p, Shard)]
    others = [p for p in placements if not isinstance(p, Shard | Replicate)]
    if len(cuts) != 1 or others:
        raise ValueError(
            "params must be sharded along one dimension of the mesh and replicated along the "
            f"others, as fully_shard does, got placements {placements}"
        )
    return int(cuts[0])


def process_group_of_shards(params: Sequence[Tensor]) -> ProcessGroup:
    """The processes that have the pieces of sharded parameters: the same for all."""
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
    data_rank = 0
    for size, index in zip(mesh.shape, coordinate, strict=True):
        data_rank = data_rank * size + index
    return ProcessGroup(mesh.get_group(along.pop()), data_rank, mesh.size())


def _mesh_dim(param: Tensor) -> int:
    """The dimension of the mesh over which a parameter is cut."""
    shard_dim(param)  # checks that there is one
    placements = param.placements  # type: ignore[attr-defined]
    return [isinstance(p, Shard) for p in placements].index(True)


def length(size: int, pieces: int, index: int) -> int:
    """The length of one piece of a dimension; the last pieces may be shorter, or empty.

    >>> [length(5, 4, index) for index in range(4)]
    [2, 2, 1, 0]
    """
    full = -(-size // pieces)
    return max(0, min(full, size - index * full))


class Sharded(OwnerRanks, Processes):
    """A step divided by processes that each have a piece of every parameter."""

    is_sharded = True

    def gradients(
        self, loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, scale: float
    ) -> Gradients:
        """Pieces of the gradients, averaged over all processes; every ``.grad`` is restored.

        Refused if this step has gradients that are not averaged yet: this backward would average
        them, too.
        """
        leaves = leaves_of(loss)  # without FSDP's parameters
        modules = _modules_of([*params, *leaves])
        if any(map(_holds_back, modules)):
            raise RuntimeError(
                "observe must be called at the first micro-batch of a step under fully_shard: at "
                "later ones there are gradients that are not averaged yet"
            )
        # The backward sets the gradients of all parameters, not only of ``params``.
        cut = [p.sharded_param for module in modules for p in _cut_params(module)]
        by_fsdp = set(map(id, cut))
        if others := [tuple(p.shape) for p in params if id(p) not in by_fsdp]:
            raise ValueError(
                "params must be sharded by fully_shard for sampled gradients and for warm_start, "
                f"got DTensors that are not, of shapes {others}: tensor parallel processes have "
                "the same batch, and would sample different labels. Without warm_start and "
                "likelihood, TNT works"
            )
        with _left_alone([*params, *cut, *leaves]), _synchronised(modules):
            with without_autocast(loss), before_backward():
                loss.backward(torch.full_like(loss, scale), retain_graph=retain_graph)
            return unscaled({p: p.grad for p in params if p.grad is not None}, scale)

    def mean(
        self, params: Sequence[Tensor], gradients: Mapping[Tensor, Tensor], count: int | Tensor
    ) -> tuple[Gradients, Tensor]:
        """See ``Processes.mean``. Corrects FSDP's average, which counts processes without a row."""
        mesh = params[0].device_mesh  # type: ignore[attr-defined]
        total = torch.zeros((), dtype=torch.float64, device=params[0].device) + count
        for dim in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dim))
        ratio = self.processes.data_size / total
        return {
            p: gradients[p] * ratio.to(gradients[p].dtype) if p in gradients else None
            for p in params
        }, total

    def batch_mean(
        self, params: Sequence[Tensor], gradients: Gradients | None, count: int | Tensor
    ) -> dict[Tensor, Tensor] | None:
        """See ``Processes.batch_mean``. All processes have the same number of batches."""
        if gradients is None:
            return None
        pieces = {p: g for p, g in gradients.items() if g is not None}
        means, total = self.mean(list(pieces), pieces, count)
        return self.whole(means) if total > 0 else {}

    def with_gradients(self, params: Sequence[Tensor]) -> set[Tensor]:
        """The parameters with a gradient in any process."""
        flags = self.anywhere([p.grad is not None for p in params], params[0].device)
        return {p for p, has_gradient in zip(params, flags, strict=True) if has_gradient}

    def whole(self, gradients: Gradients) -> dict[Tensor, Tensor]:
        """The whole gradients of the parameters this process owns; 0-dim zeros for the others.

        ``gradients`` are this process's pieces, in the same order in all processes; None for zeros.
        """
        whole: dict[Tensor, Tensor] = {}
        for alike in by_device(gradients, by_dtype=True):
            dtype = state_dtype(alike[0])
            owned, ranks = self.owned(alike), range(self.size)
            pieces = {p: _piece(p, gradients[p]).to(dtype) for p in alike}
            arrived = self.processes.all_to_all(
                {owner: [pieces[p] for p in self._of(owner, alike)] for owner in ranks},
                {source: [self._shape(p, source) for p in owned] for source in ranks},
            )
            for index, param in enumerate(owned):
                parts = [arrived[source][index] for source in ranks]
                whole[param] = torch.cat(parts, dim=shard_dim(param))
        return {p: whole[p] if p in whole else torch.zeros((), device=p.device) for p in gradients}

    def all_finite(self, gradients: Iterable[Tensor]) -> Tensor:
        """See ``Processes.all_finite``."""
        pieces = list(gradients)
        bad = (~all_finite(pieces)).to(pieces[0].device, torch.int32)
        return self.processes.largest(bad) == 0

    def update(self, part: Part) -> list[Stage]:
        """Sends gradients to the owners and directions back; each process updates its pieces."""
        return [lambda: self._update(part)]

    def _update(self, part: Part) -> None:
        grads = part.grads
        whole = self.whole(grads)
        directions = part.directions({p: whole[p] for p in self.owned(whole)})
        ranks = range(self.size)
        for alike in by_device(grads, by_dtype=True):
            owned = [(p, directions[p].view(p.shape)) for p in self.owned(alike)]
            cut = [d.split(self._lengths(p), dim=shard_dim(p)) for p, d in owned]
            by_owner = {owner: self._of(owner, alike) for owner in ranks}
            # A process that owns none of these sends an empty tensor.
            empty = torch.empty(0, dtype=state_dtype(alike[0]), device=alike[0].device)
            arrived = self.processes.all_to_all(
                {target: [empty, *(piece[target] for piece in cut)] for target in ranks},
                {o: [self._shape(p, self.processes.rank) for p in by_owner[o]] for o in ranks},
            )
            for owner in ranks:
                pieces = [_local(p) for p in by_owner[owner]]
                key = owner, self.processes.rank
                part.move(by_owner[owner], arrived[owner], *key, pieces=pieces)

    def _of(self, owner: int, params: Iterable[Tensor]) -> list[Tensor]:
        return [p for p in params if self.owner(p) == owner]

    def _lengths(self, param: Tensor) -> list[int]:
        size = param.shape[shard_dim(param)]
        return [length(size, self.size, rank) for rank in range(self.size)]

    def _shape(self, param: Tensor, rank: int) -> tuple[int, ...]:
        """The shape of a process's piece."""
        shape = list(param.shape)
        dim = shard_dim(param)
        shape[dim] = length(shape[dim], self.size, rank)
        return tuple(shape)


def _local(param: Tensor) -> Tensor:
    local: Tensor = param.to_local()  # type: ignore[attr-defined]
    return local


def _piece(param: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros_like(_local(param))
    if not isinstance(gradient, DTensor):
        return gradient
    placements = param.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        # An embedding that tensor parallelism cuts by rows has a whole gradient in each process.
        gradient = gradient.redistribute(placements=placements)
    return _local(gradient)


# The sampled gradient. FSDP averages gradients in hooks of the backward, for parameters that it
# gathers for the pass, so torch.autograd.grad cannot give the averages.


@contextmanager
def _left_alone(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restores the tensors' gradients on leaving; their post-accumulate hooks do not run."""
    kept = {t: (t.grad, dict(t._post_accumulate_grad_hooks or {})) for t in tensors}
    for tensor, (_, hooks) in kept.items():
        tensor.grad = None  # otherwise the backward adds to it in place
        if hooks:  # in place: autograd and the handles of hooks refer to this dictionary
            tensor._post_accumulate_grad_hooks.clear()
    try:
        yield
    finally:
        for tensor, (grad, hooks) in kept.items():
            tensor.grad = grad
            if hooks:
                tensor._post_accumulate_grad_hooks.update(hooks)


def _modules_of(params: Sequence[Tensor]) -> Sequence[FSDPModule]:
    """The FSDP modules that have one of ``params``."""
    # FSDP has no mapping from a parameter to its module; torch has one from module to state.
    from torch.distributed._composable_state import _module_state_mapping

    wanted = set(map(id, params))
    modules = []
    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            cut = _cut_params(module)
            pairs = [(p.sharded_param, getattr(p, "_unsharded_param", None)) for p in cut]
            if any(id(tensor) in wanted for pair in pairs for tensor in pair):
                modules.append(module)
    return modules


def _groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _cut_params(module: FSDPModule) -> list[Any]:
    return [param for group in _groups(module) for param in group.fsdp_params]


def _holds_back(module: FSDPModule) -> bool:
    """Whether gradients of earlier micro-batches wait to be averaged."""
    if any(getattr(g, "_partial_reduce_output", None) is not None for g in _groups(module)):
        return True
    for param in _cut_params(module):
        gathered = getattr(param, "_unsharded_param", None)
        if param.unsharded_accumulated_grad is not None:
            return True
        if gathered is not None and gathered.grad is not None:
            return True
    return False


@contextmanager
def _synchronised(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Makes every backward average gradients, whatever the user's settings are."""
    groups = [group for module in modules for group in _groups(module)]
    ours = {"reduce_grads": True, "all_reduce_grads": True, "gradient_divide_factor": None}
    before = [{name: getattr(group, name) for name in ours} for group in groups]
    for group in groups:
        vars(group).update(ours)
    try:
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            vars(group).update(values)
