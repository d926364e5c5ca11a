"""Records of benchmarks and their pages: every candidate, every ratio, losing cases in bold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tnt_kernels.benchmark.clock import MIN_ROUNDS, busy_share
from tnt_kernels.benchmark.provenance import provenance
from tnt_kernels.benchmark.records import check_writable, read_json, write_json
from tnt_kernels.benchmark.tables import disturbance, milliseconds, table

Row = Mapping[str, Any]
DIGITS = 6  # more than any clock has


def new_record(path: Path | None, device: torch.device | str, **protocol: Any) -> dict[str, Any]:
    """A record without rows, to be written to ``path`` if there is one.

    Raises:
        ValueError: the path does not end in `.json`.
        OSError: nothing can be written there.
    """
    if path is not None:
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
    return [
        "Medians of candidates that alternate in one process, each checked against the reference "
        "before it is timed. Ratios are the candidate's time over the first one's, medians over "
        "the rounds, with quartiles; bold where ours loses. Flops use symmetry (one "
        "triangle, d^3 for an inverse). The limit is the later of the flops at the rate of "
        "a large product and the bytes at the rate of a copy; small sets stay in a cache and can "
        "be faster than a copy.",
        "",
        *table((f"limits, n = {limits['size']}", "GF/s or GB/s"), rates(limits)),
    ]


def rates(limits: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and number of each limit, in 10^9 flops or bytes a second."""
    return [(n, f"{v / 1e9:.1f}") for n, v in limits.items() if isinstance(v, float)]


def _section(op: str, rows: Sequence[Row]) -> list[str]:
    title = f"## {op.capitalize()}" if " " in op else f"## `{op}`"
    return [title, "", *results(rows)]


def results(rows: Sequence[Row], columns: Mapping[str, str] | None = None) -> list[str]:
    """The table of one operator and its notes: a block of lines for each set, kind, precision.

    ``columns``: the columns to show and their headers; by default all. Empty ones are left out.
    """
    ours = rows[0]["candidate"]
    lines: list[dict[str, str]] = []
    for row in rows:
        flops_rate, byte_rate, limit = _rates(row)
        few = row.get("rounds", MIN_ROUNDS) < MIN_ROUNDS
        ratio = "" if few or row["candidate"] == ours else _ratio(row)
        lines.append(
            {
                "set": row["set"],
                "kind": row["kind"],
                "precision": row["precision"],
                "candidate": row["candidate"],
                "ms": milliseconds(row["median"]),
                "quartiles": _span(row.get("quartiles", []), milliseconds),
                "ratio": ratio,
                "its quartiles": _span(row["ratio"][1:], "{:.3g}".format) if ratio else "",
                "error": f"{row['error']:.0e}" if "error" in row else "",
                "GF/s": flops_rate,
                "GB/s": byte_rate,
                "of the limit": limit,
                "rounds": f"{row.get('rounds', '')}{', too few' if few else ''}",
                "engine": row.get("engine", ""),
            }
        )
    kept = [
        name
        for name in lines[0]
        if any(line[name] for line in lines)
        and (columns is None or name in columns)
        and (name not in ("kind", "precision") or len({line[name] for line in lines}) > 1)
    ]
    notes = dict.fromkeys(f"{row['set']}: {row['note']}." for row in rows if row.get("note"))
    return [
        *table(
            [name if columns is None else columns[name] for name in kept],
            [[line[name] for name in kept] for line in lines],
        ),
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
