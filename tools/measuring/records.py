"""Writing the JSON records of benchmarks and experiments."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NUMBER_LIST = re.compile(r"\[\s+((?:[-+.\deE]+|null)(?:,\s+(?:[-+.\deE]+|null))*)\s+\]")


def check_writable(path: str | Path) -> Path:
    """Make sure now that a JSON file can be written at the end, creating its folder.

    Returns:
        `path` as a Path.

    Raises:
        ValueError: the name does not end in `.json`.
        OSError: nothing can be written there.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"must end in .json, got {path}")
    if path.is_dir():
        raise IsADirectoryError(f"must be a file, got a folder: {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink()
    return path


def write_json(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write `record` as indented JSON; a reader sees the old file or the new one, never a half.

    Numbers that are not finite become null, as JSON has none; lists of numbers take one line.
    """
    path = Path(path)
    text = json.dumps(_finite(record), indent=2, allow_nan=False)
    text = _NUMBER_LIST.sub(lambda found: f"[{' '.join(found.group(1).split())}]", text)
    partial = path.with_name(path.name + ".part")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
