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
        for name in ("walk", "are_apart", "mark_written"):
            assert getattr(lists, name) is getattr(lists.host, name)
        return lists
    monkeypatch.setitem(sys.modules, "tnt_kernels._host", None)
    return SimpleNamespace(**runpy.run_path(lists.__file__))


def test_layouts_differ_by_every_property(functions: Any) -> None:
    keys = {name: functions.walk(group)[0] for name, group in LISTS.items()}
    for (name, key), (other, other_key) in itertools.combinations(keys.items(), 2):
        assert key != other_key, (name, other)


def test_equal_layouts_have_equal_keys(functions: Any) -> None:
    """Wherever the tensors are, in a list or a tuple, as parameters or not."""
    key = functions.walk([MEMORY[:16].view(4, 4)])[0]
    for group in (
        (MEMORY[16:32].view(4, 4),),
        [normal((4, 4))],
        [torch.nn.Parameter(normal((4, 4)))],
    ):
        same = functions.walk(group)[0]
        assert same == key and hash(same) == hash(key)


def test_addresses(functions: Any) -> None:
    group = [MEMORY, MEMORY[1:], normal((3, 2)).t(), MEMORY.as_strided((3, 2), (8, 2)), MEMORY[:0]]
    _, addresses, ends, *_ = functions.walk(group)
    words = memoryview(addresses).cast("q").tolist()
    assert words == [t.data_ptr() for t in group] and words[1] == words[0] + 4
    sizes = [end - start for start, end in zip(words, memoryview(ends).cast("q"), strict=True)]
    assert sizes == [64 * 4, 63 * 4, 6 * 4, (2 * 8 + 2 + 1) * 4, 0]
    assert functions.walk([])[1:3] == (b"", b"")


def test_a_lazy_copy_gets_its_own_address(functions: Any) -> None:
    """Kernels write through addresses."""
    original = normal((4, 4))
    lazy = torch._lazy_clone(original)
    assert functions.walk([lazy])[1] != functions.walk([original])[1]


def test_contiguous(functions: Any) -> None:
    transposed = MEMORY.view(8, 8).t()
    assert functions.walk([])[3] and functions.walk([MEMORY, MEMORY[1:]])[3]
    for group in ([transposed], [MEMORY, transposed], [transposed, MEMORY]):
        assert not functions.walk(group)[3]


class Wrapper(Tensor):
    """A subclass with a dispatch of its own, which would see an operator's call."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_plain(functions: Any) -> None:
    """What needs PyTorch's dispatcher is not."""
    assert functions.walk([MEMORY, torch.nn.Parameter(normal((3,)))])[4]
    zero = torch._efficientzerotensor((3,))
    for other in (torch._neg_view(MEMORY), normal((3,)).as_subclass(Wrapper), zero):
        assert not functions.walk([MEMORY, other])[4]


def test_memory_of_one_reaches_into_anothers(functions: Any) -> None:
    def apart(written: list[Tensor], *read: list[Tensor]) -> bool:
        return bool(
            functions.are_apart(*([functions.walk(g)[1:3] for g in gs] for gs in ([written], read)))
        )

    a, b, c = MEMORY[:8], MEMORY[8:20], MEMORY[20:]
    assert apart([b], [a, c]) and apart([c, a], [b], [b]) and apart([], [a], [a, MEMORY])
    assert apart([MEMORY[:0], b], [a, MEMORY[10:10]])
    for written, read in (
        ([a, a], []),
        ([MEMORY], [b]),
        ([b], [MEMORY]),
        ([MEMORY[7:9]], [b, c]),
        ([MEMORY[19:21]], [a, c]),
        ([a, MEMORY[10:11]], [MEMORY[8:]]),
        # Interleaved: no shared byte, which only the exact check finds out.
        ([MEMORY[::2]], [MEMORY[1::2]]),
    ):
        assert not apart(written, read)


def test_mark_written(functions: Any) -> None:
    with torch.inference_mode():
        inference = normal((2,))
    tensors = [normal((2,)), inference, torch.nn.Parameter(normal((3,)))]
    functions.mark_written(tensors)
    assert all(t._version > 0 for t in tensors if not t.is_inference())


def test_what_has_no_layout_is_refused(functions: Any) -> None:
    for wrong in ([MEMORY, 3], [None], 3):
        with pytest.raises((AttributeError, TypeError)):
            functions.walk(wrong)
    with pytest.raises(RuntimeError):
        functions.walk([torch.eye(2).to_sparse()])


def test_a_list_is_walked_once() -> None:
    given = [MEMORY, MEMORY[1:]]
    first = lists.walked(given)
    assert list(map(id, first)) == list(map(id, given)) and lists.walked(first) is first
    found = first.layouts, first.addresses, first.ends, first.contiguous, first.plain
    assert found == lists.walk(given)
