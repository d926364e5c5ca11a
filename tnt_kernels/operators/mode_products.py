"""``mode_products``: tensors times a factor in every mode."""

import torch
from torch import Tensor

from tnt_kernels import arguments
from tnt_kernels.arguments import Modes, Tensors
from tnt_kernels.calls import by_mode, call, flat, listed

SCHEMA = "mode_products(Tensor[] tensors, Tensor[] factors) -> Tensor[]"


@torch.no_grad()
def mode_products(tensors: Tensors, factors: Modes) -> list[Tensor]:
    """G x_1 A_1 x_2 ... x_k A_k, for each tensor G: multiplies every mode by its factor.

    Args:
        tensors: the tensors G.
        factors: the symmetric A_i; a diagonal one scales its mode.

    Returns:
        New contiguous tensors of the shapes of ``tensors``, in the factors' dtype (float32 for
        half-precision tensors).

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, equation 10 and Proposition 1.

    >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> mode_products([torch.tensor([[1.0, 2.0], [3.0, 4.0]])], [[swap, torch.tensor([1.0, 10.0])]])
    [tensor([[ 3., 40.],
            [ 1., 20.]])]
    """

    def check() -> None:
        arguments.check_tensors("tensors", tensors)
        arguments.check_modes("factors", factors, "tensors", tensors)
        arguments.check_device(tensors=tensors, factors=factors)

    if isinstance(tensors, list | tuple) and not tensors:
        check()
        return []
    return list(call(SCHEMA, check, lambda: (listed(tensors), flat(factors, tensors))))


def definition(tensors: Tensors, factors: Modes) -> list[Tensor]:
    """G x_1 A_1 ... x_k A_k, for each tensor G, in the factors' dtype."""
    products = []
    for tensor, modes in zip(tensors, factors, strict=True):
        product = tensor
        for i, factor in enumerate(modes):
            product = product.to(factor.dtype)
            if factor.dim() == 1:
                product = product * factor.view(-1, *[1] * (product.dim() - i - 1))
            else:
                product = torch.tensordot(factor, product, dims=([1], [i])).movedim(0, i)
        products.append(product.contiguous())
    return products


def fake(tensors: Tensors, factors: Tensors) -> list[Tensor]:
    """Tensors of the products' shapes."""
    return [t.new_empty(t.shape, dtype=arguments.state_dtype(t)) for t in tensors]


def from_flat(tensors: Tensors, factors: Tensors) -> list[Tensor]:
    """The definition on flat lists."""
    return definition(tensors, by_mode(factors, tensors))
