"""``attach``: observing without a line in the training loop, for trainers that own the loop.

A forward hook on the model passes the forward's result to the optimizer's ``observe``.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class OutputHook:
    """Passes a model's result to the optimizer, if the optimizer wants it.

    The model holds the hook; the hook refers to the optimizer weakly. A copied or saved model has a
    hook that does nothing; loading a saved one needs this package.
    """

    def __init__(
        self,
        optimizer: "weakref.ref[Any] | None",
        output: Callable[[Any], Any] | None,
        is_sharded: bool,
    ) -> None:
        self.optimizer = optimizer
        self.output = output
        self.is_sharded = is_sharded
        self._hand_over: Callable[..., None] | None = None
        if optimizer is not None:
            # A compiled model's graph ends here, at the end of the forward. A decorator would
            # import the compiler with this module.
            self._hand_over = torch.compiler.disable(
                _hand_over,
                reason="an optimizer's attach() observes what this model returns; attach it to "
                "what torch.compile returned, with which fullgraph=True works, too",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputHook, (None, None, False)

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        """A forward hook; returns None, which leaves the result as it is."""
        if self._hand_over is not None and module.training and torch.is_grad_enabled():
            self._hand_over(self, module, result)


def attach(
    optimizer: Any, model: nn.Module, output: Callable[[Any], Any] | None
) -> RemovableHandle:
    """Makes ``optimizer`` observe ``model``, as long as both exist; see ``TNT.attach``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if output is not None and not callable(output):
        raise TypeError(f"output must be a function or None, got {type(output).__name__}")
    hook = OutputHook(weakref.ref(optimizer), output, _is_sharded(model))
    handle = model.register_forward_hook(hook)
    weakref.finalize(optimizer, handle.remove).atexit = False
    return handle


def _hand_over(hook: OutputHook, module: nn.Module, result: Any) -> None:
    optimizer = None if hook.optimizer is None else hook.optimizer()
    # Under torch.export tensors have no values. A forward inside a backward is activation
    # checkpointing, which repeats a forward that was observed.
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return
    if optimizer is None or not optimizer._wants_output():
        return
    if getattr(module, "_is_replica", False):
        raise RuntimeError(
            "model must not be a replica of torch.nn.DataParallel, whose threads would all observe "
            "at once: attach to the DataParallel module, or use DistributedDataParallel"
        )
    if _is_sharded(module) and not hook.is_sharded:
        raise RuntimeError(
            "model must be attached to after fully_shard(model), whose hooks have to run first"
        )
    described = _logits(result) if hook.output is None else hook.output(result)
    if isinstance(described, Tensor) and not described.requires_grad:
        return
    # It shows in the graph only when DistributedDataParallel's own forward has ended.
    replica = DistributedDataParallel._get_active_ddp_module()
    if replica is not None and replica.find_unused_parameters:
        optimizer._observed.partial = True
    # If the whole model is checkpointed, its hooks must not see the tensors saved here.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        optimizer.observe(described)


def _is_sharded(module: nn.Module) -> bool:
    # No import, which takes most of a second: a program with such a module has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _logits(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        found = result.get("logits")
    else:
        found = getattr(result, "logits", None)
    if found is None:
        raise TypeError(
            "output must say what to observe of a model that returns neither a tensor nor "
            f"logits, but {type(result).__name__}: "
            "opt.attach(model, output=lambda result: ...)"
        )
    return found
