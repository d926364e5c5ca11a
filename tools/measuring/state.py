"""The size of an optimizer's state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state, without single numbers (counters)."""
    leaves = [leaf for leaf in tree_leaves(optimizer.state_dict()) if isinstance(leaf, Tensor)]
    return sum({leaf.data_ptr(): leaf.nbytes for leaf in leaves if leaf.dim() > 0}.values())
