"""A text that repeats itself, which a tiny transformer learns in a few steps."""

from pathlib import Path

import torch

from experiments.data.text import Text
from experiments.problems.language import Language

CODES = torch.arange(300) * 7 % 11
_ALPHABET = "abcdefghijk"


def repeating_problem() -> Language:
    """On 11 characters: 260 to train on, 40 to validate on."""
    text = Text(CODES[:260], CODES[260:], _ALPHABET)
    return Language(text, 8, 1, 2, context=6, epoch_steps=4, validation_windows=5, source="x.txt")


def repeating_file(folder: Path) -> Path:
    """The same as a file, twice as long."""
    path = folder / "text.txt"
    path.write_text("".join(_ALPHABET[code] for code in CODES) * 2)
    return path
