"""The benchmark's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MIB = 2**20
_KINDS = {
    "nothing": "nothing due",
    "statistics": "statistics",
    "statistics and inverses": "statistics and inverses",
}


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of a record's runs."""
    header = [
        "parameters", "processes", "shared", "state of the largest process, MiB", "of all, MiB",
        *(f"{label}: ms" for label in _KINDS.values()),
        *(f"{label}: MiB sent" for label in _KINDS.values()),
        "apart from one process", "from each other",
    ]  # fmt: skip
    rows = [_row(run["key"], run) for run in runs]
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        "Milliseconds are of `step`, the slowest process's median; MiB sent is what all processes "
        "together hand to collectives in one step; how far apart parameters end is relative to how "
        f"far they have moved.\n\n{table}\n"
    )


def _row(key: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    state = run["state_bytes"]
    return [
        key["parameters"],
        str(key["processes"]),
        key["way"],
        f"{max(state) / _MIB:.1f}",
        f"{sum(state) / _MIB:.1f}",
        *(f"{1000 * run['seconds'][kind]:.1f}" for kind in _KINDS),
        *(f"{sum(run['sent_bytes'][kind]) / _MIB:.1f}" for kind in _KINDS),
        f"{run['difference']:.1e}",
        f"{run['processes_differ']:.1e}",
    ]
