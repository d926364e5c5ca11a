"""MNIST's reader: what it returns, and what it says of files that are broken."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.data.mnist import mnist_16x16, mnist_images, mnist_labels

RAW_NAMES = ("train-images-idx3-ubyte", "train-images.idx3-ubyte")


def idx_bytes(array: torch.Tensor) -> bytes:
    """The IDX file of a uint8 tensor, written from the format's description."""
    array = array.to(torch.uint8)
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.numpy().tobytes()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(256, (5, 28, 28), dtype=torch.uint8)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda good: b"", "it starts with"),
        (lambda good: b"\x89PNG" + good, "it starts with 89 50 4e 47"),
        (lambda good: good[:-1], "cannot reshape array of size 3919"),
        (lambda good: good + b"ab", "cannot reshape array of size 3922"),
        (lambda good: idx_bytes(torch.ones(5, 28, 27)), "its sizes are .5, 28, 27"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_broken_file_is_named_with_what_is_wrong(
    tmp_path: Path,
    images: torch.Tensor,
    change: Callable[[bytes], bytes],
    message: str,
    packed: bool,
) -> None:
    path = tmp_path / (RAW_NAMES[0] + (".gz" if packed else ""))
    content = change(idx_bytes(images))
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match=f"{path.name}: must be .* file of images: {message}"):
        mnist_images(tmp_path)
    if packed:
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ValueError, match=f"{path.name}: must be .* file of images: "):
            mnist_images(tmp_path)


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
