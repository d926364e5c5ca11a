"""Saving a state, and loading it: the check that it fits, and a copy at full precision."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tnt_optim.messages import warn_the_caller
from tnt_optim.modes import Settings, State, state_dtype
from tnt_optim.options import REMOVED, check_settings
from tnt_optim.state import NAMES, check_keys, has_entries

# Functions, and an entry that torch adds to the defaults when an optimizer loads or is copied.
_NOT_SAVED = {"modes", "differentiable"}

# Parts of a parameter's name that wrappers add: DistributedDataParallel and torch.compile.
_WRAPPERS = {"module", "_orig_mod"}

# Settings that states saved by version 0.2 lack: they were made without, as with False.
_LATER = {"nesterov", "early_roots", "takes_roots"}

# Options that decide what the statistics are of; the others matter only with a likelihood.
_SAMPLING = ("likelihood", "seed")

StateDict = dict[str, Any]


def save_completed(
    optimizer: Optimizer, save: Callable[[], StateDict], complete: Callable[[StateDict], None]
) -> StateDict:
    """Saves with torch's own ``state_dict``; ``complete`` changes it before the user's hooks."""

    def finish(_: Optimizer, state_dict: StateDict) -> None:
        for group in state_dict["param_groups"]:  # weights_only=True loads no numbers of NumPy
            group.update({k: _number(v) for k, v in group.items() if isinstance(v, Real)})
        complete(state_dict)

    handle = optimizer.register_state_dict_post_hook(finish, prepend=True)
    try:
        return save()
    finally:
        handle.remove()


def _number(value: Real) -> float:
    """A number of Python's own types."""
    if isinstance(value, bool):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def load_adapted(
    optimizer: Optimizer,
    state_dict: StateDict,
    load: Callable[[StateDict], None],
    convert: Callable[[StateDict], StateDict],
    check: Callable[[StateDict], None],
    finish: Callable[[StateDict], None],
) -> None:
    """Loads a state with torch's own ``load_state_dict``, between a check and a finish.

    ``convert`` and ``check`` run after the user's pre-hooks, before anything is changed. ``finish``
    runs when torch has loaded the state, before the user's post-hooks. The optimizer keeps its own
    names of parameters.
    """
    adapted: list[StateDict] = []
    names = [group.get("param_names") for group in optimizer.param_groups]

    def before(_: Optimizer, state: StateDict) -> StateDict:
        state = convert(state)
        check(state)
        adapted.append(state)
        return state

    def after(_: Optimizer) -> None:
        (state,) = adapted
        warn_of_other_names(names, state["param_groups"])
        for group, kept_names in zip(optimizer.param_groups, names, strict=True):
            for name in _LATER & optimizer.defaults.keys():
                group.setdefault(name, False)
            for name in REMOVED:
                if group.pop(name, None) is not None:
                    warn_the_caller(f"state_dict has {name}, which was removed: {REMOVED[name]}")
            if kept_names is not None:
                group["param_names"] = kept_names
        finish(state)
        if not state["state"] and any(group["step"] for group in optimizer.param_groups):
            warn_the_caller(_WITHOUT_STATE)

    handles = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        load(with_integer_keys(state_dict))
    finally:
        for handle in handles:
            handle.remove()


