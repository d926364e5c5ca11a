"""Checks, before a step changes anything, that states and gradients fit their parameters.

Between steps a user may change a parameter (``p.data = ...``), give it the state of another, or
change a setting by which the state got its shapes.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from tnt_optim.modes import Settings, State, is_sharded, state_dtype
from tnt_optim.options import OPTIONS
from tnt_optim.state import has_entries, has_statistics

States = Mapping[Tensor, State]
Name = Callable[[Tensor], str]

_SHAPE, _DTYPE, _DEVICE = map(attrgetter, ("shape", "dtype", "device"))

REPAIR = (
    "set the parameter back, call `del opt.state[param]` to start its state over, or load a state "
    "that fits"
)


class Fit:
    """Remembers the shape of the parameter that each state was made or loaded for.

    A state has only the mode sizes, which parameters of several shapes share, and with ``shard``
    not even those in every process.

    Args:
        entries: the optimizer's entries by name; a state without any belongs to a wrapper. None if
            every entry is the optimizer's.
    """

    def __init__(self, entries: frozenset[str] | None = None) -> None:
        self._entries = entries
        # By the state's address: the state, the parameter's shape when the state was made, and the
        # state's tensors then. While a state has the same tensors, this shape is the one it fits.
        self._made: dict[int, tuple[State, torch.Size, list[Tensor]]] = {}
        self._passed: Any = None  # shapes, dtypes, devices and addresses of the last check

    def __getstate__(self) -> dict[str, Any]:
        return {"entries": self._entries, "made": list(self._made.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._entries, self._passed = state["entries"], None
        self._made = {id(made[0]): made for made in state["made"]}

    def note(self, params: Sequence[Tensor], states: States) -> None:
        """Remembers the present shapes of the parameters whose states are new."""
        made = {}
        for param in params:
            state = states.get(param, {})
            if self._is_own(state):
                made[id(state)] = self._known(state) or (state, param.shape, _tensors(state))
        self._made = made

    def note_if_new(self, params: Sequence[Tensor], states: States) -> None:
        """As ``note``, if a state is new since the last check."""
        if self._passed is None or self._passed[-1] != _addresses(states):
            self.note(params, states)

    def check(
        self,
        params: Sequence[Tensor],
        states: States,
        name: Name,
        check_state: Callable[[Tensor, State], None],
        observed: Mapping[Tensor, Tensor],
    ) -> None:
        """Refuses states and gradients that do not fit; quick if no parameter has changed.

        Autograd gives a parameter gradients that fit. So they are checked if a parameter changed.

        Args:
            params: the optimizer's parameters.
            states: of the optimizer.
            name: the name of a parameter in messages.
            check_state: raises ValueError for a state that does not fit the present shape.
            observed: gradients for the statistics.
        """
        found = [list(map(fact, params)) for fact in (_SHAPE, _DTYPE, _DEVICE)]
        seen = [*found, _addresses(states)]
        if seen == self._passed:
            return
        for param in params:
            state = states.get(param, {})
            if self._is_own(state):
                self._check_state(param, state, name, check_state)
            if param.grad is not None:
                _check_gradient(param, param.grad, name)
        for param, gradient in observed.items():
            _check_gradient(param, gradient, name)
        self.note(params, states)
        if all(states.get(param, True) for param in params):  # an empty one may be filled in place
            self._passed = seen

    def _check_state(
        self, param: Tensor, state: State, name: Name, check_state: Callable[[Tensor, State], None]
    ) -> None:
        known = self._known(state)
        if known is None:
            try:
                check_state(param, state)
            except ValueError as error:
                raise RuntimeError(f"{error} ({REPAIR})") from None
        elif known[1] != param.shape:
            raise RuntimeError(
                f"{name(param)} must have the shape that its state was made for, "
                f"{tuple(known[1])}: {REPAIR}"
            )
        if self._entries is not None:  # another optimizer's moments may have any dtype
            _check_dtype(param, state, name)

    def _known(self, state: State) -> tuple[State, torch.Size, list[Tensor]] | None:
        """The record of a state, unless the user has given it other tensors."""
        made = self._made.get(id(state))
        if made is None:
            return None
        before, now = made[2], _tensors(state)
        same = len(before) == len(now) and all(map(is_, before, now))
        return made if same else None

    def _is_own(self, state: Settings) -> bool:
        return bool(state) and (self._entries is None or not self._entries.isdisjoint(state))


# The options that shape statistics, factors and momentum.
_SHAPING = tuple(option.name for option in OPTIONS.values() if option.shapes)


class Shaping:
    """Remembers the settings by which each group's states got their shapes."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, ...] | None] = []  # None for a group without states

    def note(self, groups: Sequence[Settings], states: States) -> None:
        """Remembers the present settings."""
        self._made = [
            tuple(group[name] for name in _SHAPING)
            if any(has_entries(states.get(p, {})) for p in group["params"])
            else None
            for group in groups
        ]

    def check(
        self, groups: Sequence[Settings], states: States, name: Name, fresh: Container[Tensor] = ()
    ) -> None:
        """Refuses changed settings, unless ``fresh`` states replace all old statistics."""
        for number, (group, made) in enumerate(zip(groups, self._made, strict=False)):
            changed = [
                (option, before)
                for option, before in zip(_SHAPING, made or (), strict=False)
                if group[option] != before
            ]
            has = has_statistics if fresh else has_entries
            params = group["params"] if changed else []
            if old := [p for p in params if has(states.get(p, {})) and p not in fresh]:
                option, before = changed[0]
                raise RuntimeError(
                    f"{option} must be set before the first step, and group {number} had "
                    f"{before!r}, got {group[option]!r}: set it back, or call warm_start with "
                    f"outputs that reach all its parameters, among them {name(old[0])}"
                )


def _addresses(states: States) -> list[int]:
    return [*map(id, states), *map(id, states.values())]


def _tensors(state: Settings) -> list[Tensor]:
    return [entry for entry in state.values() if isinstance(entry, Tensor) and entry.dim()]


def _check_dtype(param: Tensor, state: Settings, name: Name) -> None:
    kept = [state["momentum"]] if "momentum" in state else state.get("stats", [])
    if kept and kept[0].dtype != state_dtype(param):
        raise RuntimeError(
            f"the state of {name(param)} must be {state_dtype(param)} for {param.dtype}, got "
            f"{kept[0].dtype}: after model.double() call opt.load_state_dict(opt.state_dict())"
        )


def _check_gradient(param: Tensor, gradient: Tensor, name: Name) -> None:
    local = param
    if is_sharded(param) and not is_sharded(gradient):
        local = param.to_local()  # type: ignore[attr-defined]
    wanted, got = ((tuple(t.shape), state_dtype(t), t.device) for t in (local, gradient))
    if got != wanted:
        raise RuntimeError(
            f"the gradient of {name(param)} must fit its {param.dtype} on {param.device}, got "
            f"{gradient.dtype} of shape {tuple(gradient.shape)} on {gradient.device}: the "
            "parameter has changed since the backward; call zero_grad() and run it again"
        )
