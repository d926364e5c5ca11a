"""The 8x8 handwritten digits that come with scikit-learn: no download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor


def digits_images() -> Tensor:
    """Scikit-learn's handwritten digits as float32 rows in [0, 1], shape (1797, 64)."""
    return torch.from_numpy(load_digits().data).to(torch.float32).div_(16.0)
