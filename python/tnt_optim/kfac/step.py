"""The part of KFAC's step that runs on the device. Nothing here looks at a value on it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tnt_optim.kfac.inverses import Inverse
from tnt_optim.kfac.layers import Layer, joined, parted
from tnt_optim.kfac.statistics import all_finite_statistics
from tnt_optim.modes import by_device, state_dtype
from tnt_optim.options import as_number

States = Mapping[Tensor, dict[str, Any]]


def blend(states: States, observed: Mapping[Tensor, list[Tensor]], decay: float | Tensor) -> Tensor:
    """S <- decay S + (1 - decay) new, by weight, if everything observed is finite.

    Returns:
        A code for each weight, 0 where its statistics took it in.
    """
    finite = all_finite_statistics(observed.values())
    for weight, pair in observed.items():
        for old, new in zip(states[weight]["stats"], pair, strict=True):
            old.copy_(torch.where(finite.to(old.device), new.lerp(old, decay), old))
    return (~finite).to(torch.int32).expand(len(observed)).contiguous()


def update_(
    group: Mapping[str, Any],
    states: States,
    layers: Sequence[Layer],
    others: Sequence[Tensor],
    inverse: Inverse,
) -> None:
    """m <- μ m + g; W <- W - lr (P + γ W), with P the preconditioned m in layers, m elsewhere.

    Args:
        group: the settings.
        states: of all parameters that move, where a momentum that is not there yet starts from
            zero; of the layers' weights, with factors. Gives an empty one where there is none.
        layers: the layers that move, as far as their parameters have gradients.
        others: the other parameters that move.
        inverse: how the layers' factors are applied.
    """
    parts = [p for layer in layers for p in parameters(layer) if p.grad is not None]
    params = [*parts, *others]
    if not params:
        return
    for p in params:
        if "momentum" not in states[p]:
            states[p]["momentum"] = torch.zeros(p.shape, dtype=state_dtype(p), device=p.device)
    momenta = [states[p]["momentum"] for p in params]
    torch._foreach_mul_(momenta, group["momentum"])
    torch._foreach_add_(momenta, [p.grad for p in params if p.grad is not None])
    moving = dict(zip(params, momenta, strict=True))
    by_weight = {layer.weight: layer for layer in layers}
    directions = dict(moving)
    for weights in by_device(by_weight):
        blocks = [by_weight[weight] for weight in weights]
        matrices = [
            joined(moving.get(block.weight), _part(moving, block.bias), block) for block in blocks
        ]
        applied = inverse.apply(matrices, [states[weight]["factors"] for weight in weights])
        for block, matrix in zip(blocks, applied, strict=True):
            for param, part in zip(parameters(block), parted(matrix, block), strict=True):
                if param in moving:
                    directions[param] = part
    lr, decay = as_number(group["lr"]), group["weight_decay"]
    steps = torch._foreach_mul([directions[p] for p in params], lr)
    # Half precision is rounded once.
    wide = [p if p.dtype == state_dtype(p) else p.to(state_dtype(p)) for p in params]
    if isinstance(decay, Tensor) or decay != 0:
        torch._foreach_mul_(wide, 1 - lr * decay)
    torch._foreach_sub_(wide, steps)
    for param, value in zip(params, wide, strict=True):
        if value is not param:
            param.copy_(value)


def parameters(layer: Layer) -> list[Tensor]:
    """The weight, and the bias where there is one."""
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]


def _part(moving: Mapping[Tensor, Tensor], bias: Tensor | None) -> Tensor | None:
    return None if bias is None else moving.get(bias)
