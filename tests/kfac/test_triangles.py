"""Symmetric matrices as half their numbers."""

import pytest
import torch

from tnt_optim.kfac.triangles import packed, packed_size, unpacked


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_symmetric_matrix_comes_back(size: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(size, size, dtype=dtype)
    matrix = matrix + matrix.T
    flat = packed(matrix)
    assert flat.shape == (packed_size(size),)
    assert flat.dtype == dtype
    lower = matrix[torch.tril_indices(size, size).unbind()]
    assert torch.equal(flat.sort().values, lower.sort().values)
    assert torch.equal(unpacked(flat, size), matrix)


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_any_numbers_give_a_symmetric_matrix(size: int) -> None:
    matrix = unpacked(torch.randn(packed_size(size)), size)
    assert torch.equal(matrix, matrix.T)


def test_infinite_entries_stay_where_they_are() -> None:
    matrix = torch.ones(5, 5)
    matrix[1, 3] = matrix[3, 1] = torch.inf
    assert torch.equal(unpacked(packed(matrix), 5), matrix)
    matrix[4, 4] = torch.nan
    assert int(unpacked(packed(matrix), 5).isnan().sum()) == 1
