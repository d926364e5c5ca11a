"""FACES: the original patches' file, and patches made from the Olivetti faces."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from experiments.data import faces
from experiments.data.faces import faces_images

ORIGINAL, OLIVETTI = "newfaces_rot_single.mat", "olivettifaces.mat"


@pytest.fixture
def few_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training set of 40 patches: the original's 103,500 would be a file of 259 MB."""
    monkeypatch.setattr(faces, "_TRAINING_PATCHES", 40)


@pytest.fixture
def smooth_faces() -> np.ndarray:
    """400 faces, (400, 64, 64) uint8 rows before columns: each a plane of its own slope."""
    steps = np.arange(64) + 0.5
    slopes = np.random.default_rng(0).uniform(-1.5, 1.5, (400, 2, 1, 1))
    planes = 128 + slopes[:, 0] * (steps - 32) + slopes[:, 1] * (steps[:, None] - 32)
    rounded: np.ndarray = planes.round().astype(np.uint8)
    return rounded


def save_olivetti(folder: Path, images: np.ndarray) -> None:
    """The layout of Roweis's file: a face a column, its pixels column by column."""
    columns = images.transpose(0, 2, 1).reshape(len(images), -1).T
    savemat(folder / OLIVETTI, {"faces": columns, "u": np.float64(3)})


@pytest.mark.usefixtures("few_patches")
@pytest.mark.parametrize("transposed", [False, True])
def test_the_original_file_is_taken_as_it_is(tmp_path: Path, transposed: bool) -> None:
    patches = np.random.default_rng(0).standard_normal((66, 625), dtype=np.float32)
    content = {
        "newfaces_single": patches if transposed else patches.T,
        "note": "of two things",
        "n": 66.0,
    }
    savemat(tmp_path / ORIGINAL, content)
    (tmp_path / OLIVETTI).write_bytes(b"not read")
    images, source = faces_images(tmp_path)
    assert images.dtype == torch.float32
    assert torch.equal(images, torch.from_numpy(patches[:40]))
    assert "original newfaces_rot_single.mat" in source and "40 of" in source
    # 15 of 40, evenly: every second or third.
    some, source = faces_images(tmp_path, count=15)
    assert torch.equal(some, images[[i * 40 // 15 for i in range(15)]])
    assert "15 of the 40" in source


@pytest.mark.parametrize("face", [0, 131, 249])
def test_a_patch_is_a_turned_square_of_its_face(
    tmp_path: Path, smooth_faces: np.ndarray, face: int
) -> None:
    """On a plane of intensities, interpolation is exact, and the patch's slopes tell the turn."""
    images = torch.from_numpy(smooth_faces[:250].astype(np.float32))
    patches = faces._patches(images, torch.arange(414) + 414 * face).reshape(414, 25, 25).double()
    plane = images[face].double()
    slopes = torch.stack([plane[:, -1] - plane[:, 0], plane[-1] - plane[0]]).mean(1) / 63
    right = (patches[:, :, -1] - patches[:, :, 0]).mean(1) / 24
    down = (patches[:, -1] - patches[:, 0]).mean(1) / 24
    # (right, down) = pitch * the slopes turned by the angle.
    pitch = torch.stack([right, down]).norm(dim=0) / slopes.norm()
    angle = torch.atan2(slopes[1], slopes[0]) - torch.atan2(down, right)
    angle = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
    # Rounding the face to whole levels costs some hundredths; of 414 draws the extremes are near.
    assert 1.36 < pitch.min() < 1.44 and 1.76 < pitch.max() < 1.84
    assert pitch.mean().item() == pytest.approx(1.6, abs=0.03)
    assert -1.62 < angle.min() < -1.5 and 1.5 < angle.max() < 1.62
    assert angle.mean().abs() < 4 * math.pi / math.sqrt(12 * 414)
    # The square's middle: half of it inside wherever it lies, and anywhere that leaves it inside.
    centre = (patches[:, 12, 12] - plane.mean()) / slopes.norm()
    reach = 32 - 12.5 * pitch * (angle.cos() + angle.sin().abs())
    direction = slopes / slopes.norm()
    furthest = reach * direction.abs().sum()
    assert (centre.abs() <= furthest + 0.8).all()
    assert centre.max() > 5 and centre.min() < -5


def test_made_patches_are_normalised_and_say_what_they_are(
    tmp_path: Path, smooth_faces: np.ndarray
) -> None:
    save_olivetti(tmp_path, smooth_faces)
    images, source = faces_images(tmp_path, count=1000)
    assert images.shape == (1000, 625) and images.dtype == torch.float32
    assert images.mean(0).abs().max() < 1e-5
    assert images.var(0, correction=0).mean().item() == pytest.approx(1, abs=1e-5)
    assert source.startswith("1,000 of the 103,500 training patches made from olivettifaces")
    assert "not the original patches" in source
    # Four of each face, the first and three more, spread evenly.
    chosen = torch.arange(250).repeat_interleave(4) * 414 + torch.tensor([0, 103, 207, 310]).repeat(
        250
    )
    originals = torch.from_numpy(smooth_faces[:250].astype(np.float32))
    wanted = faces._patches(originals, chosen)
    wanted -= wanted.mean(0)
    wanted /= wanted.var(0, correction=0).mean().sqrt()
    torch.testing.assert_close(images, wanted, rtol=0, atol=1e-5)
    before = torch.get_rng_state()
    assert torch.equal(faces_images(tmp_path, count=1000)[0], images)
    assert torch.equal(torch.get_rng_state(), before)


FEW = np.ones((625, 39), dtype=np.float32)


@pytest.mark.usefixtures("few_patches")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (ORIGINAL, {"newfaces_single": FEW}, "must hold at least 40 patches, got 39"),
        (ORIGINAL, {"a": FEW, "b": FEW}, "one matrix .* side of 625, got 2"),
        (ORIGINAL, {"x": np.full((625, 40), np.nan)}, "holds pixels that are not finite"),
        (OLIVETTI, {"faces": np.ones((4096, 399))}, "must hold 400 faces of 64x64, got 399"),
        (OLIVETTI, {"faces": np.ones((4096, 400))}, "must hold 400 faces"),
    ],
)
def test_a_file_of_something_else_is_named(
    tmp_path: Path, name: str, content: Mapping[str, np.ndarray], message: str
) -> None:
    savemat(tmp_path / name, dict(content))
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        faces_images(tmp_path)


def test_the_real_file(real_data: Callable[[str], Path]) -> None:
    images, _ = faces_images(real_data("olivetti"), count=2500)
    # Ten faces a person: patches of one person's are more alike than of others'.
    assert images.shape == (2500, 625)
    assert images.abs().max() < 6
    # Smooth, as pictures are: neighbours differ by less than a third of the deviation.
    patches = images.reshape(-1, 25, 25)
    assert patches.diff(dim=2).square().mean().sqrt() < 0.5
