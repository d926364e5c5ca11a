"""The experiments' data, one data set a file, and the search for their files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "TNT_DATA"
# What the folder of each data set has, and where to get it.
SOURCES = {
    "mnist": "the four IDX files, plain or .gz, of ossci-datasets.s3.amazonaws.com/mnist",
    "cifar10": "the Python version of www.cs.toronto.edu/~kriz/cifar.html, unpacked",
    "cifar100": "the Python version of www.cs.toronto.edu/~kriz/cifar.html, unpacked",
    "olivetti": "olivettifaces.mat of cs.nyu.edu/~roweis/data.html",
    "tinyshakespeare": "input.txt of github.com/karpathy/char-rnn, data/tinyshakespeare",
}


class DataMissingError(FileNotFoundError):
    """A data set is not where the user said, or the user did not say where."""


def data_folder(name: str, given: Path | None = None) -> Path:
    """The folder of one data set.

    Args:
        name: of `SOURCES`.
        given: `--data`: a folder that has the folder `name` in it, or that folder itself. None for
            the one that the environment variable TNT_DATA names.

    Raises:
        DataMissingError: there is no such folder.
    """
    root = given or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if root is None:
        raise DataMissingError(
            f"no {name}: give --data FOLDER, or set {VARIABLE}, with a folder {name} in it. It has "
            f"{SOURCES[name]}"
        )
    if not root.is_dir():
        raise DataMissingError(f"no {name}: {root} must be a folder")
    if (root / name).is_dir():
        return root / name
    if given is None:
        raise DataMissingError(f"no {name}: {VARIABLE} names {root}, which has no {name} in it")
    return root


def find_file(folder: str | Path, candidates: Sequence[str]) -> Path:
    """The first of these relative paths that is a file in `folder`.

    Raises:
        DataMissingError: there is no such folder, or none of the files in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataMissingError(f"no such folder: {folder}")
    for candidate in candidates:
        if (folder / candidate).is_file():
            return folder / candidate
    raise DataMissingError(f"{folder} must hold {' or '.join(candidates)}")
