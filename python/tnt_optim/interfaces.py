"""The seams: what a method and a source compute, and what a process computes of an update."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from tnt_optim.attempt import Stage
from tnt_optim.autograd import Gradients
from tnt_optim.modes import Layout, Rows, Settings, State


class Method(Protocol):
    """From statistics to factors, from factors to directions: ``KroneckerOptimizer``."""

    _parts: Sequence[str]  # names of what has inverses

    @property
    def multiplies(self) -> bool:
        """Whether directions are products with the factors, which the fused step computes."""

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
        """Tensors to check: statistics take what was observed if their squared norms are finite."""

    def accumulate_(
        self,
        stats: Sequence[list[Tensor]],
        observed: Sequence[Any],
        layouts: Sequence[Layout],
        decay: float | Tensor,
        factors: Sequence[list[Tensor]] | None,
    ) -> None:
        """Statistics <- decay * statistics + (1 - decay) * those of what was observed."""


class Work(Protocol):
    """What a process computes by itself of an update: ``update.Part``."""

    grads: Gradients  # of the loss; of sharded parameters this process's pieces
    group: Settings

    def stages(self) -> list[Stage]:
        """Directions and weights of all parameters, in this process alone."""

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

        ``key`` names the random stream within the part; the same for copies in other processes.
        """
