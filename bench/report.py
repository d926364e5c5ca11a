"""The page of a record: every candidate, every ratio, losing cases in bold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.measuring.clock import busy_share
from tools.measuring.provenance import provenance
from tools.measuring.records import check_writable, read_json, write_json
from tools.measuring.tables import disturbance, milliseconds, table

Row = Mapping[str, Any]
DIGITS = 6  # more than any clock has


def new_record(path: Path, device: torch.device | str, **protocol: Any) -> dict[str, Any]:
    """A record without rows, to be written to ``path``.

    Raises:
        ValueError: the path does not end in `.json`.
        OSError: nothing can be written there.
    """
    check_writable(path)
    busy = {"busy_before": busy_share(), "busy_after": None}
    return {"provenance": provenance(device), "protocol": {**protocol, **busy}, "rows": []}


def write(path: Path, record: dict[str, Any], page_of: Callable[[Mapping[str, Any]], str]) -> None:
    """End a record: write it and its page, which shows its numbers, rounded."""
    record["protocol"]["busy_after"] = busy_share()
    write_json(path, record, DIGITS)
    path.with_suffix(".md").write_text(page_of(read_json(path)), encoding="utf-8")


def page(record: Mapping[str, Any]) -> str:
    """The whole page of a record of `pytest bench`."""
    rows = record["rows"]
    lines = ["# Operators and whole steps", "", *origin(record), *_limits(record["limits"])]
    for op in dict.fromkeys(row["op"] for row in rows):
        lines += _section(op, [row for row in rows if row["op"] == op])
    return "\n".join(lines).rstrip() + "\n"


def origin(record: Mapping[str, Any]) -> list[str]:
    """One paragraph: commit, date, machine, versions, command."""
    source = record["provenance"]
    machine, versions = source["machine"], source["versions"]
    commit = (source["commit"] or "unknown")[:12] + (" with changes" if source["dirty"] else "")
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    return [
        f"Commit {commit}, {source['date'][:10]}, {where}, {source['threads']['torch']} threads, "
        f"torch {versions['torch']}; `{source['command']}`.{disturbance(record['protocol'])}",
        "",
    ]


def _limits(limits: Mapping[str, Any]) -> list[str]:
    rates = [(n, f"{v / 1e9:.1f}") for n, v in limits.items() if isinstance(v, float)]
    return [
        "Medians of candidates that alternate in one process, each checked against the reference "
        "before it is timed. Ratios are the candidate's time over the first one's, medians over "
        "the rounds, with quartiles; bold where ours loses. Flops use symmetry (one "
        "triangle, d^3 for an inverse). The limit is the later of the flops at the rate of "
        "a large product and the bytes at the rate of a copy; small sets stay in a cache and can "
        "be faster than a copy.",
        "",
        *table((f"limits, n = {limits['size']}", "GF/s or GB/s"), rates),
    ]


def _section(op: str, rows: Sequence[Row]) -> list[str]:
    """One table: a block of lines for each set, kind and precision."""
    columns = [name for name in ("kind", "precision") if len({row[name] for row in rows}) > 1]
    header = ["set", *columns, "candidate", "ms", "(quartiles)", "ratio", "(quartiles)"]
    header += ["error", "GF/s", "GB/s", "of the limit", "rounds", "engine"]
    ours = rows[0]["candidate"]
    lines = [
        [
            row["set"],
            *(row[name] for name in columns),
            row["candidate"],
            milliseconds(row["median"]),
            _span(row.get("quartiles", []), milliseconds),
            "" if row["candidate"] == ours else _ratio(row),
            "" if row["candidate"] == ours else _span(row["ratio"][1:], "{:.3g}".format),
            f"{row['error']:.0e}" if "error" in row else "",
            *_rates(row),
            row.get("rounds", ""),
            row.get("engine", ""),
        ]
        for row in rows
    ]
    kept = [
        i for i, name in enumerate(header) if any(line[i] != "" for line in lines) or name == "ms"
    ]
    notes = dict.fromkeys(f"{row['set']}: {row['note']}." for row in rows if row.get("note"))
    return [
        f"## {op.capitalize()}" if " " in op else f"## `{op}`",
        "",
        *table([header[i] for i in kept], [[line[i] for i in kept] for line in lines]),
        *(line for note in notes for line in (note, "")),
    ]


def _ratio(row: Row) -> str:
    """Bold if ours loses to a baseline; between options or other methods it is only a number."""
    ratio: float = row["ratio"][0]
    if not row.get("baseline"):
        return f"{ratio:.3g}"
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"


def _rates(row: Row) -> tuple[str, str, str]:
    if "work" not in row:
        return "", "", ""
    flops, size, _ = row["work"]
    limit = ""
    if "least_seconds" in row:
        limit = f"{100 * row['least_seconds'] / row['median']:.0f} % ({row['limit']})"
    return f"{flops / row['median'] / 1e9:.1f}", f"{size / row['median'] / 1e9:.2f}", limit


def _span(values: Iterable[float], form: Any) -> str:
    return " to ".join(form(value) for value in values)
