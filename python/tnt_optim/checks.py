"""Checks of what a user gives an optimizer as its parameters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tnt_optim.failures import warn_the_caller
from tnt_optim.modes import is_plain

# A warning says so if a smaller share of the trainable entries is preconditioned.
LEAST_PRECONDITIONED = 0.1


def listed(params: Any, kind: str) -> list[Any]:
    """The entries of the argument ``params`` of an optimizer of this ``kind``.

    Raises:
        TypeError: if it is a module, or an entry is a list.
    """
    if isinstance(params, nn.Module):
        raise TypeError(
            f"params must be parameters, got a module: write {kind}(model.parameters())"
        )
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be an iterable of parameters, got {type(params).__name__}: for a single "
            f"one write {kind}([parameter])"
        )
    entries = list(params)
    nested = [entry for entry in entries if isinstance(entry, list | set)]
    if nested:
        raise TypeError(
            f"params must hold parameters, (name, parameter) pairs or groups, got a "
            f"{type(nested[0]).__name__} of {len(nested[0])} in it: write "
            f"{kind}([{{'params': first_list}}, {{'params': second_list}}])"
        )
    return entries


def warn_of_few_preconditioned(groups: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Warns if most of the trainable entries take the momentum, without a preconditioner."""
    trained = [(p, group) for group in groups for p in group["params"] if p.requires_grad]
    entries = sum(p.numel() for p, _ in trained)
    plain = [p for p, group in trained if is_plain(p, group)]
    preconditioned = entries - sum(p.numel() for p in plain)
    if preconditioned < LEAST_PRECONDITIONED * entries:
        largest = max(plain, key=lambda p: p.numel())
        share = preconditioned / entries
        warn_the_caller(
            f"{kind} preconditions {share:.0%} of the {entries:,} entries of its parameters: "
            f"{len(plain)} of {len(trained)} parameters have fewer than two dimensions (the "
            f"largest is {tuple(largest.shape)}) and take the momentum. If a wrapper has flattened "
            "them, as some forms of ZeRO do, give the optimizer parameters in their own shapes; "
            "for sharding use shard=... or fully_shard"
        )
