"""The trainings of the tests of ``attach``: with ``observe`` in the loop, and without."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import TNT

SETTINGS: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "stat_interval": 2, "inverse_interval": 3}


class Net(nn.Module):
    """Two linear layers with batch norm between; ``wrap`` makes its result from the logits."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        return self.wrap(self.out(torch.tanh(self.norm(self.hidden(x)))))


def made_net(**more: Any) -> Net:
    """A net with fixed weights."""
    torch.manual_seed(3)
    return Net(**more)


def batches(step: int, micro: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """The micro-batches of a step."""
    rng = torch.Generator().manual_seed(step)
    for _ in range(micro):
        yield torch.randn(8, 5, generator=rng), torch.randint(4, (8,), generator=rng)


def train(
    model: nn.Module,
    opt: Any,
    steps: int = 7,
    *,
    observe: bool,
    micro: int = 1,
    logits: Callable[[Any], Tensor] = lambda result: result,
    dtype: torch.dtype | None = None,
) -> None:
    """Trains, under autocast if given a dtype; ``observe`` says whether the loop calls it."""
    for step in range(steps):
        opt.zero_grad()
        for x, y in batches(step, micro):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                output = logits(model(x))
                loss = cross_entropy(output, y) / micro
            if observe:
                opt.observe(output)
            loss.backward()
        opt.step()


def contents(model: nn.Module, opt: Any) -> tuple[Any, ...]:
    """Copies of model and state, and the number of steps."""
    saved = opt.state_dict()
    steps = [group["step"] for group in saved["param_groups"] if "step" in group]
    return copy.deepcopy((model.state_dict(), saved["state"], steps))


def assert_same(one: Any, other: Any) -> None:
    """The same to the bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def explicit(**how: Any) -> tuple[Any, ...]:
    """The end of a training with ``observe`` in the loop."""
    model = made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
    train(model, opt, observe=True, **how)
    assert all(opt.state[p] for p in model.parameters())
    return contents(model, opt)


def counted() -> tuple[list[Any], Callable[[Any], Any]]:
    """An ``output`` function, and the arguments of its calls."""
    seen: list[Any] = []

    def output(result: Any) -> Any:
        seen.append(result)
        return result

    return seen, output
