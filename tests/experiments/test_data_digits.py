"""The digits that come with scikit-learn."""

import torch

from experiments.data import digits_images


def test_digits_are_scaled_scans() -> None:
    digits = digits_images()
    assert digits.shape == (1797, 64)
    assert digits.dtype == torch.float32
    assert (digits.min().item(), digits.max().item()) == (0.0, 1.0)
    assert torch.equal(digits * 16, (digits * 16).round())
