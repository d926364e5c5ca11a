"""Texts as the codes of their characters: a file, or the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import platform
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """A text's characters as int64 codes: code i stands for `characters[i]`."""

    train: Tensor
    validation: Tensor
    characters: str


def read_text(path: str | Path, validation: float = 0.1) -> Text:
    """Read a UTF-8 text character by character; its end is for validation.

    Args:
        path: the file. Line ends stay as they are.
        validation: share of the characters, at the end, for validation.

    Returns:
        The codes, shapes (floor(n (1 - validation)),) and the rest. The alphabet is that of the
        whole text, in the order of Unicode.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, or leaves fewer than two characters on one side.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be text in UTF-8: {error}") from error
    return split(text, str(path), validation)


def split(text: str, name: str, validation: float = 0.1) -> Text:
    """The codes of a text, whose end is for validation.

    Raises:
        ValueError: with the text's name: fewer than two characters are left on one side.
    """
    trained = int(len(text) * (1 - validation))
    if trained < 2 or len(text) - trained < 2:
        raise ValueError(
            f"{name}: training and validation need 2 characters each, "
            f"got {trained} and {len(text) - trained}"
        )
    points, codes = np.unique(
        np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True
    )
    train, rest = torch.from_numpy(codes.astype(np.int64)).split([trained, len(text) - trained])
    return Text(train, rest, "".join(map(chr, points)))


def python_sources(root: Path | None = None) -> tuple[str, str]:
    """The sources of Python's standard library, which every machine has: about 10 MB.

    They are the .py files in ASCII, without tests and installed packages, in an order that depends
    on their names alone: so a part at the end has files from everywhere.

    Args:
        root: their folder; None for that of the running Python.

    Returns:
        The text, and its name with version, size and digest: versions of Python differ, and
        distributions leave parts out.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = sorted(name for name in names if left_out.isdisjoint(name.parts))
    random.Random(0).shuffle(names)
    contents = [(root / name).read_bytes() for name in names]
    whole = b"".join(content for content in contents if content.isascii())
    digest = hashlib.sha256(whole).hexdigest()
    version = platform.python_version()
    source = f"standard library of Python {version}, {len(whole):,} characters, sha256 {digest}"
    return whole.decode("ascii"), source
