"""What an optimizer's state takes, from shapes and settings alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tnt_optim.state import MOMENTS, is_half, layout, state_dtype

SIZES = ("stats", "factors", "moments", "master")


def estimate(
    groups: Sequence[Mapping[str, Any]],
    kept: Callable[[Tensor], frozenset[str]],
    name: Callable[[Tensor], str],
) -> dict[str, Any]:
    """The bytes of each parameter's state, and of all; see ``TNT.memory_estimate``.

    Args:
        groups: an optimizer's.
        kept: which tensors of a parameter's state this process keeps.
        name: of a parameter.
    """
    rows = []
    for group in groups:
        moments = MOMENTS if group["graft"] == "adam" else MOMENTS[:1]
        for param in group["params"]:
            if not param.requires_grad:
                continue
            seen = layout(param, group)
            shapes = seen.statistic_shapes(group["max_factor_dim"])
            itemsize, has = state_dtype(param).itemsize, kept(param)
            numbers = sum(map(math.prod, shapes))
            has_master = group["rounding"] == "master" and is_half(param)
            rows.append(
                {
                    "name": name(param),
                    "shape": tuple(param.shape),
                    "statistics": shapes,
                    "stats": numbers * itemsize * ("stats" in has),
                    "factors": numbers * itemsize * ("factors" in has),
                    "moments": param.numel() * itemsize * sum(m in has for m in moments),
                    "master": 4 * param.numel() * has_master,
                }
            )
    total = sum(row[key] for row in rows for key in SIZES)
    return {"parameters": rows, "total": total}
