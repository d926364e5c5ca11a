"""The examples in the docstrings print what they say."""

import doctest
import importlib

import pytest

EXPERIMENTS = ("defaults", "figures2to6", "methods", "options", "search", "steps")


@pytest.mark.parametrize(
    "module",
    [
        *(f"experiments.{name}" for name in EXPERIMENTS),
        "tnt_kernels.ops",
        "tnt_optim.checkpoint",
        "tnt_optim.distributed.fsdp",
        "tnt_optim.distributed.ownership",
        "tnt_optim.likelihoods",
        "tnt_optim.modes",
        "tools.measuring.clock",
        "tools.measuring.tables",
    ],
)
def test_examples(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted > 0
    assert failed == 0
