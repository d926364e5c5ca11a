"""CIFAR-10 and CIFAR-100 from the official Python archives, and what is done to their images."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.files import find_file

# As the paper's code has them. Those of CIFAR-10 are the mean of the images' own deviations, not
# the deviation of all pixels (0.2470, 0.2435, 0.2616).
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2023, 0.1994, 0.2010)
CIFAR100_MEAN = (0.507, 0.487, 0.441)
CIFAR100_STD = (0.267, 0.256, 0.276)

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Cifar:
    """Images, uint8 (N, 3, 32, 32), red, green and blue, and labels, int64 (N,) below `classes`."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int


def cifar10(folder: str | Path) -> Cifar:
    """CIFAR-10: 50,000 training and 10,000 test images of 10 classes, in the files' order.

    Args:
        folder: holds `data_batch_1` to `data_batch_5` and `test_batch` of the Python version,
            itself or in `cifar-10-batches-py` as the archive unpacks. They are pickles: only
            arrays, numbers, strings, lists and dictionaries are unpickled.

    Raises:
        FileNotFoundError: there is no such folder, or not all of the files in it.
        NotADirectoryError: `folder` is a file.
        ValueError: a file is corrupt, or is not one of 32x32 images and their labels. The number
            of images is not checked.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    train = [f"data_batch_{i}" for i in range(1, 6)]
    return _read(folder, "cifar-10-batches-py", train, "test_batch", "labels", 10)


def cifar100(folder: str | Path) -> Cifar:
    """CIFAR-100 by its fine labels: 50,000 training and 10,000 test images of 100 classes.

    Args:
        folder: as of `cifar10`, with `train` and `test`, itself or in `cifar-100-python`.

    Raises: as `cifar10`.
    """
    return _read(folder, "cifar-100-python", ["train"], "test", "fine_labels", 100)


def normalised(
    images: Tensor, mean: Tensor | Sequence[float], std: Tensor | Sequence[float]
) -> Tensor:
    """(images / 255 - mean) / std for each channel, float32, on the images' device.

    Args:
        images: uint8, (N, C, H, W).
        mean: C numbers, of pixels in [0, 1]. As a tensor on the images' device it saves a copy.
        std: likewise.

    Raises:
        ValueError: the images are not uint8, or a shape does not fit.
    """
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"images must be uint8 (N, C, H, W), got {images.dtype} {tuple(images.shape)}"
        )
    shift = torch.as_tensor(mean, dtype=torch.float32, device=images.device)
    scale = torch.as_tensor(std, dtype=torch.float32, device=images.device)
    for name, numbers in (("mean", shift), ("std", scale)):
        if numbers.shape != images.shape[1:2]:
            raise ValueError(
                f"{name} must be a number for each of {images.shape[1]} channels, "
                f"got {tuple(numbers.shape)}"
            )
    pixels = images.to(torch.float32).div_(255.0)
    return pixels.sub_(shift[:, None, None]).div_(scale[:, None, None])


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Pad each image with zeros, crop its size out again anywhere, and flip half of them.

    The paper's code augments the uint8 images, whose zeros are black, and normalises the result:
    `normalised(crop_and_flip(images, generator), ...)`. After the normalisation the zeros would be
    the mean colour.

    Args:
        images: (N, C, H, W), any dtype and device. Left as they are.
        generator: of any device; the crops and flips are drawn there, so that one on the CPU gives
            the same ones on every device.
        padding: zeros on each of the four sides.

    Returns:
        A new tensor like `images`. Each image is shifted by -padding..padding rows and columns,
        uniformly, and mirrored left to right with probability 1/2, all independently.

    Raises:
        ValueError: the images are not four-dimensional, or the padding is negative.

    Source: He et al., Deep Residual Learning for Image Recognition, 2015, section 4.2.
    """
    if images.ndim != 4:
        raise ValueError(f"images must be (N, C, H, W), got {tuple(images.shape)}")
    if padding < 0:
        raise ValueError(f"padding must not be negative, got {padding}")
    number, channels, height, width = images.shape
    at, origin = images.device, generator.device
    shifts = torch.randint(
        -padding, padding + 1, (2, number, 1), generator=generator, device=origin
    )
    flips = torch.randint(0, 2, (number, 1), generator=generator, device=origin)
    down, right = shifts.to(at)
    flipped = flips.to(at).bool()
    # Where each pixel comes from, in the coordinates of the image without its padding: the flip is
    # the last thing done, so that it is the first to be undone.
    rows = torch.arange(height, device=at) + down
    columns = torch.arange(width, device=at)
    columns = torch.where(flipped, width - 1 - columns, columns) + right
    outside_rows = (rows < 0) | (rows >= height)
    outside_columns = (columns < 0) | (columns >= width)
    outside = outside_rows[:, :, None] | outside_columns[:, None, :]
    rows, columns = rows.clamp_(0, height - 1), columns.clamp_(0, width - 1)
    places = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    cropped = images.flatten(2).gather(2, places[:, None].expand(-1, channels, -1))
    return cropped.view(images.shape).masked_fill_(outside[:, None], 0)


