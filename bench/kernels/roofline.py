"""``python -m bench.kernels.roofline``: what the GPU kernels' plans should take, on paper.

For every parameter set and GPU: a predicted time of each operator, from the launches that would be
made (``planned_work.py``) and a handful of rates (``devices.py``), beside the floor that flops and
bytes set. These are predictions of a model with assumed constants, not measurements. Writes
``roofline.json`` and ``roofline.md``.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.kernels.devices import GPUS, PRECISIONS, Gpu
from bench.kernels.planned_inverses import (
    ITERATIONS,
    LIBRARY_SHARE,
    damped_inverse_launches,
    inverse_root_launches,
    root_flops,
)
from bench.kernels.planned_inverses import RESIDENT as RESIDENT_INVERSES
from bench.kernels.planned_work import (
    RESIDENT,
    Diagonal,
    LaunchWork,
    Views,
    gram_launches,
    momentum_launches,
    product_launches,
)
from bench.kernels.work import gram_work, inverse_work, products_work, step_work
from tools.measuring.parameter_sets import PARAMETER_SETS, ParameterSet
from tools.measuring.provenance import provenance
from tools.measuring.records import write_json

# The six sets; of GPT-2 all twelve blocks, which a GPU has room for.
SETS = ("mnist_ae", "faces_ae", "resnet32", "vgg16", "gpt2_full", "square4096")
OPERATORS = ("gram_ema_", "mode_products", "preconditioned_step_")
# Those whose products do not follow PyTorch's switch, and how they are made.
INVERSES = {"damped_inverse": "ffma", "inverse_root": "tf32x3"}

# Assumptions, nowhere measured: seconds.
GRAPH_LAUNCH = 1.5e-6  # from one kernel of a replayed graph to the next
EAGER_LAUNCH = 20e-6  # of the host, for each launch from Python
# Tile, problem, address, first data, and at the end address, old value, store: each waits for the
# one before, 0.2 to 0.6 us each.
PROGRAM_LATENCY = 2.0e-6
# A read from the second-level cache, some 270 cycles with two steps under way, and the barriers and
# the product of one step that four warps cannot hide.
STEP_LATENCY = 0.2e-6


@dataclass(frozen=True)
class Floors:
    """The least time that bytes and flops allow, seconds, each by itself.

    As kernels.md counts: of ``gram_ema_`` the tensor read once for every mode and N d flops for a
    mode of d rows (one triangle); of the others every input read and every output written once.
    """

    memory: float
    tf32x3: float
    tf32: float
    bf16: float
    ffma: float

    def of(self, precision: str) -> float:
        """The later of memory and products in one precision."""
        return max(self.memory, float(getattr(self, precision)))


@dataclass(frozen=True)
class LaunchTime:
    """One launch on one device, seconds.

    Attributes:
        kernel: its name.
        programs: how many.
        waves: of programs that are resident together.
        steps: of all programs.
        done: flops of its products, those of whole tiles; 0 where it has none.
        useful: flops that the result needs.
        imbalance: steps of the busiest multiprocessor over the mean.
        flops: time of the products, on the busiest multiprocessor.
        cache: time of the bytes through the second-level cache.
        memory: time of the bytes of device memory.
        latency: time of the longest row of programs that wait for each other.
    """

    kernel: str
    programs: int
    waves: int
    steps: int
    done: int
    useful: int
    imbalance: float
    flops: float
    cache: float
    memory: float
    latency: float

    @property
    def binds(self) -> str:
        """Which of the four it is."""
        return max(("flops", "cache", "memory", "latency"), key=lambda name: getattr(self, name))

    @property
    def seconds(self) -> float:
        """In a graph."""
        return float(GRAPH_LAUNCH + getattr(self, self.binds))


@dataclass(frozen=True)
class Prediction:
    """One operator on one parameter set and device."""

    set: str
    operator: str
    device: str
    precision: str
    launches: tuple[LaunchTime, ...]
    floors: Floors

    @property
    def seconds(self) -> float:
        """As a graph's replay."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def eager_seconds(self) -> float:
        """Launched one by one from Python: no faster than the host launches."""
        return max(self.seconds, EAGER_LAUNCH * len(self.launches))

    @property
    def floor(self) -> float:
        """In the same precision."""
        return self.floors.of(self.precision)

    @property
    def ratio(self) -> float:
        """Of the prediction to the floor."""
        return self.seconds / self.floor

    def shares(self) -> dict[str, float]:
        """What the time goes to: seconds of launches, flops, cache, memory and latency."""
        found = {"launches": GRAPH_LAUNCH * len(self.launches)}
        for launch in self.launches:
            at = launch.binds
            found[at] = found.get(at, 0.0) + launch.seconds - GRAPH_LAUNCH
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def binds(self) -> str:
        """What most of the time goes to."""
        return next(iter(self.shares()))


def padding(launches: Iterable[LaunchTime]) -> float:
    """Flops of whole tiles over those needed, of all products; 0 where there are none."""
    products = [launch for launch in launches if launch.done]
    useful = sum(launch.useful for launch in products)
    return sum(launch.done for launch in products) / useful if useful else 0.0


