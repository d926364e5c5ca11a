"""Whether a saved state fits an optimizer, and its copy at full precision."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tnt_optim.failures import COUNTERS
from tnt_optim.options import ADDED, check_settings
from tnt_optim.state import MOMENTS, TENSORS, layout

_KEYS = {"block_size", "first_step", "updates", *COUNTERS}
_GRAFTED = {"second_moment", "second_moment_updates"}

# Functions, and what torch adds to the defaults of an optimizer that has loaded or was copied.
_NOT_SAVED = {"modes", "differentiable"}

StateDict = dict[str, Any]


def load_adapted(
    optimizer: Optimizer,
    state_dict: StateDict,
    load: Callable[[StateDict], None],
    check: Callable[[StateDict], None],
    finish: Callable[[StateDict], None],
) -> None:
    """Has torch load a state, checked and finished as the user's own pre-hooks have adapted it.

    Args:
        optimizer: whose hooks are called.
        state_dict: what is to be loaded.
        load: torch's own loading, which calls the hooks.
        check: called after the user's pre-hooks, before anything is changed.
        finish: called after torch has loaded the state, before the user's post-hooks.
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
    """A state as it was saved, where torch.distributed.checkpoint loaded it in place.

    That finds tensors where they are, but puts what is no tensor under names of its own: "0" for 0.

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
    """Checks that ``state_dict`` is of the same method, if it says of which it is.

    Statistics, factors and settings of one method have the form of another's. States may have lost
    the entry, as torch.distributed.checkpoint keeps only those that torch knows.

    Raises:
        ValueError: where it is another one's.
    """
    saved = state_dict.get("method", method)
    if saved != method:
        raise ValueError(f"state_dict must be of {method}, got that of {saved}")


def check_groups(
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
    settings: set[str],
    check: Callable[[Mapping[str, Any]], None],
) -> None:
    """Checks that ``state_dict`` has these parameter groups, and ``settings`` that pass ``check``.

    What else a group has, such as a scheduler's ``initial_lr``, may be missing.

    Raises:
        ValueError: says where the two part.
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
            check(saved)
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
    """Checks that ``state_dict`` is of an optimizer with these parameter groups and ``settings``.

    Args:
        groups: the optimizer's.
        state_dict: what is to be loaded.
        settings: that a group has.
        kept: which tensors of a parameter's state this process keeps; it may hold more.

    Raises:
        ValueError: says where the two part.
    """
    check_groups(
        groups,
        state_dict,
        settings,
        lambda saved: check_settings({**ADDED, **saved, "modes": None}),
    )
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for index, param in zip(saved["params"], group["params"], strict=True):
            if state_dict["state"].get(index):
                name = f"state_dict['state'][{index}]"
                _check_state(name, state_dict["state"][index], group, param, kept(param))


def check_keys(name: str, state: Mapping[str, Any], keys: set[str]) -> None:
    """Checks that a parameter's state has all of ``keys``.

    Raises:
        ValueError: names those that it lacks.
    """
    missing = sorted(keys - set(state))
    if missing:
        raise ValueError(f"{name} lacks {missing}; is it another optimizer's?")


def _check_state(
    name: str,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    param: Tensor,
    kept: frozenset[str],
) -> None:
    grafted = not _GRAFTED.isdisjoint(state)
    wanted = kept & (TENSORS if grafted else TENSORS - _GRAFTED)
    if "stats" in wanted and "stats" not in state and _KEYS <= state.keys():
        raise ValueError(
            f"{name} lacks stats: is it damaged, or that of one of several processes with shard? "
            "Theirs load through torch.distributed.checkpoint, after allocate_state()"
        )
    check_keys(name, state, _KEYS | wanted | (_GRAFTED - TENSORS if grafted else set()))
    if "master" in state and tuple(state["master"].shape) != tuple(param.shape):
        raise ValueError(
            f"{name}: master must have the parameter's shape {tuple(param.shape)}, got "
            f"{tuple(state['master'].shape)}"
        )
    seen = layout(param, group)
    shapes = seen.statistic_shapes(group["max_factor_dim"])
    for key in sorted(wanted, key=lambda key: key not in MOMENTS):
        tensors = [state[key]] if key in MOMENTS else state[key]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise ValueError(f"{name}: {key} must be made of tensors")
        got = [tuple(tensor.shape) for tensor in tensors]
        if key in MOMENTS and got != [seen.sizes]:
            raise ValueError(
                f"{name}: the {key} must be {seen.sizes} for a parameter of shape "
                f"{tuple(param.shape)}, got {got[0]}; is it of another model?"
            )
        blocks = state["block_size"]
        if key not in MOMENTS and (got != shapes or blocks != seen.block_size):
            raise ValueError(
                f"{name}: {key} must have shapes {shapes} with max_factor_dim="
                f"{group['max_factor_dim']} and block_size={seen.block_size}, got {got} with "
                f"block_size={blocks}"
            )


def copied_states(
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
    dtype: Callable[[Tensor], torch.dtype],
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The saved states by parameter, where torch would cast them to the parameter's dtype."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for param, index in zip(group["params"], saved["params"], strict=True):
            if index in state_dict["state"]:
                yield param, _copied(state_dict["state"][index], param.device, dtype(param))


def _copied(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A deep copy with all tensors on ``device`` and of ``dtype``."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype, copy=True)
    if isinstance(value, dict):
        return {key: _copied(item, device, dtype) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, device, dtype) for item in value]
    return value
