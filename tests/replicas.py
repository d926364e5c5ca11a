"""Trainings of several processes, compared with that of one process on all their batches."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from optimizers import equal
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy

Batches = list[tuple[Tensor, Tensor]]


def drawn(count: int, key: int, *shape: int) -> Batches:
    """Micro-batches of inputs of a shape, and labels from 0 to 2."""
    rng = torch.Generator().manual_seed(key)
    inputs = torch.randn(count, *shape, generator=rng, dtype=torch.float64)
    return list(zip(inputs, torch.randint(3, (count, shape[0]), generator=rng), strict=True))


def train(model: nn.Module, opt: Any, steps: Sequence[Batches]) -> None:
    """Takes a step on each list of micro-batches."""
    for batches in steps:
        opt.zero_grad()
        for number, (x, y) in enumerate(batches, 1):
            # DistributedDataParallel.no_sync() sets this, too.
            model.require_backward_grad_sync = number == len(batches)  # type: ignore[assignment]
            output = model(x)
            opt.observe(output)
            (cross_entropy(output, y) / len(batches)).backward()
        opt.step()


def whole(net: nn.Module) -> list[Tensor]:
    """Copies of the parameters; sharded ones are gathered."""
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in net.parameters()]


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Of two lists of parameters."""
    return float(torch.cat([(x - y).reshape(-1) for x, y in zip(a, b, strict=True)]).norm())


def assert_trained_as(
    ends: Sequence[Sequence[Tensor]], wanted: Sequence[Tensor], start: Sequence[Tensor]
) -> None:
    """All processes end with the same bits, and as one process does except for rounding."""
    moved = distance(wanted, start)
    assert moved > 0.01
    for end in ends:
        assert equal(end, ends[0])
    assert distance(ends[0], wanted) <= FLOAT64_TRAJECTORY * moved


def save(folder: str, net: nn.Module, opt: Any, by_name: bool = False) -> None:
    """Saves with torch.distributed.checkpoint; ``by_name``: the state under parameters' names."""
    state = get_optimizer_state_dict(net, opt) if by_name else opt.state_dict()
    dcp.save({"net": net.state_dict(), "opt": state}, checkpoint_id=folder)


def load(folder: str, net: nn.Module, opt: Any, by_name: bool = False) -> None:
    """Loads what ``save`` has saved."""
    opt.allocate_state()
    state = get_optimizer_state_dict(net, opt) if by_name else opt.state_dict()
    target = {"net": net.state_dict(), "opt": state}
    dcp.load(target, checkpoint_id=folder)
    net.load_state_dict(target["net"])
    if by_name:
        set_optimizer_state_dict(net, opt, target["opt"])
    else:
        opt.load_state_dict(target["opt"])
