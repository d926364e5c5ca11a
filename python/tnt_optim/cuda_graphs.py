"""Steps as CUDA graphs: the device's part of a step, recorded once for each kind and replayed.

There are few kinds of steps: with nothing due, with statistics, with statistics and factors. The
first of a kind runs without a graph, which also compiles kernels and plans launches. The second is
recorded. From then on a step is one launch. A graph reads and writes fixed addresses: gradients at
other addresses are copied first, and a graph is recorded again when parameters or state were
replaced. Numbers that may change between steps are device tensors. A kind that cannot be recorded
runs without a graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tnt_optim.autograd import Gradients
from tnt_optim.failures import Report
from tnt_optim.messages import warn_the_caller
from tnt_optim.modes import Batch, Group, Settings, States
from tnt_optim.options import OPTIONS, as_number, as_they_are
from tnt_optim.state import TENSORS

NUMBERS = ("lr", "damping", "momentum", "stat_decay", "weight_decay")

# Settings of a group that a recorded graph cannot change: all but numbers and schedule.
_CHANGING = (*NUMBERS, "stat_interval", "inverse_interval", "interval_warmup", "modes")
_FIXED = tuple(o.name for o in OPTIONS.values() if o.per_group and o.name not in _CHANGING)

# The most graphs of an optimizer; further kinds of steps run without one. A model has many kinds if
# different parameters have gradients at different steps.
MOST_GRAPHS = 16


@dataclass(kw_only=True)
class Recordable(ABC):
    """What ``StepGraphs`` reads and replaces of a ``step.Step``."""

    statistics: list[Batch]
    factors: list[Batch]
    updated: list[Batch]
    observed: Mapping[Tensor, Any]
    grads: Gradients
    states: States
    settings: Callable[[Group], Settings] = as_they_are

    @abstractmethod
    def recorded(self) -> list[Report]:
        """Calls all that the step calls, for a graph that records it."""


StepT = TypeVar("StepT", bound=Recordable)


@dataclass
class Recorded:
    """A kind of step, and its graph once it has one."""

    addresses: tuple[int, ...]
    kept: list[Any]  # keeps the addresses in use
    replay: Callable[[], None] | None = None
    reports: list[Report] = field(default_factory=list)


class StepGraphs:
    """The graphs of one optimizer's steps."""

    def __init__(self) -> None:
        self._recorded: dict[tuple[Any, ...], Recorded] = {}
        self._gradients: dict[tuple[str, Tensor], Tensor] = {}
        self._owners: dict[int, Tensor] = {}  # address of a gradient -> parameter
        self._numbers: dict[tuple[int, str], tuple[Any, Tensor]] = {}
        self._refused: set[tuple[Any, ...]] = set()  # kinds that could not be recorded

    def replayed(self, step: StepT) -> tuple[StepT, list[Report] | None]:
        """The step with fixed addresses and numbers, and its reports if a graph has run it.

        Raises while another graph is recorded: that graph would hold one kind of step only.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() with capturable=True records graphs of its own, and cannot be part of "
                "another graph: call it after that graph's replay"
            )
        for group, params in _batches(step):
            self._send_numbers(group, params[0].device)
        kind = _kind(step)
        recorded = self._recorded.get(kind)
        no_room = recorded is None and len(self._recorded) >= MOST_GRAPHS
        if not step.updated or kind in self._refused or no_room:
            return replace(step, settings=self._settings), None
        # Fixed copies from the first step on: launch plans depend on the gradients' strides.
        observed = self._fixed("observed", step.observed)
        grads = self._fixed("grads", {p: g for p, g in step.grads.items() if g is not None})
        fixed = replace(step, observed=observed, grads=grads, settings=self._settings)
        addresses, kept = _addresses(step)
        if recorded is None or recorded.addresses != addresses:
            self._recorded[kind] = Recorded(addresses, kept)
            return fixed, None
        if recorded.replay is None:
            return fixed, self._record(kind, fixed)
        recorded.replay()
        return fixed, recorded.reports

    def _record(self, kind: tuple[Any, ...], step: Recordable) -> list[Report] | None:
        """Records a step and replays it; None for a kind that cannot be recorded."""
        recorded = self._recorded.pop(kind)  # until its graph has worked
        param = step.updated[0][1][0]
        try:
            replay, reports = record(step.recorded, param.device)
        except Exception as error:
            self._refused.add(kind)
            # After an error in a capture, ending the capture raises a second, less useful one.
            why = error.__context__ or error
            warn_the_caller(
                f"{_described(step)} cannot be captured in a CUDA graph ({why}): they run "
                "without one"
            )
            return None
        updates = int(step.states[param]["updates"])
        replay()
        if int(step.states[param]["updates"]) != updates + 1:
            raise RuntimeError(
                f"the CUDA graph of {_described(step)} updates nothing: set capturable=False"
            )
        self._recorded[kind] = replace(recorded, replay=replay, reports=reports)
        return reports

    def _settings(self, group: Group) -> Settings:
        """The group's settings, with device tensors in place of ``NUMBERS``."""
        numbers = {name: self._numbers[id(group), name][1] for name in NUMBERS}
        return {**group, **numbers}

    def _send_numbers(self, group: Group, device: torch.device) -> None:
        for name in NUMBERS:
            value, key = group[name], (id(group), name)
            if key not in self._numbers:
                self._numbers[key] = (None, torch.zeros((), dtype=torch.float64, device=device))
            sent, tensor = self._numbers[key]
            if isinstance(value, Tensor):
                tensor.copy_(as_number(value), non_blocking=True)
                self._numbers[key] = (None, tensor)
            elif sent != value:
                tensor.fill_(value)
                self._numbers[key] = (value, tensor)

    def _fixed(self, name: str, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The gradients at the fixed addresses that the graphs read."""
        for p, g in gradients.items():
            if (name, p) not in self._gradients:
                self._gradients[name, p] = g if self._may_overwrite(p, g) else torch.empty_like(g)
        fixed = {p: self._gradients[name, p] for p in gradients}
        others = [p for p, g in gradients.items() if fixed[p] is not g]
        if others:
            torch._foreach_copy_([fixed[p] for p in others], [gradients[p] for p in others])
        return fixed

    def _may_overwrite(self, param: Tensor, gradient: Tensor) -> bool:
        """Whether later gradients may overwrite it: autograd's may be shared or expanded."""
        if gradient is not param.grad or torch._debug_has_internal_overlap(gradient) != 0:
            return False
        return self._owners.setdefault(gradient.data_ptr(), param) is param


def record(
    run: Callable[[], list[Report]], device: torch.device
) -> tuple[Callable[[], None], list[Report]]:
    """Records the launches of ``run`` on a device without running them.

    Returns the replay and the results. The current device and streams stay what they were.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        # A stream of this device: PyTorch's default one is of the first device with a graph.
        stream = torch.cuda.Stream()
        try:
            # Other threads, such as a data loader's, may allocate meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                reports = run()
        finally:
            # torch.cuda.graph leaves its stream the current one if the end of the capture fails.
            torch.cuda.set_stream(before)
    return graph.replay, reports


def check_graphs_device(param: Tensor, others: list[Tensor]) -> None:
    """Refuses a parameter that is not on the same CUDA device as the others."""
    if not param.is_cuda or any(other.device != param.device for other in others):
        where = {str(p.device) for p in (param, *others)}
        raise ValueError(
            "capturable=True needs all parameters on one CUDA device, got "
            f"{', '.join(sorted(where))}"
        )


def _batches(step: Recordable) -> list[Batch]:
    return [*step.statistics, *step.factors, *step.updated]


def _kind(step: Recordable) -> tuple[Any, ...]:
    batches = (step.statistics, step.factors, step.updated)
    members = tuple(
        tuple((id(group), *map(id, params)) for group, params in batch) for batch in batches
    )
    return *members, tuple(tuple(group[name] for name in _FIXED) for group, _ in _batches(step))


def _described(step: Recordable) -> str:
    due = {"statistics": step.statistics, "factors": step.factors}
    refreshed = " and ".join(name for name, batches in due.items() if batches)
    return f"steps that refresh {refreshed or 'nothing'}"


def _addresses(step: Recordable) -> tuple[tuple[int, ...], list[Any]]:
    """The addresses of parameters and state that the step reads and writes, and their holders."""
    params = {id(p): p for _, batch in _batches(step) for p in batch}
    kept: list[Any] = []
    addresses = []
    for param in params.values():
        state = step.states[param]
        tensors = [state[name] for name in TENSORS if name in state]
        kept += [param, *tensors]
        addresses += [param.data_ptr(), *map(id, tensors)]
    return tuple(addresses), kept
