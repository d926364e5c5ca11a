"""``scaled_step_``: the update of parameters along given directions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import arguments
from tnt_kernels.arguments import Number, Tensors
from tnt_kernels.calls import call, listed
from tnt_kernels.formulas import scalar_like, stepped, write

SCHEMA = (
    "scaled_step_(Tensor(a!)[] params, Tensor[] directions, Tensor lr, Tensor weight_decay, "
    "bool[] decayed, Tensor scales) -> ()"
)


@torch.no_grad()
def scaled_step_(
    params: Tensors,
    directions: Tensors,
    lr: Number,
    weight_decay: Number,
    decayed: Sequence[bool] | None = None,
    scales: Tensor | None = None,
) -> None:
    """W <- W - lr (s P + weight_decay W), for each W, its direction P and its scale s.

    Args:
        params: the W, any float dtype and strides, updated in place; half precision is rounded
            once.
        directions: the P, of any strides; float64 for a float64 W, else float32.
        lr: alpha >= 0.
        weight_decay: gamma >= 0.
        decayed: for each W, whether it decays; by default all do.
        scales: the s, float64 of shape (number of params,), on the CPU or the lists' device; by
            default 1.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    >>> w, p = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    >>> scaled_step_([w], [p], 0.1, 0.0, scales=torch.tensor([2.0], dtype=torch.float64))
    >>> w
    tensor([0.4000, 1.2000])
    """
    alpha = arguments.scalar("lr", lr)
    gamma = arguments.scalar("weight_decay", weight_decay)

    def check() -> None:
        arguments.check_tensors("params", params)
        arguments.check_directions(params, directions)
        if decayed is not None:
            arguments.check_length("decayed", decayed, "params", params)
        arguments.check_device(params=params, directions=directions, lr=alpha, weight_decay=gamma)
        if scales is not None:
            arguments.check_table("scales", scales, (len(params),))
            arguments.check_device(params=params, scales=scales)
        arguments.check_overlaps({"params": params}, {"directions": directions})

    def flattened() -> tuple[Any, ...]:
        if scales is not None:  # to the operator, an empty table means not given
            arguments.check_table("scales", scales, (len(params),))
        table = torch.zeros(0, dtype=torch.float64, device="cpu") if scales is None else scales
        chosen = [True] * len(params) if decayed is None else [bool(flag) for flag in decayed]
        return listed(params), listed(directions), alpha, gamma, chosen, table

    call(SCHEMA, check, flattened)


def definition(
    params: Tensors,
    directions: Tensors,
    lr: Number,
    weight_decay: Number,
    decayed: Sequence[bool] | None = None,
    scales: Tensor | None = None,
) -> None:
    """W <- W - lr (s P + weight_decay W), s by default 1; no decay where ``decayed`` is False."""
    new_params = []
    for t, (param, direction) in enumerate(zip(params, directions, strict=True)):
        scale = 1.0 if scales is None else scales[t]
        decay = weight_decay if decayed is None or decayed[t] else 0.0
        alpha, gamma, s = (scalar_like(direction, value) for value in (lr, decay, scale))
        new_params.append(stepped(param, alpha * s * direction, alpha * gamma))
    write(params, new_params)


def from_flat(params: Tensors, directions: Tensors, *rest: Any) -> None:
    """The definition; empty ``scales`` mean 1."""
    lr, weight_decay, decayed, scales = rest
    scales = scales if len(scales) else None
    definition(params, directions, lr, weight_decay, decayed, scales)
