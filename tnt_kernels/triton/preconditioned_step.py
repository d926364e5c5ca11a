"""``preconditioned_step_`` in Triton: one launch for the momenta, then the mode products.

The epilogue of each tensor's last product updates the parameter instead of storing the product.
"""

from collections.abc import Sequence

from torch import Tensor

from tnt_kernels.lists import mark_written
from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import scalar_on
from tnt_kernels.triton.momentum import launch_over, momentum_kernel


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
    update_params = products(momenta, params, factors, (lr, weight_decay))
    mu = scalar_on(params[0].device, momentum)
    # Without sums and Adam the kernel reads no other numbers.
    numbers = (mu, mu, mu, 0.0, 0.0)
    launch_over(momentum_kernel, [momenta, grads], numbers, SUMS=False, ADAM=False)
    update_params()
    mark_written([*params, *momenta])
