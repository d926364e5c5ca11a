"""The one clock of all comparisons: candidates alternate, in an order that rotates by round.

All candidates then run at the same clock frequency, with warm thread pools, and no candidate always
follows the same other one. On a GPU a sample starts on an idle device with a flushed L2 cache and
ends when the device is idle again, so it includes the launches.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

MIN_ROUNDS, MAX_ROUNDS = 3, 50
# Larger than the L2 cache of any GPU; triton.testing.do_bench flushes as much.
LEAST_FLUSHED = 256 << 20

Run = Callable[[], object]
Item = TypeVar("Item")


def now(device: torch.device | str = "cpu") -> float:
    """Seconds of the host's clock, read when the device is idle."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """Times single runs on one device.

    Args:
        device: where the runs compute. On "cuda" every sample is taken between two CUDA events.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0)
            size = max(LEAST_FLUSHED, 4 * cache)
            self._flushed = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def prepare(self) -> None:
        """On a GPU: flush the L2 cache and wait until the device is idle."""
        if self.device.type == "cuda":
            self._flushed.zero_()
            torch.cuda.synchronize(self.device)

    def __call__(self, run: Run) -> float:
        """Seconds of one run."""
        self.prepare()
        return self.timed(run)

    def timed(self, run: Run) -> float:
        """Seconds of one run after ``prepare``."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        self._start.record()
        run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


def alternate(
    candidates: Mapping[str, Run],
    *,
    seconds: float,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    setup: Callable[[str], object] | None = None,
    device: torch.device | str = "cpu",
    deadline: float = math.inf,
) -> dict[str, list[float]]:
    """Time every candidate once a round; a different candidate starts each round.

    Each candidate first runs once or twice untimed. `samples[name][i]` of two names belong to the
    same round, so ratios are taken round by round.

    Args:
        candidates: by name. A candidate runs on its own copies of the tensors that it changes.
        seconds: for all rounds together, between `min_rounds` and `max_rounds` of them.
        min_rounds: at least 1.
        max_rounds: not less than `min_rounds`.
        setup: gets the name of the candidate before each of its runs, untimed.
        device: where the candidates compute.
        deadline: of `time.monotonic()`. No round starts after it; if the untimed runs ended after
            it, they are the only round.

    Returns:
        The seconds of each round, by candidate.
    """
    stopwatch = Stopwatch(device)

    def sample(name: str) -> float:
        if setup is not None:
            setup(name)
        return stopwatch(candidates[name])

    warm: dict[str, list[float]] = {}
    for name in candidates:
        # The first run also has page faults and cold caches, which dominate a short run.
        first = sample(name)
        warm[name] = [first if first > 0.5 else sample(name)]
    if time.monotonic() > deadline:
        return warm
    took = sum(second for (second,) in warm.values())
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with no_collection():
        for round_ in range(rounds_for(took, seconds, min_rounds, max_rounds)):
            if round_ and time.monotonic() > deadline:
                break
            for name in rotated(names, round_):
                samples[name].append(sample(name))
    return samples


@contextmanager
def no_collection() -> Iterator[None]:
    """Stops garbage collection, which would add to the time of one candidate only."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rounds_for(
    round_seconds: float,
    seconds: float,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
) -> int:
    """How many rounds fit in `seconds`, within the bounds.

    >>> rounds_for(0.5, 2.0), rounds_for(10.0, 2.0), rounds_for(1e-6, 2.0)
    (4, 3, 50)
    """
    return min(max_rounds, max(min_rounds, math.ceil(seconds / max(round_seconds, 1e-9))))


def rotated(candidates: Sequence[Item], turns: int) -> list[Item]:
    """The same candidates, starting with the one at `turns`.

    >>> rotated("abc", 4)
    ['b', 'c', 'a']
    """
    start = turns % max(len(candidates), 1)
    return [*candidates[start:], *candidates[:start]]


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and number of the samples; at least one sample.

    >>> summary([3.0, 1.0, 2.0])
    {'median': 2.0, 'quartiles': [1.5, 2.5], 'rounds': 3}
    """
    known = [*samples] * (2 if len(samples) == 1 else 1)
    lower, median, upper = statistics.quantiles(known, n=4, method="inclusive")
    return {"median": median, "quartiles": [lower, upper], "rounds": len(samples)}


def ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round, the seconds of one candidate over those of another."""
    return [sample / reference for sample, reference in zip(samples, base, strict=True)]


def busy_share(seconds: float = 1.0) -> float | None:
    """Share of all cores that other processes use during a sleep; None if the system counts none.

    Times taken next to another busy process mean little: two threads wait for each other in every
    parallel region, so the method with more of them looks slower.
    """
    try:
        before = _processor_times()
        time.sleep(seconds)
        spent = [new - old for old, new in zip(before, _processor_times(), strict=True)]
    except OSError:
        return None
    idle = spent[3] + spent[4]  # idle, and waiting for input or output
    return 1 - idle / max(sum(spent), 1)


def _processor_times() -> list[int]:
    line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    return [int(word) for word in line.split()[1:9]]  # later columns are part of the first ones
