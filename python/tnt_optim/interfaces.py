"""What a method computes."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

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
