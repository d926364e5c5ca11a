"""From a parameter's shape to the modes its statistics belong to. Pure functions of integers."""

import math
from collections.abc import Callable, Sequence

# Re-views a parameter: takes its shape, returns mode sizes with the same product.
ModesFunction = Callable[[tuple[int, ...]], Sequence[int]]


def mode_shape(shape: Sequence[int], modes: ModesFunction | None = None) -> tuple[int, ...]:
    """Returns the mode sizes (d_1, ..., d_k) under which a parameter of ``shape`` is seen.

    A vector has one mode and a matrix two. A convolution weight (out, in, *kernel) has three, (out,
    in, prod(kernel)), whatever the kernel's dimension. A scalar is seen as (1,).

    Args:
        shape: the parameter's shape.
        modes: a function of the shape that decides instead.

    Raises:
        ValueError: where ``modes`` returns anything but sizes with the same product.

    >>> mode_shape((64, 3, 7, 7))
    (64, 3, 49)
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
        return chosen
    if len(shape) <= 2:
        return tuple(shape) or (1,)
    return (shape[0], shape[1], math.prod(shape[2:]))


def diagonal_modes(sizes: Sequence[int], max_factor_dim: int) -> tuple[bool, ...]:
    """Returns for each mode whether its statistic is kept as a diagonal: where it is too large.

    Ren & Goldfarb 2021 suggest it for large dimensions; a full factor takes d^2 numbers and d^3
    operations an inverse.

    >>> diagonal_modes((50257, 768), max_factor_dim=8192)
    (True, False)
    """
    return tuple(d > max_factor_dim for d in sizes)
