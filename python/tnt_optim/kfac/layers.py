"""The layers that KFAC preconditions: their parameters, inputs and gradients as matrices.

The parameters of a layer form one matrix [W | b], (out, in * kernel + 1), without the last column
if there is no bias. At each position of its output (a linear layer: for each vector of its input)
the layer multiplies this matrix by a row a: the input, or a convolution's patch of it, followed by
a 1 for the bias. Grosse & Martens 2016, section 3.

A new kind of layer is added to ``Layer``, ``input_rows`` and ``output_rows``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard, get_args

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
    own = ("forward", "_conv_forward")
    same = all(getattr(type(module), n, None) is getattr(kinds[0], n, None) for n in own)
    return same and "weight" in module._parameters and getattr(module, "groups", 1) == 1


def supported_layers(model: nn.Module) -> tuple[list[str], list[Layer]]:
    """The names and modules of a model's supported layers.

    A layer that shares a parameter with another module is refused: its rows would describe only a
    part of the gradient.
    """
    names: dict[Layer, str] = {}
    owners: dict[Tensor, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_supported(module):
            if module in names:
                raise ValueError(
                    f"model must use each layer once, and {names[module]!r} is {name!r}, too"
                )
            names[module] = name
        for key, param in module._parameters.items():
            if param is None:
                continue
            other, owner = owners.setdefault(param, (f"{name}.{key}", module))
            if owner is not module and (module in names or owner in names):
                raise ValueError(
                    "model must not share parameters of linear and convolution layers, and "
                    f"{other!r} is {f'{name}.{key}'!r}, too: untie them, or use TNT"
                )
            if isinstance(param, UninitializedParameter) and module in names:
                raise ValueError(f"model must be initialized, and {name!r} is lazy: run it once")
    if not names:
        raise ValueError(
            f"model must have a Linear or Conv layer without groups, got {type(model).__name__} "
            "with none"
        )
    return list(names.values()), list(names)


def parameters(layer: Layer) -> list[Tensor]:
    """The weight, and the bias if there is one."""
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]


def is_trainable(layer: Layer) -> bool:
    """Whether a layer has a parameter that requires a gradient."""
    return any(param.requires_grad for param in layer.parameters())


def matrix_shape(layer: Layer) -> tuple[int, int]:
    """The shape of [W | b]."""
    weight = layer.weight
    return weight.shape[0], math.prod(weight.shape[1:]) + (layer.bias is not None)


def joined(layer: Layer, values: Mapping[Tensor, Tensor]) -> Tensor:
    """[W | b] of values by parameter; a missing one counts as zero."""
    rows, columns = matrix_shape(layer)
    if layer.bias is None:
        return values[layer.weight].reshape(rows, columns)
    present = [values[p] for p in parameters(layer) if p in values]
    matrix = present[0].new_zeros(rows, columns)
    if layer.weight in values:
        matrix[:, :-1] = values[layer.weight].reshape(rows, -1)
    if layer.bias in values:
        matrix[:, -1] = values[layer.bias]
    return matrix


def split(layer: Layer, matrix: Tensor) -> Sequence[Tensor]:
    """W, and b if there is one, from [W | b]."""
    if layer.bias is None:
        return [matrix.reshape(layer.weight.shape)]
    return [matrix[:, :-1].reshape(layer.weight.shape), matrix[:, -1]]


def input_rows(layer: Layer, inputs: Tensor) -> Tensor:
    """The rows a without the 1 for the bias, (positions, in * kernel), of all examples."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(-1, layer.in_features)
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
    """The gradient by a layer's output as rows g, (positions, out), in the order of the a.

    The gradient may lack the output's leading dimensions: see ``LayerHook``.
    """
    if isinstance(layer, nn.Linear):
        return gradient.reshape(-1, layer.out_features)
    dims = len(layer.kernel_size)
    flat = gradient.reshape(-1, layer.out_channels, math.prod(gradient.shape[-dims:]))
    return flat.transpose(1, 2).reshape(-1, layer.out_channels)


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
