"""``attach``: observing without a line in the training loop, for trainers that own the loop.

A forward hook on the model passes the forward's result to the optimizer's ``observe``.
"""

import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from tnt_optim.messages import IN_EVAL


class OutputHook:
    """Passes a model's result to the optimizer, if the optimizer wants it.

    The model holds the hook; the hook refers to the optimizer weakly. A copied or saved model has a
    hook that does nothing; loading a saved one needs this package.
    """

    def __init__(
        self,
        optimizer: "weakref.ref[Any] | None",
        output: Callable[..., Any] | None,
        is_sharded: bool,
    ) -> None:
        self.optimizer = optimizer
        self.output = output or _logits
        self.takes_inputs = _takes_inputs(self.output)
        self.is_sharded = is_sharded
        self._observe: Callable[..., None] | None = None
        if optimizer is not None:
            # The graph of a compiled model ends here, at the end of the forward. A decorator
            # would import the compiler together with this module.
            self._observe = torch.compiler.disable(
                _observe_call,
                reason="an optimizer's attach() observes what this model returns; attach it to "
                "what torch.compile returned, with which fullgraph=True works, too",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputHook, (None, None, False)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """A hook after the forward. Returns None, which leaves the result as it is."""
        if self._observe is None or not torch.is_grad_enabled():
            return
        if module.training:
            self._observe(self, module, args, kwargs, result)
        elif not torch.compiler.is_compiling():
            optimizer = None if self.optimizer is None else self.optimizer()
            if optimizer is not None and optimizer.observing:
                optimizer._observed.hint = IN_EVAL


class Attachable:
    """Adds ``attach`` and ``observing`` to an optimizer with ``observe`` and ``_observed``."""

    # Removes the hook on the observed model; a copy has none.
    _attached: Callable[[], object] | None = None
    _warming = False  # whether ``warm_start`` observes
    _wanted: Callable[[], Any]  # the parameters or layers whose statistics are due now
    _samples: Any = True  # whether outputs are observed at all

    @property
    def observing(self) -> bool:
        """Whether ``observe`` would use an output now, because statistics are due."""
        return not self._warming and bool(self._wanted())

    def attach(self, model: nn.Module, output: Callable[..., Any] | None = None) -> RemovableHandle:
        """Observes every output of ``model`` from now on, for trainers that own the training loop.

        Without a ``likelihood`` there is nothing to observe, and nothing happens. Otherwise a
        forward hook then replaces the call of ``observe`` in the loop::

            opt.attach(model)
            trainer = Trainer(model=model, optimizers=(opt, None), ...)

        While statistics are due, every call of the model in training mode with gradients enabled
        counts as a micro-batch. Put calls without a loss under ``torch.no_grad()``, or after
        ``model.eval()``. Calls for ``warm_start`` do not count, nor calls that activation
        checkpointing repeats in the backward, nor outputs that require no gradient. Under autocast
        the output is observed as if autocast had ended, except by a likelihood function.

        An optimizer is attached to one model at a time; a second ``attach`` replaces the first. Two
        optimizers may be attached to one model. If they have the same parameters (a trainer's
        second ``fit`` makes another one), only the last one stays attached. The hook keeps no
        optimizer alive; copies of the model have a hook that does nothing, copies of the optimizer
        are not attached.

        Under DistributedDataParallel attach to the wrapper or to the inner module; with
        ``static_graph=True`` to the inner module. Attach after ``fully_shard``. A model may be
        compiled before or after; with ``fullgraph=True`` attach to the result of ``torch.compile``.
        Compile with ``torch._functorch.config.donated_buffer = False``: two backward passes use the
        graph.

        Args:
            model: a module whose outputs depend on this optimizer's parameters; for ``KFAC`` the
                model it was made for or a module around it, not compiled and not sharded.
            output: a function from the model's result to the argument of ``observe``, such as
                ``lambda out: out.logits[:, :-1]`` for a language model; None: the result if it is
                a tensor, else its ``logits``. A function of three arguments, ``lambda out, args,
                kwargs: ...``, also gets the forward's arguments, such as labels that mark padding.
                A call for which it leaves no row does not count.

        Returns:
            A handle; its ``remove`` ends the observation, as does the end of a ``with``.

        Raises:
            TypeError: if ``model`` is no module, or ``output`` no function.
            ValueError: if ``model`` has no parameter of this optimizer. A forward raises the
                errors of ``observe``, TypeError if ``output`` is missing, and RuntimeError if the
                model was compiled with donated buffers or sharded since.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if output is not None and not callable(output):
            raise TypeError(f"output must be a function or None, got {type(output).__name__}")
        hook = OutputHook(weakref.ref(self), output, _is_sharded(model))
        if _params(self).isdisjoint(model.parameters()):
            raise ValueError(
                "model must have a parameter of this optimizer: got another model, or a copy"
            )
        for replaced in [self, *_attached_to(model, _params(self))]:
            if replaced._attached is not None:
                replaced._attached()
        if not self._samples:
            return RemovableHandle(OrderedDict())  # a plain dict has no weak references
        handle = model.register_forward_hook(hook, with_kwargs=True)
        self._attached = finalizer = weakref.finalize(self, handle.remove)
        finalizer.atexit = False
        return handle


def _params(optimizer: Any) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}


def _attached_to(model: nn.Module, params: set[Tensor]) -> list[Any]:
    """The optimizers of these parameters that are attached to a model."""
    hooks = [hook for hook in model._forward_hooks.values() if isinstance(hook, OutputHook)]
    attached = [hook.optimizer() for hook in hooks if hook.optimizer is not None]
    return [other for other in attached if other is not None and _params(other) == params]


def _asking(hook: OutputHook, module: nn.Module) -> Any:
    """The optimizer, if it wants an output now."""
    optimizer = None if hook.optimizer is None else hook.optimizer()
    # Under torch.export tensors have no values. A forward inside a backward is activation
    # checkpointing, which repeats a forward that was observed.
    is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
    if torch.compiler.is_compiling() or is_tracing() or torch._C._current_graph_task_id() != -1:
        return None
    if optimizer is None or not optimizer.observing:
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
    if not hook.is_sharded and _params(optimizer).isdisjoint(module.parameters()):
        return None
    return optimizer


def _takes_inputs(output: Callable[..., Any]) -> bool:
    """Whether a function of a result takes the arguments of the forward, too."""
    try:
        signature = inspect.signature(output)
    except ValueError:  # a built-in function
        return False
    for count in (1, 3):
        with suppress(TypeError):
            signature.bind(*range(count))
            return count == 3
    raise TypeError(
        f"output must be a function of (result) or of (result, args, kwargs), got {signature}"
    )


def _observe_call(hook: OutputHook, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    optimizer = _asking(hook, module)
    if optimizer is None:
        return
    described = hook.output(result, *((args, kwargs) if hook.takes_inputs else ()))
    tensors = [leaf for leaf in tree_leaves(described) if isinstance(leaf, Tensor)]
    if tensors and not any(tensor.requires_grad for tensor in tensors):
        return
    # DistributedDataParallel adds its node to the graph after this hook, so ask DDP itself.
    replica = DistributedDataParallel._get_active_ddp_module()
    if replica is not None and replica.find_unused_parameters:
        optimizer._observed.partial = True
    observations = optimizer._observed
    before = observations.count
    # If the whole model is checkpointed, its hooks must not see the tensors saved here.
    with saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        optimizer.observe(described)
    observations.attached += observations.count - before


def _is_sharded(module: nn.Module) -> bool:
    # No import, which takes most of a second: a program with such a module has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in module.modules())


def _logits(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        logits = result.get("logits")
    else:
        logits = getattr(result, "logits", None)
    if logits is None:
        raise TypeError(
            "output must say what to observe of a model that returns neither a tensor nor "
            f"logits, but {type(result).__name__}: "
            "opt.attach(model, output=lambda result: ...)"
        )
    return logits
