"""Checks of a constructor's arguments: parameters, and names that are no options."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from tnt_optim.messages import warn_the_caller
from tnt_optim.modes import (
    Settings,
    are_sharded,
    check_dense,
    is_plain,
    is_sharded,
    layout_for,
)
from tnt_optim.options import REMOVED
from tnt_optim.rounding import check_rounding

# A warning says so if a smaller share of the entries is preconditioned.
_LEAST_PRECONDITIONED = 0.1

# Arguments of torch's optimizers, and what to write instead.
_INSTEAD = {
    "betas": "write momentum=betas[0]; Adam's second moment, for graft='adam', decays by 0.99",
    "eps": "leave it out, or write damping=..., which is added to the statistics' eigenvalues",
    "fused": "leave it out: every step runs fused kernels",
    "foreach": "leave it out: every step works on lists of tensors",
    "differentiable": "leave it out: no gradient flows through a step",
    "amsgrad": "leave it out",
    "dampening": "leave it out: m <- momentum m + g",
    **REMOVED,
}


def refuse_unknown(kind: str, unknown: Settings) -> None:
    """Refuses arguments that a constructor does not have."""
    for name in unknown:
        hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise TypeError(f"{kind} has no argument {name!r}{hint}")


def pop_fisher(
    kind: str, arguments: dict[str, Any], likelihood: Any, sampled: Any = "categorical"
) -> Any:
    """Takes ``fisher``, of earlier versions, out of arguments; returns the likelihood it means.

    ``likelihood`` is the one given; ``sampled`` stands for it if it is None.

    Raises:
        ValueError: if ``fisher`` has a value that it never had.
    """
    if "fisher" not in arguments:
        return likelihood
    fisher = arguments.pop("fisher")
    if fisher not in ("sampled", "empirical"):
        raise ValueError(f"fisher must be 'sampled' or 'empirical', got {fisher!r}")
    meant = None if fisher == "empirical" else likelihood or sampled
    warn_the_caller(
        f"{kind}: write likelihood={meant!r} for fisher={fisher!r}. Without a likelihood, the "
        "default, statistics are of the training gradients; with one, of gradients at sampled "
        "labels"
    )
    return meant


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


def check_param(
    param: Tensor,
    group: Settings,
    groups: Sequence[Settings],
    name: Callable[[Tensor], str],
    *,
    capturable: bool,
) -> None:
    """Checks that a parameter can have its group's settings."""
    if isinstance(param, UninitializedParameter):  # has no shape to be named by
        raise ValueError("params must be initialized, and one is lazy: run the model once")
    check_dense(param, name(param))
    check_rounding(param, group["rounding"], name)
    layout_for(param, group)  # checks the modes
    if is_sharded(param) != are_sharded(groups):
        raise ValueError(
            "params must all be sharded over one device mesh, or none, got both: "
            f"{name(param)} is {'' if is_sharded(param) else 'not '}sharded"
        )
    if capturable and group["rounding"] == "stochastic":
        raise ValueError("rounding='stochastic' cannot be part of CUDA graphs")


def check_form(group: Settings, kind: str, *, whitens: bool) -> None:
    """Refuses settings of a group that do not go together in an optimizer of this ``kind``."""
    if group["estimator"] == "mle" and not whitens:
        raise ValueError(
            f"estimator must be 'moments' for {kind}, got 'mle': it whitens by the factors, as if "
            "they were inverses of the statistics"
        )
    if group["early_roots"] and not group["relative_damping"]:
        raise ValueError("early_roots must be False where relative_damping is, got True")


def warn_of_few_preconditioned(groups: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Warns if most entries are of parameters that take the momentum, without a preconditioner.

    Frozen ones count, too: who trains nothing but a model's biases needs no warning.
    """
    params = [(p, group) for group in groups for p in group["params"]]
    entries = sum(p.numel() for p, _ in params)
    plain = [p for p, group in params if is_plain(p, group)]
    preconditioned = entries - sum(p.numel() for p in plain)
    if preconditioned < _LEAST_PRECONDITIONED * entries:
        largest = max(plain, key=lambda p: p.numel())
        share = preconditioned / entries
        warn_the_caller(
            f"{kind} preconditions {share:.0%} of the {entries:,} entries of its parameters: "
            f"{len(plain)} of {len(params)} parameters have fewer than two dimensions (the "
            f"largest is {tuple(largest.shape)}) and take the momentum. If a wrapper has flattened "
            "them, as some forms of ZeRO do, give the optimizer parameters in their own shapes; "
            "for sharding use shard=... or fully_shard"
        )
