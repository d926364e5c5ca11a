"""MNIST's training set from its IDX files."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from experiments.data import find_file


def mnist_images(folder: str | Path) -> Tensor:
    """MNIST's training images as float32 rows in [0, 1], shape (N, 784).

    Args:
        folder: holds the IDX file, raw or gzipped, itself or in `MNIST/raw` as torchvision does.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is corrupt, or holds no 28x28 images.
    """
    return _scaled(_read(folder, "images", (28, 28)))


def mnist_labels(folder: str | Path) -> Tensor:
    """The digits of the rows of `mnist_images`, int64 from 0 to 9, shape (N,).

    Args, Raises: as `mnist_images`.
    """
    return _read(folder, "labels", ()).to(torch.int64)


def mnist_16x16(folder: str | Path) -> Tensor:
    """MNIST's training images at 16x16 pixels as float32 rows in [0, 1], shape (N, 256).

    The whole 28x28 image is resampled with antialiased bilinear interpolation and rounded to whole
    grey levels. The paper's code uses torchvision's `Resize([16, 16])`, which differs by one grey
    level in some pixels. Martens & Grosse 2015 do not say how they scaled the images.

    Args, Raises: as `mnist_images`.
    """
    scans = _read(folder, "images", (28, 28))[:, None]
    small = functional.interpolate(scans, size=(16, 16), mode="bilinear", antialias=True)
    return _scaled(small[:, 0])


def _scaled(scans: Tensor) -> Tensor:
    return scans.flatten(1).to(torch.float32).div_(255.0)


def _read(folder: str | Path, what: str, shape: tuple[int, ...]) -> Tensor:
    """The items of an IDX file: 00 00 08 k, then k big-endian 32-bit sizes, then bytes."""
    # torchvision and the original site write the first name, many mirrors the second.
    names = [f"train-{what}{separator}idx{1 + len(shape)}-ubyte" for separator in "-."]
    places = ("", "MNIST/raw/")
    path = find_file(folder, [p + n + end for p in places for end in ("", ".gz") for n in names])
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:4] != bytes((0, 0, 8, 1 + len(shape))):
            raise ValueError(f"it starts with {content[:4].hex(' ')}")
        sizes = np.frombuffer(content, ">u4", 1 + len(shape), offset=4)
        items = np.frombuffer(content, np.uint8, offset=4 * (2 + len(shape))).reshape(sizes)
        if not len(items) or items.shape[1:] != shape:
            raise ValueError(f"its sizes are {items.shape}")
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path}: must be MNIST's IDX file of {what}: {error}") from error
    return torch.from_numpy(items.copy())  # torch warns of tensors over read-only memory
