"""The examples in the docstrings print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Python files by the folder from which they are imported.
FILES = [
    (source, file)
    for source in (ROOT, ROOT / "python")
    for package in ("bench", "experiments", "tools", "tnt_kernels", "tnt_optim")
    for file in sorted((source / package).rglob("*.py"))
    if "\n    >>> " in file.read_text(encoding="utf-8")
]
MODULES = [".".join(file.relative_to(source).with_suffix("").parts) for source, file in FILES]
# It imports Triton, which the quick tests do without.
COMPILE_REPORT = "tools.compile_report."


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.slow if name.startswith(COMPILE_REPORT) else ())
        for name in MODULES
    ],
)
def test_examples(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted > 0
    assert failed == 0
