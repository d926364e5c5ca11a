"""The layers that KFAC preconditions, and their inputs and gradients as rows of matrices.

A layer's parameters are one matrix [W | b], (out, in * positions of the kernel + 1), or without the
last column where it has no bias. At each position of its output (a linear layer: each vector of its
input) it multiplies that matrix with a row a: the input, a convolution's patch, with a homogeneous
1 for the bias. Grosse & Martens 2016, section 3.
"""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_LINEAR = (nn.Linear,)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_supported(module: nn.Module) -> bool:
    """Whether KFAC preconditions a module as one block.

    Linear layers and convolutions are, and classes derived from them that compute the same. Not a
    grouped convolution, whose Fisher matrix has a block for each group; not a transposed one, whose
    patches are those of its output; not a layer whose weight is computed (parametrizations); not
    the projections inside nn.MultiheadAttention, which reads their weights and never calls them.
    """
    kinds = [kind for kind in (*_LINEAR, *_CONVOLUTIONS) if isinstance(module, kind)]
    if not kinds or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    own = ("forward", "_conv_forward")
    same = all(getattr(type(module), n, None) is getattr(kinds[0], n, None) for n in own)
    return same and "weight" in module._parameters and getattr(module, "groups", 1) == 1


def supported_layers(model: nn.Module) -> tuple[list[str], list[Layer]]:
    """Names and modules of a model's supported layers.

    Raises:
        ValueError: where there is none; where one is uninitialized, or registered twice; where one
            shares a parameter with another module. Then the rows of one use alone would describe
            the gradient of several.
    """
    names: dict[nn.Module, str] = {}
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
    return list(names.values()), [m for m in names if isinstance(m, (*_LINEAR, *_CONVOLUTIONS))]


def is_trainable(layer: Layer) -> bool:
    """Whether any of a layer's parameters is."""
    return any(param.requires_grad for param in layer.parameters())


def matrix_shape(layer: Layer) -> tuple[int, int]:
    """The shape of [W | b]."""
    weight = layer.weight
    return weight.shape[0], math.prod(weight.shape[1:]) + (layer.bias is not None)


def input_rows(layer: Layer, inputs: Tensor) -> Tensor:
    """The rows a without the 1, (positions, in * kernel), of all examples: what W multiplies."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(-1, layer.in_features)
    return _patches(layer, inputs)


def output_rows(layer: Layer, gradient: Tensor) -> Tensor:
    """The gradient by the layer's output as rows g, (positions, out), in the order of the a.

    The gradient may have lost the output's leading dimensions: see ``capture``.
    """
    if isinstance(layer, nn.Linear):
        return gradient.reshape(-1, layer.out_features)
    dims = len(layer.kernel_size)
    flat = gradient.reshape(-1, layer.out_channels, math.prod(gradient.shape[-dims:]))
    return flat.transpose(1, 2).reshape(-1, layer.out_channels)


def _patches(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor) -> Tensor:
    """Every patch a convolution sees, as a row in the order of its weight's (in, *kernel)."""
    dims = len(layer.kernel_size)
    if inputs.dim() == dims + 1:
        inputs = inputs.unsqueeze(0)
    around = _padding(layer)
    if any(around):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs = F.pad(inputs, around, mode=mode)
    batch, channels, *sizes = inputs.shape
    spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    positions = [
        (size - span) // step + 1
        for size, span, step in zip(sizes, spans, layer.stride, strict=True)
    ]
    strides = inputs.stride()[2:]
    windows = inputs.as_strided(
        (batch, *positions, channels, *layer.kernel_size),
        (
            inputs.stride(0),
            *(s * step for s, step in zip(strides, layer.stride, strict=True)),
            inputs.stride(1),
            *(s * apart for s, apart in zip(strides, layer.dilation, strict=True)),
        ),
        inputs.storage_offset(),
    )
    return windows.reshape(-1, channels * math.prod(layer.kernel_size))


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """Both ends of every spatial dimension, the last one first, as ``F.pad`` takes them."""
    ends: list[int] = []
    for i in reversed(range(len(layer.kernel_size))):
        if layer.padding == "valid":
            ends += [0, 0]
        elif layer.padding == "same":
            total = layer.dilation[i] * (layer.kernel_size[i] - 1)
            ends += [total // 2, total - total // 2]
        else:
            ends += [int(layer.padding[i])] * 2
    return ends


def joined(weight: Tensor | None, bias: Tensor | None, layer: Layer) -> Tensor:
    """[W | b] from its parts; a part that is not there counts as zero."""
    present = weight if weight is not None else bias
    assert present is not None
    rows, columns = matrix_shape(layer)
    if layer.bias is None and weight is not None:
        return weight.reshape(rows, columns)
    matrix = present.new_zeros(rows, columns)
    if weight is not None:
        matrix[:, :-1] = weight.reshape(rows, -1)
    if bias is not None:
        matrix[:, -1] = bias
    return matrix


def parted(matrix: Tensor, layer: Layer) -> Sequence[Tensor]:
    """W, and b where there is one, from [W | b]."""
    if layer.bias is None:
        return [matrix.reshape(layer.weight.shape)]
    return [matrix[:, :-1].reshape(layer.weight.shape), matrix[:, -1]]
