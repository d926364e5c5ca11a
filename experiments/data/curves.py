"""A CURVES set of this project: images of one smooth curve each, given by six numbers."""

from __future__ import annotations

import torch
from torch import Tensor

_SIDE = 28
_PEN = 2.0  # the stroke's width in pixels
_MARGIN = 2.0  # of the points, in pixels: half the pen is 1, half a pixel's soft edge 0.5
# A sixteenth of the sharpest curve that fits the image is at most 0.07 pixels off its chord.
_CHORDS = 16
# 40 images of 784 pixels are below the 32,768 elements from which torch splits elementwise loops
# over threads; with threads it was slower on two busy cores.
_AT_ONCE = 40


def curves_images(count: int = 20_000, seed: int = 0) -> Tensor:
    """Images of curves as float32 rows in [0, 1], shape (count, 784), 28x28 pixels row by row.

    Each image shows the quadratic Bezier curve of three points, uniform in the square [2, 26]^2 of
    the 28x28 pixels: it starts at the first, ends at the third and leaves towards the second. A
    round pen 2 pixels wide draws it; a pixel is 1 inside the pen and 0 outside, with a ramp one
    pixel wide between. Image i depends on `seed` and i only, so a longer set starts with the images
    of a shorter one.

    These are not the images of the original file (`digs3pts_1.mat`), whose source says only that
    the curves are "generated from three randomly chosen points in two dimensions": losses on the
    two sets are not comparable.

    Source: Hinton & Salakhutdinov, Science 313, 2006, supporting material.
    """
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(count, 3, 2, generator=generator) * (_SIDE - 2 * _MARGIN) + _MARGIN
    return torch.cat([drawn_curves(some) for some in points.split(_AT_ONCE)])


def drawn_curves(points: Tensor) -> Tensor:
    """The images, (n, 784), of the Bezier curves with these points, (n, 3, 2), x before y.

    The unit is the pixel and the origin the image's upper left corner, so that the first pixel's
    centre is (0.5, 0.5).
    """
    # No matrix product: its rounding would depend on the number of images.
    t = torch.linspace(0.0, 1.0, _CHORDS + 1)
    start, middle, end = points[:, :, :, None].unbind(1)
    knots = (1 - t).square() * start + 2 * t * (1 - t) * middle + t.square() * end
    pixels = torch.arange(_SIDE) + 0.5
    nearest = torch.full((points.shape[0], _SIDE, _SIDE), torch.inf)
    for i in range(_CHORDS):
        # x lies along the rows, y along the columns: (n, 1, 28) and (n, 28, 1).
        from_x, from_y = (pixels - knots[:, :, i, None]).unbind(1)
        from_x, from_y = from_x[:, None, :], from_y[:, :, None]
        along = knots[:, :, i + 1] - knots[:, :, i]
        squared_length = along.square().sum(1).clamp_min(1e-12)[:, None, None]
        along_x, along_y = along[:, :, None, None].unbind(1)
        share = from_x * (along_x / squared_length) + from_y * (along_y / squared_length)
        share.clamp_(0.0, 1.0)
        distance = (from_x - share * along_x).square_()
        distance += (from_y - share * along_y).square_()
        torch.minimum(nearest, distance, out=nearest)
    coverage = (_PEN / 2 + 0.5 - nearest.sqrt_()).clamp_(0.0, 1.0)
    return coverage.reshape(points.shape[0], _SIDE * _SIDE)
