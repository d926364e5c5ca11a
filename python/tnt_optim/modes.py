"""How an optimizer sees a parameter: as a tensor with modes, cut into blocks; and calls' buckets.

A statistic belongs to one mode of one block. Each block is treated as a parameter of its own.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The state of a parameter, by entry, and the settings of its group, by option.
State = dict[str, Any]
States = Mapping[Tensor, State]
Settings = Mapping[str, Any]
Group = dict[str, Any]
# Parameters with one group's settings on one device: one call of an operator serves them all.
Batch = tuple[Group, list[Tensor]]

# Statistics or factors as operators take them: for each block a list over its modes.
Rows = Sequence[Sequence[Tensor]]

# A function from a parameter's shape to mode sizes with the same product.
ModesFunction = Callable[[tuple[int, ...]], Sequence[int]]

# Most entries in a bucket (CPU, GPU): its directions and float32 copies are all in memory at once.
# A larger parameter is a bucket of its own.
_BUCKET, _LARGE_BUCKET = 1 << 22, 1 << 28

_LONGEST_SIDE = 16  # of a kernel: a vision transformer's patches have it


def mode_shape(
    shape: Sequence[int],
    modes: ModesFunction | None = None,
    merge_small_dims: str | None = None,
    max_factor_dim: int = sys.maxsize,
) -> tuple[int, ...]:
    """Returns the mode sizes (d_1, ..., d_k) of a parameter of a shape.

    A vector has one mode and a matrix two. A convolution weight (out, in, *kernel) has three: (out,
    in, prod(kernel)). A scalar has the mode sizes (1,). A function ``modes`` of the shape replaces
    this rule. With ``merge_small_dims="kernel"`` a convolution's kernel and input channels are one
    mode, if their product is at most ``max_factor_dim``. With a side above 16 it is not taken for a
    kernel: experts' weights and position embeddings have such shapes.

    >>> mode_shape((64, 3, 7, 7))
    (64, 3, 49)
    >>> mode_shape((64, 3, 7, 7), merge_small_dims="kernel"), mode_shape((3, 4), None, "kernel")
    ((64, 147), (3, 4))
    >>> mode_shape((8, 64, 32), merge_small_dims="kernel")
    (8, 64, 32)
    >>> mode_shape(())
    (1,)
    """
    if modes is not None:
        chosen = modes(tuple(shape))
        chosen = tuple(chosen) if isinstance(chosen, Sequence) else (chosen,)
        integers = all(isinstance(d, Integral) and d >= 0 for d in chosen)
        if not chosen or not integers or math.prod(chosen) != math.prod(shape):
            raise ValueError(
                f"modes must return at least one size, with product {math.prod(shape)}, for a "
                f"parameter of shape {tuple(shape)}, got {chosen}"
            )
        return tuple(map(int, chosen))
    if len(shape) <= 2:
        return tuple(shape) or (1,)
    is_kernel = merge_small_dims == "kernel" and max(shape[2:]) <= _LONGEST_SIDE
    if is_kernel and math.prod(shape[1:]) <= max_factor_dim:
        return (shape[0], math.prod(shape[1:]))
    return (shape[0], shape[1], math.prod(shape[2:]))


def cuts(sizes: tuple[int, ...], block_size: int | None) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The blocks of a tensor whose modes are cut into pieces of ``block_size`` and a rest.

    Returns:
        For each block its first index and its length in every mode, the last mode fastest. One
        block, the whole tensor, if no mode is larger than ``block_size`` or it is None.

    >>> cuts((5, 2), 3)
    (((0, 3), (0, 2)), ((3, 2), (0, 2)))
    """
    if block_size is None or max(sizes) <= block_size or 0 in sizes:
        return (tuple((0, d) for d in sizes),)
    pieces = [
        [(start, min(block_size, d - start)) for start in range(0, d, block_size)] for d in sizes
    ]
    return tuple(itertools.product(*pieces))


