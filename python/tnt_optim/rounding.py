"""Weights in half precision: they are updated in float32, then rounded or kept in a master copy."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tnt_optim.likelihoods import stream_seed
from tnt_optim.modes import Layout, Settings, State, is_half, is_sharded

# The range of a random draw, whose 64 bits round four values: drawing costs more than rounding.
_INT64 = (-(1 << 63), (1 << 63) - 1)
# On the CPU, values are rounded in pieces that stay in the cache.
_ROUNDING_PIECE = 1 << 16


class Weights:
    """The tensors that a step updates in place, and how they are written to the parameters.

    With ``rounding`` other than "nearest" they are float32 copies of parameters in half precision.

    Args:
        params: the parameters, or pieces of them, on one device.
        states: they have the master copies.
        group: the settings.
        layouts: for tensors in the shapes of the modes; None for the parameters' own shapes.
        key: names the random stream within the step; copies in other processes have the same.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Mapping[Tensor, State],
        group: Settings,
        layouts: Sequence[Layout] | None = None,
        *,
        key: tuple[int, ...],
    ) -> None:
        self.params = params
        self._states, self._group, self._layouts, self._key = states, group, layouts, key
        self._wide: list[Tensor] = []
        self._updated: list[Tensor] = []

    def take(self) -> list[Tensor]:
        """The tensors to update; the first call makes the copies."""
        if not self._updated:
            rounding = self._group["rounding"]
            wide = [_wide(param, self._states, rounding) for param in self.params]
            updated = wide
            if self._layouts is not None:
                updated = [layout.view(w) for layout, w in zip(self._layouts, wide, strict=True)]
            self._wide, self._updated = wide, updated
        return self._updated

    def write(self) -> None:
        """Writes the updated copies to the parameters; an attempt that raised can be repeated."""
        for target, weight in zip(self._wide, self._updated, strict=True):
            if weight is not target and weight.data_ptr() != target.data_ptr():
                target.copy_(weight.view(target.shape))  # the modes' shape needed a copy
        pairs = zip(self.params, self._wide, strict=True)
        copies = [(p, copy) for p, copy in pairs if copy is not p]
        if copies and self._group["rounding"] == "stochastic":
            seed = stream_seed("rounding", self._group["step"], *self._key)
            generator = torch.Generator(copies[0][0].device).manual_seed(seed)
            for _, copy in copies:
                stochastically_rounded_(copy, generator)  # leaves rounded values as they are
        for param, copy in copies:
            param.copy_(copy)


def check_rounding(param: Tensor, rounding: str, name: Callable[[Tensor], str]) -> None:
    """Refuses a parameter whose weights cannot be rounded like this."""
    if rounding == "master" and is_half(param) and is_sharded(param):
        raise ValueError(
            "rounding='master' is not for sharded parameters: fully_shard's "
            "MixedPrecisionPolicy(param_dtype=...) keeps them in float32, got "
            f"{param.dtype} for {name(param)}"
        )
    if rounding == "stochastic" and param.dtype == torch.float16:
        raise ValueError(
            f"rounding='stochastic' is for bfloat16, got {param.dtype} for {name(param)}"
        )


def _wide(param: Tensor, states: Mapping[Tensor, State], rounding: str) -> Tensor:
    if rounding == "nearest" or not is_half(param):
        return param
    if rounding == "stochastic":
        return param.float()
    master: Tensor = states[param]["master"]
    for kept, given in _pieces(master, param):
        # The parameter may have been set from outside, as by the model's load_state_dict.
        same = kept.to(given.dtype) == given
        kept.copy_(torch.where(same, kept, given.float()))
    return master


def _pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Pieces of tensors of one shape, on the CPU small enough to stay in the cache."""
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return zip(*(tensor.view(-1).split(_ROUNDING_PIECE) for tensor in tensors), strict=True)


def stochastically_rounded_(values: Tensor, generator: torch.Generator) -> None:
    """Rounds float32 values in place to bfloat16 ones, up or down at random, with the right mean.

    NaN and infinity stay.
    """
    for (piece,) in _pieces(values):
        drawn = torch.randint(
            *_INT64, (piece.numel() // 4 + 1,), device=values.device, generator=generator
        )
        noise = drawn.view(torch.int16)[: piece.numel()].view(piece.shape).to(torch.int32)
        noise.bitwise_and_(0xFFFF).add_(piece.view(torch.int32)).bitwise_and_(-(1 << 16))
        # A NaN with all bits set would become a number.
        piece.copy_(torch.where(piece.isfinite(), noise.view(torch.float32), piece))
