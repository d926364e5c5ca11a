"""Mistakes that every operator must refuse before it writes anything, whoever calls it.

The same ones through the public functions where C++ serves, through the public functions where it
does not (then Python's own checks are all there is), and through torch.ops, where C++'s are. What
each operator's own arguments can get wrong is in its own file.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Arguments, flat, mode_statistics, normal, scalar, unchanged

import tnt_kernels
from tnt_kernels import ops
from tnt_kernels.schemas import NAMESPACE

SHAPES = [(9, 5), (3,)]


def modes() -> list[list[torch.Tensor]]:
    return [mode_statistics(shape, "full") for shape in SHAPES]


def tensors() -> list[torch.Tensor]:
    return [normal(shape) for shape in SHAPES]


GOOD: dict[str, Callable[[], Arguments]] = {
    "gram_ema_": lambda: {"stats": modes(), "tensors": tensors(), "decay": 0.5},
    "damped_inverse": lambda: {"stats": modes(), "damping": 0.1, "out": modes()},
    "inverse_root": lambda: {"stats": modes(), "damping": 0.1, "root": 4, "out": modes()},
    "mode_products": lambda: {"tensors": tensors(), "factors": modes()},
    "preconditioned_step_": lambda: {
        "params": tensors(),
        "momenta": tensors(),
        "grads": tensors(),
        "factors": modes(),
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.1,
    },
    "grafted_directions_": lambda: {
        "momenta": tensors(),
        "second_moments": [t.square() for t in tensors()],
        "out": tensors(),
        "grads": tensors(),
        "factors": modes(),
        "momentum": 0.9,
        "counts": torch.ones(len(SHAPES), 2, dtype=torch.float64),
        "second_decay": 0.99,
        "eps": 1e-8,
    },
}


def public(name: str, given: Arguments) -> None:
    getattr(tnt_kernels, name)(**given)


def direct(name: str, given: Arguments) -> None:
    """By torch.ops: lists flat, numbers as tensors, `out` first."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name)
    number = {k: scalar(v) for k, v in given.items() if isinstance(v, float)}
    lists = {k: flat(v) for k, v in given.items() if isinstance(v, list)}
    orders = [len(row) for row in given.get("stats", [])]
    if name == "gram_ema_":
        operator(lists["stats"], lists["tensors"], number["decay"])
    elif name == "damped_inverse":
        operator(lists["out"], lists["stats"], orders, number["damping"], False)
    elif name == "inverse_root":
        roots = [given["root"]] * len(orders)
        operator(lists["out"], lists["stats"], orders, number["damping"], roots)
    elif name == "mode_products":
        operator(lists["tensors"], lists["factors"])
    elif name == "grafted_directions_":
        plain = given["counts"], given["second_decay"], given["eps"]
        operator(*lists.values(), number["momentum"], *plain)
    else:
        operator(*lists.values(), *number.values())


CALLERS = {"public": public, "python checks": public, "torch.ops": direct}