class Layout(NamedTuple):
    """The mode sizes of a parameter, and how the modes are cut into blocks."""

    sizes: tuple[int, ...]
    cuts: tuple[tuple[tuple[int, int], ...], ...]  # one entry for each block, from ``modes.cuts``

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor like the parameter in the shape of its modes; a copy if its strides need one."""
        return tensor if tensor.shape == self.sizes else tensor.reshape(self.sizes)

    def blocks(self, tensor: Tensor) -> list[Tensor]:
        """The blocks of a tensor like the parameter: views of ``view(tensor)``."""
        whole = self.view(tensor)
        if len(self.cuts) == 1:
            return [whole]
        return [whole[tuple(slice(s, s + d) for s, d in block)] for block in self.cuts]

    def assembled(self, pieces: Sequence[Tensor]) -> Tensor:
        """The tensor with these blocks."""
        if len(pieces) == 1:
            return pieces[0]
        whole = pieces[0].new_empty(self.sizes)
        for block, piece in zip(self.blocks(whole), pieces, strict=True):
            block.copy_(piece)
        return whole

    def rows(self, entries: list[Tensor]) -> list[list[Tensor]]:
        """Statistics or factors as operators take them."""
        if len(self.cuts) == 1:
            return [entries]
        k = len(entries) // len(self.cuts)
        return [entries[k * n : k * (n + 1)] for n in range(len(self.cuts))]

    def statistic_shapes(self, max_factor_dim: int) -> list[tuple[int, ...]]:
        """The shapes of the statistics, block by block and mode by mode.

        Modes larger than ``max_factor_dim`` keep only the diagonal, as Ren & Goldfarb 2021 suggest:
        a full factor takes d^2 numbers, its inverse d^3 operations.
        """
        shapes: list[tuple[int, ...]] = []
        for block in self.cuts:
            shapes += [(d, d) if d <= max_factor_dim else (d,) for _, d in block]
        return shapes


@functools.cache
def _layout(sizes: tuple[int, ...], block_size: int | None) -> Layout:
    """A layout, made once: every step asks for those of all parameters."""
    return Layout(tuple(sizes), cuts(sizes, block_size))


def layout_for(param: Tensor, group: Mapping[str, Any]) -> Layout:
    """The layout that a group's settings give a parameter."""
    if param in group.get("units", ()):
        sizes: tuple[int, ...] = group["units"].sizes(param)
        return _layout(sizes, group["block_size"])
    modes = None if is_plain(param, group) else group["modes"]
    sizes = mode_shape(param.shape, modes, group["merge_small_dims"], group["max_factor_dim"])
    return _layout(sizes, group["block_size"])


def is_plain(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a group's settings leave a parameter without statistics: a bias, a norm's weight.

    If the group has ``units``, every parameter is plain except the weights of layers.
    """
    if "units" in group:
        return param not in group["units"]
    return param.dim() < 2 and not group["precondition_1d"]


def layout_of(state: Mapping[str, Any]) -> Layout:
    """The layout with which a state was made; its group's settings may have changed since."""
    return _layout(state["momentum"].shape, state["block_size"])


def blocks(tensors: Iterable[Tensor], layouts: Iterable[Layout]) -> list[Tensor]:
    """The blocks of all tensors, one after the other."""
    return [b for t, layout in zip(tensors, layouts, strict=True) for b in layout.blocks(t)]


def rows(entries: Iterable[list[Tensor]], layouts: Iterable[Layout]) -> list[list[Tensor]]:
    """The statistics or factors of several parameters: a list over the modes of each block."""
    return [row for e, layout in zip(entries, layouts, strict=True) for row in layout.rows(e)]


def each(states: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """One entry of each state."""
    return [state[name] for state in states]


def state_dtype(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's statistics, factors and momentum."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def check_dense(param: Tensor, name: str) -> None:
    """Refuses a parameter that the optimizers cannot update."""
    known = torch.float64, torch.float32, torch.bfloat16, torch.float16
    if not (param.is_floating_point() or param.is_complex()):
        return  # frozen for good, such as quantized weights: integers have no gradient
    if getattr(param, "_fsdp_flattened", False):
        raise ValueError(
            "params must not be flattened, as by FullyShardedDataParallel: use fully_shard "
            f"(FSDP2), got {name}"
        )
    if param.dtype not in known or param.layout != torch.strided:
        raise ValueError(
            "params must be dense tensors of float64, float32, bfloat16 or float16, got "
            f"{param.dtype}, {param.layout} for {name}"
        )


def is_half(param: Tensor) -> bool:
    """Whether a parameter has half precision; its step is then computed in float32."""
    return param.dtype in (torch.bfloat16, torch.float16)


def is_sharded(param: Tensor) -> bool:
    """Whether a parameter is cut into pieces over processes, as ``fully_shard`` does."""
    # No import, which takes most of a second: a program with such a parameter has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(param, module.DTensor)


def are_sharded(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the parameters are sharded; the first one stands for all."""
    first = next((p for group in groups for p in group["params"]), None)
    return first is not None and is_sharded(first)


def by_device(params: Iterable[Tensor], *, by_dtype: bool = False) -> list[list[Tensor]]:
    """Splits parameters by device, and ``by_dtype`` also by the dtype of their state."""
    lists: dict[Any, list[Tensor]] = {}
    for param in params:
        lists.setdefault((param.device, by_dtype and state_dtype(param)), []).append(param)
    return list(lists.values())


def buckets_of(params: Sequence[Tensor]) -> list[slice]:
    """Buckets of neighbouring parameters.

    On the CPU a bucket's directions are still in the cache when the parameters are updated. On a
    GPU larger buckets need fewer launches.
    """
    limit = _BUCKET if params and params[0].is_cpu else _LARGE_BUCKET
    bounds, size = [0], 0
    for index, param in enumerate(params):
        if size and size + param.numel() > limit:
            bounds.append(index)
            size = 0
        size += param.numel()
    bounds.append(len(params))
    return [slice(first, last) for first, last in itertools.pairwise(bounds)]
