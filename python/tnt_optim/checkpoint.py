"""Loading a saved state: the check that it fits, and a copy at full precision."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tnt_optim.modes import state_dtype
from tnt_optim.options import ADDED, check_settings
from tnt_optim.state import check_state

# Functions, and an entry that torch adds to the defaults when an optimizer loads or is copied.
_NOT_SAVED = {"modes", "differentiable"}

StateDict = dict[str, Any]


def load_adapted(
    optimizer: Optimizer,
    state_dict: StateDict,
    load: Callable[[StateDict], None],
    check: Callable[[StateDict], None],
    finish: Callable[[StateDict], None],
) -> None:
    """Loads a state with torch's own ``load_state_dict``, between a check and a finish.

    ``check`` runs after the user's pre-hooks, before anything is changed. ``finish`` runs when
    torch has loaded the state, before the user's post-hooks.
    """
    adapted: list[StateDict] = []

    def before(_: Optimizer, state: StateDict) -> None:
        check(state)
        adapted.append(state)

    handles = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(lambda _: finish(adapted[0]), prepend=True),
    ]
    try:
        load(state_dict)
    finally:
        for handle in handles:
            handle.remove()


def with_integer_keys(state_dict: StateDict) -> StateDict:
    """Repairs a state that torch.distributed.checkpoint loaded in place.

    It loads tensors in place, but puts other values under string keys: "0" instead of 0.

    >>> with_integer_keys({"state": {0: {"m": [], "t": 0}, "0": {"t": 5}}})
    {'state': {0: {'m': [], 't': 5}}}
    """
    states = state_dict.get("state")
    if not isinstance(states, Mapping) or not any(isinstance(key, str) for key in states):
        return state_dict
    merged: dict[Any, Any] = {key: state for key, state in states.items() if isinstance(key, int)}
    for key, state in states.items():
        if isinstance(key, str):
            number = int(key) if key.isdecimal() else key
            known = merged.get(number, {})
            merged[number] = {**known, **state} if isinstance(number, int) else state
    return {**state_dict, "state": merged}


def check_method(method: str, state_dict: Mapping[str, Any]) -> None:
    """Checks that ``state_dict`` is of the same method, if it has the entry "method".

    Statistics, factors and settings of two methods may have the same form. The entry is missing
    after torch.distributed.checkpoint, which keeps only the entries that torch knows.

    Raises:
        ValueError: if it is of another method.
    """
    saved = state_dict.get("method", method)
    if saved != method:
        raise ValueError(f"state_dict must be of {method}, got that of {saved}")


def check_groups(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], settings: set[str]
) -> None:
    """Checks that ``state_dict`` has these parameter groups, with valid ``settings``.

    Other entries of a group, such as a scheduler's ``initial_lr``, may be missing.

    Raises:
        ValueError: says where the two differ.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"state_dict must have the key {key!r}, got {sorted(state_dict)}")
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict must have {len(groups)} parameter groups, got {len(saved_groups)}"
        )
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        missing = sorted(settings - set(saved) - _NOT_SAVED - ADDED.keys())
        if missing:
            raise ValueError(
                f"state_dict: group {number} lacks {missing}; is it another optimizer's?"
            )
        try:
            check_settings(saved)
        except ValueError as error:
            raise ValueError(f"state_dict: group {number}: {error}") from None
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"state_dict: group {number} must have {len(group['params'])} parameters, "
                f"got {len(saved['params'])}; is it of another model?"
            )


def check_state_dict(
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
    settings: set[str],
    kept: Callable[[Tensor], frozenset[str]],
) -> None:
    """Checks groups and states; a state may have more entries than this process keeps.

    Raises:
        ValueError: says where the two differ.
    """
    check_groups(groups, state_dict, settings)
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for index, param in zip(saved["params"], group["params"], strict=True):
            if state_dict["state"].get(index):
                name = f"state_dict['state'][{index}]"
                check_state(name, state_dict["state"][index], group, param, kept(param))


def copied_states(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The saved states by parameter; torch's own copies have the parameter's dtype."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for param, index in zip(group["params"], saved["params"], strict=True):
            if index in state_dict["state"]:
                yield param, _copied(state_dict["state"][index], param.device, state_dtype(param))


def _copied(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A deep copy with all tensors on ``device`` and of ``dtype``."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype, copy=True)
    if isinstance(value, dict):
        return {key: _copied(item, device, dtype) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, device, dtype) for item in value]
    return value
