"""The 8x8 handwritten digits that come with scikit-learn: no download."""

from __future__ import annotations

import torch
from torch import Tensor


def digits_images() -> Tensor:
    """scikit-learn's bundled handwritten digits as float32 rows in [0, 1], shape (1797, 64)."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: "
            "install it, or this project with its `bench` extra"
        ) from error
    return torch.from_numpy(load_digits().data).to(torch.float32).div_(16.0)
