"""MNIST's training set from its IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from experiments.data.files import find_file

# torchvision and the original site write the first, many mirrors the second.
_IMAGE_NAMES = ("train-images-idx3-ubyte", "train-images.idx3-ubyte")
_LABEL_NAMES = ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte")
_UNSIGNED_BYTE = 0x08


def read_idx(path: str | Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped when its name ends in `.gz`.

    Args:
        path: the file. Its header is 00 00 08 k, then k big-endian 32-bit sizes, then the data.

    Returns:
        A uint8 tensor of the k sizes the header names.

    Raises:
        ValueError: the file is no such IDX file, is cut short, goes on too long or is corrupt gzip.
        OSError: it cannot be read.
    """
    path = Path(path)
    content = _file_content(path)
    if len(content) < 4:
        raise ValueError(
            f"{path}: truncated: an IDX header has at least 4 bytes, got {len(content)}"
        )
    if content[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or content[3] == 0:
        raise ValueError(
            f"{path}: wrong magic number: an IDX file of unsigned bytes starts with 00 00 08 and "
            f"its number of dimensions, got {content[:4].hex(' ')}"
        )
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise ValueError(
            f"{path}: truncated: a header of {content[3]} dimensions has {header} bytes, "
            f"got {len(content)}"
        )
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    wanted, got = math.prod(sizes), len(content) - header
    shape = "x".join(map(str, sizes))
    if got < wanted:
        raise ValueError(
            f"{path}: truncated: {shape} needs {wanted} bytes after the header, got {got}"
        )
    if got > wanted:
        raise ValueError(
            f"{path}: {got - wanted} trailing bytes: {shape} needs {wanted} bytes after the "
            f"header, got {got}"
        )
    if wanted == 0:
        return torch.empty(sizes, dtype=torch.uint8)
    # bytearray, because torch warns of tensors over read-only memory
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(sizes)


def mnist_images(folder: str | Path) -> Tensor:
    """MNIST's training images as float32 rows in [0, 1], shape (N, 784).

    Args:
        folder: holds the IDX file, raw or gzipped, itself or in `MNIST/raw` as torchvision lays
            it out. A raw file is taken before a gzipped one.

    Raises:
        FileNotFoundError: there is no such folder, or no training images in it.
        NotADirectoryError: `folder` is a file.
        ValueError: the file is corrupt, or is not one of 28x28 images.
    """
    return _scaled(_scans(folder))


def mnist_labels(folder: str | Path) -> Tensor:
    """The digits that MNIST's training images show, int64 in 0..9, shape (N,).

    Args:
        folder: as of `mnist_images`, and in the order of its rows.

    Raises:
        FileNotFoundError: there is no such folder, or no training labels in it.
        NotADirectoryError: `folder` is a file.
        ValueError: the file is corrupt, or is not one of digits.
    """
    path = _mnist_file(folder, _LABEL_NAMES, "MNIST training labels")
    labels = read_idx(path)
    if labels.ndim != 1 or labels.numel() == 0:
        raise ValueError(f"{path}: must hold labels (size N > 0), got sizes {tuple(labels.shape)}")
    if labels.max() > 9:
        raise ValueError(f"{path}: must hold digits, 0 to 9, got {labels.max()}")
    return labels.to(torch.int64)


def mnist_16x16(folder: str | Path) -> Tensor:
    """MNIST's training images at 16x16 pixels as float32 rows in [0, 1], shape (N, 256).

    The whole 28x28 image is resampled by a triangle filter 2 x 28/16 pixels wide, antialiased
    bilinear as Pillow calls it, and rounded to whole grey levels. The paper's code has
    torchvision's `Resize([16, 16])` do it, which differs by one grey level in some
    pixels. Martens & Grosse 2015, whose "16x16 down-scaled" digits these are, do not say how.

    Args, Raises: as `mnist_images`.
    """
    scans = _scans(folder)[:, None]
    small = functional.interpolate(scans, size=(16, 16), mode="bilinear", antialias=True)
    return _scaled(small[:, 0])


def _scans(folder: str | Path) -> Tensor:
    """The training images as they are in the file: uint8, (N, 28, 28)."""
    path = _mnist_file(folder, _IMAGE_NAMES, "MNIST training images")
    images = read_idx(path)
    if images.ndim != 3 or images.shape[1:] != (28, 28) or images.shape[0] == 0:
        raise ValueError(
            f"{path}: must hold 28x28 images (sizes N, 28, 28 with N > 0), "
            f"got sizes {tuple(images.shape)}"
        )
    return images


def _scaled(scans: Tensor) -> Tensor:
    """uint8 images as float32 rows in [0, 1]."""
    return scans.reshape(scans.shape[0], -1).to(torch.float32).div_(255.0)


def _file_content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: corrupt gzip file: {error}") from error


def _mnist_file(folder: str | Path, names: tuple[str, ...], what: str) -> Path:
    candidates = [
        place + name + ending
        for place in ("", "MNIST/raw/")
        for ending in ("", ".gz")
        for name in names
    ]
    wanted = f"{' or '.join(names)}, raw or .gz, there or in MNIST/raw"
    return find_file(folder, candidates, what, wanted)