def sampling_of(optimizer: Any) -> dict[str, Any]:
    """The options of the sampled gradients, as a saved state has them: functions by their names."""
    names = _SAMPLING[:1] if getattr(optimizer, "likelihood", None) is None else _SAMPLING
    return {name: _plain(getattr(optimizer, name)) for name in names if hasattr(optimizer, name)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return f"({', '.join(str(_plain(item)) for item in value)})"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _number(value) if isinstance(value, Real) else value


def warn_of_other_sampling(optimizer: Any, state_dict: StateDict) -> None:
    """Warns if a loaded state's options of the sampled gradients are not the optimizer's."""
    saved, current = state_dict.get("sampling", {}), sampling_of(optimizer)
    if saved.get("fisher") == "empirical":  # of earlier versions
        saved = {"likelihood": None}
    others = [name for name in current if name in saved and saved[name] != current[name]]
    if others:
        before, after = (", ".join(f"{n}={s[n]!r}" for n in others) for s in (saved, current))
        warn_the_caller(
            f"state_dict was saved with {before}: this optimizer keeps its own {after}, and trains "
            "differently from the saved one"
        )


def warn_of_part(params: Sequence[Tensor], states: Mapping[Tensor, State]) -> bool:
    """Warns of a trained state without the parts of other processes; returns whether it did."""
    if all("stats" in states[p] for p in params if has_entries(states.get(p, {}))):
        return False
    warn_the_caller(
        "state_dict() has one process's part of the state. torch.distributed.checkpoint saves the "
        "parts of all processes; for a whole state in one process, also with full_state_dict=True, "
        "call consolidate_state_dict() in all processes first (warned once)"
    )
    return True


def warn_of_zeros(
    params: Sequence[Tensor], states: Mapping[Tensor, State], name: Callable[[Tensor], str]
) -> None:
    """Warns of a loaded state without statistics that were trained; waits for the device.

    From a state that is not whole, ``set_optimizer_state_dict`` with ``full_state_dict=True``
    leaves zeros of ``allocate_state`` in the other processes.
    """
    updated = [p for p in params if has_entries(states.get(p, {})) and states[p]["updates"] > 0]
    held = [(p, stats) for p in updated if (stats := states[p].get("stats"))]
    zeros = [p for p, stats in held if not any(s.any() for s in stats)]
    if zeros:
        warn_the_caller(
            f"state_dict has zeros for the statistics of {name(zeros[0])} (in this process "
            f"{len(zeros)} of {len(held)}), which has been updated: if its gradients were not "
            "zero, the saved state was one process's part; save it after consolidate_state_dict()"
        )


def params_in(state_dict: StateDict, groups: Sequence[Settings]) -> dict[int, Tensor]:
    """The parameters of ``groups`` by their numbers in a saved state."""
    pairs = zip(state_dict["param_groups"], groups, strict=True)
    return {n: p for s, g in pairs for n, p in zip(s["params"], g["params"], strict=True)}


# Checks of saved observations. ``name`` is the place in the state_dict, as "['missed']", and
# ``known`` has the numbers of the parameters, or of KFAC's layers.


def missed_in(state_dict: StateDict, known: Collection[int]) -> dict[int, int]:
    """The status of each parameter, or layer, that outputs have missed."""
    missed = by_number("['missed']", state_dict.get("missed", {}), known)
    for number, status in missed.items():
        if not isinstance(status, int):
            raise ValueError(f"state_dict['missed'][{number}] must be an integer, got {status!r}")
    return missed


def accumulated_in(state_dict: StateDict, known: Collection[int]) -> list[int]:
    """The parameters, or layers, that a step which raised has refreshed already."""
    return numbers_in("['accumulated']", state_dict.get("accumulated", []), known)


def entries_of(name: str, saved: Any, keys: Sequence[str]) -> list[Any]:
    """The entries of a saved mapping; entries under other keys are ignored."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"state_dict{name} must be a mapping, got {type(saved).__name__}")
    check_keys(f"state_dict{name}", saved, set(keys))
    return [saved[key] for key in keys]


def by_number(name: str, saved: Any, known: Collection[int]) -> dict[int, Any]:
    """The entries of a mapping by number. torch.distributed.checkpoint makes "0" of a key 0."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"state_dict{name} must be a mapping, got {type(saved).__name__}")
    entries = {
        int(key) if isinstance(key, str) and key.isdecimal() else key: value
        for key, value in saved.items()
    }
    numbers_in(name, list(entries), known)
    return entries


def numbers_in(name: str, saved: Any, known: Collection[int]) -> list[int]:
    """A list of numbers."""
    is_list = isinstance(saved, list | tuple)
    unknown = [n for n in saved if type(n) is not int or n not in known] if is_list else [saved]
    if unknown:
        raise ValueError(
            f"state_dict{name} must hold numbers from 0 to {max(known)}, got {unknown[0]!r}; "
            "is it of another model?"
        )
    return list(saved)


def checked_count(name: str, value: Any) -> int | Tensor:
    """A count, which is a 0-dim tensor if only the device knew it."""
    is_tensor = isinstance(value, Tensor) and value.dim() == 0
    if not is_tensor and not (type(value) is int and value >= 0):
        raise ValueError(f"state_dict{name} must be an integer >= 0, got {value!r}")
    count: int | Tensor = value
    return count


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


def check_groups(
    method: str, groups: Sequence[Settings], state_dict: StateDict, settings: set[str]
) -> None:
    """Refuses a ``state_dict`` of another method, other parameter groups, or invalid ``settings``.

    Also one whose parameters come in another order, if both have names.
    Statistics, factors and settings of two methods may have the same form. The entry "method" is
    missing after torch.distributed.checkpoint, which keeps only the entries that torch knows. Other
    entries of a group, such as a scheduler's ``initial_lr``, may be missing.
    """
    saved_method = state_dict.get("method", method)
    if saved_method != method:
        raise ValueError(f"state_dict must be of {method}, got that of {saved_method}")
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"state_dict must have the key {key!r}, got {sorted(state_dict)}")
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict must have {len(groups)} parameter groups, got {len(saved_groups)}: is it "
            "another optimizer's?"
        )
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        check_keys(f"state_dict: group {number}", saved, settings - _NOT_SAVED - _LATER)
        try:
            check_settings(saved)
        except ValueError as error:
            raise ValueError(f"state_dict: group {number}: {error}") from None
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"state_dict: group {number} must have {len(group['params'])} parameters, "
                f"got {len(saved['params'])}; is it of another model?"
            )
    check_names(groups, state_dict)


