"""How parameters in half precision take in a step that is computed in float32."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tnt_optim.likelihoods import stream_seed
from tnt_optim.state import Layout, State, is_half, put_back

# Sixteen random bits for each number, four numbers a draw: a draw costs more than all else here.
_INT64 = (-(1 << 63), (1 << 63) - 1)
# On the CPU numbers are rounded piece by piece, each in the cache throughout.
_PIECE = 1 << 16


@contextmanager
def to_be_moved(
    params: Sequence[Tensor],
    states: Mapping[Tensor, State],
    group: Mapping[str, Any],
    layouts: Sequence[Layout] | None = None,
    *,
    key: tuple[int, ...],
) -> Iterator[list[Tensor]]:
    """What a step writes to in place of parameters; on leaving, it is in the parameters.

    Args:
        params: the parameters, or pieces of them.
        states: those of whole parameters, with master copies.
        group: their settings.
        layouts: to see them in the shapes of their modes; None for their own.
        key: names these parameters among all that move in a step, for draws of their own; the same
            for copies in other processes.
    """
    rounding = group["rounding"]
    wide = [_wide(param, states, rounding) for param in params]
    weights = wide
    if layouts is not None:
        weights = [seen.view(w) for seen, w in zip(layouts, wide, strict=True)]
    yield weights
    put_back(wide, weights)
    generators: dict[torch.device, torch.Generator] = {}
    for param, source in zip(params, wide, strict=True):
        if source is not param:
            if rounding == "stochastic":
                stochastically_rounded_(source, _generator(generators, source.device, group, key))
            param.copy_(source)


def _wide(param: Tensor, states: Mapping[Tensor, State], rounding: str) -> Tensor:
    if rounding == "nearest" or not is_half(param):
        return param
    if rounding == "stochastic":
        return param.float()
    master: Tensor = states[param]["master"]
    for kept, given in _pieces(master, param):
        # What was set from outside, as by load_state_dict of the model, counts.
        same = kept.to(given.dtype) == given
        kept.copy_(torch.where(same, kept, given.float()))
    return master


def _pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Pieces of tensors of one shape, on the CPU small enough to stay in the cache."""
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return zip(*(tensor.view(-1).split(_PIECE) for tensor in tensors), strict=True)


def _generator(
    generators: dict[torch.device, torch.Generator],
    device: torch.device,
    group: Mapping[str, Any],
    key: tuple[int, ...],
) -> torch.Generator:
    if device not in generators:
        seed = stream_seed("rounding", group["step"], *key)
        generators[device] = torch.Generator(device).manual_seed(seed)
    return generators[device]


def stochastically_rounded_(values: Tensor, generator: torch.Generator) -> None:
    """Rounds float32 values to bfloat16 ones, up or down with the chances that keep the mean.

    Args:
        values: overwritten by numbers that bfloat16 has; NaN and infinity stay what they are.
        generator: where the chances come from, on the device of ``values``.
    """
    for (piece,) in _pieces(values):
        drawn = torch.randint(
            *_INT64, (piece.numel() // 4 + 1,), device=values.device, generator=generator
        )
        noise = drawn.view(torch.int16)[: piece.numel()].view(piece.shape).to(torch.int32)
        noise.bitwise_and_(0xFFFF).add_(piece.view(torch.int32)).bitwise_and_(-(1 << 16))
        # A NaN whose bits are all set would become a number.
        piece.copy_(torch.where(piece.isfinite(), noise.view(torch.float32), piece))
