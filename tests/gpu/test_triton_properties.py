"""The Triton kernels against the definition in float64, on random lists of tensors."""

import os

import pytest
import triton_operators
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from kernels.test_properties import check_definition

from tnt_kernels.operators import OPERATORS


@pytest.mark.parametrize("name", OPERATORS)
# Few examples, as compiling takes its time, and the same at every run without TNT_FUZZ_EXAMPLES.
@settings(
    max_examples=max(1, settings.default.max_examples // 2),
    derandomize="TNT_FUZZ_EXAMPLES" not in os.environ,
)
@given(data=st.data())
def test_definition(name: str, data: DataObject) -> None:
    check_definition(name, data, triton_operators)
