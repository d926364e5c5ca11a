"""Files of one JSON object a line: what is in them survives whatever comes after."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """A file that begins empty and grows by a line at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self._path = path

    def add(self, kind: str, **content: Any) -> None:
        """Appends one object; numbers that are not finite become null, as JSON has none."""
        text = json.dumps(_plain({"kind": kind, **content}), allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole objects of a file; of a process that was ended the last line may be cut off."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number != len(lines) - 1:
                raise
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        # Six digits are more than any clock here has.
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