_WITHOUT_STATE = (
    "state_dict counts steps and has no state of any parameter: training starts over, at a later "
    "step. Loaders that load in place, as torch.distributed.checkpoint does, need a state to load "
    "into: call allocate_state() before state_dict() and the load"
)


def _unwrapped(name: str) -> str:
    """A parameter's name without the parts that wrappers add.

    >>> _unwrapped("module._orig_mod.0.weight")
    '0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _other_names(
    names: Sequence[Sequence[str] | None], saved_groups: Sequence[Settings]
) -> list[tuple[str, str, str]]:
    """Where names differ: the parameter's index and group, its name here, and the saved name.

    Groups without names count as equal, and so do those that torch's ``set_optimizer_state_dict``
    loads: it has matched parameters by name, and put names in place of their indices.
    """
    return [
        (f"parameter {index} of group {number}", here, there)
        for number, (group_names, saved) in enumerate(zip(names, saved_groups, strict=True))
        if not any(isinstance(param, str) for param in saved["params"])
        for index, (here, there) in enumerate(
            zip(group_names or (), saved.get("param_names") or (), strict=False)
        )
        if _unwrapped(here) != _unwrapped(there)
    ]


def check_names(groups: Sequence[Settings], state_dict: StateDict) -> None:
    """Refuses a state whose parameters are those of the optimizer in another order.

    A saved name that no other parameter has here is no error: modules may be renamed.
    """
    names = [group.get("param_names") for group in groups]
    differ = _other_names(names, state_dict["param_groups"])
    ours = {_unwrapped(here) for _, here, _ in differ}
    if mixed := [entry for entry in differ if _unwrapped(entry[2]) in ours]:
        raise ValueError(
            "state_dict must have the optimizer's parameters in the same order, got "
            f"{_listed(mixed)}. Give the optimizer its parameters in the order in which the state "
            "was saved, or reorder the state in a hook (register_load_state_dict_pre_hook)"
        )


def warn_of_other_names(
    names: Sequence[Sequence[str] | None], saved_groups: Sequence[Settings]
) -> None:
    """Warns of a loaded state whose parameters have other names."""
    if differ := _other_names(names, saved_groups):
        warn_the_caller(
            f"state_dict was saved with other names, and is loaded by order: {_listed(differ)}"
        )


def _listed(differ: Sequence[tuple[str, str, str]]) -> str:
    listed = ", ".join(f"{there!r} for {here!r} ({place})" for place, here, there in differ[:3])
    return listed + (f" and {len(differ) - 3} more" if len(differ) > 3 else "")


def asks_for_state(groups: Sequence[Settings], distribution: Callable[[], Any]) -> bool:
    """Whether a step is torch's way to get a new state; the host may wait, sharded processes agree.

    ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` take a step with rates of zero,
    in which every trainable parameter has a gradient of zeros.
    """
    if any(group["lr"] != 0 for group in groups):
        return False
    trainable = [p for group in groups for p in group["params"] if p.requires_grad]
    grads = [p.grad for p in trainable if p.grad is not None]
    trains = len(grads) < max(1, len(trainable)) or any(g.layout != torch.strided for g in grads)
    trains = trains or any(getattr(g, "to_local", lambda g=g: g)().any() for g in grads)
    processes = distribution()
    if processes.is_sharded:  # one process may have no piece that is not zero
        first = next(p for group in groups for p in group["params"])
        trains = any(processes.anywhere([trains], first.device))
    return not trains


def saved_states(
    groups: Sequence[Settings], state_dict: StateDict
) -> Iterator[tuple[str, Settings, Tensor, State]]:
    """The saved states: each with its name in messages, its group and its parameter.

    The modes are merged as in the saved group, whose settings are loaded.
    """
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        settings = {**group, "merge_small_dims": saved.get("merge_small_dims")}
        for index, param in zip(saved["params"], group["params"], strict=True):
            state = state_dict["state"].get(index, {})
            if has_entries(state):
                if state.get("first_step", 0) is None and "stats" not in state:
                    # torch's set_optimizer_state_dict with full_state_dict loses empty lists.
                    state = {**state, "stats": []}
                yield f"state_dict['state'][{index}]", settings, param, state


def copied_states(
    groups: Sequence[Settings], state_dict: StateDict
) -> Iterator[tuple[Tensor, State]]:
    """The optimizer's entries by parameter; torch's own copies have the parameter's dtype."""
    for _, _, param, state in saved_states(groups, state_dict):
        entries = {name: value for name, value in state.items() if name in NAMES}
        yield param, copied(entries, param.device, state_dtype(param))


def copied(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A deep copy with all tensors on ``device`` and of ``dtype``."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype, copy=True)
    if isinstance(value, dict):
        return {key: copied(item, device, dtype) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item, device, dtype) for item in value]
    return value
