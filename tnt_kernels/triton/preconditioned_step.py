"""``preconditioned_step_`` in Triton: one launch for the momenta, then the mode products.

The epilogue of each tensor's last product updates the parameter instead of storing the product.
"""

from collections.abc import Sequence

from torch import Tensor

from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import run, scalar_on
from tnt_kernels.triton.momentum import momentum_kernel, over_elements


def preconditioned_step_(
    params: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    lr: Tensor,
    momentum: Tensor,
    weight_decay: Tensor,
) -> None:
    """The operator with ``factors`` flat."""
    if not params:
        return
    device = params[0].device
    mu = scalar_on(device, momentum)
    # Without sums and Adam the kernel reads no other numbers.
    numbers = (mu, mu, mu, 0.0, 0.0)
    move, _ = over_elements(
        momentum_kernel, [momenta, grads], numbers, SUMS=False, ADAM=False, AHEAD=False
    )
    update_params = products(momenta, params, factors, (lr, weight_decay))
    run(device, [move, *update_params], [*params, *momenta])
