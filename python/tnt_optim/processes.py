"""How processes divide a step: the interface, implemented for a single process."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tnt_optim.attempt import Stage
from tnt_optim.autograd import Gradients, all_finite, gradients_of
from tnt_optim.modes import State, States
from tnt_optim.state import NAMES
from tnt_optim.update import Part


class Processes:
    """How processes divide a step: here a single process does all of it.

    ``Replicated`` and ``Sharded`` override the methods whose work is divided or sent. They move
    tensors only; the optimizer's method and ``update`` compute.
    """

    is_distributed = False  # whether torch.distributed runs the step, even in a single process
    is_sharded = False  # whether parameters are cut into pieces, as ``fully_shard`` does
    shard: str | None = None  # what is divided among the processes

    def global_index(self, index: int) -> int:
        """The index of this process's observation among the observations of all processes."""
        return index

    def gradients(
        self, loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, scale: float
    ) -> Gradients:
        """The gradients of a loss; see ``autograd.gradients_of``."""
        return gradients_of(loss, params, retain_graph=retain_graph, scale=scale)

    def with_gradients(self, params: Sequence[Tensor]) -> set[Tensor]:
        """The parameters with a gradient, for sharded ones in any process."""
        return {p for p in params if p.grad is not None}

    def anywhere(self, flags: Sequence[int], device: torch.device) -> list[int]:
        """Whether each flag is set in any process; the host waits for the answer."""
        return list(flags)

    def check_alike(self, params: Sequence[Tensor]) -> None:
        """Raises if processes have different parameters; the host waits for the answer."""

    def mean(
        self, params: Sequence[Tensor], gradients: Mapping[Tensor, Tensor], count: int | Tensor
    ) -> tuple[Gradients, int | Tensor]:
        """The mean gradients over the observations of several processes; the host does not wait.

        ``params`` are the same in every process; ``gradients`` are sums over this process's
        ``count`` observations, zero if missing. Also returns the sum of all counts.
        """
        raise NotImplementedError

    def batch_mean(
        self, params: Sequence[Tensor], gradients: Gradients | None, count: int | Tensor
    ) -> dict[Tensor, Tensor] | None:
        """The mean gradients of one batch in each process; None if no process has more batches.

        ``params`` may have gradients. ``gradients`` is None if this process has no more batches;
        ``count`` is 0 if no row of its batch counts. The result is empty if no row counts in any
        process.
        """
        return None if gradients is None else self.whole(gradients)

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

    def codes(self, params: Sequence[Tensor], owned: Sequence[Tensor], codes: Tensor) -> Tensor:
        """The error codes of ``params``, from this process's ``codes`` of the ``owned`` ones."""
        return codes

    def send_factors(self, params: Iterable[Tensor], states: States) -> None:
        """Sends refreshed factors from the owners to the processes that keep them."""

    def others_parts(
        self, params: Iterable[Tensor], states: States, to: int
    ) -> dict[Tensor, State]:
        """Sends entries that only owners keep to process ``to``; returns them there."""
        return {}

    def update(self, part: Part) -> list[Stage]:
        """The stages that update the momenta and parameters of a part."""
        return part.stages()