def put(argument: str, value: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    """A mistake in the first entry of a list: its first mode where the list is nested."""

    def make(given: Arguments) -> None:
        entries = given[argument]
        while isinstance(entries[0], list):
            entries = entries[0]
        entries[0] = value(entries[0])

    return make


def share(one: str, other: str) -> Callable[[Arguments], None]:
    """Both arguments begin with the same memory."""

    def make(given: Arguments) -> None:
        memory = torch.randn(100)
        for argument in (one, other):
            put(argument, lambda old: memory[: old.numel()].view(old.shape).copy_(old))(given)

    return make


def inside(argument: str) -> Callable[[Arguments], None]:
    """Two entries of one argument overlap by one element."""

    def make(given: Arguments) -> None:
        row = given[argument][0] if isinstance(given[argument][0], list) else given[argument]
        first, second = row[0], row[1]
        memory = torch.randn(first.numel() + second.numel() - 1)
        row[0] = memory[: first.numel()].view(first.shape).copy_(first)
        row[1] = memory[first.numel() - 1 :].view(second.shape)

    return make


def number(argument: str, value: float) -> Callable[[Arguments], None]:
    return lambda given: given.update({argument: value})


def _expanded(old: torch.Tensor) -> torch.Tensor:
    return old[:1].expand(old.shape)


def _zero(old: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(tuple(old.shape))


def _negated(old: torch.Tensor) -> torch.Tensor:
    return torch.complex(old, -old).conj().imag


def _wider(old: torch.Tensor) -> torch.Tensor:
    return torch.randn(old.shape[0] + 1, *old.shape[1:])


WRITTEN = {
    "gram_ema_": ["stats"],
    "damped_inverse": ["out"],
    "inverse_root": ["out"],
    "mode_products": [],
    "preconditioned_step_": ["params", "momenta"],
    "grafted_directions_": ["momenta", "second_moments", "out"],
}
NUMBERS = {
    "gram_ema_": {"decay": [-0.5, 1.5]},
    "damped_inverse": {"damping": [-0.1]},
    "inverse_root": {"damping": [-0.1]},
    "mode_products": {},
    "preconditioned_step_": {"lr": [-1.0], "momentum": [-0.9], "weight_decay": [-0.1]},
    "grafted_directions_": {"momentum": [-0.9, 1.0], "second_decay": [-0.1, 1.0], "eps": [-0.1]},
}
LISTS = {name: [k for k, v in good().items() if isinstance(v, list)] for name, good in GOOD.items()}


def cases() -> list[Any]:
    found: list[tuple[str, str, Callable[[Arguments], None], str]] = []
    for name in GOOD:
        for argument in LISTS[name]:
            for kind, value in (
                ("integers", lambda old: old.int()),
                ("complex", lambda old: old.cfloat()),
                ("bool", lambda old: old > 0),
                ("shape", _wider),
            ):
                # A tensor of another shape is as good as any; its modes are then what is wrong.
                blamed = argument
                if kind == "shape" and argument in ("tensors", "params"):
                    blamed = "stats|factors"
                if kind == "shape" and name in ("damped_inverse", "inverse_root"):
                    blamed = "stats|out"
                if kind == "shape" and argument == "params":
                    blamed = "factors|momenta"
                if kind == "shape" and name == "grafted_directions_" and argument == "momenta":
                    blamed = "grads"
                found.append((name, f"{argument} {kind}", put(argument, value), blamed))
        for argument in WRITTEN[name]:
            found += [
                (name, f"{argument} expanded", put(argument, _expanded), argument),
                # PyTorch's dispatcher has words of its own for these.
                (name, f"{argument} zero", put(argument, _zero), f"{argument}|ZeroTensors"),
                (name, f"{argument} negated", put(argument, _negated), f"{argument}| fallback"),
                (name, f"{argument} overlapping", inside(argument), argument),
            ]
            for other in LISTS[name]:
                if other != argument:
                    either = f"{argument}|{other}"
                    found.append((name, f"{argument} is {other}", share(argument, other), either))
        for argument, values in NUMBERS[name].items():
            for value in [*values, float("nan")]:
                found.append((name, f"{argument} {value}", number(argument, value), argument))
    return [pytest.param(*case[::2], case[3], id=f"{case[0]}-{case[1]}") for case in found]


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize(("name", "make", "blamed"), cases())
def test_refused(
    name: str,
    make: Callable[[Arguments], None],
    blamed: str,
    caller: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if caller == "python checks":
        monkeypatch.setattr(ops, "_checks_itself", lambda name: False)
    given = GOOD[name]()
    make(given)
    errors = (ValueError, RuntimeError) if caller == "torch.ops" else ValueError
    with unchanged(given), pytest.raises(errors, match=f"^({blamed})"):
        CALLERS[caller](name, given)


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("name", GOOD)
def test_good_arguments_are_not(name: str, caller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mistakes are made of is no mistake."""
    if caller == "python checks":
        monkeypatch.setattr(ops, "_checks_itself", lambda name: False)
    CALLERS[caller](name, GOOD[name]())


def test_views_may_interleave() -> None:
    """Every second entry of one memory each: they share none."""
    memory = torch.randn(18)
    params = [memory[::2], memory[1::2]]
    momenta = [torch.zeros(9), torch.zeros(9)]
    factors = [[torch.eye(9)], [torch.eye(9)]]
    wanted = memory.clone()
    grads = [torch.ones(9), torch.ones(9)]
    tnt_kernels.preconditioned_step_(params, momenta, grads, factors, 0.5, 0.9, 0.0)
    torch.testing.assert_close(memory, wanted - 0.5)
