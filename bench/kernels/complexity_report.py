"""The complexity table's part of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.measuring.tables import disturbance, megabytes, milliseconds, span, table

WITHIN = 0.15  # how far a fitted exponent may lie from the predicted one


def agreement(predicted: float, fitted: float | None) -> str:
    """Says whether a fitted exponent agrees with the predicted one.

    >>> agreement(3, 2.86), agreement(3, 2.7), agreement(3, None)
    ('agrees', '**off**', 'too few points')
    """
    if fitted is None:
        return "too few points"
    return "agrees" if abs(fitted - predicted) <= WITHIN else "**off**"


def left_out(record: dict[str, Any]) -> str:
    """Which values were not fitted, by reason.

    >>> left_out({"values": [1, 2, 4], "status": ["launch-bound", "launch-bound", "fitted"]})
    'launch-bound: 1, 2'
    """
    reasons: dict[str, list[str]] = {}
    for value, status in zip(record["values"], record["status"], strict=True):
        if status != "fitted":
            reasons.setdefault(status, []).append(str(value))
    return "; ".join(f"{reason}: {', '.join(values)}" for reason, values in reasons.items())


def complexity_section(record: dict[str, Any]) -> list[str]:
    """Time, memory, and the memory of whole models."""
    rules = " ".join(f"*{name}*: {rule}." for name, rule in record["rules"].items())
    commit = (record["provenance"]["commit"] or "unknown")[:12]
    return [
        "## Complexity",
        "",
        f"Commit {commit}. Table 2 of Ren & Goldfarb 2021, measured on one tensor of k modes of "
        "size d. A time is the least of several. An exponent is the slope of the logarithms; it "
        f"agrees where it is within {WITHIN} of the predicted "
        f"one. {rules}{disturbance(record)}",
        "",
        *_time(record["time"]),
        "T1, T2 and m do not enter Adam's cost, nor T1 and m Shampoo's; its statistics and its "
        "update are the same operators as TNT's. Newton-like methods are counted as storage only.",
        "",
        *_memory(record["memory"]),
        *_sets(record["memory_of_sets"]),
        "![time and memory of TNT, Shampoo, Adam and a dense matrix](complexity.png)",
        "",
    ]


def _time(records: Sequence[dict[str, Any]]) -> list[str]:
    header = ["time of", "", "cost in Table 2", "over", "predicted", "fitted", ""]
    header += ["fitted range (points)", "not fitted", "slowest point, ms"]
    rows = [
        [
            *(record["method"], record["part"], record["term"], record["abscissa"]),
            *_exponent(record["predicted"], record["fitted"]),
            span(record["fitted_values"]),
            left_out(record),
            milliseconds(max(record["seconds"])),
        ]
        for record in records
    ]
    return table(header, rows)


def _memory(records: Sequence[dict[str, Any]]) -> list[str]:
    header = ["memory of", "", "cost in Table 2", "over", "predicted", "counted", ""]
    header += ["peak", "its range (points)", "largest point, MB counted", "peak"]
    rows = []
    for record in records:
        peak = record["peak_fitted"]
        rows.append(
            [
                *(record["method"], record["part"], record["term"], record["abscissa"]),
                *_exponent(record["predicted"], record["fitted"]),
                "" if peak is None else f"{peak:.2f}",
                span(record["peak_fitted_values"]),
                megabytes(record["counted_bytes"][-1]),
                megabytes(record["peak_bytes"][-1]),
            ]
        )
    return [
        "Memory beyond SGD with momentum: exponents of the state, counted from its tensors, and of "
        "the peak of the process beyond parameters and gradients, with momenta and temporaries "
        "(not fitted over k, where the momentum grows faster than what it is beside).",
        "",
        *table(header, rows),
    ]


def _sets(records: Sequence[dict[str, Any]]) -> list[str]:
    header = ["set", "parameters", "statistics", "inverses", "momenta"]
    header += ["beside them", "to stay within", ""]
    rows = []
    for record in records:
        beside, bound = record["temporaries"], record["bound_on_temporaries"]
        verdict = "" if beside is None else "reached" if beside <= bound else "**missed**"
        state = [record["state"][name] for name in ("statistics", "inverses", "momenta")]
        sizes = [record["parameters"], *state, beside, bound]
        rows.append([record["set"], *(megabytes(size) for size in sizes), verdict])
    return [
        "TNT on whole models, MB: its state, and what a step with everything due has beside it at "
        "its peak. That is to stay within one copy of the largest parameter and its factors, and 2 "
        "MB for the process itself.",
        "",
        *table(header, rows),
    ]


def _exponent(predicted: float, fitted: float | None) -> tuple[str, str, str]:
    shown = "" if fitted is None else f"{fitted:.2f}"
    return f"{predicted:g}", shown, agreement(predicted, fitted)
