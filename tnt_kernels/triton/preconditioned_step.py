"""``preconditioned_step_`` in Triton: one launch for the momenta, then the mode products.

The epilogue of each tensor's last product updates the parameter instead of storing the product.
"""

from collections.abc import Sequence

from torch import Tensor

from tnt_kernels.lists import mark_written
from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import programs_at_once
from tnt_kernels.triton.momentum import update_momenta


def preconditioned_step_(
    params: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    lr: Tensor,
    momentum: Tensor,
    weight_decay: Tensor,
    *,
    programs: int | None = None,
) -> None:
    """The operator with ``factors`` flat; ``programs`` defaults to the device's."""
    if not params:
        return
    device = params[0].device
    programs = programs or programs_at_once(device)
    update_params = products(momenta, params, factors, programs, (lr, weight_decay))
    update_momenta(momenta, grads, momentum, programs)
    update_params()
    mark_written([*params, *momenta])
