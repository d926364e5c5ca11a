"""Timing candidates that alternate: with CUDA events, eagerly and as replays of a CUDA graph.

Eagerly, a run begins on an idle device with a cold second-level cache, and ends when the device is
done: the caller's wall time, launches included. As a graph, the same with one launch for all: what
the device alone takes. On a CPU (in the tests of this) the host's clock serves, without graphs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from bench.kernels.timing import Candidate, rotated, rounds_for, summary

WARM_UPS = 2
# Beyond the cache of any GPU: 256 MiB, as ``triton.testing.do_bench``, or four times the cache.
LEAST_FLUSHED = 256 << 20

Run = Callable[[], object]


class NotCaptured(Exception):
    """A run that no CUDA graph can hold, and why."""


class Clock(Protocol):
    """Times one run on one device."""

    def seconds(self, run: Run) -> float:
        """Of one run, from an idle device to an idle device."""

    def graph(self, run: Run) -> Run:
        """A replay of ``run``; raises NotCaptured."""


class HostClock:
    """For the CPU."""

    def seconds(self, run: Run) -> float:
        """By the host's clock."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def graph(self, run: Run) -> Run:
        """Always raises NotCaptured."""
        raise NotCaptured("the CPU has no graphs")


class EventClock:
    """For a GPU: CUDA events, a flushed cache."""

    def __init__(self, device: torch.device) -> None:
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        size = max(LEAST_FLUSHED, 4 * cache)
        self._flushed = torch.empty(size, dtype=torch.uint8, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, run: Run) -> float:
        """Between two events; the host begins when the device is idle."""
        self._flushed.zero_()
        torch.cuda.synchronize()
        self._start.record()
        run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def graph(self, run: Run) -> Run:
        """Captures ``run``, after two warm-ups on the stream beside, as PyTorch wants it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except Exception as error:
            # Raises, and ends the stage, where the failed capture has left the device unusable.
            torch.cuda.synchronize()
            torch.zeros((), device=self._flushed.device).item()
            first_line = (str(error).splitlines() or [""])[0]
            raise NotCaptured(f"{type(error).__name__}: {first_line}"[:200]) from error
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay


def clock_of(device: torch.device) -> Clock:
    """The one for this device."""
    return EventClock(device) if device.type == "cuda" else HostClock()


def alternating(
    clock: Clock, runs: Mapping[str, Run], seconds: float
) -> dict[str, dict[str, object]]:
    """Times ``runs`` in turn, another one first in every round; at least 3 rounds, at most 50.

    Returns:
        For each, median, quartiles and samples in seconds.
    """
    if not runs:
        return {}
    for _ in range(WARM_UPS):
        took = {name: clock.seconds(run) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = [Candidate(name, run, list) for name, run in runs.items()]
    gc.collect()
    gc.disable()  # a collection in the middle would be one candidate's alone
    try:
        for turn in range(rounds_for(sum(took.values()), seconds)):
            for candidate in rotated(order, turn):
                samples[candidate.name].append(clock.seconds(candidate.run))
    finally:
        gc.enable()
    return {name: summary(times) for name, times in samples.items()}


def captured(
    clock: Clock, candidates: Sequence[Candidate], refused: Mapping[str, str]
) -> tuple[dict[str, Run], dict[str, str]]:
    """The candidates' graphs, and why some have none.

    Args:
        clock: captures.
        candidates: what to capture.
        refused: name -> why it is not even tried: a failed capture may disturb what follows.
    """
    graphs: dict[str, Run] = {}
    why = {c.name: refused[c.name] for c in candidates if c.name in refused}
    for candidate in candidates:
        if candidate.name in why:
            continue
        try:
            graphs[candidate.name] = clock.graph(candidate.run)
        except NotCaptured as reason:
            why[candidate.name] = str(reason)
    return graphs, why
