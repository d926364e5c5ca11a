"""``mode_products`` in Triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels.triton.chain import products
from tnt_kernels.triton.launch import run, state_dtype


def mode_products(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """The operator with ``factors`` flat."""
    if not tensors:
        return []
    device = tensors[0].device
    results = [torch.empty(t.shape, dtype=state_dtype(t.dtype), device=device) for t in tensors]
    run(device, products(tensors, results, factors))
    return results
