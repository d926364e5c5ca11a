"""The entries of a parameter's state. ``SPEC`` is their only definition.

New states, the tensors that each process keeps, the check of a checkpoint, the addresses of CUDA
graphs and the memory estimate follow from this table. A parameter's state has all of these entries
or none: they are made with its first statistics. Only a master copy may come later. A parameter
that is not preconditioned has no statistics, and factors of ones; its ``first_step`` is None. A
state that is only allocated has all entries, and counts as no state. Entries under other names
belong to a wrapper (a lookahead's slow weights): they stay.
"""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tnt_optim.modes import Settings, State, is_half, is_plain, layout_for, state_dtype
from tnt_optim.units import units_of

Shapes = list[tuple[int, ...]]


def _identity(*shape: int, **like: Any) -> Tensor:
    return torch.eye(*shape, **like) if len(shape) == 2 else torch.ones(*shape, **like)


# How many refreshes of statistics and factors failed: in total, and the latest in a row.
COUNTERS = ("skipped_statistics", "skipped_in_a_row", "failed_inverses", "failed_in_a_row")

# The ``first_step`` of a state that was only allocated: zeros stand for its statistics. First
# statistics replace it, as if there were no state.
ALLOCATED = -1

# Shapes of an entry. NUMBER has none. MODES: a list with a tensor for each mode of each block,
# (d, d) or (d,). VIEW: one tensor of the mode sizes. PARAMETER: one of the parameter's shape.
NUMBER, MODES, VIEW, PARAMETER = "number", "modes", "view", "parameter"


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    name: str
    shape: str = NUMBER  # tensors are float32, or float64 for float64 parameters
    needs: tuple[str, str] | None = None  # the option and its value with which the entry exists
    half_only: bool = False  # whether only parameters in half precision have it
    owner_only: tuple[str, ...] = ()  # values of ``shard`` with which only the owner rank keeps it
    survives: bool = False  # whether ``warm_start`` leaves it as it is
    counts: bool = False  # whether it counts updates; CUDA graphs go on counting in a tensor
    start: Callable[[Settings], Any] = lambda group: 0  # the first value of a number
    fill: Callable[..., Tensor] = torch.zeros  # makes new tensors
    column: str = ""  # where the memory estimate counts it

    def exists(self, param: Tensor, group: Settings) -> bool:
        """Whether a parameter with these settings has it."""
        if self.needs is not None and group[self.needs[0]] != self.needs[1]:
            return False
        return is_half(param) or not self.half_only

    def shapes(self, param: Tensor, group: Settings, plain: bool) -> Shapes:
        """The shapes of its tensors; ``plain``: the parameter is not preconditioned."""
        if self.shape == MODES and plain:
            return layout_for(param, group).statistic_shapes(0) if self.name == "factors" else []
        if self.shape == MODES:
            shapes = layout_for(param, group).statistic_shapes(group["max_factor_dim"])
            spectra = self.name == "factors" and "units" in group and group["units"].has_spectra
            return [*shapes, layout_for(param, group).sizes] if spectra else shapes
        if self.shape == VIEW:
            return [layout_for(param, group).sizes]
        return [tuple(param.shape)]

    def nbytes(self, param: Tensor, group: Settings) -> int:
        """The bytes of its tensors."""
        if self.shape == NUMBER or not self.exists(param, group):
            return 0
        shapes = self.shapes(param, group, is_plain(param, group))
        return sum(map(math.prod, shapes)) * state_dtype(param).itemsize


_ADAM = ("graft", "adam")
_DIRECTIONS = ("directions",)

# The parameter in float32.
_MASTER = Entry(
    "master", PARAMETER, ("rounding", "master"), half_only=True, survives=True, column="master"
)

