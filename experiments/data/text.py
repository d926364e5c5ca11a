"""A text file as the codes of its characters."""

from __future__ import annotations

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
    trained = int(len(text) * (1 - validation))
    if trained < 2 or len(text) - trained < 2:
        raise ValueError(
            f"{path}: training and validation need 2 characters each, "
            f"got {trained} and {len(text) - trained}"
        )
    points, codes = np.unique(
        np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True
    )
    train, rest = torch.from_numpy(codes.astype(np.int64)).split([trained, len(text) - trained])
    return Text(train, rest, "".join(map(chr, points)))
