"""``preconditioned_step_`` in Triton: the momenta in one launch, then their products.

The last product of each tensor is not stored but made into the update of its parameter.
"""

from collections.abc import Sequence

from torch import Tensor

from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import mark_written, programs_at_once, scalar_on
from tnt_kernels.triton.momentum import move_momenta


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
    """The operator, with ``factors`` flat; see ``tnt_kernels.preconditioned_step_``.

    Args:
        params: the W.
        momenta: the m.
        grads: the g.
        factors: the symmetric A_i, mode after mode of tensor after tensor.
        lr: alpha.
        momentum: mu.
        weight_decay: gamma.
        programs: how many programs the device runs at once; by default asked of it.
    """
    if not params:
        return
    device = params[0].device
    programs = programs or programs_at_once(device)
    move_momenta(momenta, grads, momentum, programs)
    products(
        momenta,
        params,
        factors,
        scalar_on(device, lr),
        scalar_on(device, weight_decay),
        update=True,
        programs=programs,
    )
    mark_written([*params, *momenta])