SPEC = (
    # How the modes are cut, and the step of the first statistics.
    Entry("block_size", start=lambda group: group["block_size"] and int(group["block_size"])),
    Entry("first_step", start=lambda group: group["step"]),
    *(Entry(name) for name in COUNTERS),
    # Momentum m and the number of its updates; the same for Adam's second moment.
    Entry("updates", counts=True, survives=True),
    Entry("momentum", VIEW, owner_only=_DIRECTIONS, survives=True, column="moments"),
    Entry("second_moment_updates", needs=_ADAM, counts=True, survives=True),
    Entry("second_moment", VIEW, _ADAM, owner_only=_DIRECTIONS, survives=True, column="moments"),
    _MASTER,
    # Statistics S_i, the moving averages of (whitened) Gram matrices of the gradient's unfoldings,
    # and factors A_i, which the method computes from them (TNT: damped inverses).
    Entry("stats", MODES, owner_only=("directions", "inverses"), column="stats"),
    Entry("factors", MODES, owner_only=_DIRECTIONS, column="factors", fill=_identity),
)
NAMES = frozenset(entry.name for entry in SPEC)
TENSORS = tuple(entry.name for entry in SPEC if entry.shape != NUMBER)
COUNTS = tuple(entry.name for entry in SPEC if entry.counts)
SURVIVES = tuple(entry.name for entry in SPEC if entry.survives)


def kept_names(shard: str | None, is_owner: bool) -> frozenset[str]:
    """The entries of a parameter's state that a process keeps."""
    return frozenset(e.name for e in SPEC if is_owner or shard not in e.owner_only)


def owned_bytes(param: Tensor, group: Settings, shard: str) -> int:
    """The bytes of a parameter's statistics, factors, and entries that only its owner keeps."""
    entries = [e for e in SPEC if e.shape == MODES or shard in e.owner_only]
    return sum(entry.nbytes(param, group) for entry in entries)


def statistic_shapes(param: Tensor, group: Settings) -> Shapes:
    """The shapes of a parameter's statistics: none if it is not preconditioned."""
    if is_plain(param, group):
        return []
    return layout_for(param, group).statistic_shapes(group["max_factor_dim"])


def zero_statistics(param: Tensor, group: Settings) -> list[Tensor]:
    """Zeros for the statistics of a parameter."""
    shapes = layout_for(param, group).statistic_shapes(group["max_factor_dim"])
    return [torch.zeros(s, dtype=state_dtype(param), device=param.device) for s in shapes]


def has_entries(state: Settings) -> bool:
    """Whether a parameter's state has the optimizer's entries; a wrapper may have written some."""
    return not NAMES.isdisjoint(state)


def has_statistics(state: Settings) -> bool:
    """Whether a state has statistics, here or at the parameter's owner rank."""
    first_step: int | None = state.get("first_step")
    return first_step is not None and first_step != ALLOCATED


def new_state(
    param: Tensor, group: Settings, kept: Container[str], *, plain: bool = False, stats: Any = None
) -> State:
    """A new state with the entries in ``kept``; ``plain``: the parameter is not preconditioned.

    ``stats`` are the statistics. Without them the state is only allocated, unless ``plain``.
    """
    state: State = {}
    like: dict[str, Any] = {"dtype": state_dtype(param), "device": param.device}
    for entry in SPEC:
        if entry.name not in kept or not entry.exists(param, group):
            continue
        if entry.shape == NUMBER:
            state[entry.name] = entry.start(group)
        elif entry.shape == PARAMETER:
            add_master(state, param, group)
        elif entry.name == "stats" and stats is not None:
            state[entry.name] = stats
        else:
            tensors = [entry.fill(*shape, **like) for shape in entry.shapes(param, group, plain)]
            state[entry.name] = tensors if entry.shape == MODES else tensors[0]
    if plain or stats is None:
        state["first_step"] = None if plain else ALLOCATED
    return state


def add_master(state: State, param: Tensor, group: Settings) -> None:
    """Adds the master copy if it is missing, for example since the dtype has changed."""
    if _MASTER.exists(param, group) and _MASTER.name not in state:
        state[_MASTER.name] = param.detach().to(dtype=state_dtype(param), copy=True)


