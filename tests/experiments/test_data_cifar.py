"""CIFAR's reader, and what is done to its images, against one image at a time."""

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from experiments.data.cifar import crop_and_flip, read_cifar

CIFAR10_FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def batch(number: int, classes: int, seed: int) -> tuple[np.ndarray, list[int]]:
    random = np.random.default_rng(seed)
    images = random.integers(256, size=(number, 3072), dtype=np.uint8)
    return images, random.integers(classes, size=number).tolist()


def python2_pickle(images: np.ndarray, labels: list[int], name: str) -> bytes:
    """What Python 2 wrote into the official files, opcode by opcode: byte strings, old names."""

    def string(text: str) -> bytes:
        return b"U" + bytes([len(text)]) + text.encode()

    def integer(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + string("b") + b"tR"
    dtype = b"cnumpy\ndtype\n(" + string("u1") + b"K\x00K\x01tR"
    dtype += b"(K\x03" + string("|") + b"NNN" + 2 * integer(-1) + b"K\x00tb"
    pixels = b"T" + struct.pack("<i", images.size) + images.tobytes()
    shape = b"(" + integer(images.shape[0]) + integer(images.shape[1]) + b"t"
    array = empty + b"(K\x01" + shape + dtype + b"I00\n" + pixels + b"tb"
    numbers = b"](" + b"".join(map(integer, labels)) + b"e"
    items = string("data") + array + string(name) + numbers
    return b"\x80\x02}(" + string("batch_label") + string("a batch") + items + b"u."


def python3_pickle(protocol: int, keys: type) -> Callable[[np.ndarray, list[int], str], bytes]:
    def write(images: np.ndarray, labels: list[int], name: str) -> bytes:
        content = {"data": images, name: labels}
        if keys is bytes:
            return pickle.dumps({k.encode(): v for k, v in content.items()}, protocol)
        return pickle.dumps(content, protocol)

    return write


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """CIFAR-10's layout, with 4 images a batch."""
    for i, name in enumerate(CIFAR10_FILES):
        content = python2_pickle(*batch(4, 10, i), "labels")
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    "write",
    [
        python2_pickle,
        *(python3_pickle(protocol, keys) for protocol in (4, 5) for keys in (bytes, str)),
    ],
)
@pytest.mark.parametrize("place", [".", "cifar-10-batches-py"])
def test_cifar10_is_read_in_order(
    tmp_path: Path, place: str, write: Callable[[np.ndarray, list[int], str], bytes]
) -> None:
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    batches = [batch(4 + i, 10, i) for i in range(6)]
    for name, (images, labels) in zip(CIFAR10_FILES, batches, strict=True):
        (folder / name).write_bytes(write(images, labels, "labels"))
    read = read_cifar(tmp_path, 10)
    assert read.classes == 10
    for images, labels, part in (
        (read.train_images, read.train_labels, batches[:5]),
        (read.test_images, read.test_labels, batches[5:]),
    ):
        wanted = np.concatenate([pixels for pixels, _ in part])
        assert images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert images.shape == (len(wanted), 3, 32, 32)
        # 1024 reds row by row, then the greens, then the blues.
        assert images[1, 2, 3, 4] == wanted[1, 2 * 1024 + 3 * 32 + 4]
        assert torch.equal(images.flatten(1), torch.from_numpy(wanted))
        assert labels.tolist() == [label for _, some in part for label in some]


@pytest.mark.parametrize("place", [".", "cifar-100-python"])
def test_cifar100_is_read_by_its_fine_labels(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    parts = {"train": batch(9, 100, 0), "test": batch(5, 100, 1)}
    for name, (images, labels) in parts.items():
        coarse = [label // 5 for label in labels]
        content = {b"data": images, b"fine_labels": labels, b"coarse_labels": coarse}
        (folder / name).write_bytes(pickle.dumps(content))
    read = read_cifar(tmp_path, 100)
    assert read.classes == 100
    assert torch.equal(read.train_images.flatten(1), torch.from_numpy(parts["train"][0]))
    assert torch.equal(read.test_images.flatten(1), torch.from_numpy(parts["test"][0]))
    assert read.train_labels.tolist() == parts["train"][1]
    assert read.test_labels.tolist() == parts["test"][1]


IMAGES, LABELS = batch(3, 10, 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({b"data": IMAGES, b"fine_labels": LABELS}, "KeyError.*labels"),
        ({b"data": IMAGES / 255, b"labels": LABELS}, "3 images in torch.float64"),
        ({b"data": IMAGES[:, 1:], b"labels": LABELS}, "invalid for input of size"),
        ({b"data": IMAGES, b"labels": LABELS[:2]}, "3 images in torch.uint8, 2 labels"),
        ({b"data": IMAGES, b"labels": [0, 1, 10]}, "labels from 0 to 10"),
    ],
)
def test_a_file_of_something_else_is_named(ten: Path, content: object, message: str) -> None:
    (ten / "data_batch_3").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=f"data_batch_3: .*{message}"):
        read_cifar(ten, 10)


@pytest.mark.parametrize("kept", [0, 30, -1])
def test_a_file_that_is_cut_short_is_named(ten: Path, kept: int) -> None:
    path = ten / "test_batch"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="test_batch: no CIFAR batch, or a corrupt one: "):
        read_cifar(ten, 10)


class Call:
    """An object whose pickle calls a function, as a malicious one's does."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [(os.mkdir, [], "mkdir"), (np.ndarray.tofile, [IMAGES], "(getattr|tofile)")],
)
def test_a_malicious_pickle_is_refused_before_it_does_anything(
    ten: Path, function: Callable[..., Any], arguments: list[Any], name: str
) -> None:
    call = Call(function, *arguments, str(ten / "was_here"))
    (ten / "data_batch_1").write_bytes(pickle.dumps({b"data": call, b"labels": [0]}))
    with pytest.raises(ValueError, match=rf"data_batch_1: no CIFAR batch.*it asks for .*{name}"):
        read_cifar(ten, 10)
    assert not (ten / "was_here").exists()


def variants(image: torch.Tensor, padding: int) -> torch.Tensor:
    """Every crop of a padded image and its mirror image: (rows, columns, 2, C, H, W)."""
    height, width = image.shape[1:]
    padded = functional.pad(image, [padding] * 4)
    crops = torch.stack(
        [
            padded[:, top : top + height, left : left + width]
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        ]
    )
    both = torch.stack([crops, crops.flip(-1)], dim=1)
    return both.reshape(2 * padding + 1, 2 * padding + 1, 2, *image.shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("shape", "padding"), [((40, 3, 32, 32), 4), ((7, 1, 9, 5), 2), ((3, 2, 4, 6), 9)]
)
def test_crops_are_those_of_a_loop_over_images(
    dtype: torch.dtype, shape: tuple[int, ...], padding: int
) -> None:
    images = torch.randint(1, 256, shape).to(dtype)
    before = images.clone()
    cropped = crop_and_flip(images, torch.Generator().manual_seed(5), padding)
    assert cropped.dtype == dtype and cropped.shape == shape
    assert torch.equal(images, before)
    for image, result in zip(images, cropped, strict=True):
        matches = (variants(image, padding) == result).flatten(3).all(-1).sum()
        # With more padding than image, several crops are all zeros.
        assert matches == 1 or (matches > 1 and padding >= min(shape[2:]))
    again = crop_and_flip(images, torch.Generator().manual_seed(5), padding)
    assert torch.equal(again, cropped)
    assert not torch.equal(crop_and_flip(images, torch.Generator().manual_seed(6), padding), again)
