"""Which faults befall which steps of a soak: drawn from a seed, before it starts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Numerical faults belong to a step: it suffers them whenever it is taken.
NAN = "a NaN in the sampled gradient of one process"
NEGATIVE = "a statistic that is negative definite"
# The others befall the soak once, and end all of its processes.
KILL_ONE = "SIGKILL of one process"
KILL_ALL = "SIGKILL of all processes"
KILL_SAVING = "SIGKILL of one process during a checkpoint"
KILL_ALL_SAVING = "SIGKILL of all processes during a checkpoint"
ERRORS = {
    f"an exception in {place} of one process": place
    for place in ("observe", "the statistics", "the factors", "the update")
}
RESIZE = "a planned restart"

NUMERICAL = (NAN, NEGATIVE)
KILLS = (KILL_ONE, KILL_ALL)
KILLS_SAVING = (KILL_SAVING, KILL_ALL_SAVING)
KINDS = (*NUMERICAL, *KILLS, *KILLS_SAVING, *ERRORS, RESIZE)


@dataclass(frozen=True)
class Fault:
    """What befalls a step.

    Attributes:
        step: which, from 0.
        kind: one of ``KINDS``.
        who: in [0, 1), of all processes or parameters: there may be any number of them.
        when: in [0, 1), of the time that a step, or a checkpoint, takes.
    """

    step: int
    kind: str
    who: float
    when: float


@dataclass(frozen=True)
class Schedule:
    """When what is done: every so many steps."""

    statistics: int
    factors: int
    checkpoints: int

    def saves_after(self, step: int, steps: int) -> bool:
        """Whether there is a checkpoint after a step; never after the last one."""
        return (step + 1) % self.checkpoints == 0 and step + 1 < steps


def draw(seed: int, steps: int, faults: int, schedule: Schedule) -> list[Fault]:
    """Draws so many faults, of all kinds in turn, each of a step of its own, as far as they fit.

    Args:
        seed: of the draws.
        steps: of the soak.
        faults: how many.
        schedule: a fault befalls only steps at which what it is of takes place.
    """
    rng = random.Random(seed)
    # The first factors are made at the first step: what fails there has nothing to go on with.
    free = set(range(1, steps - 1))
    places = {kind: _places(kind, free, steps, schedule) for kind in KINDS}
    drawn: list[Fault] = []
    deck: list[str] = []
    for _ in range(faults):
        deck = deck or rng.sample(KINDS, len(KINDS))
        kind = deck.pop()
        open_places = [step for step in places[kind] if step in free]
        if open_places:
            step = rng.choice(open_places)
            free.discard(step)
            drawn.append(Fault(step, kind, rng.random(), rng.random()))
    return sorted(drawn, key=lambda fault: fault.step)


def at(faults: Iterable[Fault], step: int, kinds: Sequence[str]) -> Fault | None:
    """The fault of one of some kinds that befalls a step."""
    return next((f for f in faults if f.step == step and f.kind in kinds), None)


def _places(kind: str, free: set[int], steps: int, schedule: Schedule) -> list[int]:
    place = ERRORS.get(kind)
    if kind in (NEGATIVE,) or place == "the factors":
        return sorted(step for step in free if step % schedule.factors == 0)
    if kind == NAN or place in ("observe", "the statistics"):
        return sorted(step for step in free if step % schedule.statistics == 0)
    if kind in KILLS_SAVING:
        return sorted(step for step in free if schedule.saves_after(step, steps))
    return sorted(free)
