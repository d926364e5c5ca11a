"""The table of errors has one row for each size and condition, and errors that can be right."""

from bench.root_accuracy import CONDITIONS, errors, statistic, table


def test_errors_grow_with_the_condition_for_newton_only() -> None:
    (low,), (high,) = (errors(statistic(9, condition), [4]) for condition in (1e2, 1e6))
    assert float(low[0]) < 1e-6 and float(high[0]) > 1e-5
    assert float(low[1]) < 1e-6 and float(high[1]) < 1e-6


def test_table() -> None:
    lines = table([9]).splitlines()
    assert len(lines) == 2 + len(CONDITIONS)
    assert all(line.count("|") == 6 for line in lines)
