"""The CURVES set against a pen at 4001 points of the curve; the digits."""

import pytest
import torch

from experiments.data.curves import curves_images, drawn_curves
from experiments.data.digits import digits_images

pytestmark = pytest.mark.usefixtures("one_thread")


def slowly_drawn(points: torch.Tensor) -> torch.Tensor:
    """One image from De Casteljau's construction at 4001 places, in float64: (28, 28)."""
    t = torch.linspace(0, 1, 4001, dtype=torch.float64)[:, None]
    start, middle, end = points.double()
    first, second = torch.lerp(start, middle, t), torch.lerp(middle, end, t)
    curve = torch.lerp(first, second, t)
    image = torch.empty(28, 28, dtype=torch.float64)
    for row in range(28):
        for column in range(28):
            centre = torch.tensor([column + 0.5, row + 0.5])
            distance = (curve - centre).norm(dim=1).min()
            image[row, column] = (1.5 - distance).clamp(0, 1)
    return image


@pytest.mark.parametrize(
    "points",
    [
        [[3.0, 4.0], [20.0, 5.0], [12.0, 24.0]],
        [[2.0, 2.0], [26.0, 26.0], [26.0, 2.0]],
        [[2.0, 26.0], [26.0, 2.0], [2.5, 26.0]],  # there and nearly back: the sharpest turn
        [[5.0, 5.0], [14.0, 14.0], [23.0, 23.0]],  # straight
        [[9.3, 17.1], [9.3, 17.1], [9.3, 17.1]],  # a dot
    ],
)
def test_a_curve_is_drawn_by_a_pen_along_it(points: list[list[float]]) -> None:
    image = drawn_curves(torch.tensor([points]))
    assert image.shape == (1, 784)
    # The sixteen chords are at most 0.066 pixels off the curve.
    torch.testing.assert_close(
        image.reshape(28, 28), slowly_drawn(torch.tensor(points)).float(), rtol=0, atol=0.07
    )


def test_a_longer_set_starts_with_a_shorter_one() -> None:
    whole = curves_images(1013, seed=3)
    for count in (1, 7, 1000):
        assert torch.equal(curves_images(count, seed=3), whole[:count])


def test_digits_are_scaled_scans() -> None:
    digits = digits_images()
    assert digits.shape == (1797, 64) and digits.dtype == torch.float32
    assert (digits.min().item(), digits.max().item()) == (0.0, 1.0)
    assert torch.equal(digits * 16, (digits * 16).round())
