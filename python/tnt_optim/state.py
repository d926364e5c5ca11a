"""The state of a parameter: what is in it, and its blocks as the operators take them.

A parameter W is seen as a tensor with modes of sizes d_1, ..., d_k, and where its modes are cut
(``block_size``), as blocks that stand for themselves: exactly as if each were a parameter. Its
state has

- ``momentum`` m, (d_1, ..., d_k), and with ``graft="adam"`` ``second_moment``, like it;
- ``master``, with ``rounding="master"`` and a parameter in half precision, W in float32;
- ``block_size``: how its modes are cut, None where they are not;
- ``stats`` S_i, for each block and each of its modes, (d_i, d_i), or (d_i,) for a diagonal mode:
  the moving average of the Gram matrices of the gradient's unfoldings;
- ``factors`` A_i, like the statistics: what the optimizer makes of them (TNT: damped inverses);
- counts: see ``new_state``.

All are float32, or float64 for float64 parameters.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_optim.failures import COUNTERS
from tnt_optim.modes import cuts, diagonal_modes, mode_shape

State = dict[str, Any]

# What a new start of the statistics leaves as it is.
MOMENTS = ("momentum", "second_moment")
# What is large: where processes share the work, not all of them have it.
TENSORS = frozenset(("stats", "factors", *MOMENTS))
COUNTS = {"updates", "second_moment_updates"}


@dataclass(frozen=True)
class Layout:
    """How a parameter is seen: the sizes of its modes, and how they are cut into blocks."""

    sizes: tuple[int, ...]
    block_size: int | None

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(cuts(self.sizes, self.block_size))

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter in the shape of its modes; a copy where strides want one."""
        return tensor if tensor.shape == self.sizes else tensor.reshape(self.sizes)

    def blocks(self, tensor: Tensor) -> list[Tensor]:
        """The blocks of a tensor of the parameter: views, where no copy is needed for the modes."""
        whole, found = self.view(tensor), cuts(self.sizes, self.block_size)
        if len(found) == 1:
            return [whole]
        views = []
        for block in found:
            view = whole
            for mode, (start, length) in enumerate(block):
                view = view.narrow(mode, start, length)
            views.append(view)
        return views

    def assembled(self, pieces: Sequence[Tensor]) -> Tensor:
        """The tensor of which these are the blocks."""
        if len(pieces) == 1:
            return pieces[0]
        whole = pieces[0].new_empty(self.sizes)
        for block, piece in zip(self.blocks(whole), pieces, strict=True):
            block.copy_(piece)
        return whole

    def rows(self, entries: list[Tensor]) -> list[list[Tensor]]:
        """Statistics, or factors: for each block a list with an entry for each mode."""
        k = len(self.sizes)
        return [entries[start : start + k] for start in range(0, len(entries), k)]

    def statistic_shapes(self, max_factor_dim: int) -> list[tuple[int, ...]]:
        """The shapes of the statistics: of each block, those of all its modes."""
        shapes: list[tuple[int, ...]] = []
        for block in cuts(self.sizes, self.block_size):
            lengths = [length for _, length in block]
            kinds = diagonal_modes(lengths, max_factor_dim)
            shapes += [(d,) if flat else (d, d) for d, flat in zip(lengths, kinds, strict=True)]
        return shapes


def layout(param: Tensor, group: Mapping[str, Any]) -> Layout:
    """How a parameter is seen with its group's settings."""
    sizes = mode_shape(param.shape, group["modes"], group["merge_small_dims"])
    return Layout(sizes, group["block_size"])


def layout_of(state: State) -> Layout:
    """How a parameter with this state is seen, whatever its group's settings have become."""
    return Layout(tuple(state["momentum"].shape), state["block_size"])


def state_dtype(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's statistics, factors and momentum."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def is_half(param: Tensor) -> bool:
    """Whether a parameter has fewer bits than its step."""
    return param.dtype in (torch.bfloat16, torch.float16)


def zero_statistics(param: Tensor, group: Mapping[str, Any]) -> list[Tensor]:
    """Zeros for statistics of a parameter."""
    dtype = state_dtype(param)
    return [
        torch.zeros(shape, dtype=dtype, device=param.device)
        for shape in layout(param, group).statistic_shapes(group["max_factor_dim"])
    ]


def new_state(
    param: Tensor,
    group: Mapping[str, Any],
    kept: Container[str],
    *,
    stats: list[Tensor] | None = None,
    factors: list[Tensor] | None = None,
) -> State:
    """A state with zero moments.

    Its counts: ``first_step``, at which it began; ``updates`` of the momentum, and
    ``second_moment_updates``; how often statistics and inverses failed, and how often in a row.

    Args:
        param: the parameter.
        group: its settings.
        kept: which of ``TENSORS`` this process keeps.
        stats: None for zeros.
        factors: None for zeros.
    """
    state: State = {"block_size": group["block_size"], "first_step": group["step"], "updates": 0}
    state.update(dict.fromkeys(COUNTERS, 0))
    if "stats" in kept:
        state["stats"] = zero_statistics(param, group) if stats is None else stats
    if "factors" in kept:
        state["factors"] = zero_statistics(param, group) if factors is None else factors
    grafted = group["graft"] == "adam"
    if grafted:
        state["second_moment_updates"] = 0
    if group["rounding"] == "master" and is_half(param):
        state["master"] = param.detach().to(dtype=torch.float32, copy=True)
    sizes, dtype = layout(param, group).sizes, state_dtype(param)
    for name in MOMENTS if grafted else MOMENTS[:1]:
        if name in kept:
            state[name] = torch.zeros(sizes, dtype=dtype, device=param.device)
    return state


def each(states: Iterable[State], name: str) -> list[Any]:
    """One entry of each of some states."""
    return [state[name] for state in states]


def blocks(tensors: Iterable[Tensor], layouts: Iterable[Layout]) -> list[Tensor]:
    """The blocks of tensors, one after the other."""
    return [b for t, seen in zip(tensors, layouts, strict=True) for b in seen.blocks(t)]


def rows(entries: Iterable[list[Tensor]], layouts: Iterable[Layout]) -> list[list[Tensor]]:
    """The statistics, or factors, of parameters: a list for each of their blocks."""
    return [row for own, seen in zip(entries, layouts, strict=True) for row in seen.rows(own)]


def put_back(params: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
    """Copies what was written in the shape of the modes to parameters whose strides had no view."""
    for param, weight in zip(params, weights, strict=True):
        if weight is not param and weight.data_ptr() != param.data_ptr():
            param.copy_(weight.view(param.shape))
