"""Random float64 parameters and gradients of the optimizer tests, and how they are compared."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tolerances import FLOAT64_FORMULA
from torch import Tensor, nn


def weight(*shape: int) -> nn.Parameter:
    """A float64 parameter."""
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


def noise(*shape: int) -> Tensor:
    """A float64 gradient."""
    return torch.randn(shape, dtype=torch.float64)


def close(actual: Any, expected: Any, tolerance: float = FLOAT64_FORMULA) -> None:
    """Equal but for rounding in float64, relative to the largest expected entry; also of lists."""
    if not isinstance(expected, Tensor):
        for one, other in zip(actual, expected, strict=True):
            close(one, other, tolerance)
        return
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


@contextmanager
def raising(error: Any, match: str) -> Iterator[None]:
    """Expect an error; a warning issued on the way to it is not an error of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=match):
            yield
