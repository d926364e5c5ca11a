"""``grafted_directions_`` in Triton: momenta and Adam's second moments, products, then the norms.

The first launch also adds the squares of the direction to graft, span by span, because it has read
all that these need. One more launch does so for the products, and one adds up the spans.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import Prepared, launch, run, scalar_on, table_on
from tnt_kernels.triton.momentum import (
    WARPS,
    correction,
    inner_kernel,
    momentum_kernel,
    over_elements,
    sum_of,
)


@triton.jit
def norms_kernel(
    norms,
    wanted,
    wanted_firsts,
    squares,
    squares_firsts,
    momentum,
    counts,
    second_decay: tl.float64,
    ADAM: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """|R| and |P| of one tensor.

    With ADAM, |R| = |c n / (sqrt(v / d) + eps)|, c and d the bias corrections, is
    c sqrt(d) |n / (sqrt(v) + eps sqrt(d))|. n is m or, with AHEAD, mu m + g, which sums one more
    power of mu.

    Grid: one program for each tensor, which reads its partial sums. Bound: the launch.
    """
    t = tl.program_id(0)
    length = tl.sqrt(sum_of(wanted, wanted_firsts, t))
    if ADAM:
        mu = tl.load(momentum).to(tl.float64)
        # The momentum is not averaged: Adam's first moment is 1 - mu times it.
        first = (1 - mu) / correction(mu, tl.load(counts + 2 * t) + AHEAD)
        second = correction(second_decay, tl.load(counts + 2 * t + 1))
        length *= first * tl.sqrt(second)
    tl.store(norms + 2 * t, length)
    tl.store(norms + 2 * t + 1, tl.sqrt(sum_of(squares, squares_firsts, t)))


def grafted_directions_(
    momenta: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    out: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    momentum: Tensor,
    counts: Tensor,
    second_decay: float,
    eps: float,
    nesterov: bool,
) -> Tensor:
    """The operator with ``factors`` flat, ``second_moments`` empty to graft the momentum's norm."""
    if not momenta:
        return torch.zeros(0, 2, dtype=torch.float64, device=momentum.device)
    device = momenta[0].device
    mu, adam = scalar_on(device, momentum), len(second_moments) > 0
    # The look-ahead momenta are in ``out``, where the products replace them.
    lists = [momenta, *([second_moments] if adam else []), *([out] if nesterov else []), grads]
    table = table_on(device, counts) if adam else mu  # not read without
    numbers = (mu, table, second_decay, eps)
    move, wanted = over_elements(
        *(momentum_kernel, lists, numbers), sums=1, SUMS=True, ADAM=adam, AHEAD=nesterov
    )
    precondition = products(out if nesterov else momenta, out, factors)
    square, squares = over_elements(inner_kernel, [out], (), sums=1, TWO=False)
    norms = torch.empty(len(momenta), 2, dtype=torch.float64, device=device)

    def finish(_: Tensor) -> None:
        launch(
            norms_kernel,
            *(len(momenta), norms, *wanted, *squares, mu, table, second_decay),
            ADAM=adam,
            AHEAD=nesterov,
            num_warps=WARPS,
        )

    written = [*momenta, *second_moments, *out]
    run(device, [move, *precondition, square, Prepared(0, finish)], written)
    return norms