def check_keys(name: str, state: Settings, keys: set[str]) -> None:
    """Refuses a saved state that lacks one of ``keys``."""
    missing = sorted(keys - set(state))
    if missing:
        raise ValueError(f"{name} lacks {missing}; is it another optimizer's?")


def check_state(
    name: str, state: Settings, group: Settings, param: Tensor, kept: Container[str]
) -> None:
    """Refuses a saved state that does not fit the parameter.

    It may hold more entries than this process keeps. Entries that need no option must be there.
    Entries that need the same option must be there together.
    """
    has = {entry.needs for entry in SPEC if entry.name in state} | {None}
    wanted = [entry for entry in SPEC if entry.needs in has and entry.name in kept]
    missing = {entry.name for entry in wanted} - state.keys()
    numbers = {entry.name for entry in wanted if entry.shape == NUMBER}
    if missing and not missing & numbers:
        raise ValueError(
            f"{name} lacks {sorted(missing)}: is it damaged, or one process's part, saved with "
            "shard or fully_shard? Save the whole state after consolidate_state_dict() in all "
            "processes, or load the parts with torch.distributed.checkpoint, after "
            "allocate_state()"
        )
    check_keys(name, state, missing)
    for entry in wanted:
        if entry.shape != NUMBER:
            _check_tensors(name, entry, state, group, param)
        else:
            _check_number(name, entry, state[entry.name])


def _check_number(name: str, entry: Entry, value: Any) -> None:
    is_scalar = isinstance(value, Tensor) and value.dim() == 0
    may_be_none = entry.name in ("block_size", "first_step")
    is_number = is_scalar or (isinstance(value, Real) and 0 <= float(value) < math.inf)
    is_number |= entry.name == "first_step" and value == ALLOCATED
    if not (is_number or (value is None and may_be_none)):
        raise ValueError(f"{name}: {entry.name} must be a finite number >= 0, got {value!r}")


def _check_tensors(
    name: str, entry: Entry, state: Settings, group: Settings, param: Tensor
) -> None:
    plain = state["first_step"] is None
    tensors = state[entry.name] if entry.shape == MODES else [state[entry.name]]
    if not isinstance(tensors, list) or not all(isinstance(t, Tensor) for t in tensors):
        raise ValueError(f"{name}: {entry.name} must be made of tensors")
    got, wanted = [tuple(tensor.shape) for tensor in tensors], entry.shapes(param, group, plain)
    if entry.shape != MODES and got != wanted:
        raise ValueError(
            f"{name}: the {entry.name} must be {wanted[0]} for a parameter of shape "
            f"{tuple(param.shape)}, got {got[0]}; is it of another model?"
        )
    sizes = group["block_size"], state["block_size"]
    if entry.shape == MODES and (got != wanted or sizes[0] != sizes[1]):
        raise ValueError(
            f"{name}: {entry.name} must have shapes {wanted} with max_factor_dim="
            f"{group['max_factor_dim']} and block_size={sizes[0]}, got {got} with "
            f"block_size={sizes[1]}"
        )


def memory_estimate(
    groups: Sequence[Settings],
    kept: Callable[[Tensor], Container[str]],
    name: Callable[[Tensor], str],
) -> dict[str, Any]:
    """The bytes of each parameter's state, and of all; see ``TNT.memory_estimate``."""
    rows: list[dict[str, Any]] = []
    total, units = 0, units_of(groups)
    for group in groups:
        for param in group["params"]:
            if units.key(param) is not param or not units.is_trainable(param):
                continue
            nbytes = dict.fromkeys(("stats", "factors", "moments", "master"), 0)
            held = kept(param)
            for entry in SPEC:
                if entry.column and entry.name in held:
                    nbytes[entry.column] += entry.nbytes(param, group)
            row = {"name": name(param), "shape": tuple(param.shape)}
            rows.append({**row, "statistics": statistic_shapes(param, group), **nbytes})
            total += sum(nbytes.values())
    return {"parameters": rows, "total": total}
