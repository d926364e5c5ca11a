"""Numbers compared by their bits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, int8


def differing(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
    """How many numbers of two lists of tensors have not the same bits.

    Zeros of another sign differ, NaNs of the same bits do not.

    Raises:
        ValueError: where the tensors are not of the same number, shapes and dtypes.
    """
    kinds = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in (found, wanted)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"tensors must be of the same shapes and dtypes, got {kinds}")
    return sum(
        int((_bytes(a) != _bytes(b)).any(-1).sum()) for a, b in zip(found, wanted, strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    """One row for each number."""
    return tensor.detach().contiguous().reshape(-1, 1).view(int8)
