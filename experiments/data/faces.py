"""FACES: 25x25 patches of the Olivetti faces, from the original file or made anew."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments.data.files import find_file

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


@dataclass(frozen=True)
class Faces:
    """Training patches, (N, 625) float32, and in words where they come from."""

    images: Tensor
    source: str


def faces_images(folder: str | Path, count: int | None = None) -> Faces:
    """The FACES training patches, float32 rows of 25x25 pixels, shape (count, 625).

    Pixels are about N(0, 1): every pixel has mean zero over the training set, and one number
    scales them all to a mean variance of one.

    From `newfaces_rot_single.mat` where the folder has it: the set of Hinton & Salakhutdinov in
    Martens' single precision file, 165,600 patches, 414 of each of 400 faces, of which the first
    103,500 (25 people) are trained on. Pixels as they are there, column by column.

    Otherwise made from `olivettifaces.mat` as Hinton & Salakhutdinov's supporting material tells:
    rotating (-90 to +90 degrees), scaling (1.4 to 1.8), cropping and subsampling, 414 patches of
    each of the first 250 faces, then the normalisation above over the patches made. What it
    leaves open is chosen here. Angle, scale and place are uniform and independent, from a fixed
    seed; a scale is the distance between two pixels of the patch in pixels of the face, so that a
    patch covers 35 to 45 of the face's 64 pixels; the places are all those where the patch's square
    lies inside the face, which at 1.8 and 45 degrees is only just so; pixels are interpolated
    bilinearly, row by row. **The patches are therefore not the original ones, and losses on them
    are not comparable with published ones.**

    Args:
        folder: holds one of the two MATLAB files.
        count: how many of the 103,500, spread evenly over the faces. All by default.

    Raises:
        FileNotFoundError: there is no such folder, or neither file in it.
        NotADirectoryError: `folder` is a file.
        ValueError: `count` is not from 2 to 103,500; or the file is corrupt or holds something
            else.

    Source: Hinton & Salakhutdinov, Science 313, 2006; Martens, ICML 2010.
    """
    if count is None:
        count = _TRAINING_PATCHES
    if not 2 <= count <= _TRAINING_PATCHES:
        raise ValueError(f"count must be from 2 to {_TRAINING_PATCHES:,}, got {count}")
    wanted = f"{_PATCHES_NAME} or {_OLIVETTI_NAME}"
    path = find_file(folder, (_PATCHES_NAME, _OLIVETTI_NAME), "face images", wanted)
    chosen = torch.arange(count) * _TRAINING_PATCHES // count
    share = f"{count:,} of the {_TRAINING_PATCHES:,} training patches"
    if path.name == _PATCHES_NAME:
        source = f"{share} of the original {_PATCHES_NAME} (Hinton & Salakhutdinov 2006)"
        return Faces(_original_patches(path)[chosen], source)
    source = (
        f"{share} made from {_OLIVETTI_NAME} by the procedure of Hinton & Salakhutdinov 2006 "
        "(rotated by up to 90 degrees, scaled by 1.4 to 1.8, cropped, mean 0 in each pixel, mean "
        "variance 1) with random numbers of our own: not the original patches, so losses are not "
        "comparable with the paper's"
    )
    images = _patches(_olivetti_faces(path), chosen)
    images -= images.mean(0)
    return Faces(images.div_(images.square().mean().sqrt()), source)


def _original_patches(path: Path) -> Tensor:
    """The training patches of Martens' file, (103500, 625)."""
    patches = _rows(path, _SIDE**2)
    if patches.shape[0] < _TRAINING_PATCHES:
        raise ValueError(
            f"{path}: must hold at least {_TRAINING_PATCHES:,} patches of {_SIDE}x{_SIDE}, "
            f"got {patches.shape[0]:,}"
        )
    patches = patches[:_TRAINING_PATCHES]
    if not patches.isfinite().all():
        raise ValueError(f"{path}: holds pixels that are not finite")
    return patches


def _olivetti_faces(path: Path) -> Tensor:
    """The training faces in the file's units, (250, 64, 64), rows before columns."""
    faces = _rows(path, _FACE_SIDE**2)
    if faces.shape[0] != _FACES:
        raise ValueError(
            f"{path}: must hold {_FACES} faces of {_FACE_SIDE}x{_FACE_SIDE}, got {faces.shape[0]}"
        )
    if not faces.isfinite().all():
        raise ValueError(f"{path}: holds pixels that are not finite")
    if faces.min() == faces.max():
        raise ValueError(f"{path}: all its images are one single grey")
    # MATLAB stores columns.
    return faces[:_TRAINING_FACES].reshape(-1, _FACE_SIDE, _FACE_SIDE).transpose(1, 2)


def _rows(path: Path, pixels: int) -> Tensor:
    """The only matrix with a side of `pixels` in a MATLAB file, as float32 (images, pixels)."""
    found = {
        name: array
        for name, array in _matlab_variables(path).items()
        if getattr(array, "ndim", 0) == 2 and pixels in array.shape and array.dtype.kind in "uif"
    }
    if len(found) != 1:
        got = ", ".join(found) if found else "none"
        raise ValueError(
            f"{path}: must hold one matrix of numbers with a side of {pixels}, got {got}"
        )
    (array,) = found.values()
    rows = array if array.shape[1] == pixels else array.T
    return torch.from_numpy(rows.astype("float32", order="C"))


def _matlab_variables(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "MATLAB files are read by SciPy, which is not installed: "
            "install it, or this project with its `bench` extra"
        ) from error
    with path.open("rb") as file:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of variables that SciPy cannot read
                content: dict[str, Any] = loadmat(file)
        # SciPy raises whatever the broken bytes lead it to.
        except Exception as error:
            raise ValueError(f"{path}: no MATLAB file, or a corrupt one: {error}") from error
    return content


def _patches(faces: Tensor, chosen: Tensor) -> Tensor:
    """The patches with these numbers, (len(chosen), 625), before the normalisation.

    A patch's number is that of its face times 414, and its own among the face's.
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
    """Where the pixels' centres lie in their faces, (n, 25, 25, 2), x before y.

    The unit is the pixel of a face and the origin its upper left corner.

    drawn: (n, 4) in [0, 1): angle, pitch and the centre's x and y.
    """
    angles = (drawn[:, 0] - 0.5) * math.pi
    pitches = _PITCHES[0] + drawn[:, 1] * (_PITCHES[1] - _PITCHES[0])
    cosines, sines = angles.cos() * pitches, angles.sin() * pitches
    # Of the turned square's bounding box; at most 31.8 of the face's 32 pixels.
    half_side = (cosines.abs() + sines.abs()) * (_SIDE / 2)
    centres = half_side[:, None] + drawn[:, 2:] * (_FACE_SIDE - 2 * half_side[:, None])
    steps = torch.arange(_SIDE) - (_SIDE - 1) / 2
    right, down = steps[None, None, :], steps[None, :, None]
    cosines, sines = cosines[:, None, None], sines[:, None, None]
    x = centres[:, 0, None, None] + cosines * right - sines * down
    y = centres[:, 1, None, None] + sines * right + cosines * down
    return torch.stack([x, y], dim=-1)
