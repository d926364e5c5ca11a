"""The format of all records: compact JSON with one row a line, so that diffs are readable."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_writable(path: str | Path) -> Path:
    """Check before a run that its JSON file can be written at the end; create its folder.

    Raises:
        ValueError: the name does not end in `.json`.
        OSError: nothing can be written there.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"must end in .json, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink()
    return path


def write_json(path: str | Path, record: Mapping[str, Any], digits: int | None = None) -> None:
    """Write a record; a reader sees the old file or the new one, never a part.

    Numbers that are not finite become null; floats are rounded to `digits` significant digits, if
    given. Each entry of `record` takes a line, and so does each item of an entry that is a list of
    mappings (such as "rows").
    """
    entries = [f" {json.dumps(key)}: {_entry(_clean(record[key], digits))}" for key in record]
    text = "{\n" + ",\n".join(entries) + "\n}\n"
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_json(path: str | Path) -> dict[str, Any]:
    """The record in a file.

    Raises:
        ValueError: the file holds no JSON object.
    """
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"must hold a JSON object, got {type(record).__name__} in {path}")
    return record


def _entry(value: Any) -> str:
    if not (isinstance(value, list) and value and all(isinstance(i, dict) for i in value)):
        return json.dumps(value, allow_nan=False)
    return "[\n" + ",\n".join(f"  {json.dumps(i, allow_nan=False)}" for i in value) + "\n ]"


def _clean(value: Any, digits: int | None) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: _clean(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, digits) for item in value]
    return value
