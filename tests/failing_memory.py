"""Fails every allocation of a call in turn: a failure must change nothing that the call writes."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
from cases import bits
from operators import Call, Results, everything
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counter(Protocol):
    """Within it allocations are counted, and one of them fails."""

    @property
    def count(self) -> int:
        """The number of allocations."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Allocator:
    """Counts tensors and the C++ operators' own allocations; all fail from ``fails_at`` on, from 1.

    For a process that tests/system/failing_allocator.cpp was loaded into.
    """

    def __init__(self, fails_at: int) -> None:
        self._library, self._fails_at, self.count = ctypes.CDLL(None), fails_at, 0

    def __enter__(self) -> Self:
        """Starts to count."""
        self._library.fail_allocations_after(ctypes.c_long(self._fails_at - 1))
        return self

    def __exit__(self, *_: object) -> None:
        """All allocations succeed again."""
        self.count = self._library.allocations()
        self._library.fail_allocations_after(ctypes.c_long(-1))


class Memory(TorchDispatchMode):
    """Counts the operations that take memory for tensors, from 1; raises at one of them."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        self.sizes: list[int] = []  # bytes
        self._fails_at = fails_at

    @property
    def count(self) -> int:
        """The number of operations."""
        return len(self.sizes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation, unless it is the one to fail."""
        returned = func._schema.returns
        # torch.tensor() takes its memory out of sight, and shows its result as lifted.
        is_new = func._schema.name == "aten::lift_fresh" or any(
            "Tensor" in str(value.type) and value.alias_info is None for value in returned
        )
        if is_new and len(self.sizes) + 1 == self._fails_at:
            raise torch.OutOfMemoryError(f"{func._schema.name} is call {self._fails_at}")
        result = func(*args, **(kwargs or {}))
        if is_new:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.sizes.append(sum(tensor.nbytes for tensor in leaves))
        return result


def fail_every_allocation(
    given: Call,
    functions: Any,
    before_each: Callable[[], object] = lambda: None,
    counting: Callable[[int], Counter] = Memory,
) -> int:
    """How many allocations the call makes, as ``counting`` counts them. Each has failed once.

    After each failure the written tensors have their old bits and versions, and the last call,
    which succeeds, gives the bits of an undisturbed one. ``before_each`` call it may empty caches.
    """
    written = given.written
    device = (written or given.read)[0].device
    before_each()
    wanted = given.copy(device)(functions)
    old = [(bits(tensor).clone(), tensor._version) for tensor in written]
    failures = 0
    while True:
        before_each()
        memory = counting(failures + 1)
        try:
            with memory:
                results: Results = given(functions)
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is one
            failures += 1
            for tensor, (values, version) in zip(written, old, strict=True):
                assert torch.equal(bits(tensor), values), error
                assert tensor._version == version, error
        else:
            break
    assert memory.count == failures > 0
    for new, expected in zip(everything(results), everything(wanted), strict=True):
        assert torch.equal(bits(new), bits(expected))
    print(f"{given.name}: {failures} allocations failed in turn")  # pytest -s shows it
    return failures
