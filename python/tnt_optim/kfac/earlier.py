"""Saved states of KFAC in the form of earlier commits of version 0.2.

They keep separate moments of weight and bias, and count layers where today's count parameters.
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
    """A saved state in today's form; one in this form, or of another kind, stays as it is."""
    saved_groups = state_dict.get("param_groups", [])
    is_old = state_dict.get("method") == "KFAC" and all(
        "estimator" not in saved for saved in saved_groups
    )
    if not is_old or len(saved_groups) != len(groups):
        return state_dict
    places = [index for saved in saved_groups for index in saved["params"]]
    params = [p for group in groups for p in group["params"]]
    indices = dict(zip(params, places, strict=False))
    owners = {p: group for group in groups for p in group["params"]}
    states = state_dict["state"]
    units = units_of(groups)
    new: dict[Any, Any] = {key: state for key, state in states.items() if key not in places}
    for param, index in indices.items():
        state = {**states.get(index, {})}
        members = units.members(param)
        parts = [states.get(indices[p], {}) for p in members if p in indices]
        if units.key(param) is not param or not any("momentum" in part for part in parts):
            continue
        sizes = layout_for(param, owners[param]).sizes
        for name in _MOMENTS:
            moments = {
                p: part[name].reshape(p.shape)
                for p, part in zip(members, parts, strict=False)
                if name in part
            }
            if moments:
                state[name] = units.joined(param, moments).reshape(sizes)
        updates = state.get("updates", saved_groups[0]["step"])
        state |= {"updates": updates, "block_size": None}
        if "second_moment" in state:
            state["second_moment_updates"] = updates
        if "stats" not in state:
            ones = [state["momentum"].new_ones(d) for d in sizes]
            state |= {"stats": [], "factors": ones, "first_step": None}
            state |= dict.fromkeys(COUNTERS, 0)
        new[index] = state
    result = {**state_dict, "state": new}
    result["param_groups"] = [
        {**{k: v for k, v in group.items() if k not in ("params", "units", "modes")}, **saved}
        for group, saved in zip(groups, saved_groups, strict=True)
    ]
    if "missed" in state_dict:
        result["missed"] = {
            indices[weights[int(n)]]: LOSS_ONLY if called else PATIENCE
            for n, called in state_dict["missed"].items()
        }
    if "accumulated" in state_dict:
        result["accumulated"] = [indices[weights[n]] for n in state_dict["accumulated"]]
    result.pop("observed", None)
    return result
