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
    """Read a UTF-8 text character by character, its end set apart for validation.

    Args:
        path: the file. Line ends are kept as they are in it.
        validation: the share of the characters, from the end, that is not trained on.

    Returns:
        The codes, shapes (floor(n (1 - validation)),) and the rest. The vocabulary is that of the
        whole text, so that the validation has no unknown characters, in the order of Unicode.

    Raises:
        FileNotFoundError: there is no such file.
        IsADirectoryError: it is a folder.
        ValueError: `validation` is not inside (0, 1); the file is not UTF-8; or it is too short to
            leave two characters, one to predict the other from, on each side.
    """
    path = Path(path)
    if not 0 < validation < 1:
        raise ValueError(f"validation must be inside (0, 1), got {validation}")
    if path.is_dir():
        raise IsADirectoryError(f"must be a text file, got a folder: {path}")
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be text in UTF-8: {error}") from error
    trained = int(len(text) * (1 - validation))
    if trained < 2 or len(text) - trained < 2:
        raise ValueError(
            f"{path}: too short: training and validation need 2 characters each, "
            f"got {trained} and {len(text) - trained}"
        )
    points, codes = np.unique(
        np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True
    )
    train, rest = torch.from_numpy(codes.astype(np.int64)).split([trained, len(text) - trained])
    return Text(train, rest, "".join(map(chr, points)))
