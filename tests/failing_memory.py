"""Fails every allocation of a call in turn: a failure must change nothing that the call writes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from cases import bits
from operators import Call, Results, everything
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Counts the operations that take memory for tensors, from 1; raises at one of them."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        self.sizes: list[int] = []  # bytes
        self._fails_at = fails_at

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
    given: Call, functions: Any, before_each: Callable[[], object] = lambda: None
) -> int:
    """How many operations of the call take memory. Each of them has failed once.

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
        memory = Memory(failures + 1)
        try:
            with memory:
                results: Results = given(functions)
        except torch.OutOfMemoryError as error:
            failures += 1
            for tensor, (values, version) in zip(written, old, strict=True):
                assert torch.equal(bits(tensor), values), error
                assert tensor._version == version, error
        else:
            break
    assert len(memory.sizes) == failures > 0
    for new, expected in zip(everything(results), everything(wanted), strict=True):
        assert torch.equal(bits(new), bits(expected))
    print(f"{given.name}: {failures} allocations failed in turn")  # pytest -s shows it
    return failures
