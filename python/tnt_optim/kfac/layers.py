"""The layers that KFAC preconditions: their parameters, inputs and gradients as matrices.

The parameters of a layer form one matrix [W | b], (out, in * kernel + 1), without the last column
if there is no bias. At each position of its output (a linear layer: for each vector of its input)
the layer multiplies this matrix by a row a: the input, or a convolution's patch of it, followed by
a 1 for the bias. Grosse & Martens 2016, section 3.

A new kind of layer is added to ``Layer``, ``input_rows`` and ``output_rows``.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard, get_args

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def is_supported(module: nn.Module) -> TypeGuard[Layer]:
    """Whether a module is a linear layer or convolution, or a derived class that computes the same.

    Not supported: grouped convolutions, whose Fisher matrix has a block for each group; transposed
    convolutions, whose patches are those of the output; layers with a computed weight
    (parametrizations); the projections in nn.MultiheadAttention, which are never called.
    """
    kinds = [kind for kind in get_args(Layer) if isinstance(module, kind)]
    if not kinds or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    methods = ("forward", "_conv_forward")
    same = all(getattr(type(module), n, None) is getattr(kinds[0], n, None) for n in methods)
    has_weight = "weight" in dict(module.named_parameters(recurse=False))
    return same and has_weight and getattr(module, "groups", 1) == 1


def preconditioned(
    model: nn.Module, largest: Mapping[Tensor, int]
) -> tuple[dict[str, Layer], dict[Tensor, str]]:
    """The layers to precondition, by name, and for every other parameter why it is not.

    ``largest`` maps each optimized weight to the size of the largest factor that it may have. A
    layer that shares a parameter with another module is left out: its rows would describe only a
    part of the gradient.
    """
    modules = dict(model.named_modules())
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in modules.values():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(module)
    layers: dict[str, Layer] = {}
    reasons: dict[Tensor, str] = {}
    for name, module in modules.items():
        params = list(module.parameters(recurse=False))
        why = " with groups" if getattr(module, "groups", 1) != 1 else ""
        if is_supported(module):
            if any(isinstance(param, UninitializedParameter) for param in params):
                raise ValueError(f"model must be initialized, and {name!r} is lazy: run it once")
            if any(len(owners[param]) > 1 for param in params):
                why = " with a shared parameter"
            elif module.weight not in largest:
                why = " whose weight is not optimized"
            elif not module.weight.numel():
                why = " without entries"
            elif max(matrix_shape(module)) > largest[module.weight]:
                why = " above max_factor_dim"
            else:
                layers[name] = module
                continue
        reasons |= dict.fromkeys(params, f"{type(module).__name__}{why}")
    if not layers:
        raise ValueError(
            "model must have a Linear or Conv layer without groups to precondition, got "
            f"{type(model).__name__} with {', '.join(sorted(set(reasons.values()))) or 'none'}"
        )
    return layers, reasons


def named_groups(model: nn.Module, params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Parameter groups in torch's forms, with the model's names; None for all parameters in one."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    given = list(names if params is None else params)
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        members = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        members = [param[1] if isinstance(param, tuple) else param for param in members]
        if any(param not in names for param in members):
            raise ValueError("params must be parameters of the model, got others")
        for param, count in Counter(members).items():
            if count > 1:
                raise ValueError(f"params must differ, got {names[param]!r} twice")
        # torch wants names in all groups or in none, and sees none in an empty group.
        pairs = [(names[param], param) for param in members]
        groups.append({**group, "params": pairs, "param_names": list(map(names.get, members))})
    return groups


def parameters(layer: Layer) -> list[Tensor]:
    """The weight, and the bias if there is one."""
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]


def is_trainable(layer: Layer) -> bool:
    """Whether a layer has a parameter that requires a gradient."""
    return any(param.requires_grad for param in parameters(layer))


def matrix_shape(layer: Layer) -> tuple[int, int]:
    """The shape of [W | b]."""
    weight = layer.weight
    return weight.shape[0], math.prod(weight.shape[1:]) + (layer.bias is not None)


def input_rows(layer: Layer, inputs: Tensor) -> Tensor:
    """The rows a without the 1 for the bias, (positions, in * kernel), of all examples."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(-1, layer.weight.shape[1])
    dims = len(layer.kernel_size)
    if inputs.dim() == dims + 1:
        inputs = inputs.unsqueeze(0)
    padding = _padding(layer)
    if any(padding):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs = F.pad(inputs, padding, mode=mode)
    windows = inputs
    for i, (size, spacing, step) in enumerate(
        zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)
    ):
        windows = windows.unfold(2 + i, spacing * (size - 1) + 1, step)[..., ::spacing]
    # (batch, in, *positions, *kernel), and the weight's order is (in, *kernel).
    return windows.movedim(1, 1 + dims).reshape(-1, inputs.shape[1] * math.prod(layer.kernel_size))


def output_rows(layer: Layer, gradient: Tensor) -> Tensor:
    """The gradient by a layer's output as rows g, (positions, out), in the order of the rows a.

    The gradient may lack the output's leading dimensions: see ``LayerHook``.
    """
    if isinstance(layer, nn.Linear):
        return gradient.reshape(-1, len(layer.weight))
    dims = len(layer.kernel_size)
    flat = gradient.reshape(-1, len(layer.weight), math.prod(gradient.shape[-dims:]))
    return flat.transpose(1, 2).reshape(-1, len(layer.weight))


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """Both ends of every spatial dimension, the last one first, as ``F.pad`` takes them."""
    ends: list[int] = []
    for i in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[i] * (layer.kernel_size[i] - 1)
            ends += [total // 2, total - total // 2]
        else:
            ends += [0 if layer.padding == "valid" else int(layer.padding[i])] * 2
    return ends
