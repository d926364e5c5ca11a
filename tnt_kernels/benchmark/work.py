"""Floating-point operations and bytes of an operator, and how its time grows, from shapes.

Flops are the least that the result needs: one triangle of a Gram matrix; Cholesky and its inverse
for an inverse (d^3). They count products only: moving averages, momentum and scaling have d^2 or N
where a product has N d. Bytes count every float32 input once and every output once, no temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tnt_kernels.benchmark.inputs import TensorSet

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Work:
    """Counts of one call."""

    flops: int
    bytes: int
    symmetric: bool = False  # whether a product is symmetric, so one triangle is enough


def gram_work(tensor_set: TensorSet) -> Work:
    """One update of all statistics: reads G once, reads and writes every S."""
    # A full S has d (d + 1) / 2 entries, each a product and a sum over size / d terms.
    flops = sum((2 if flat else d + 1) * size for size, d, flat in _modes(tensor_set))
    size = _tensor_bytes(tensor_set) + 2 * _factor_bytes(tensor_set)
    return Work(flops, size, symmetric=True)


def whitened_work(tensor_set: TensorSet) -> Work:
    """As ``gram_work``, but each Gram matrix takes k - 1 mode products more; reads every A."""
    gram, flops = gram_work(tensor_set), 0
    for view, row in zip(tensor_set.views, tensor_set.matrices, strict=True):
        costs = [1 if len(matrix) == 1 else 2 * matrix[0] for matrix in row]
        flops += math.prod(view) * (len(row) - 1) * sum(costs)
    return Work(gram.flops + flops, gram.bytes + _factor_bytes(tensor_set))


def inverse_work(tensor_set: TensorSet) -> Work:
    """One damped inverse of every statistic: reads S, writes A."""
    return Work(factors_growth(tensor_set), 2 * _factor_bytes(tensor_set))


def root_work(tensor_set: TensorSet) -> Work:
    """One inverse root of every statistic by eigenvalues: reads S, writes A.

    4/3 d^3 to a tridiagonal matrix, 4/3 d^3 for its eigenvectors, 2 d^3 to transform them, d^3 for
    one triangle of the product.
    """
    flops = sum(d if flat else 17 * d**3 // 3 for _, d, flat in _modes(tensor_set))
    return Work(flops, 2 * _factor_bytes(tensor_set))


def products_work(tensor_set: TensorSet) -> Work:
    """Every tensor multiplied by all its factors: reads both, writes the product."""
    flops = sum((1 if flat else 2 * d) * size for size, d, flat in _modes(tensor_set))
    return Work(flops, 2 * _tensor_bytes(tensor_set) + _factor_bytes(tensor_set))


def step_work(tensor_set: TensorSet) -> Work:
    """The products, with momentum and weight read and written and the gradient read."""
    products = products_work(tensor_set)
    return Work(products.flops, products.bytes + 3 * _tensor_bytes(tensor_set))


def grafted_work(tensor_set: TensorSet) -> Work:
    """The products, with both moments read and written: m, g, v and the direction."""
    products = products_work(tensor_set)
    return Work(products.flops, products.bytes + 4 * _tensor_bytes(tensor_set))


def scaled_work(tensor_set: TensorSet) -> Work:
    """Reads W and P, writes W."""
    return Work(0, 3 * _tensor_bytes(tensor_set))


# Table 2 of Ren & Goldfarb 2021. A mode with only a diagonal has prod d, and d.


def products_growth(tensor_set: TensorSet) -> int:
    """The sum of d_i prod_j d_j over all modes: statistics, whitening and products."""
    return sum((1 if flat else d) * size for size, d, flat in _modes(tensor_set))


def factors_growth(tensor_set: TensorSet) -> int:
    """The sum of d_i^3 over all modes: inverses and roots."""
    return sum(d if flat else d**3 for _, d, flat in _modes(tensor_set))


def entries_growth(tensor_set: TensorSet) -> int:
    """prod_j d_j: elementwise work."""
    return sum(math.prod(shape) for shape in tensor_set.shapes)


def _tensor_bytes(tensor_set: TensorSet) -> int:
    return FLOAT_BYTES * entries_growth(tensor_set)


def _factor_bytes(tensor_set: TensorSet) -> int:
    """The bytes of one matrix, or diagonal, for every mode."""
    return FLOAT_BYTES * sum(math.prod(shape) for row in tensor_set.matrices for shape in row)


def _modes(tensor_set: TensorSet) -> Iterator[tuple[int, int, bool]]:
    """For every mode: its tensor's size, the mode's size, and whether it has only a diagonal."""
    for shape, row in zip(tensor_set.shapes, tensor_set.matrices, strict=True):
        for matrix in row:
            yield math.prod(shape), matrix[0], len(matrix) == 1
