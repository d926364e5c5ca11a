"""What is due at a step. A plan changes nothing; ``update`` carries it out."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_optim.directions import check_rounding
from tnt_optim.groups import Groups
from tnt_optim.modes import Group, State, States, is_plain
from tnt_optim.observations import Empirical
from tnt_optim.options import factors_due, is_due
from tnt_optim.processes import Processes
from tnt_optim.state import ALLOCATED, has_entries, has_statistics


@dataclass(frozen=True)
class Plan:
    """What is due at a step.

    Attributes:
        first: what the source gives for the statistics of parameters that have none yet.
        refreshed: the same for statistics that parameters already have.
        inverted: parameters whose factors are due. A new parameter has new factors.
        updated: parameters to update.
    """

    first: dict[Tensor, Any]
    refreshed: dict[Tensor, Any]
    inverted: set[Tensor]
    updated: list[Tensor]


def statistics_due(groups: Sequence[Group], states: States, source: Empirical) -> list[Tensor]:
    """Parameters with statistics due, and parameters without any that an output may reach."""
    return [
        p
        for group in groups
        for scheduled in [is_due(group, "stat_interval")]
        for p in group["params"]
        if not is_plain(p, group)
        if scheduled or source.waits_for(p, is_new=not has_statistics(states.get(p, {})))
    ]


def plan_step(
    groups: Sequence[Group],
    states: States,
    source: Empirical,
    processes: Processes,
    accumulated: Container[Tensor],
) -> Plan:
    """Plans a step.

    Args:
        groups: of the optimizer.
        states: of its parameters.
        source: of the gradients for the statistics.
        processes: how they divide the step.
        accumulated: parameters whose statistics already have this step's gradients, from an attempt
            that raised.

    Raises:
        RuntimeError: if a parameter cannot be updated.
    """
    names = Groups(groups)
    units = names.units
    with_gradients = processes.with_gradients(names.params)
    _check_dense(names.name, with_gradients)
    if units:
        with_gradients = {units.key(p) for p in with_gradients}
    earlier = {p: states[p] for p in names.params if has_statistics(states.get(p, {}))}
    due = statistics_due(groups, states, source)
    found = source.gradients(processes, due, with_gradients, earlier)
    updated = []
    for group in groups:
        for param in group["params"]:
            if param in with_gradients:
                _check_update(names.name, param, group, states.get(param, {}), source, found)
                updated.append(param)
    observed: dict[Tensor, Any] = processes.whole(found)
    refreshed = {p: g for p, g in observed.items() if p in earlier}
    has_new = {p for p in earlier if p in refreshed or p in accumulated}
    return Plan(
        first={p: g for p, g in observed.items() if p not in earlier},
        refreshed=refreshed,
        inverted={p for group in groups for p in factors_due(group, earlier, has_new)},
        updated=updated,
    )


def _check_dense(name: Callable[[Tensor], str], params: Iterable[Tensor]) -> None:
    """Refuses sparse gradients."""
    for param in params:
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {name(param)} must be dense, got {param.grad.layout}"
            )


def _check_update(
    name: Callable[[Tensor], str],
    param: Tensor,
    group: Group,
    state: State,
    source: Empirical,
    observed: Container[Tensor],
) -> None:
    """Refuses a parameter that cannot be updated."""
    plain = is_plain(param, group)
    if plain and has_statistics(state):
        raise RuntimeError(
            "precondition_1d must be set to False before the first statistics: "
            f"{name(param)} has some"
        )
    if state.get("first_step") == ALLOCATED:
        state = {}  # it is replaced
    has = has_entries(state)
    lacks = not (has or plain or param in observed or param in source.asked)
    if lacks and param.requires_grad and source.requires(param):
        raise RuntimeError(
            f"step() has no statistics for {name(param)}, which has a gradient: call "
            "observe(output) before loss.backward(), or attach(model) once, with outputs "
            f"that depend on every parameter the loss depends on{source.hint}"
        )
    if group["rounding"] != "nearest":  # the dtype may have changed
        check_rounding(param, group["rounding"], name)
    if has and group["graft"] == "adam" and "second_moment_updates" not in state:
        raise RuntimeError(
            "graft='adam' must be set before the first statistics: "
            f"{name(param)} has no second moment in its state"
        )
