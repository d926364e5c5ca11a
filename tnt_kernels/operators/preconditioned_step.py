"""``preconditioned_step_``: momentum, product with the factors, decay and update in one call."""

from typing import Any

import torch
from torch import Tensor

from tnt_kernels import arguments
from tnt_kernels.arguments import Modes, Number, Tensors
from tnt_kernels.calls import by_mode, call, flat, listed
from tnt_kernels.formulas import moved, scalar_like, stepped, write
from tnt_kernels.operators.mode_products import definition as products

SCHEMA = (
    "preconditioned_step_(Tensor(a!)[] params, Tensor(b!)[] momenta, Tensor[] grads, "
    "Tensor[] factors, Tensor lr, Tensor momentum, Tensor weight_decay) -> ()"
)


@torch.no_grad()
def preconditioned_step_(
    params: Tensors,
    momenta: Tensors,
    grads: Tensors,
    factors: Modes,
    lr: Number,
    momentum: Number,
    weight_decay: Number,
) -> None:
    """m <- momentum m + g;  W <- W - lr (m x_1 A_1 ... x_k A_k + weight_decay W).

    Args:
        params: the W, any float dtype and strides, updated in place; half precision is rounded
            once, at the end.
        momenta: the m, updated in place; float64 for a float64 W, else float32.
        grads: the g, any float dtype and strides.
        factors: the symmetric A_i, of the momenta's dtype.
        lr: alpha >= 0.
        momentum: mu >= 0.
        weight_decay: gamma >= 0, outside the preconditioner.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, Algorithm 2.
    """
    scalars = {
        name: arguments.scalar(name, value)
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay))
    }

    def check() -> None:
        arguments.check_tensors("params", params)
        arguments.check_modes("factors", factors, "params", params)
        arguments.check_directions(params, momenta, "momenta")
        arguments.check_shapes("grads", grads, "params", params)
        for t, m in enumerate(momenta):
            arguments.check_written(f"momenta[{t}]", m)
        written, read = {"params": params, "momenta": momenta}, {"grads": grads, "factors": factors}
        arguments.check_device(**written, **read, **scalars)
        arguments.check_overlaps(written, read)

    def flattened() -> tuple[Any, ...]:
        lists = map(listed, (params, momenta, grads))
        return *lists, flat(factors, params), *scalars.values()

    call(SCHEMA, check, flattened)


def definition(
    params: Tensors,
    momenta: Tensors,
    grads: Tensors,
    factors: Modes,
    lr: Number,
    momentum: Number,
    weight_decay: Number,
) -> None:
    """m <- momentum m + g;  W <- W - lr (m x_1 A_1 ... x_k A_k + weight_decay W)."""
    new_momenta = [moved(m, g, momentum) for m, g in zip(momenta, grads, strict=True)]
    new_params = []
    for param, m, modes in zip(params, new_momenta, factors, strict=True):
        alpha, gamma = scalar_like(m, lr), scalar_like(m, weight_decay)
        (direction,) = products([m], [modes])
        new_params.append(stepped(param, alpha * direction, alpha * gamma))
    write([*momenta, *params], [*new_momenta, *new_params])


def from_flat(
    params: Tensors, momenta: Tensors, grads: Tensors, factors: Tensors, *numbers: Tensor
) -> None:
    """The definition on flat lists."""
    definition(params, momenta, grads, by_mode(factors, params), *numbers)
