"""The examples in the docstrings of the experiments print what they say."""

import doctest
import importlib

import pytest

MODULES = ("figures2to6", "methods", "options", "search", "steps")


@pytest.mark.parametrize("module", [*MODULES, "defaults"])
def test_examples(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"experiments.{module}"))
    assert attempted > 0 and failed == 0
