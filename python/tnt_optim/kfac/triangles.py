"""Symmetric matrices as half their numbers, to be sent.

What comes back from a sum over processes is symmetric to the bit, whatever the order of the sum.
"""

import torch
from torch import Tensor


def packed_size(size: int) -> int:
    """How many numbers a symmetric matrix of so many rows has."""
    return size * (size + 1) // 2


def packed(matrix: Tensor) -> Tensor:
    """The lower triangle of a square matrix, (size (size + 1) / 2,), in an order of its own."""
    half = len(matrix) // 2
    # The matrix is [[A, Cᵀ], [C, B]]. The triangle of A fits above that of B: a rectangle.
    rectangle = matrix.new_zeros(len(matrix) - half, half + 1)
    rectangle[:, : len(rectangle)] = matrix[half:, half:].tril()
    rectangle[:half, 1:] += matrix[:half, :half].tril().T
    return torch.cat([rectangle.reshape(-1), matrix[half:, :half].reshape(-1)])


def unpacked(flat: Tensor, size: int) -> Tensor:
    """The symmetric matrix, (size, size), that ``packed`` took apart."""
    half = size // 2
    rest = size - half
    rectangle, corner = flat.split([rest * (half + 1), rest * half])
    rectangle, corner = rectangle.view(rest, half + 1), corner.view(rest, half)
    matrix = flat.new_empty(size, size)
    above, below = rectangle[:half, 1:].triu(), rectangle[:, :rest].tril()
    matrix[:half, :half] = above + above.triu(1).T
    matrix[half:, half:] = below + below.tril(-1).T
    matrix[half:, :half] = corner
    matrix[:half, half:] = corner.T
    return matrix
