"""From a parameter's shape to the modes its statistics belong to. Pure functions of integers."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

# Re-views a parameter: takes its shape, returns mode sizes with the same product.
ModesFunction = Callable[[tuple[int, ...]], Sequence[int]]


def mode_shape(
    shape: Sequence[int],
    modes: ModesFunction | None = None,
    merge_small_dims: int | None = None,
) -> tuple[int, ...]:
    """Returns the mode sizes (d_1, ..., d_k) under which a parameter of ``shape`` is seen.

    A vector has one mode and a matrix two. A convolution weight (out, in, *kernel) has three, (out,
    in, prod(kernel)), whatever the kernel's dimension. A scalar is seen as (1,).

    Args:
        shape: the parameter's shape.
        modes: a function of the shape that decides instead.
        merge_small_dims: then merge neighbouring modes while their product is at most this.

    Raises:
        ValueError: where ``modes`` returns anything but sizes with the same product.

    >>> mode_shape((64, 3, 7, 7))
    (64, 3, 49)
    >>> mode_shape((64, 3, 7, 7), merge_small_dims=1024)
    (64, 147)
    >>> mode_shape(())
    (1,)
    """
    if modes is not None:
        chosen = tuple(modes(tuple(shape)))
        integers = all(isinstance(d, int) and d >= 0 for d in chosen)
        if not chosen or not integers or math.prod(chosen) != math.prod(shape):
            raise ValueError(
                f"modes must return at least one size, with product {math.prod(shape)}, for a "
                f"parameter of shape {tuple(shape)}, got {chosen}"
            )
    elif len(shape) <= 2:
        chosen = tuple(shape) or (1,)
    else:
        chosen = (shape[0], shape[1], math.prod(shape[2:]))
    return chosen if merge_small_dims is None else merged(chosen, merge_small_dims)


def merged(sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    """Merges neighbours, from the right, while their product is at most ``limit``.

    A size of 1 joins whatever is beside it. Anil et al. 2021, "Scalable second order optimization
    for deep learning", merge small dimensions for Shampoo, whose convolutions have the kernel
    first; PyTorch has it last, and from the right it joins the channels that it is applied to.

    >>> merged((64, 3, 49), 1024), merged((1, 4096, 1, 2, 8), 16)
    ((64, 147), (4096, 16))
    """
    found: list[int] = []
    for size in reversed(sizes):
        if found and (found[-1] * size <= limit or 1 in (found[-1], size)):
            found[-1] *= size
        else:
            found.append(size)
    return tuple(reversed(found))


@functools.cache
def cuts(sizes: tuple[int, ...], block_size: int | None) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The blocks of a tensor whose modes are cut into pieces of at most ``block_size``.

    Every mode is cut into pieces of that size and a rest; the last mode's vary fastest.

    Returns:
        For each block its first index and its length in every mode; one block that is the whole
        tensor where nothing is larger, and for None.

    >>> cuts((5, 2), 3)
    (((0, 3), (0, 2)), ((3, 2), (0, 2)))
    """
    if block_size is None or max(sizes) <= block_size or 0 in sizes:
        return (tuple((0, d) for d in sizes),)
    pieces = [
        [(start, min(block_size, d - start)) for start in range(0, d, block_size)] for d in sizes
    ]
    return tuple(itertools.product(*pieces))


def diagonal_modes(sizes: Sequence[int], max_factor_dim: int) -> tuple[bool, ...]:
    """Returns for each mode whether its statistic is kept as a diagonal: where it is too large.

    Ren & Goldfarb 2021 suggest it for large dimensions; a full factor takes d^2 numbers and d^3
    operations an inverse.

    >>> diagonal_modes((50257, 768), max_factor_dim=8192)
    (True, False)
    """
    return tuple(d > max_factor_dim for d in sizes)
