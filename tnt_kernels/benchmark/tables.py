"""Markdown tables and the formats of their numbers. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

BUSY = 0.1  # largest share of the machine that other processes may use


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    r"""The lines of a Markdown table, and the empty line that ends it.

    >>> print("\n".join(table(("set", "ms"), [("mnist_ae", "12.3")])))
    | set      | ms   |
    |----------|------|
    | mnist_ae | 12.3 |
    <BLANKLINE>
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(n) for cell, n in zip(row, widths, strict=True))} |"
        for row in cells
    ]
    rule = f"|{'|'.join('-' * (n + 2) for n in widths)}|"
    return [lines[0], rule, *lines[1:], ""]


def milliseconds(seconds: float) -> str:
    """Three significant digits; all digits before the point.

    >>> milliseconds(0.0123456), milliseconds(1.5e-6), milliseconds(2.34567)
    ('12.3', '0.0015', '2346')
    """
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def megabytes(size: float) -> str:
    """In 10^6 bytes, as `milliseconds`.

    >>> megabytes(12345678), megabytes(1234567890)
    ('12.3', '1235')
    """
    return milliseconds(size / 1e9)


def disturbance(record: Mapping[str, float | None]) -> str:
    """A warning where other processes used the machine; empty where they did not, or if unknown.

    >>> disturbance({"busy_before": 0.02, "busy_after": None})
    ''
    """
    most = max(record["busy_before"] or 0.0, record["busy_after"] or 0.0)
    if most <= BUSY:
        return ""
    return (
        f" **Other processes used {100 * most:.0f} % of the machine before or after the run: do "
        "not rely on these numbers.**"
    )
