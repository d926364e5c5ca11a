"""Saved states of KFAC in the form of earlier commits of version 0.2.

They have the moments of weight and bias apart, and count layers in place of parameters.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tnt_optim.modes import Group, layout_for
from tnt_optim.observations import LOSS_ONLY, PATIENCE
from tnt_optim.state import COUNTERS
from tnt_optim.units import units_of

_MOMENTS = ("momentum", "second_moment")


def converted(
    state_dict: dict[str, Any], groups: Sequence[Group], weights: Sequence[Tensor]
) -> dict[str, Any]:
    """A saved state in today's form; one that has it, or is of another kind, as it is."""
    saved_groups = state_dict.get("param_groups", [])
    is_old = state_dict.get("method") == "KFAC" and all(
        "estimator" not in saved for saved in saved_groups
    )
    if not is_old or len(saved_groups) != len(groups):
        return state_dict
    places = [n for saved in saved_groups for n in saved["params"]]
    params = [p for group in groups for p in group["params"]]
    numbers = dict(zip(params, places, strict=False))
    owners = {p: group for group in groups for p in group["params"]}
    states = state_dict["state"]
    units = units_of(groups)
    new: dict[Any, Any] = {n: state for n, state in states.items() if n not in places}
    for param, number in numbers.items():
        state = {**states.get(number, {})}
        members = units.members(param)
        parts = [states.get(numbers[p], {}) for p in members if p in numbers]
        if units.key(param) is not param or not any("momentum" in part for part in parts):
            continue
        sizes = layout_for(param, owners[param]).sizes
        for name in _MOMENTS:
            own = {
                p: part[name].reshape(p.shape)
                for p, part in zip(members, parts, strict=False)
                if name in part
            }
            if own:
                state[name] = units.joined(param, own).reshape(sizes)
        updates = state.get("updates", saved_groups[0]["step"])
        state |= {"updates": updates, "block_size": None}
        if "second_moment" in state:
            state["second_moment_updates"] = updates
        if "stats" not in state:
            ones = [state["momentum"].new_ones(d) for d in sizes]
            state |= {"stats": [], "factors": ones, "first_step": None}
            state |= dict.fromkeys(COUNTERS, 0)
        new[number] = state
    result = {**state_dict, "state": new}
    result["param_groups"] = [
        {**{k: v for k, v in group.items() if k not in ("params", "units", "modes")}, **saved}
        for group, saved in zip(groups, saved_groups, strict=True)
    ]
    if "missed" in state_dict:
        result["missed"] = {
            numbers[weights[int(n)]]: LOSS_ONLY if called else PATIENCE
            for n, called in state_dict["missed"].items()
        }
    if "accumulated" in state_dict:
        result["accumulated"] = [numbers[weights[n]] for n in state_dict["accumulated"]]
    result.pop("observed", None)
    return result
