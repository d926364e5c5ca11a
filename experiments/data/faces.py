"""FACES: 25x25 patches of the Olivetti faces, from the original file or made from the faces."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from scipy.io import loadmat
from torch import Tensor
from torch.nn import functional

from experiments.data import find_file

_PATCHES_NAME = "newfaces_rot_single.mat"
_OLIVETTI_NAME = "olivettifaces.mat"
_SIDE = 25
_FACE_SIDE = 64
_FACES = 400  # 10 of each of 40 people
_TRAINING_FACES = 250  # of the first 25 people
_PATCHES_PER_FACE = 414
_TRAINING_PATCHES = _TRAINING_FACES * _PATCHES_PER_FACE  # 103,500
_PITCHES = (1.4, 1.8)  # pixels of a face between two pixels of a patch
_SEED = 0
_AT_ONCE = 2000  # patches made together


def faces_images(folder: str | Path, count: int | None = None) -> tuple[Tensor, str]:
    """The FACES training patches, and in words where they come from.

    The patches are float32 rows of 25x25 pixels, shape (count, 625).

    Every pixel has mean zero over the patches, and one number scales all pixels to a mean variance
    of one.

    If the folder has `newfaces_rot_single.mat` (Martens' single precision file of the set of Hinton
    & Salakhutdinov: 165,600 patches, 414 of each of 400 faces), the patches are its first 103,500
    (25 people), with pixels column by column.

    Otherwise they are made from `olivettifaces.mat` by the procedure in Hinton & Salakhutdinov's
    supporting material: rotate by -90 to +90 degrees, scale by 1.4 to 1.8, crop and subsample, 414
    patches of each of the first 250 faces. This project chooses the rest: angle, scale and place
    are uniform and independent, from a fixed seed; a scale is the distance between two pixels of
    the patch in pixels of the face; the whole patch lies inside the face; pixels are interpolated
    bilinearly, row by row. **So these are not the original patches, and losses on them are not
    comparable with published ones.**

    Args:
        folder: holds one of the two MATLAB files.
        count: number of patches, spread evenly over the faces; all 103,500 by default.

    Raises:
        FileNotFoundError: there is no such folder, or neither file in it.
        ValueError: `count` is not from 2 to 103,500, or the file is corrupt or holds other data.

    Source: Hinton & Salakhutdinov, Science 313, 2006; Martens, ICML 2010.
    """
    if count is None:
        count = _TRAINING_PATCHES
    if not 2 <= count <= _TRAINING_PATCHES:
        raise ValueError(f"count must be from 2 to {_TRAINING_PATCHES:,}, got {count}")
    path = find_file(folder, (_PATCHES_NAME, _OLIVETTI_NAME))
    chosen = torch.arange(count) * _TRAINING_PATCHES // count
    share = f"{count:,} of the {_TRAINING_PATCHES:,} training patches"
    if path.name == _PATCHES_NAME:
        source = f"{share} of the original {_PATCHES_NAME} (Hinton & Salakhutdinov 2006)"
        return _original_patches(path)[chosen], source
    source = (
        f"{share} made from {_OLIVETTI_NAME} by the procedure of Hinton & Salakhutdinov 2006 "
        "(rotated by up to 90 degrees, scaled by 1.4 to 1.8, cropped, mean 0 in each pixel, mean "
        "variance 1) with random numbers of our own: not the original patches, so losses are not "
        "comparable with the paper's"
    )
    images = _patches(_olivetti_faces(path), chosen)
    images -= images.mean(0)
    return images.div_(images.square().mean().sqrt()), source


def _original_patches(path: Path) -> Tensor:
    patches = _rows(path, _SIDE**2)
    if patches.shape[0] < _TRAINING_PATCHES:
        raise ValueError(
            f"{path}: must hold at least {_TRAINING_PATCHES:,} patches, got {patches.shape[0]:,}"
        )
    return patches[:_TRAINING_PATCHES]


def _olivetti_faces(path: Path) -> Tensor:
    """The training faces in the file's units, (250, 64, 64), rows before columns."""
    faces = _rows(path, _FACE_SIDE**2)
    if faces.shape[0] != _FACES or faces.min() == faces.max():
        raise ValueError(f"{path}: must hold {_FACES} faces of 64x64, got {faces.shape[0]}")
    # MATLAB stores columns.
    return faces[:_TRAINING_FACES].reshape(-1, _FACE_SIDE, _FACE_SIDE).transpose(1, 2)


def _rows(path: Path, pixels: int) -> Tensor:
    """The only matrix with a side of `pixels` in a MATLAB file, as float32 (images, pixels)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of variables that SciPy cannot read
            content: dict[str, Any] = loadmat(path)
    # SciPy may raise anything for broken bytes.
    except Exception as error:
        raise ValueError(f"{path}: no MATLAB file, or a corrupt one: {error}") from error
    found = [
        array
        for array in content.values()
        if getattr(array, "ndim", 0) == 2 and pixels in array.shape and array.dtype.kind in "uif"
    ]
    if len(found) != 1:
        raise ValueError(f"{path}: must hold one matrix with a side of {pixels}, got {len(found)}")
    rows = found[0] if found[0].shape[1] == pixels else found[0].T
    tensor = torch.from_numpy(rows.astype("float32", order="C"))
    if not tensor.isfinite().all():
        raise ValueError(f"{path}: holds pixels that are not finite")
    return tensor


def _patches(faces: Tensor, chosen: Tensor) -> Tensor:
    """The patches with these numbers, (len(chosen), 625), before the normalisation.

    The number of a patch is 414 times the number of its face, plus its number within the face.
    """
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.rand(faces.shape[0] * _PATCHES_PER_FACE, 4, generator=generator)
    patches = torch.empty(len(chosen), _SIDE**2)
    for numbers, out in zip(chosen.split(_AT_ONCE), patches.split(_AT_ONCE), strict=True):
        images = faces[numbers // _PATCHES_PER_FACE, None].to(torch.float32)
        # grid_sample's face spans [-1, 1] in both directions.
        places = _places(drawn[numbers]) * (2 / _FACE_SIDE) - 1
        made = functional.grid_sample(images, places, padding_mode="border", align_corners=False)
        out.copy_(made.reshape(out.shape))
    return patches


def _places(drawn: Tensor) -> Tensor:
    """The centres of the pixels in their faces, (n, 25, 25, 2), x before y.

    The unit is the pixel of a face, the origin its upper left corner.

    drawn: (n, 4) in [0, 1): angle, pitch and the centre's x and y.
    """
    angles = (drawn[:, 0] - 0.5) * math.pi
    pitches = _PITCHES[0] + drawn[:, 1] * (_PITCHES[1] - _PITCHES[0])
    cosines, sines = angles.cos() * pitches, angles.sin() * pitches
    # Half the side of the rotated square's bounding box: at most 31.8 of the face's 32 pixels.
    half_side = (cosines.abs() + sines.abs()) * (_SIDE / 2)
    centres = half_side[:, None] + drawn[:, 2:] * (_FACE_SIDE - 2 * half_side[:, None])
    steps = torch.arange(_SIDE) - (_SIDE - 1) / 2
    right, down = steps[None, None, :], steps[None, :, None]
    cosines, sines = cosines[:, None, None], sines[:, None, None]
    x = centres[:, 0, None, None] + cosines * right - sines * down
    y = centres[:, 1, None, None] + sines * right + cosines * down
    return torch.stack([x, y], dim=-1)
