"""Failures found on the device, counted on the host without waiting for the device.

A refresh of statistics or inverses leaves a code for each parameter on the device, 0 for success.
The codes are copied to the host in the background and read when they have arrived: at once on the
CPU, one step late on a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_optim.messages import names_of, warn_the_caller
from tnt_optim.state import COUNTERS

# A parameter whose refreshes fail this many times in a row stops the training with an error.
FAILURES_IN_A_ROW = 5


class PreconditionerError(RuntimeError):
    """Refreshes of statistics or inverses failed the first time, or several times in a row."""


class Delivery:
    """A copy of a device tensor to the host, in the background."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # A copy to memory that is not pinned would wait for the device.
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> bool:
        """Whether the codes can be read without waiting."""
        return self._arrived is None or self._arrived.query()

    def codes(self) -> list[int]:
        """The codes; waits for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [int(code) for code in self._host.tolist()]


@dataclass(frozen=True)
class Report:
    """The outcome of a refresh.

    Attributes:
        kind: "statistics" or "inverses".
        codes: one for each parameter, on the device or as a ``Delivery``: 0 for success, else
            nonzero; for inverses the part that failed, counted from 1.
        params: the parameters.
    """

    kind: str
    codes: Any
    params: Sequence[Tensor]


class Failures:
    """Reports of refreshes that have not been read yet.

    Failures are counted in the parameters' own states, and saved and loaded with them.

    Args:
        parts: names of the parts of a parameter that have inverses; by default its modes.
    """

    def __init__(self, parts: Sequence[str] = ()) -> None:
        self._parts = parts
        self._pending: list[Report] = []

    def report(self, report: Report) -> None:
        """Adds the outcome of a refresh, whose codes are delivered."""
        self._pending.append(report)

    def read(
        self,
        states: Mapping[Tensor, dict[str, Any]],
        name: Callable[[Tensor], str],
        *,
        wait: bool = False,
        fatal: bool = True,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Counts the reports that have arrived (with ``wait``: all) in ``states``, and warns.

        If ``fatal``, a parameter that failed FAILURES_IN_A_ROW times in a row is an error. Messages
        name parameters of ``groups`` that are not finite.
        """
        error = None
        while self._pending and (wait or self._pending[0].codes.arrived()):
            report = self._pending.pop(0)
            kind, params = report.kind, report.params
            total, in_a_row = COUNTERS[:2] if kind == "statistics" else COUNTERS[2:]
            failed = []
            for code, param in zip(report.codes.codes(), params, strict=True):
                state = states[param]
                state[total] += code != 0
                state[in_a_row] = state[in_a_row] + 1 if code != 0 else 0
                if code != 0:
                    failed.append((state[in_a_row], code, param))
            if failed:
                worst, code, param = max(failed, key=lambda entry: entry[0])
                more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
                message = _MESSAGES[kind].format(part=self._part(code), name=name(param) + more)
                if worst >= FAILURES_IN_A_ROW and fatal:
                    message += f"; time {worst} in a row: stopping"
                    error = PreconditionerError(message + diverged(groups))
                else:
                    warn_the_caller(message + diverged(groups))
        if error is not None:
            raise error

    def totals(
        self, states: Mapping[Tensor, dict[str, Any]], name: Callable[[Tensor], str]
    ) -> dict[str, int]:
        """How many refreshes failed; waits for the device. See ``TNT.failures``."""
        self.read(states, name, wait=True, fatal=False)
        skipped = [state["skipped_statistics"] for state in states.values()]
        failed = [state["failed_inverses"] for state in states.values()]
        return {"skipped_statistics": max(skipped, default=0), "failed_inverses": sum(failed)}

    def first_inverse(self, code: int, name: str, damping: Any) -> PreconditionerError:
        """The error for a parameter whose first inverse failed."""
        return PreconditionerError(
            f"{self._part(code)} of {name} could not be inverted, and there is no earlier inverse "
            f"to go on with; damping is {damping}"
        )

    def _part(self, code: int) -> str:
        return self._parts[code - 1] if self._parts else f"mode {code - 1}"


_MESSAGES = {
    "statistics": "a gradient for the statistics is not finite: they are not refreshed, for {name}",
    "inverses": "{part} could not be inverted: its earlier inverse stays in use, for {name}",
}


def diverged(groups: Sequence[Mapping[str, Any]]) -> str:
    """The end of a message: which parameters are not finite. The host reads all of them."""
    bad = [
        (name, index, group["lr"])
        for index, group in enumerate(groups)
        for name, param in zip(names_of(group), group["params"], strict=False)
        if not getattr(param, "to_local", lambda p=param: p)().isfinite().all()
    ]
    if not bad:
        return ""
    named = ", ".join(f"{name!r} of group {i} with lr={float(lr):g}" for name, i, lr in bad[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return (
        f". Training has diverged: parameters {named}{more} are not finite. Go back to a "
        "checkpoint and lower lr"
    )
