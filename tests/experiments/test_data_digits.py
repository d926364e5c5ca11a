"""The digits of scikit-learn."""

import torch

from experiments.data.digits import digits_images


def test_digits_are_scaled_scans() -> None:
    digits = digits_images()
    assert digits.shape == (1797, 64) and digits.dtype == torch.float32
    assert (digits.min().item(), digits.max().item()) == (0.0, 1.0)
    assert torch.equal(digits * 16, (digits * 16).round())
