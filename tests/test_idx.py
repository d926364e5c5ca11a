"""The readers of image files: what they return, and what they say of files that are broken."""

import gzip
import struct
from pathlib import Path

import pytest
import torch

from bench.experiments.data import digits_images, mnist_images, read_idx

RAW_NAMES = ("train-images-idx3-ubyte", "train-images.idx3-ubyte")


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


def test_a_raw_file_is_taken_before_a_gzipped_one(tmp_path: Path, images: torch.Tensor) -> None:
    (tmp_path / RAW_NAMES[1]).write_bytes(idx_bytes(images))
    (tmp_path / f"{RAW_NAMES[0]}.gz").write_bytes(b"not read")
    assert mnist_images(tmp_path).shape == (5, 784)


def test_digits_are_scaled_scans() -> None:
    digits = digits_images()
    assert digits.shape == (1797, 64)
    assert digits.dtype == torch.float32
    assert (digits.min().item(), digits.max().item()) == (0.0, 1.0)
    assert torch.equal(digits * 16, (digits * 16).round())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder: .*nowhere"):
        mnist_images(tmp_path / "nowhere")


def test_a_file_for_a_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / RAW_NAMES[0]
    path.write_bytes(b"")
    with pytest.raises(NotADirectoryError, match=r"must be a folder, got a file: .*ubyte"):
        mnist_images(path)


def test_an_empty_folder_is_named_with_what_was_wanted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is empty: wanted train-images-idx3-ubyte or"):
        mnist_images(tmp_path)


def test_a_folder_of_other_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"holds no MNIST training images: wanted"):
        mnist_images(tmp_path)


GOOD = idx_bytes(torch.ones(2, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: an IDX header has at least 4 bytes, got 0"),
        (GOOD[:3], "truncated: an IDX header has at least 4 bytes, got 3"),
        (b"\x89PNG" + GOOD, "wrong magic number: .* got 89 50 4e 47"),
        (b"\0\0\x0d\x02" + GOOD[4:], "wrong magic number: .* got 00 00 0d 02"),
        (b"\0\0\x08\x00", "wrong magic number: .* got 00 00 08 00"),
        (GOOD[:7], "truncated: a header of 2 dimensions has 12 bytes, got 7"),
        (GOOD[:-1], "truncated: 2x3 needs 6 bytes after the header, got 5"),
        (GOOD + b"ab", "2 trailing bytes: 2x3 needs 6 bytes after the header, got 8"),
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
    "content",
    [
        pytest.param(GOOD, id="not gzip at all"),
        pytest.param(gzip.compress(GOOD)[:-9], id="cut short"),
        pytest.param(gzip.compress(GOOD)[:-8] + bytes(8), id="wrong checksum"),
        pytest.param(gzip.compress(GOOD)[:10] + b"\xff" * 12, id="broken stream"),
    ],
)
def test_a_corrupt_gzip_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken-ubyte\.gz: corrupt gzip file: "):
        read_idx(path)


@pytest.mark.parametrize("shape", [(5, 28), (5, 14, 28), (0, 28, 28)])
def test_images_of_another_size_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    (tmp_path / RAW_NAMES[0]).write_bytes(idx_bytes(torch.zeros(shape, dtype=torch.uint8)))
    with pytest.raises(ValueError, match=r"idx3-ubyte: must hold 28x28 images .* got sizes"):
        mnist_images(tmp_path)
