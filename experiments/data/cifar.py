"""CIFAR-10 and CIFAR-100 from the official Python archives, and their augmentation."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data import find_file


@dataclass(frozen=True)
class Cifar:
    """Images, uint8 (N, 3, 32, 32), red, green and blue, and labels, int64 (N,) below `classes`."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int


def read_cifar(folder: str | Path, classes: int) -> Cifar:
    """CIFAR-10 or CIFAR-100 (by its fine labels), in the order of the files.

    Args:
        folder: holds `data_batch_1` to `data_batch_5` and `test_batch` (CIFAR-10), or `train` and
            `test` (CIFAR-100), itself or in the folder that the archive unpacks to. They are
            pickles; only arrays, numbers, strings, lists and dictionaries are read.
        classes: 10 or 100.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is corrupt, or holds no 32x32 images and labels.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    if classes == 10:
        names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        archive, labels = "cifar-10-batches-py", "labels"
    else:
        names, archive, labels = ["train", "test"], "cifar-100-python", "fine_labels"
    place = find_file(folder, (f"{archive}/{names[0]}", names[0])).parent
    parts = [_read_batch(find_file(place, [name]), labels, classes) for name in names]
    train_images, train_labels = (torch.cat(tensors) for tensors in zip(*parts[:-1], strict=True))
    return Cifar(train_images, train_labels, *parts[-1], classes)


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Pad each image with zeros, crop it at a random place, and mirror half of the images.

    The paper's code augments the uint8 images, whose zeros are black, and normalises afterwards.

    Args:
        images: (N, C, H, W), any dtype and device. Not changed.
        generator: of any device; crops and flips are drawn there.
        padding: zeros on each of the four sides.

    Returns:
        A new tensor like `images`. Each image is shifted by -padding..padding rows and columns,
        uniformly, and mirrored left to right with probability 1/2, all independently.

    Source: He et al., Deep Residual Learning for Image Recognition, 2015, section 4.2.
    """
    number, channels, height, width = images.shape
    at, origin = images.device, generator.device
    shifts = torch.randint(
        -padding, padding + 1, (2, number, 1), generator=generator, device=origin
    )
    flips = torch.randint(0, 2, (number, 1), generator=generator, device=origin)
    down, right = shifts.to(at)
    flipped = flips.to(at).bool()
    # The source of each pixel, in coordinates of the image without padding. The flip comes last, so
    # it is undone first.
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


def _read_batch(path: Path, labels_name: str, classes: int) -> tuple[Tensor, Tensor]:
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of what its first versions wrote
            # Python 2 wrote the official files: their strings are bytes here.
            content = _Unpickler(file, encoding="bytes").load()
        content = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
        # A copy: an unpickled array may be read-only, of which torch warns.
        images = torch.from_numpy(content["data"].copy()).reshape(-1, 3, 32, 32)
        labels = torch.tensor(content[labels_name], dtype=torch.int64)
        if images.dtype != torch.uint8 or len(images) != len(labels) or not len(labels):
            raise ValueError(f"{len(images)} images in {images.dtype}, {len(labels)} labels")
        if not 0 <= labels.min() <= labels.max() < classes:
            raise ValueError(f"labels from {labels.min()} to {labels.max()}")
    # The unpickler may raise anything for broken bytes.
    except Exception as error:
        raise ValueError(f"{path}: no CIFAR batch, or a corrupt one: {error!r}") from error
    return images, labels


class _Unpickler(pickle.Unpickler):
    """Calls only the functions that rebuild arrays: a pickle may name any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


# NumPy 2 renamed its inner package; protocol 5 has a function of its own.
_PLAIN, _BUFFER = np.zeros(1).__reduce__()[0], np.zeros(1).__reduce_ex__(5)[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _PLAIN for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _BUFFER for core in ("core", "_core")},
}
