"""What a forward pass leaves for KFAC: each layer's input, kept in the graph by its output's node.

A forward hook puts the input into the metadata of the autograd node that made the layer's output
before anything changed it in place. So the graph owns what was captured: it goes when the graph
goes, a second forward pass or a micro-batch cannot be mistaken for another, and a walk through the
graph of a loss finds the layers that this loss depends on, each time one was used. Nothing hooks
into the backward: that of the user would fire it, too.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class Captured:
    """One use of a layer.

    Attributes:
        layer: the layer's number.
        inputs: its input, without history.
        version: how often the input had been changed in place.
        output_nr: which of the node's outputs is the layer's.
    """

    layer: int
    inputs: Tensor
    version: int
    output_nr: int


class LayerHook:
    """Captures one layer's input when its optimizer wants it.

    The model holds the hook and the hook does not hold the optimizer. A copy of the model, or what
    was saved of it, has a hook that does nothing; to load what was saved still takes this package.
    """

    def __init__(self, layer: int, wanted: "weakref.WeakMethod[Callable[[int], bool]] | None"):
        self.layer = layer
        self._wanted = wanted

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerHook, (self.layer, None)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook; returns nothing, so that the output stays what it is."""
        if torch.compiler.is_compiling() or self._wanted is None:
            return
        wanted = self._wanted()
        if wanted is None or not torch.is_grad_enabled() or not output.requires_grad:
            return
        if not wanted(self.layer):
            return
        inputs = args[0] if args else kwargs["input"]
        if output._is_view() and output._base.numel() == output.numel():
            # A linear layer's output on more than two dimensions, a convolution's without a batch:
            # views of what was computed, all of it in the same order. A change in place would
            # rewrite the view's history, but leaves the base's node in the graph.
            output = output._base
        edge = get_gradient_edge(output)
        _metadata(edge.node)[self] = Captured(
            self.layer, inputs.detach(), inputs._version, edge.output_nr
        )


def hook_layers(
    layers: Sequence[nn.Module], wanted: Callable[[int], bool]
) -> tuple[list[LayerHook], Callable[[], None]]:
    """Hooks layers, by number, to a method that says which are wanted.

    Returns:
        The hooks, and what removes them.
    """
    method = weakref.WeakMethod(wanted)
    hooks = [LayerHook(index, method) for index in range(len(layers))]
    handles = [
        # First of all hooks, before one that replaces the output.
        layer.register_forward_hook(hook, with_kwargs=True, prepend=True)
        for layer, hook in zip(layers, hooks, strict=True)
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return hooks, remove


@dataclass
class Graph:
    """What the graph of a loss holds.

    Attributes:
        uses: the captured uses of each layer, by its number, with their nodes.
        observed: layers whose use had been observed before.
        leaves: the parameters that the loss depends on.
        kinds: the names of its nodes' types.
    """

    uses: dict[int, list[tuple[Node, Captured]]]
    observed: set[int]
    leaves: set[int]
    kinds: set[str]

    def edges(self, layers: Sequence[int]) -> list[GradientEdge]:
        """Where the gradients by the layers' outputs arrive."""
        first = [self.uses[layer][0] for layer in layers]
        return [GradientEdge(node, use.output_nr) for node, use in first]

    def release(self, layers: Sequence[int], hooks: Sequence[LayerHook]) -> None:
        """Frees what was captured of layers: the graph lives through the user's backward."""
        for layer in layers:
            for node, _ in self.uses[layer]:
                _metadata(node)[hooks[layer]] = None


def walk(loss: Tensor, hooks: Sequence[LayerHook]) -> Graph:
    """Goes through the graph of a loss."""
    graph = Graph({}, set(), set(), set())
    own = set(hooks)
    start = get_gradient_edge(loss).node
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        graph.kinds.add(node.name())
        for key, use in _metadata(node).items():
            if key not in own:
                continue
            if use is None:
                graph.observed.add(key.layer)
            else:
                graph.uses.setdefault(use.layer, []).append((node, use))
        variable = getattr(node, "variable", None)
        if variable is not None:
            graph.leaves.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return graph


def _metadata(node: Node) -> dict[Any, Any]:
    """A dictionary that lives as long as the node; a property, whatever its annotation says."""
    return cast(dict[Any, Any], node.metadata)


# Nodes that stand for a whole piece of the model, in whose inside nothing can be captured: the one
# hides its parameters, too; with the other the graph still shows which layers it hides, if any.
_CHECKPOINT, _COMPILED = "CheckpointFunctionBackward", "CompiledFunctionBackward"


def check_uses(
    graph: Graph, layers: Sequence[int], names: Sequence[str], modules: Sequence[nn.Module]
) -> list[int]:
    """Those of ``layers`` that a loss depends on, each used once and captured.

    Raises:
        ValueError: where a layer was used more than once, was observed before, took part without
            having been captured, or had its input changed in place since.
    """
    if _CHECKPOINT in graph.kinds:
        raise ValueError(
            f"output must have a graph that shows its layers, and {_CHECKPOINT} hides some: use "
            "checkpoint(..., use_reentrant=False)"
        )
    reached = []
    for layer in layers:
        name, uses = names[layer], graph.uses.get(layer, [])
        if len(uses) > 1:
            raise ValueError(
                f"output must use each layer once, and depends on {len(uses)} calls of {name!r}: "
                "make them layers of their own, or use TNT"
            )
        if layer in graph.observed:
            raise ValueError(
                f"output depends on a call of {name!r} that was observed before; where one forward "
                "pass has several outputs, observe them together, with a likelihood function"
            )
        if uses:
            if uses[0][1].inputs._version != uses[0][1].version:
                raise ValueError(f"the input of {name!r} must not be changed in place after it")
            reached.append(layer)
        elif any(id(param) in graph.leaves for param in modules[layer].parameters()):
            reason = (
                "was it called before (warm_start takes a generator that calls the model), after "
                "close(), or its weight used directly?"
            )
            if _COMPILED in graph.kinds:
                reason = f"does {_COMPILED} hide it? Observe the model without torch.compile"
            raise ValueError(
                f"output depends on the parameters of {name!r}, but not through a forward call of "
                f"that layer while statistics were due: {reason}"
            )
    return reached
