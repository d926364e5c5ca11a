"""MNIST's training set from its IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from experiments.data import find_file

_UNSIGNED_BYTE = 0x08


def read_idx(path: str | Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in `.gz`.

    The header is 00 00 08 k, then k big-endian 32-bit sizes. Returns a uint8 tensor of these sizes.

    Raises:
        ValueError: the file is no such IDX file, too short, too long, or corrupt gzip.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: corrupt gzip file: {error}") from error
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or content[3] == 0:
        raise ValueError(
            f"{path}: must start with 00 00 08 and the number of dimensions, as an IDX file of "
            f"unsigned bytes does, got {content[:4].hex(' ')}"
        )
    header = 4 + 4 * content[3]
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    wanted = header + math.prod(sizes)
    if len(content) != wanted:
        raise ValueError(f"{path}: must have {wanted} bytes for sizes {sizes}, got {len(content)}")
    if wanted == header:
        return torch.empty(sizes, dtype=torch.uint8)
    # bytearray: torch warns of tensors over read-only memory
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(sizes)


def mnist_images(folder: str | Path) -> Tensor:
    """MNIST's training images as float32 rows in [0, 1], shape (N, 784).

    Args:
        folder: holds the IDX file, raw or gzipped, itself or in `MNIST/raw` as torchvision does.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is corrupt, or holds no 28x28 images.
    """
    return _scaled(_scans(folder))


def mnist_labels(folder: str | Path) -> Tensor:
    """The digits of the rows of `mnist_images`, int64 from 0 to 9, shape (N,).

    Args, Raises: as `mnist_images`.
    """
    path = _file(folder, "labels", 1)
    labels = read_idx(path)
    if labels.ndim != 1 or labels.numel() == 0 or labels.max() > 9:
        raise ValueError(f"{path}: must hold digits from 0 to 9, got sizes {tuple(labels.shape)}")
    return labels.to(torch.int64)


def mnist_16x16(folder: str | Path) -> Tensor:
    """MNIST's training images at 16x16 pixels as float32 rows in [0, 1], shape (N, 256).

    The whole 28x28 image is resampled with antialiased bilinear interpolation and rounded to whole
    grey levels. The paper's code uses torchvision's `Resize([16, 16])`, which differs by one grey
    level in some pixels. Martens & Grosse 2015 do not say how they scaled the images.

    Args, Raises: as `mnist_images`.
    """
    scans = _scans(folder)[:, None]
    small = functional.interpolate(scans, size=(16, 16), mode="bilinear", antialias=True)
    return _scaled(small[:, 0])


def _scans(folder: str | Path) -> Tensor:
    path = _file(folder, "images", 3)
    images = read_idx(path)
    if images.ndim != 3 or images.shape[1:] != (28, 28) or images.shape[0] == 0:
        raise ValueError(f"{path}: must hold 28x28 images, got sizes {tuple(images.shape)}")
    return images


def _scaled(scans: Tensor) -> Tensor:
    return scans.reshape(scans.shape[0], -1).to(torch.float32).div_(255.0)


def _file(folder: str | Path, what: str, dimensions: int) -> Path:
    # torchvision and the original site write the first name, many mirrors the second.
    names = [f"train-{what}{separator}idx{dimensions}-ubyte" for separator in "-."]
    places = ("", "MNIST/raw/")
    return find_file(folder, [p + n + end for p in places for end in ("", ".gz") for n in names])
