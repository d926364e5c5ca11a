"""The examples in the docstrings print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "tnt_kernels.ops",
        "tnt_optim.checkpoint",
        "tnt_optim.distributed.fsdp",
        "tnt_optim.distributed.ownership",
        "tnt_optim.likelihoods",
        "tnt_optim.modes",
    ],
)
def test_examples(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted > 0
    assert failed == 0
