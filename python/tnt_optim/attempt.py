"""How a step that raises, for example for lack of memory, can be repeated.

Every call that writes allocates its memory first, and the optimizer records what was written. A
repeated step refreshes no statistics twice, and finishes an update that had begun.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Stage = Callable[[], None]


class Stages:
    """A sequence of calls, each of which does all of its work or raises before it changes anything.

    After an error, ``run`` goes on with the call that raised.

    Args:
        stages: the calls.
        resumable: whether the caller can go on after an error; several processes cannot.
        is_started: whether the update itself has run, and only its reports are left.

    Attributes:
        is_started: whether a call has returned, and the remaining ones can be made later.
    """

    def __init__(
        self, stages: Iterable[Stage], *, resumable: bool = True, is_started: bool = False
    ) -> None:
        self._waiting, self._resumable = deque(stages), resumable
        self.is_started = is_started

    def run(self) -> None:
        """Makes the calls that have not returned yet."""
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()
            self.is_started = self._resumable


@dataclass
class Attempt:
    """What failed attempts at a step have done; the next attempt goes on from there."""

    # Parameters whose statistics have this step's observations, and whose factors are refreshed.
    accumulated: set[Tensor] = field(default_factory=set)
    inverted: set[Tensor] = field(default_factory=set)
    update: Stages | None = None  # None until the update begins

    def finish(self, update: Stages) -> None:
        """Runs the stages that change parameters, and what must follow then."""
        self.update = update
        update.run()

    def stop(self, error: BaseException, params: Iterable[Tensor]) -> None:
        """Decides how the next step goes on after an error in this one."""
        # An interrupt may come in the middle of a stage.
        if self.update is None or not self.update.is_started or not isinstance(error, Exception):
            self.update = None
            return
        # The update still needs these gradients: a backward before it ends must not change them.
        for param in params:
            param.grad = None

    def forget(self) -> None:
        """Starts anew, for the next step."""
        self.accumulated.clear()
        self.inverted.clear()
        self.update = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "update": None}  # a copy cannot have the gradients
