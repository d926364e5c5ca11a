"""KFAC keeps the input of each layer in the autograd graph.

A forward hook puts the input into the metadata of the autograd node that made the layer's output,
before anything changes that output in place. So the graph owns the input: the input is freed with
the graph, two forward passes or micro-batches cannot be confused, and a walk through the graph of a
loss finds every call of every layer that the loss depends on. With sampled labels there are no
backward hooks, because the user's backward would run them, too. Without a likelihood the statistics
are those of the user's backward, and each node gets a hook.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from tnt_optim.autograd import check_shown, graph_nodes
from tnt_optim.kfac.layers import Layer, parameters
from tnt_optim.messages import warn_the_caller

# Takes the index of a layer, its input, and a gradient by its output.
Arrived = Callable[[int, Tensor, Tensor], None]

# A node that hides a part of the model, in which nothing can be captured.
_COMPILED = "CompiledFunctionBackward"


@dataclass
class Call:
    """One call of a layer."""

    inputs: Tensor  # without history; empty once observed
    version: int  # the input's version at the call: how often it was changed in place
    output_nr: int  # which of the node's outputs is the layer's
    observed: bool = False


class LayerHook:
    """Captures one layer's input when the optimizer wants it.

    The model holds the hook, and the hook does not hold the optimizer. The hooks of a copied or
    loaded model do nothing; loading one with hooks needs this package.
    """

    def __init__(
        self,
        layer: int,
        wanted: "weakref.WeakMethod[Callable[[int, bool], bool]] | None",
        arrived: "weakref.WeakMethod[Arrived] | None" = None,
    ):
        self.layer = layer
        self.warned = False  # of uses of the weight outside of the layer's calls
        self._wanted, self._arrived = wanted, arrived

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerHook, (self.layer, None)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook; returns nothing, so the output stays as it is."""
        if torch.compiler.is_compiling() or self._wanted is None:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return  # inside a transform of torch.func tensors are wrapped
        wanted = self._wanted()
        if wanted is None or not torch.is_grad_enabled() or not output.requires_grad:
            return
        inputs = args[0] if args else kwargs["input"]
        if inputs.layout != torch.strided:
            inputs = inputs.to_dense()
        # A call without rows (an expert that got no token) does not count.
        if not wanted(self.layer, inputs.numel() > 0):
            return
        if output._is_view() and output._base.numel() == output.numel():
            # A linear layer on more than two dimensions, or a convolution without a batch, returns
            # a view of the whole computed tensor, in the same order. A change in place rewrites the
            # view's history, but leaves the base's node in the graph.
            output = output._base
        edge = get_gradient_edge(output)
        call = Call(inputs.detach(), inputs._version, edge.output_nr)
        _metadata(edge.node)[self] = call
        if self._arrived is not None:  # runs before the node does in a backward
            edge.node.register_prehook(functools.partial(_hand_over, self, call))


def _hand_over(hook: LayerHook, call: Call, gradients: Sequence[Tensor | None]) -> None:
    """Gives a call's output gradient to the optimizer, if the optimizer still exists."""
    arrived = None if hook._arrived is None else hook._arrived()
    gradient = gradients[call.output_nr]
    if arrived is None or gradient is None or not gradient.numel():
        return
    if call.inputs._version != call.version:
        raise RuntimeError(
            "the input of a layer must not be changed in place before the backward: KFAC's "
            "statistics are of what the layer saw; write h = h + layer(h), not h += layer(h)"
        )
    arrived(hook.layer, call.inputs, gradient)


def hook_layers(
    layers: Sequence[nn.Module], wanted: Callable[[int, bool], bool], arrived: Arrived | None
) -> tuple[list[LayerHook], list[RemovableHandle]]:
    """Adds a hook to each layer, which asks the method ``wanted`` with the layer's index.

    With a method ``arrived``, every backward gives it the input and the gradient of each call.
    """
    weak_wanted = weakref.WeakMethod(wanted)
    weak_arrived = None if arrived is None else weakref.WeakMethod(arrived)
    hooks = [LayerHook(index, weak_wanted, weak_arrived) for index in range(len(layers))]
    # They run before all other hooks, which may replace the output.
    how = {"with_kwargs": True, "prepend": True}
    pairs = zip(layers, hooks, strict=True)
    return hooks, [layer.register_forward_hook(hook, **how) for layer, hook in pairs]


def captured_calls(
    loss: Tensor,
    due: Iterable[int],
    names: Sequence[str],
    layers: Sequence[Layer],
    hooks: Sequence[LayerHook],
) -> dict[int, list[tuple[GradientEdge, Call]]]:
    """The calls of due layers that a loss depends on, each with the edge of its output's gradient.

    Raises if a due layer was observed before, was used without being captured, or had its input
    changed in place since. Warns once of a layer whose weight is used outside of its calls, too.
    """
    own_hooks, kinds, edges = set(hooks), set(), Counter[Node]()
    captured: dict[int, list[tuple[Node, Call]]] = {}
    for node in graph_nodes(loss):
        kinds.add(node.name())
        edges.update(child for child, _ in node.next_functions if child is not None)
        for hook, call in _metadata(node).items():
            if hook in own_hooks:
                captured.setdefault(hook.layer, []).append((node, call))
    check_shown(kinds)
    uses = {id(node.variable): count for node, count in edges.items() if hasattr(node, "variable")}
    reached = {}
    for index in due:
        name, calls = names[index], captured.get(index, [])
        if any(call.observed for _, call in calls):
            raise ValueError(
                f"output depends on a call of {name!r} that was observed before: observe several "
                "outputs of one forward pass together, with a likelihood function"
            )
        if any(call.inputs._version != call.version for _, call in calls):
            raise ValueError(
                f"the input of {name!r} must not be changed in place after it: write h = h + "
                "layer(h), not h += layer(h)"
            )
        is_used = any(id(param) in uses for param in parameters(layers[index]))
        if calls and not is_used:
            raise ValueError(
                f"output must depend on the parameters of {name!r}, but the layer was called with "
                "others, as by torch.func.functional_call"
            )
        hook = hooks[index]
        if uses.get(id(layers[index].weight), 0) > len(calls) > 0 and not hook.warned:
            hook.warned = True
            warn_the_caller(
                f"the weight of {name!r} is used outside of the layer's calls, too, as by "
                "F.linear(x, layer.weight.t()): KFAC's statistics of it describe the calls only "
                "(warned once)"
            )
        if calls:
            reached[index] = [(GradientEdge(node, call.output_nr), call) for node, call in calls]
        elif is_used:
            reason = (
                "was it called before (warm_start takes a generator that calls the model), after "
                "close(), its weight used directly, or is the output a derivative of the model?"
            )
            if _COMPILED in kinds:
                reason = f"does {_COMPILED} hide it? Observe the model without torch.compile"
            raise ValueError(
                f"output depends on the parameters of {name!r}, but not through a forward call of "
                f"that layer while statistics were due: {reason}"
            )
    return reached


def _metadata(node: Node) -> dict[Any, Any]:
    """A dictionary that lives as long as the node; a property, whatever its annotation says."""
    return cast(dict[Any, Any], node.metadata)
