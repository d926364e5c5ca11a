"""Finding a data set's file in the folder that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def find_file(folder: str | Path, candidates: Sequence[str], what: str, wanted: str) -> Path:
    """The first of the candidates that is a file.

    Args:
        folder: what the user named.
        candidates: paths relative to it, the one to prefer first.
        what: what it should hold, in words.
        wanted: the names to look for and where, in words.

    Raises:
        FileNotFoundError: there is no such folder, or none of the candidates in it.
        NotADirectoryError: `folder` is a file.
    """
    folder = Path(folder)
    if not folder.exists():
        raise FileNotFoundError(f"no such folder: {folder}")
    if not folder.is_dir():
        raise NotADirectoryError(f"must be a folder, got a file: {folder}")
    for candidate in candidates:
        if (folder / candidate).is_file():
            return folder / candidate
    state = f"holds no {what}" if any(folder.iterdir()) else "is empty"
    raise FileNotFoundError(f"{folder} {state}: wanted {wanted}")