def floors(views: Views, diagonal: Diagonal, operator: str, gpu: Gpu) -> Floors:
    """The floors of ``OPERATORS`` and of ``INVERSES``."""
    if operator == "gram_ema_":
        numbers = [math.prod(view) for view in views]
        again = sum(4 * n * (len(view) - 1) for n, view in zip(numbers, views, strict=True))
        moved = gram_work(views, diagonal).bytes + again
        flops = sum(
            n * (2 if flat else d)
            for n, view, kinds in zip(numbers, views, diagonal, strict=True)
            for d, flat in zip(view, kinds, strict=True)
        )
    elif operator == "inverse_root":
        moved, flops = inverse_work(views, diagonal).bytes, root_flops(views, diagonal)
    else:
        counted = {
            "mode_products": products_work,
            "preconditioned_step_": step_work,
            "damped_inverse": inverse_work,
        }
        work = counted[operator](views, diagonal)
        moved, flops = work.bytes, work.useful_flops
    rates = {name: flops / gpu.rate(name) for name in (*PRECISIONS, "bf16", "ffma")}
    return Floors(moved / gpu.memory, **rates)


def predict(
    parameter_set: ParameterSet, operator: str, gpu: Gpu, precision: str = "tf32x3"
) -> Prediction:
    """Predicts one operator on all parameters of a set, float32, all statistics refreshed.

    Args:
        parameter_set: the parameters.
        operator: one of ``OPERATORS`` or ``INVERSES``.
        gpu: the device.
        precision: one of ``PRECISIONS``; the inverses have one of their own.
    """
    operators = (*OPERATORS, *INVERSES)
    if operator not in operators or precision not in PRECISIONS:
        raise ValueError(
            f"operator must be one of {operators} and precision one of {PRECISIONS}, got "
            f"{operator!r} and {precision!r}"
        )
    precision = INVERSES.get(operator, precision)
    views, diagonal = parameter_set.views, parameter_set.diagonal
    works = planned(parameter_set, operator, gpu)
    return Prediction(
        parameter_set.name,
        operator,
        gpu.name,
        precision,
        tuple(timed(work, gpu, precision) for work in works),
        floors(views, diagonal, operator, gpu),
    )


@functools.lru_cache(maxsize=128)
def planned(parameter_set: ParameterSet, operator: str, gpu: Gpu) -> tuple[LaunchWork, ...]:
    """The launches of one operator."""
    views, diagonal = parameter_set.views, parameter_set.diagonal
    if operator == "inverse_root":
        return tuple(inverse_root_launches(views, diagonal, gpu.multiprocessors, gpu.cache))
    if operator == "damped_inverse":
        return tuple(damped_inverse_launches(views, diagonal, gpu.multiprocessors))
    if operator == "gram_ema_":
        return tuple(gram_launches(views, diagonal, gpu.multiprocessors, gpu.cache))
    update = operator == "preconditioned_step_"
    first = momentum_launches(views, gpu.multiprocessors) if update else []
    rest = product_launches(views, diagonal, gpu.multiprocessors, gpu.cache, update=update)
    return (*first, *rest)


def timed(work: LaunchWork, gpu: Gpu, precision: str) -> LaunchTime:
    """What one launch takes; what overlaps within it is taken to overlap perfectly."""
    steps = work.steps.tolist()
    slots = gpu.multiprocessors * (RESIDENT | RESIDENT_INVERSES)[work.kernel]
    busiest = longest(steps, gpu.multiprocessors)
    rate = gpu.rate(precision if work.matrix else "ffma")
    total = sum(steps)
    return LaunchTime(
        kernel=work.kernel,
        programs=len(steps),
        waves=-(-len(steps) // slots),
        steps=total,
        done=total * work.step_flops if work.matrix else 0,
        useful=work.useful,
        imbalance=busiest * gpu.multiprocessors / max(total, 1),
        flops=busiest * work.step_flops * gpu.multiprocessors / rate,
        cache=work.cache / gpu.cache_rate,
        memory=work.memory / gpu.memory,
        latency=longest([PROGRAM_LATENCY + STEP_LATENCY * n for n in steps], slots),
    )


def longest(tasks: Sequence[float], workers: int) -> float:
    """When the last task ends, each started in order by whoever is free first.

    >>> longest([3, 1, 1, 1], 2)
    3
    """
    ends: list[float] = [0] * min(workers, len(tasks))
    for task in tasks:
        heapq.heapreplace(ends, ends[0] + task)
    return max(ends, default=0)


def main() -> None:
    """Predicts everything and writes the page."""
    # Here, not above: the page needs this module.
    from bench.kernels.roofline_page import page

    parser = argparse.ArgumentParser(prog="python -m bench.kernels.roofline", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench/results"))
    options = parser.parse_args()
    origin = provenance()
    predictions = [
        predict(PARAMETER_SETS[name], operator, gpu, precision)
        for gpu in GPUS.values()
        for operator in OPERATORS
        for name in SETS
        for precision in PRECISIONS
    ]
    predictions += [
        predict(PARAMETER_SETS[name], operator, gpu)
        for gpu in GPUS.values()
        for operator in INVERSES
        for name in SETS
    ]
    record = {
        "what": "Predictions of a model. Nothing here was measured on a GPU.",
        "provenance": origin,
        "assumptions": {
            "graph_launch": GRAPH_LAUNCH,
            "eager_launch": EAGER_LAUNCH,
            "program_latency": PROGRAM_LATENCY,
            "step_latency": STEP_LATENCY,
            "resident_programs": RESIDENT | RESIDENT_INVERSES,
            "newton_iterations": ITERATIONS,
            "library_share": LIBRARY_SHARE,
        },
        "devices": [asdict(gpu) for gpu in GPUS.values()],
        "predictions": [
            {
                **asdict(p),
                "seconds": p.seconds,
                "eager_seconds": p.eager_seconds,
                "floor": p.floor,
                "ratio": p.ratio,
                "shares": p.shares(),
            }
            for p in predictions
        ],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / "roofline.json", record)
    path = options.output / "roofline.md"
    path.write_text(page(origin, predictions), encoding="utf-8")
    print(f"{len(predictions)} predictions: {path}")


if __name__ == "__main__":
    main()
