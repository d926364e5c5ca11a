"""Gradients for the statistics, taken beside the user's own backward."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from tnt_optim.state import state_dtype


def all_finite(gradients: Iterable[Tensor]) -> Tensor:
    """Whether all Gram matrices of ``gradients`` are finite: their traces are squared norms."""
    # A norm in float16 would overflow at 65504; bfloat16 has float32's range.
    wide = [g.float() if g.dtype == torch.float16 else g for g in gradients]
    if not wide:
        return torch.ones((), dtype=torch.bool)
    norms = torch._foreach_norm(wide)
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    dtype = torch.promote_types(together.dtype, torch.float32)
    return together.to(dtype).square().sum().isfinite()


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
def without_autocast(tensor: Tensor) -> Iterator[None]:
    """Switches autocast off on a tensor's device.

    It has no place around a backward, nor around what is computed from one: it would round again.
    """
    kind = tensor.device.type
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


def check_graph_lasts(loss: Tensor) -> None:
    """Checks that no compiled graph behind a loss may use up its buffers in its first backward.

    The compiler notices a second backward only where the first one did not retain the graph: many
    steps later, when statistics are due for a batch of another size; or at once, where its cache
    on disk has the graph of a training without observations.

    Raises:
        RuntimeError: where one may.
    """
    if not torch._functorch.config.donated_buffer:
        return
    if any(node.name() == "CompiledFunctionBackward" for node in graph_nodes(loss)):
        raise RuntimeError(
            "model must be compiled with torch._functorch.config.donated_buffer = False, set "
            "before torch.compile: the gradients for the statistics are a backward beside yours"
        )


def shows_float16(loss: Tensor) -> bool:
    """Whether a backward of ``loss`` may go through float16."""
    return any(map(_may_be_in_float16, graph_nodes(loss)))


def _may_be_in_float16(node: Node) -> bool:
    kinds = [entry.dtype for entry in getattr(node, "_input_metadata", ())]
    # What is inside of a compiled graph does not show.
    return torch.float16 in kinds or node.name() == "CompiledFunctionBackward"


def unscaled(gradients: Mapping[Tensor, Tensor], scale: float) -> dict[Tensor, Tensor]:
    """Gradients of a loss that was multiplied by ``scale``; of half precision in float32."""
    if scale == 1.0:
        return dict(gradients)
    return {p: g.to(state_dtype(p)) * (1.0 / scale) for p, g in gradients.items()}


def gradients_of(
    loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, scale: float = 1.0
) -> dict[Tensor, Tensor]:
    """The gradients of ``loss`` for those of ``params`` it depends on, ``.grad`` left alone.

    Args:
        loss: a scalar.
        params: whose gradients.
        retain_graph: whether a backward is to follow.
        scale: what the loss is multiplied by before its backward, and the gradients divided by: a
            power of two changes no other numbers than those too small for their dtype.

    Raises:
        ValueError: where a gradient is sparse.
    """
    grads: Sequence[Tensor | None] = ()
    if params:
        with without_autocast(loss):
            grads = torch.autograd.grad(
                loss,
                params,
                torch.full_like(loss, scale),
                retain_graph=retain_graph,
                allow_unused=True,
            )
    reached = {p: g for p, g in zip(params, grads, strict=True) if g is not None}
    for grad in reached.values():
        if grad.layout != torch.strided:
            raise ValueError(f"output must give dense gradients, got {grad.layout}")
    return unscaled(reached, scale)
