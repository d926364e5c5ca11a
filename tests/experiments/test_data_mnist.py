"""MNIST's reader: what it returns, and what it says of files that are broken."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.data.mnist import mnist_16x16, mnist_images, mnist_labels, read_idx

RAW_NAMES = ("train-images-idx3-ubyte", "train-images.idx3-ubyte")
LABEL_NAMES = ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte")


def idx_bytes(array: torch.Tensor) -> bytes:
    """The IDX file of a uint8 tensor, written from the format's description."""
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.numpy().tobytes()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(256, (5, 28, 28), dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (4, 2, 9), (0, 28, 28), (2, 1, 3, 2)])
def test_read_idx_returns_what_was_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = torch.randint(256, shape, dtype=torch.uint8)
    raw, packed = tmp_path / "file-ubyte", tmp_path / "file-ubyte.gz"
    raw.write_bytes(idx_bytes(array))
    packed.write_bytes(gzip.compress(idx_bytes(array)))
    for path in (raw, packed):
        assert torch.equal(read_idx(path), array)


@pytest.mark.parametrize("place", [".", "MNIST/raw"])
@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", RAW_NAMES)
def test_mnist_is_found_in_every_layout(
    tmp_path: Path, images: torch.Tensor, place: str, ending: str, name: str
) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    content = idx_bytes(images)
    (folder / (name + ending)).write_bytes(gzip.compress(content) if ending else content)
    read = mnist_images(tmp_path)
    assert read.dtype == torch.float32
    torch.testing.assert_close(read, images.reshape(5, 784) / 255, rtol=0, atol=0)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder: .*nowhere"):
        mnist_images(tmp_path / "nowhere")


GOOD = idx_bytes(torch.ones(2, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must start with 00 00 08"),
        (GOOD[:3], "must start with 00 00 08"),
        (b"\x89PNG" + GOOD, "must start with .* got 89 50 4e 47"),
        (b"\0\0\x0d\x02" + GOOD[4:], "must start with .* got 00 00 0d 02"),
        (b"\0\0\x08\x00", "must start with .* got 00 00 08 00"),
        (GOOD[:7], "must have .* got 7"),
        (GOOD[:-1], "must have 18 bytes .* got 17"),
        (GOOD + b"ab", "must have 18 bytes .* got 20"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_broken_idx_file_is_named_with_what_is_wrong(
    tmp_path: Path, content: bytes, message: str, packed: bool
) -> None:
    path = tmp_path / ("broken-ubyte" + (".gz" if packed else ""))
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match=f"broken-ubyte.*: {message}"):
        read_idx(path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(2, 3), r"must hold digits .*got sizes \(2, 3\)"),
        (torch.zeros(0), r"must hold digits .*got sizes \(0,\)"),
        (torch.tensor([1, 10]), "must hold digits from 0 to 9"),
    ],
)
def test_labels_of_another_kind_are_refused(
    tmp_path: Path, labels: torch.Tensor, message: str
) -> None:
    (tmp_path / LABEL_NAMES[0]).write_bytes(idx_bytes(labels.to(torch.uint8)))
    with pytest.raises(ValueError, match=f"idx1-ubyte: {message}"):
        mnist_labels(tmp_path)


def test_16x16_is_what_pillow_makes(tmp_path: Path, images: torch.Tensor) -> None:
    """Pillow resizes for torchvision, with which the paper's code made its images."""
    (tmp_path / RAW_NAMES[0]).write_bytes(idx_bytes(images))
    resized = [
        np.asarray(Image.fromarray(image.numpy()).resize((16, 16), Image.Resampling.BILINEAR))
        for image in images
    ]
    wanted = torch.from_numpy(np.stack(resized)).reshape(5, 256)
    difference = (mnist_16x16(tmp_path) * 255).round() - wanted
    # Pillow's weights have more bits than torch's, which decides some roundings.
    assert difference.abs().max() <= 1
    assert (difference != 0).float().mean() < 0.06


def test_the_real_files(real_data: Callable[[str], Path]) -> None:
    folder = real_data("mnist")
    labels = mnist_labels(folder)
    assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert labels.bincount().tolist() == counts
    images, small = mnist_images(folder), mnist_16x16(folder)
    assert images.shape == (60000, 784)
    assert images.mean().item() == pytest.approx(0.1307, abs=5e-5)
    # The border that the narrower sum leaves out is black.
    assert small.shape == (60000, 256)
    assert small.mean().item() == pytest.approx(0.1309, abs=2e-4)
