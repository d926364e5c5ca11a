"""Floating-point operations and bytes of an operator, counted from shapes.

Flops are the least that the result needs: one triangle of a Gram matrix; Cholesky and its inverse
for an inverse (d^3). They count products only: moving averages, momentum and scaling have d^2 or N
where a product has N d. Bytes count every float32 input once and every output once, no temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Work:
    """Counts of one call; ``a + b`` is the work of both."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


Views = Sequence[Sequence[int]]
Diagonal = Sequence[Sequence[bool]]


def gram_work(views: Views, diagonal: Diagonal) -> Work:
    """One update of all statistics: reads G once, reads and writes every S."""
    total = Work()
    for view, kinds in zip(views, diagonal, strict=True):
        size = math.prod(view)
        total += Work(bytes=FLOAT_BYTES * size)
        for d, is_diagonal in zip(view, kinds, strict=True):
            if is_diagonal:
                total += Work(2 * size, 2 * FLOAT_BYTES * d)
            else:
                # d (d + 1) / 2 entries, each a product and a sum over size / d terms.
                total += Work((d + 1) * size, 2 * FLOAT_BYTES * d * d)
    return total


def inverse_work(views: Views, diagonal: Diagonal) -> Work:
    """One damped inverse of every full statistic: reads S, writes A."""
    total = Work()
    for d, is_diagonal in _modes(views, diagonal):
        if is_diagonal:
            total += Work(d, 2 * FLOAT_BYTES * d)
        else:
            total += Work(d**3, 2 * FLOAT_BYTES * d * d)
    return total


def factor_bytes(views: Views, diagonal: Diagonal) -> int:
    """The size of one matrix, or diagonal, for every mode."""
    return FLOAT_BYTES * sum(d if flat else d * d for d, flat in _modes(views, diagonal))


def products_work(views: Views, diagonal: Diagonal) -> Work:
    """Every tensor multiplied by all its factors: reads both, writes the product."""
    flops = 0
    for view, kinds in zip(views, diagonal, strict=True):
        size = math.prod(view)
        flops += sum(size if flat else 2 * d * size for d, flat in zip(view, kinds, strict=True))
    tensors = FLOAT_BYTES * sum(math.prod(view) for view in views)
    return Work(flops, 2 * tensors + factor_bytes(views, diagonal))


def step_work(views: Views, diagonal: Diagonal) -> Work:
    """The products, with momentum and weight read and written and the gradient read."""
    products = products_work(views, diagonal)
    tensors = FLOAT_BYTES * sum(math.prod(view) for view in views)
    return products + Work(bytes=3 * tensors)


def _modes(views: Views, diagonal: Diagonal) -> Iterable[tuple[int, bool]]:
    for view, kinds in zip(views, diagonal, strict=True):
        yield from zip(view, kinds, strict=True)
