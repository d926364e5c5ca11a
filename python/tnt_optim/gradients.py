"""Gradients for the statistics, taken beside the user's own backward."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node


def all_finite(gradients: Iterable[Tensor]) -> Tensor:
    """Whether all Gram matrices of ``gradients`` are finite: their traces are squared norms."""
    # A norm in float16 would overflow at 65504; bfloat16 has float32's range.
    wide = [g.float() if g.dtype == torch.float16 else g for g in gradients]
    norm = nn.utils.get_total_norm(wide)
    return norm.to(torch.promote_types(norm.dtype, torch.float32)).square().isfinite()


@contextmanager
def buffers_put_back(*modules: nn.Module) -> Iterator[None]:
    """On leaving, the modules' buffers (batch norm's running statistics) are what they were."""
    buffers = {b: b.detach().clone() for module in modules for b in module.buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)


def check_reached(reached: Mapping[Tensor, Tensor]) -> None:
    """Checks that an output depends on some parameter.

    Raises:
        ValueError: says what may be the matter.
    """
    if not reached:
        raise ValueError(
            "output must depend on a parameter of this optimizer that requires a gradient, and it "
            "depends on none: is it another model's, or detached (reentrant checkpointing does so)?"
        )


def check_scalar_loss(name: str, loss: Any) -> Tensor:
    """Checks that ``loss`` is a 0-dim tensor with a graph.

    Raises:
        ValueError: says what it is instead.
    """
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{name} must give a 0-dim tensor, got {got}")
    if not loss.requires_grad:
        raise ValueError(f"{name} must have a graph, got a tensor that requires no gradient")
    return loss


@contextmanager
def without_autocast(loss: Tensor) -> Iterator[None]:
    """Switches autocast off, which has no place around a backward: it would round once more."""
    kind = loss.device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, enabled=False):
        yield


def graph_nodes(output: Tensor) -> Iterator[Node]:
    """The nodes of the graph of a tensor, each once."""
    seen: set[Node] = set()
    waiting = [] if output.grad_fn is None else [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions if following is not None]


def gradients_of(
    loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool
) -> dict[Tensor, Tensor]:
    """The gradients of ``loss`` for those of ``params`` it depends on, ``.grad`` left alone.

    Raises:
        ValueError: where a gradient is sparse.
    """
    grads: Sequence[Tensor | None] = ()
    if params:
        with without_autocast(loss):
            grads = torch.autograd.grad(loss, params, retain_graph=retain_graph, allow_unused=True)
    reached = {p: g for p, g in zip(params, grads, strict=True) if g is not None}
    for grad in reached.values():
        if grad.layout != torch.strided:
            raise ValueError(f"output must give dense gradients, got {grad.layout}")
    return reached
