"""Training images: MNIST from its IDX files, and the digits that come with scikit-learn."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

# torchvision and the original site write the first, many mirrors the second.
_MNIST_NAMES = ("train-images-idx3-ubyte", "train-images.idx3-ubyte")
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
    path = _mnist_file(Path(folder))
    images = read_idx(path)
    if images.ndim != 3 or images.shape[1:] != (28, 28) or images.shape[0] == 0:
        raise ValueError(
            f"{path}: must hold 28x28 images (sizes N, 28, 28 with N > 0), "
            f"got sizes {tuple(images.shape)}"
        )
    return images.reshape(images.shape[0], -1).to(torch.float32).div_(255.0)


def digits_images() -> Tensor:
    """scikit-learn's bundled handwritten digits as float32 rows in [0, 1], shape (1797, 64)."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: "
            "install it, or this project with its `bench` extra"
        ) from error
    return torch.from_numpy(load_digits().data).to(torch.float32).div_(16.0)


def _file_content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: corrupt gzip file: {error}") from error


def _mnist_file(folder: Path) -> Path:
    if not folder.exists():
        raise FileNotFoundError(f"no such folder: {folder}")
    if not folder.is_dir():
        raise NotADirectoryError(f"must be a folder, got a file: {folder}")
    names = [name + ending for ending in ("", ".gz") for name in _MNIST_NAMES]
    for place in (folder, folder / "MNIST" / "raw"):
        for name in names:
            if (place / name).is_file():
                return place / name
    state = "holds no MNIST training images" if any(folder.iterdir()) else "is empty"
    raise FileNotFoundError(
        f"{folder} {state}: wanted {' or '.join(_MNIST_NAMES)}, raw or .gz, there or in MNIST/raw"
    )
