"""The examples in the docstrings print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module", ["tnt_kernels.ops", "tnt_optim.modes", "tnt_optim.likelihoods"], ids=str
)
def test_examples(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted > 0
    assert failed == 0
