"""Gradients for the statistics: a second backward, without effect on the user's backward."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from tnt_optim.modes import state_dtype

# By parameter. None: this process has no gradient of it, but another process may have one.
Gradients = Mapping[Tensor, Tensor | None]

# The node of reentrant checkpointing: the graph does not show what is inside.
_CHECKPOINT = "CheckpointFunctionBackward"


def all_finite(gradients: Iterable[Tensor]) -> Tensor:
    """Whether the Gram matrices of all gradients are finite: their traces are squared norms."""
    # A norm in float16 would overflow at 65504; bfloat16 has float32's range.
    wide = [g.float() if g.dtype == torch.float16 else g for g in gradients]
    if not wide:
        return torch.ones((), dtype=torch.bool)
    # One norm each, in its own dtype: their sum may overflow where no Gram matrix does.
    norms = torch._foreach_norm(wide)
    traces = [trace.to(norms[0].device) for trace in torch._foreach_mul(norms, norms)]
    return torch.stack(traces).isfinite().all()


@contextmanager
def buffers_put_back(*modules: nn.Module) -> Iterator[None]:
    """Restores the modules' buffers (batch norm's running statistics) on leaving.

    This includes buffers that a forward replaces by other tensors.
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    values = {b: b.detach().clone() for module in modules for b in module.buffers()}
    tables = [(part._buffers, dict(part._buffers)) for m in modules for part in m.modules()]
    try:
        yield
    finally:
        for table, buffers in tables:
            table.update(buffers)
        with torch.no_grad():
            for buffer, value in values.items():
                if not torch.equal(buffer, value):  # writing to an expanded one raises
                    buffer.copy_(value)


def leaves_of(loss: Tensor) -> set[Tensor]:
    """The tensors whose gradients a backward of ``loss`` sets."""
    variables = [getattr(node, "variable", None) for node in graph_nodes(loss)]
    return {variable for variable in variables if variable is not None}


def check_reached(reached: Collection[Tensor]) -> None:
    """Refuses an output that depends on no parameter."""
    if not reached:
        raise ValueError(
            "output must depend on a parameter of this optimizer that requires a gradient, and "
            "does not: is it another model's, or detached (reentrant checkpointing detaches it)?"
        )


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Switches autocast off on a tensor's device: it would round gradients a second time."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def graph_nodes(output: Tensor) -> Iterator[Node]:
    """The nodes of the graph of a tensor, each once."""
    visited: set[Node] = set()
    waiting = [] if output.grad_fn is None else [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in visited:
            visited.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions if child is not None]


def check_shown(kinds: Collection[str]) -> None:
    """Refuses a graph, given the names of its nodes, if one of them hides parameters."""
    if _CHECKPOINT in kinds:
        raise ValueError(
            f"output must have a graph that shows its parameters, and {_CHECKPOINT} hides some: "
            "use checkpoint(..., use_reentrant=False)"
        )


def check_graph(loss: Tensor, *, retain_graph: bool) -> None:
    """Refuses a loss behind reentrant checkpointing, or behind a compiled graph that may not last.

    With donated buffers such a graph reuses memory in its first backward. The compiler's own error
    comes many steps later, for a batch of another size, or at once, if its cache on disk has the
    graph of a training without observations.
    """
    kinds = {node.name() for node in graph_nodes(loss)}
    check_shown(kinds)
    if retain_graph and config.donated_buffer and "CompiledFunctionBackward" in kinds:
        raise RuntimeError(
            "model must be compiled with torch._functorch.config.donated_buffer = False, set "
            "before torch.compile: with a likelihood, the statistics take a second backward. "
            "Without one (TNT(params), Shampoo) torch.compile needs nothing"
        )


def changed_batch_norm(output: Tensor) -> bool:
    """Whether the forward has changed batch norm's running statistics, as far as its graph shows.

    It does not show the inside of a compiled graph.
    """
    return any(
        node.name() == "SyncBatchNormBackward"
        or getattr(node, "_saved_training", False)
        and getattr(node, "_saved_running_mean", None) is not None
        for node in graph_nodes(output)
    )


def checked_replicas(loss: Tensor) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules that show in the graph of a loss.

    A module shows if it searches for unused parameters, or has a static graph and no backward yet.
    A static graph is refused: its first backward starts the averaging of all gradients, whether it
    is the user's or not. The gradients are then wrong, without an error.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    modules = [
        node.ddp_weakref()  # type: ignore[attr-defined]
        for node in graph_nodes(loss)
        if node.name() == "_DDPSinkBackward"
    ]
    replicas = [module for module in modules if module is not None]
    if any(replica.static_graph for replica in replicas):
        raise RuntimeError(
            "output must not come from DistributedDataParallel with static_graph=True, because a "
            "second backward makes its gradients wrong: leave it off, or attach to the inner module"
        )
    return replicas


def shows_float16(loss: Tensor) -> bool:
    """Whether a backward of ``loss`` may go through float16."""
    return any(
        # The inside of a compiled graph does not show.
        node.name() == "CompiledFunctionBackward"
        or any(entry.dtype == torch.float16 for entry in getattr(node, "_input_metadata", ()))
        for node in graph_nodes(loss)
    )


def unscaled(gradients: Mapping[Tensor, Tensor], scale: float) -> dict[Tensor, Tensor]:
    """The gradients divided by the scale of their loss; half precision becomes float32."""
    if scale == 1.0:
        return dict(gradients)
    return {p: g.to(state_dtype(p)) * (1.0 / scale) for p, g in gradients.items()}


@contextmanager
def before_backward() -> Iterator[None]:
    """Replaces autograd's error for a freed graph by one that names ``observe``."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise RuntimeError(
            "observe must be called before the backward of the same forward, which frees the graph "
            "of the output: call it between the forward and loss.backward()"
        ) from error


def gradients_of(
    loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, scale: float = 1.0
) -> dict[Tensor, Tensor]:
    """The gradients of ``loss`` by the parameters it depends on; every ``.grad`` is left alone.

    The loss is multiplied by ``scale`` and the gradients are divided by it: a power of two changes
    only numbers that are too small for their dtype. A sparse gradient is refused.
    """
    grads: Sequence[Tensor | None] = ()
    if params:
        with without_autocast(loss), before_backward():
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
            raise ValueError(
                f"output must give dense gradients, got {grad.layout}, {tuple(grad.shape)}"
            )
    return unscaled(reached, scale)
