"""The optimizer without its checks for faults, and the seconds that they take."""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

_TRUE = torch.ones((), dtype=torch.bool)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what checks or counts."""


def _all_finite(gradients: Any) -> Tensor:
    """In place of a look at the gradients; on the CPU."""
    return _TRUE


# The checks, and what takes their place. What an operator checks of its arguments and of its own
# results is not among them, nor is what finds the parameters that are to move.
GUARDS: dict[str, Callable[..., Any]] = {
    "tnt_optim.kronecker.check_settings": _nothing,
    "tnt_optim.update.all_finite": _all_finite,
    "tnt_optim.failures.Failures.report_statistics": _nothing,
    "tnt_optim.failures.Failures.report_inverses": _nothing,
    "tnt_optim.failures.Failures.read": _nothing,
}


def without_guards() -> AbstractContextManager[None]:
    """Steps meanwhile are taken without the checks."""
    return _replaced(lambda name, guard: GUARDS[name])


@contextmanager
def watched_guards() -> Iterator[list[float]]:
    """Collects the seconds of every call of a check."""
    spent: list[float] = []

    def watched(name: str, guard: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return guard(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - start)

        return call

    with _replaced(watched):
        yield spent


@contextmanager
def _replaced(make: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Each check replaced by what ``make`` makes of its name and it.

    Raises:
        AttributeError: a check is no longer there; none is then replaced.
    """
    places = {name: name.rpartition(".") for name in GUARDS}
    owners = {name: pkgutil.resolve_name(owner) for name, (owner, _, _) in places.items()}
    before = {name: getattr(owners[name], places[name][2]) for name in GUARDS}
    try:
        for name, guard in before.items():
            setattr(owners[name], places[name][2], make(name, guard))
        yield
    finally:
        for name, guard in before.items():
            setattr(owners[name], places[name][2], guard)
