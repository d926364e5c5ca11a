"""What every setting of a parameter group must be."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

GRAFTS = (None, "adam", "sgd")
ROUNDINGS = ("nearest", "stochastic", "master")

# Settings that states saved by earlier versions lack, and what they then did.
ADDED = {
    "block_size": None,
    "merge_small_dims": None,
    "maximize": False,
    "rounding": "nearest",
    "kl_clip": None,
}


def check_common_settings(group: Mapping[str, Any]) -> None:
    """Checks one parameter group's settings that all optimizers have.

    The real-valued ones may be 0-dim tensors, which a captured graph can change; such a tensor is
    not looked at on a GPU, as that would wait for it at every step.

    Raises:
        ValueError: names the setting, the rule, and what came.
    """
    for name in ("lr", "damping", "weight_decay"):
        _check(name, group[name], "a finite number >= 0", lambda v: 0 <= v < math.inf)
    for name in ("momentum", "stat_decay"):
        _check(name, group[name], "a number in [0, 1)", lambda v: 0 <= v < 1)
    for name in ("stat_interval", "inverse_interval"):
        _check_integer(name, group[name])


def check_settings(group: Mapping[str, Any]) -> None:
    """Checks one parameter group's settings, with those of optimizers that work mode by mode.

    Raises:
        ValueError: names the setting, the rule, and what came.
    """
    check_common_settings(group)
    _check_integer("max_factor_dim", group["max_factor_dim"])
    for name in ("block_size", "merge_small_dims"):
        if group[name] is not None:
            _check_integer(name, group[name], "None or an integer >= 1")
    if group["kl_clip"] is not None:
        rule = "None or a finite number > 0"
        _check("kl_clip", group["kl_clip"], rule, lambda v: 0 < v < math.inf)
    for name in ("relative_damping", "maximize"):
        if not isinstance(group[name], bool):
            raise ValueError(f"{name} must be True or False, got {group[name]!r}")
    if group["rounding"] not in ROUNDINGS:
        known = ", ".join(repr(rounding) for rounding in ROUNDINGS)
        raise ValueError(f"rounding must be one of {known}, got {group['rounding']!r}")
    if group["graft"] not in GRAFTS:
        known = ", ".join(repr(graft) for graft in GRAFTS)
        raise ValueError(f"graft must be one of {known}, got {group['graft']!r}")
    if group["modes"] is not None and not callable(group["modes"]):
        raise ValueError(f"modes must be a function of a shape, got {group['modes']!r}")


def as_number(value: Any) -> Any:
    """A learning rate as the operators take it: a tensor of one element has no dimensions."""
    return value.reshape(()) if isinstance(value, Tensor) else value


def _check_integer(name: str, value: Any, rule: str = "an integer >= 1") -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def _check(name: str, value: Any, rule: str, holds: Callable[[Any], bool]) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    # PyTorch's optimizers take a learning rate of one element and any number of dimensions.
    single = isinstance(value, Tensor) and (
        value.dim() == 0 or (name == "lr" and value.numel() == 1)
    )
    if single and value.is_floating_point():
        if not value.is_cpu:
            return
        number, value = True, value.item()
    if not number or not holds(value):
        raise ValueError(f"{name} must be {rule}, got {value!r}")