def _read(
    folder: str | Path, subfolder: str, train: Sequence[str], test: str, labels: str, classes: int
) -> Cifar:
    names = [*train, test]
    wanted = f"{', '.join(names)} of the Python version, there or in {subfolder}"
    what = f"CIFAR-{classes} batches"
    place = find_file(folder, (f"{subfolder}/{train[0]}", train[0]), what, wanted).parent
    for name in names:
        if not (place / name).is_file():
            raise FileNotFoundError(f"{place} holds no {name}: wanted {', '.join(names)}")
    parts = [_read_batch(place / name, labels, classes) for name in names]
    train_images, train_labels = (torch.cat(tensors) for tensors in zip(*parts[:-1], strict=True))
    return Cifar(train_images, train_labels, *parts[-1], classes)


def _read_batch(path: Path, labels_name: str, classes: int) -> tuple[Tensor, Tensor]:
    """One file's images and labels, checked."""
    content = _unpickled(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a dictionary, got {type(content).__name__}")
    # Python 2 wrote the official files, whose strings are bytes here; who wrote them anew may have
    # made them text.
    content = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    for name in ("data", labels_name):
        if name not in content:
            raise ValueError(f"{path}: must hold {name!r}, got {sorted(map(str, content))}")
    images, labels = content["data"], content[labels_name]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise ValueError(
            f"{path}: 'data' must be a uint8 array, got {getattr(images, 'dtype', type(images))}"
        )
    if images.ndim != 2 or images.shape[1] != _PIXELS or images.shape[0] == 0:
        raise ValueError(f"{path}: 'data' must be (N, {_PIXELS}) with N > 0, got {images.shape}")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(f"{path}: {labels_name!r} must be a list of integers")
    if len(labels) != images.shape[0]:
        raise ValueError(
            f"{path}: {labels_name!r} must be one for each of {images.shape[0]} images, "
            f"got {len(labels)}"
        )
    if min(labels) < 0 or max(labels) >= classes:
        raise ValueError(
            f"{path}: {labels_name!r} must be from 0 to {classes - 1}, "
            f"got {min(labels)} to {max(labels)}"
        )
    # A copy, because an unpickled array may be read-only, of which torch warns.
    return torch.from_numpy(images.copy()).reshape(-1, *_SHAPE), torch.tensor(labels)


def _unpickled(path: Path) -> Any:
    with path.open("rb") as file:
        try:
            return _Unpickler(file, encoding="bytes").load()
        # Broken bytes lead the unpickler to raise nearly anything.
        except Exception as error:
            raise ValueError(f"{path}: no CIFAR batch, or a corrupt one: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Calls nothing but what rebuilds arrays of numbers: a pickle may name any function."""

    def find_class(self, module: str, name: str) -> Any:
        # NumPy 2 renamed its inner package.
        allowed = _ALLOWED.get((module.replace("numpy._core", "numpy.core"), name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return allowed


def _dtype(name: str | bytes, align: Any = False, copy: Any = False) -> np.dtype[Any]:
    # NumPy 2.4 warns of the integers that older ones wrote for the two truth values.
    dtype = np.dtype(name.decode("ascii") if isinstance(name, bytes) else name, bool(align))
    if dtype.hasobject:
        raise pickle.UnpicklingError("it holds an array of objects")
    return dtype


def _latin1(text: str, encoding: str) -> bytes:
    # How Python 3 writes bytes for Python 2.
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


_ARRAY: Any = np.zeros(1, dtype=np.uint8)
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _ARRAY.__reduce__()[0],
    ("numpy.core.numeric", "_frombuffer"): _ARRAY.__reduce_ex__(5)[0],
    ("_codecs", "encode"): _latin1,
}
