"""``scaled_step_`` in Triton: one launch over all elements."""

from collections.abc import Sequence

from torch import Tensor

from tnt_kernels.triton.launch import run, scalar_on, table_on
from tnt_kernels.triton.momentum import over_elements, scaled_step_kernel


def scaled_step_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    lr: Tensor,
    weight_decay: Tensor,
    decayed: Sequence[bool],
    scales: Tensor,
) -> None:
    """The operator, with ``scales`` empty for 1."""
    if not params:
        return
    device = params[0].device
    alpha, gamma = scalar_on(device, lr), scalar_on(device, weight_decay)
    factors = table_on(device, scales)
    step, _ = over_elements(
        scaled_step_kernel,
        [params, directions],
        [alpha, gamma, factors if len(factors) else alpha],
        decayed=decayed,
        SCALED=len(factors) > 0,
    )
    run(device, [step], params)
