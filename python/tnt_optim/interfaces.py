"""What a method, a source of statistics and a process of an update compute."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from tnt_optim.attempt import Stage
from tnt_optim.autograd import Gradients
from tnt_optim.modes import Layout, Rows, Settings, State


class Method(Protocol):
    """Computes factors from statistics, directions from factors: ``KroneckerOptimizer``."""

    _parts: Sequence[str]  # names of a parameter's parts that have inverses

    @property
    def multiplies(self) -> bool:
        """Whether directions are momenta times factors, as the fused step computes them."""

    def _factors(self, group: Settings, stats: Rows, out: Rows) -> Tensor:
        """See ``KroneckerOptimizer._factors``."""

    def _directions(
        self,
        group: Settings,
        states: Sequence[State],
        grads: Sequence[Tensor],
        layouts: Sequence[Layout],
    ) -> tuple[list[Tensor], Tensor | None]:
        """See ``KroneckerOptimizer._directions``."""


class Source(Protocol):
    """Where the statistics come from: ``observations.Empirical``."""

    def witnesses(self, observed: Iterable[Any]) -> list[Tensor]:
        """Tensors to check: ``observed`` is used if their squared norms are finite."""

    def accumulate_(
        self,
        stats: Sequence[list[Tensor]],
        observed: Sequence[Any],
        layouts: Sequence[Layout],
        decay: float | Tensor,
        factors: Sequence[list[Tensor]] | None,
    ) -> None:
        """Statistics <- decay * statistics + (1 - decay) * the statistics of ``observed``."""


class Work(Protocol):
    """One process's work in an update: ``update.Part``."""

    grads: Gradients  # of the loss; this process's pieces if parameters are sharded
    group: Settings

    def stages(self) -> list[Stage]:
        """The stages that update all parameters, without other processes."""

    def directions(self, whole: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Updates the moments of some parameters by whole gradients; returns scaled directions."""

    def move(
        self,
        params: Sequence[Tensor],
        directions: Sequence[Tensor],
        *key: int,
        pieces: Sequence[Tensor] | None = None,
    ) -> None:
        """Updates parameters, or these ``pieces`` of them, by scaled directions.

        ``key`` names the random stream within the part; copies in other processes have the same.
        """
