"""Counts the bytes that this process hands to collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

# What each process hands over: the whole tensor where it is summed up, an owner's where it is
# broadcast, pieces where all send to all. What travels on a wire depends on the backend: a ring
# sends 2 (n - 1) / n of a sum, (n - 1) / n of a gather.
_COUNTED: dict[str, Callable[..., int]] = {
    "all_reduce": lambda tensor, *a, **k: tensor.nbytes,
    "broadcast": lambda tensor, *a, **k: tensor.nbytes if _sends(*a, **k) else 0,
    "all_to_all_single": lambda output, tensor, *a, **k: tensor.nbytes,
}


@dataclass
class Traffic:
    """What was handed over.

    Attributes:
        size: in bytes.
        calls: of collectives.
    """

    size: int = 0
    calls: int = 0


@contextmanager
def counted() -> Iterator[Traffic]:
    """Counts the optimizers' calls of collectives meanwhile."""
    traffic = Traffic()
    before = {name: getattr(dist, name) for name in _COUNTED}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            traffic.size += _COUNTED[name](*args, **kwargs)
            traffic.calls += 1
            return before[name](*args, **kwargs)

        return call

    for name in _COUNTED:
        setattr(dist, name, counting(name))
    try:
        yield traffic
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _sends(*args: Any, group: Any = None, group_src: int | None = None, **kwargs: Any) -> bool:
    return group_src == dist.get_rank(group)


def nbytes(state: Any) -> int:
    """The bytes of all tensors in a state."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(nbytes, state.values()))
    return sum(map(nbytes, state)) if isinstance(state, list) else 0
