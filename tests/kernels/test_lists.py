"""Keys and addresses of lists of tensors: in C++, and their definitions in Python."""

import itertools
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import normal
from torch import Tensor

from tnt_kernels import lists

MEMORY = torch.zeros(64)
ALIGNMENT = 16

# Lists that differ in one property each. Here only tensors without memory can differ in nothing but
# their device.
LISTS: dict[str, list[Tensor]] = {
    "base": [MEMORY[:16].view(4, 4)],
    "shape": [MEMORY[:16].view(2, 8)],
    "number of dimensions": [MEMORY[:4]],
    "strides": [MEMORY[:16].view(4, 4).t()],
    "strides of one row": [MEMORY[:4].view(1, 4)],
    "other strides of one row": [MEMORY.as_strided((1, 4), (7, 1))],
    "dtype": [MEMORY[:16].view(torch.int32).view(4, 4)],
    "alignment": [MEMORY[1:17].view(4, 4)],
    "negation": [torch._neg_view(MEMORY[:16].view(4, 4))],
    "nothing": [],
    "no elements": [MEMORY[:0].view(4, 0)],
    "no elements on another device": [torch.zeros(4, 0, device="meta")],
    "twice": [MEMORY[:16].view(4, 4)] * 2,
    "order": [MEMORY[:4], MEMORY[:16].view(4, 4)],
    "other order": [MEMORY[:16].view(4, 4), MEMORY[:4]],
}


@pytest.fixture(params=["C++", "Python"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with the extension's functions, and with its own definitions."""
    if request.param == "C++":
        if lists.host is None:
            pytest.skip("built with another PyTorch")
        for name in ("layouts_key", "addresses", "are_contiguous", "mark_written"):
            assert getattr(lists, name) is getattr(lists.host, name)
        return lists
    monkeypatch.setitem(sys.modules, "tnt_kernels._host", None)
    return SimpleNamespace(**runpy.run_path(lists.__file__))


def test_keys_differ_by_every_property(functions: Any) -> None:
    keys = {name: functions.layouts_key(group, ALIGNMENT) for name, group in LISTS.items()}
    for (name, key), (other, other_key) in itertools.combinations(keys.items(), 2):
        assert key != other_key, (name, other)


def test_equal_layouts_have_equal_keys(functions: Any) -> None:
    """Wherever the tensors are, in a list or a tuple, as parameters or not."""
    key = functions.layouts_key([MEMORY[:16].view(4, 4)], ALIGNMENT)
    for group in (
        (MEMORY[16:32].view(4, 4),),
        [normal((4, 4))],
        [torch.nn.Parameter(normal((4, 4)))],
    ):
        same = functions.layouts_key(group, ALIGNMENT)
        assert same == key and hash(same) == hash(key)
    shifted = MEMORY[1:17].view(4, 4)
    assert functions.layouts_key([shifted], 4) == functions.layouts_key([MEMORY[:16].view(4, 4)], 4)


def test_addresses(functions: Any) -> None:
    group = [MEMORY, MEMORY[1:], normal((3, 2)).t(), torch.zeros(0)]
    words = memoryview(functions.addresses(group)).cast("q").tolist()
    assert words == [t.data_ptr() for t in group] and words[1] == words[0] + 4
    assert functions.addresses([]) == b""


def test_a_lazy_copy_gets_its_own_address(functions: Any) -> None:
    """Kernels write through addresses."""
    original = normal((4, 4))
    lazy = torch._lazy_clone(original)
    assert functions.addresses([lazy]) != functions.addresses([original])


def test_contiguous(functions: Any) -> None:
    transposed = MEMORY.view(8, 8).t()
    assert functions.are_contiguous([]) and functions.are_contiguous([MEMORY, MEMORY[1:]])
    for group in ([transposed], [MEMORY, transposed], [transposed, MEMORY]):
        assert not functions.are_contiguous(group)


def test_mark_written(functions: Any) -> None:
    with torch.inference_mode():
        inference = normal((2,))
    tensors = [normal((2,)), inference, torch.nn.Parameter(normal((3,)))]
    functions.mark_written(tensors)
    assert all(t._version > 0 for t in tensors if not t.is_inference())


@pytest.mark.parametrize("name", ["layouts_key", "addresses"])
def test_what_has_no_layout_is_refused(functions: Any, name: str) -> None:
    options = (ALIGNMENT,) if name == "layouts_key" else ()
    for wrong in ([MEMORY, 3], [None], 3):
        with pytest.raises((AttributeError, TypeError)):
            getattr(functions, name)(wrong, *options)
    with pytest.raises(RuntimeError):
        getattr(functions, name)([torch.eye(2).to_sparse()], *options)
