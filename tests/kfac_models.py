"""Small models for KFAC's tests, and how they are trained."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC


def conv_net(*, inplace: bool = False) -> nn.Sequential:
    """Two convolutions, a batch norm and a linear layer; (N, 2, 4, 4) to (N, 5); float64."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 1),
        nn.ReLU(inplace),
        nn.Flatten(),
        nn.Linear(16, 5),
    ).double()


def images() -> Tensor:
    """A random batch for ``conv_net``."""
    return torch.randn(8, 2, 4, 4, dtype=torch.float64)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Random images and labels, whatever the step."""
    return images(), torch.randint(5, (8,))


class Heads(nn.Module):
    """One body and some heads, of which a batch uses one or more; float64."""

    def __init__(self, heads: int = 2, sizes: tuple[int, int, int] = (4, 5, 3)) -> None:
        super().__init__()
        self.body = nn.Linear(*sizes[:2])
        self.heads = nn.ModuleList(nn.Linear(*sizes[1:]) for _ in range(heads))
        self.double()

    def forward(self, x: Tensor, *heads: int) -> Any:
        """Logits (N, 3) of each head, as a list if there are several."""
        hidden = torch.tanh(self.body(x))
        found = [self.heads[head](hidden) for head in heads]
        return found if len(found) > 1 else found[0]


class Sides(nn.Module):
    """Two layers, each on an input of its own; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 3)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(N, 3) and (N, 2) to (N, 5)."""
        return torch.cat([self.left(x), self.right(y)], dim=1)


def step_on_ones(model: nn.Module, opt: KFAC, *inputs: Tensor) -> None:
    """One step on gradients of one, which are finite whatever is observed."""
    opt.zero_grad()
    opt.observe(model(*inputs))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    opt.step()


def held(opt: KFAC, key: str = "stats") -> list[Tensor]:
    """Copies of the statistics of all layers, or of their factors."""
    found = [opt.state.get(weight, {}) for weight in opt._observed.weights]
    return [matrix.clone() for s in found if s.get("stats") for matrix in s[key]]


def missed(opt: KFAC) -> dict[int, bool]:
    """The layers that outputs have missed, by number; True if a forward pass called them."""
    statuses = opt._observed.missed
    return {n: statuses[w] < 0 for n, w in enumerate(opt._observed.weights) if w in statuses}


def observed_statistics(
    model: nn.Module, output: Callable[[], Tensor], labels: Tensor
) -> list[Tensor]:
    """The statistics of all layers after one observed step."""
    opt = KFAC.paper(model, likelihood=lambda z: cross_entropy(z, labels), lr=0.0)
    result = output()
    opt.observe(result)
    result.sum().backward()
    opt.step()
    return held(opt)


def with_ones(x: Tensor) -> Tensor:
    """The rows a of a linear layer: its input with a 1 for the bias."""
    return torch.cat([x, x.new_ones(len(x), 1)], dim=1)


def least_likely(output: Tensor) -> Tensor:
    """A likelihood that samples nothing: the loss at the least likely labels."""
    return cross_entropy(output, output.detach().argmin(1))
