"""``attach``: observing without a line in the training loop, for trainers that own the loop.

A forward hook on the model passes the forward's result to the optimizer's ``observe``. If only a
fraction of the batch is observed, a hook before the forward calls the model on that fraction.
"""

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from tnt_optim.autograd import buffers_put_back
from tnt_optim.failures import IN_EVAL


class OutputHook:
    """Passes a model's result to the optimizer, if the optimizer wants it.

    With a ``fraction`` below 1 it is a hook before the forward, and passes results of parts of the
    batch. The model holds the hook; the hook refers to the optimizer weakly. A copied or saved
    model has a hook that does nothing; loading a saved one needs this package.
    """

    def __init__(
        self,
        optimizer: "weakref.ref[Any] | None",
        output: Callable[..., Any] | None,
        is_sharded: bool,
        fraction: float,
    ) -> None:
        self.optimizer = optimizer
        self.output = output or _logits
        self.takes_inputs = _takes_inputs(self.output)
        self.is_sharded = is_sharded
        self.fraction = fraction
        self.is_busy = False  # while it calls the model on parts of the batch
        self._observe: Callable[..., None] | None = None
        if optimizer is not None:
            # A compiled model's graph ends here, at an end of the forward. A decorator would
            # import the compiler with this module.
            self._observe = torch.compiler.disable(
                _observe_call,
                reason="an optimizer's attach() observes what this model returns; attach it to "
                "what torch.compile returned, with which fullgraph=True works, too",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputHook, (None, None, False, 1.0)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, result: Any = None) -> None:
        """A hook after the forward, with its result, or before it.

        Returns None, which leaves arguments and result as they are.
        """
        if self._observe is None or not torch.is_grad_enabled():
            return
        if module.training:
            self._observe(self, module, args, kwargs, result)
        elif not torch.compiler.is_compiling():
            optimizer = None if self.optimizer is None else self.optimizer()
            if optimizer is not None and optimizer._wants_output():
                optimizer._observed.hint = IN_EVAL


def attach(
    optimizer: Any, model: nn.Module, output: Callable[..., Any] | None, fraction: float
) -> RemovableHandle:
    """Makes ``optimizer`` observe ``model``, as long as both exist; see ``TNT.attach``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if output is not None and not callable(output):
        raise TypeError(f"output must be a function or None, got {type(output).__name__}")
    check_fraction(fraction)
    hook = OutputHook(weakref.ref(optimizer), output, _is_sharded(model), fraction)
    if fraction == 1:
        handle = model.register_forward_hook(hook, with_kwargs=True)
    else:  # before the hooks of fully_shard, each part's forward and backward are whole
        handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    weakref.finalize(optimizer, handle.remove).atexit = False
    return handle


def check_fraction(fraction: float) -> None:
    """Refuses a fraction of a batch that is none."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be a number in (0, 1], got {fraction!r}")


def _asking(hook: OutputHook, module: nn.Module) -> Any:
    """The optimizer, if it wants an output now."""
    optimizer = None if hook.optimizer is None else hook.optimizer()
    # Under torch.export tensors have no values. A forward inside a backward is activation
    # checkpointing, which repeats a forward that was observed.
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return None
    if hook.is_busy or optimizer is None or not optimizer._wants_output():
        return None
    # Inside a transform of torch.func tensors are wrapped.
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    if getattr(module, "_is_replica", False):
        raise RuntimeError(
            "model must not be a replica of torch.nn.DataParallel, whose threads would all observe "
            "at once: attach to the DataParallel module, or use DistributedDataParallel"
        )
    if _is_sharded(module) and not hook.is_sharded:
        raise RuntimeError(
            "model must be attached to after fully_shard(model), whose hooks have to run first"
        )
    # torch.func.functional_call may bring other weights.
    own = {p for group in optimizer.param_groups for p in group["params"]}
    if not hook.is_sharded and own.isdisjoint(module.parameters()):
        return None
    return optimizer


def _takes_inputs(output: Callable[..., Any]) -> bool:
    """Whether a function of a result takes the arguments of the forward, too."""
    try:
        signature = inspect.signature(output)
    except ValueError:  # a built-in function
        return False
    for number in (1, 3):
        with suppress(TypeError):
            signature.bind(*range(number))
            return number == 3
    raise TypeError(
        f"output must be a function of (result) or of (result, args, kwargs), got {signature}"
    )


def _observe_call(hook: OutputHook, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    optimizer = _asking(hook, module)
    if optimizer is None:
        return
    if hook.fraction == 1:
        _observe_result(hook, optimizer, (args, kwargs), result)
        return
    # DistributedDataParallel prepares its next backward in a forward, and sends buffers.
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    hook.is_busy = True
    try:
        cuda = sorted(device.index for device in devices if device.type == "cuda")
        with torch.random.fork_rng(devices=cuda), buffers_put_back(inner), _own_tensors():
            for part, observed in parts_of((args, kwargs), hook.fraction, optimizer.samples):
                result = inner(*part[0], **part[1])
                _observe_result(hook, optimizer, part, result, observed)
    finally:
        hook.is_busy = False


def parts_of(inputs: Any, fraction: float, parts: int) -> Iterator[tuple[Any, float]]:
    """Parts of the first ``fraction`` of a batch.

    Args:
        inputs: nested tensors; those as long as the first one in their first dimension are cut.
        fraction: of the batch, at least one example.
        parts: their number, or the number of examples if that is smaller.

    Yields:
        The inputs of each part, and the fraction that all parts are of the batch.
    """
    leaves, spec = tree_flatten(inputs)
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not sizes or not sizes[0]:
        raise ValueError(
            "model must get tensors with the batch as their first dimension if a fraction of it is "
            f"observed, got sizes {sizes}"
        )
    size, observed = sizes[0], max(1, round(fraction * sizes[0]))
    number = min(parts, observed)
    for first, last in itertools.pairwise(observed * i // number for i in range(number + 1)):
        cut = [
            leaf[first:last] if isinstance(leaf, Tensor) and leaf.shape[:1] == (size,) else leaf
            for leaf in leaves
        ]
        yield tree_unflatten(cut, spec), observed / size


def _observe_result(
    hook: OutputHook, optimizer: Any, inputs: Any, result: Any, fraction: float = 1.0
) -> None:
    described = hook.output(result, *(inputs if hook.takes_inputs else ()))
    tensors = [leaf for leaf in tree_leaves(described) if isinstance(leaf, Tensor)]
    if tensors and not any(tensor.requires_grad for tensor in tensors):
        return
    # No row counts. The processes of a sharded model have to run the backward together.
    if isinstance(described, Tensor) and described.shape[:1] == (0,) and not hook.is_sharded:
        return
    # It shows in the graph only when DistributedDataParallel's own forward has ended.
    replica = DistributedDataParallel._get_active_ddp_module()
    if replica is not None and replica.find_unused_parameters:
        optimizer._observed.partial = True
    observations = optimizer._observed
    before = observations.count
    more = {} if fraction == 1 else {"fraction": fraction}  # KFAC observes whole batches
    with _own_tensors():
        optimizer.observe(described, **more)
    observations.attached += observations.count - before


def _own_tensors() -> saved_tensors_hooks:
    """If the whole model is checkpointed, its hooks must not see the tensors saved here."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


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
