"""How the operators' times and the optimizers' states grow with d and k, next to Table 2.

Table 2 of Ren & Goldfarb 2021 gives sum d prod d for statistics and update, sum d^3 for inverses
and roots. Each sweep times one operator on one tensor of k modes of size d. A time is the least of
several; an exponent is the slope of its logarithm over that of the abscissa. States are counted
after one step on such a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Annotated, Any

from tools.measuring.packages import require_bench

require_bench()

import torch
import typer
from torch import nn
from tqdm import tqdm

from tnt_kernels import damped_inverse, gram_ema_, inverse_root, preconditioned_step_
from tnt_kernels.benchmark.clock import Run, Stopwatch, alternate
from tnt_kernels.benchmark.inputs import (
    TensorSet,
    generator,
    gram_statistics,
    normal,
    poisoned,
    symmetric_modes,
)
from tnt_kernels.benchmark.report import new_record, origin, write
from tnt_kernels.benchmark.tables import milliseconds, table
from tnt_optim import KFAC, TNT, Shampoo
from tools.measuring.state import state_bytes

DAMPING = 0.1
K_SIZE = 32  # of each mode in the sweeps over k
SAMPLE_SECONDS = 0.01
# A time below this multiple of the smallest size's time is mostly the fixed cost of the call.
LAUNCH_FACTOR = 3.0
LEAST_POINTS = 3
WITHIN = 0.15  # largest distance of a fitted exponent from the predicted one


@dataclass(frozen=True)
class Sweep:
    """One operator over one variable."""

    part: str  # the operator's part of the method
    term: str  # its cost in Table 2
    predicted: float  # exponent of the abscissa
    values: Sequence[int]  # of the variable, increasing
    # The least value that a fit may use, chosen beforehand: below it products have not reached the
    # flat part of the BLAS's rate, or the tensors fit into a cache.
    fit_from: int
    prepare: Callable[[TensorSet, torch.device], Run]  # makes the timed call for one value
    k: int | None  # modes of the tensor in a sweep over d; None in a sweep over k

    @property
    def variable(self) -> str:
        """The name of the abscissa."""
        return "k d^(k+1)" if self.k is None else "d"

    def abscissa(self, value: int) -> float:
        """What the fitted power is a power of."""
        return float(value * K_SIZE ** (value + 1) if self.k is None else value)

    def shape(self, value: int) -> TensorSet:
        """The tensor for one value."""
        d, k = (K_SIZE, value) if self.k is None else (value, self.k)
        return TensorSet(f"{d}^{k}", ((d,) * k,))


def statistics(shape: TensorSet, device: torch.device) -> Run:
    """Refresh the statistics."""
    rng = generator(device)
    tensors, stats = normal(shape.views, rng), symmetric_modes(shape, rng)
    return lambda: gram_ema_(stats, tensors, 0.9)


def inverses(shape: TensorSet, device: torch.device) -> Run:
    """Refresh the inverses."""
    stats = gram_statistics(shape, generator(device))
    out = poisoned(stats)
    return lambda: damped_inverse(stats, DAMPING, out)


def roots(shape: TensorSet, device: torch.device) -> Run:
    """Refresh the inverse roots."""
    stats = gram_statistics(shape, generator(device))
    out = poisoned(stats)
    orders = [2 * len(view) for view in shape.views]
    return lambda: inverse_root(stats, DAMPING, orders, out)


def update(shape: TensorSet, device: torch.device) -> Run:
    """Update the parameter."""
    rng = generator(device)
    weights, momenta, grads = (normal(shape.views, rng) for _ in range(3))
    factors = symmetric_modes(shape, rng)
    return lambda: preconditioned_step_(weights, momenta, grads, factors, 1e-3, 0.9, 0.0)


_SMALL = (16, 32, 64, 128, 256)
_D3 = (8, 16, 32, 64, 128, 256, 384, 512, 576, 640)
_D2 = (*_SMALL, 512, 1024, 1536, 2048, 3072, 4096)
_INVERSES = (*_SMALL, 512, 1024, 2048, 4096, 5120, 6144, 8192)
_PRODUCTS, _FACTORS = "sum d prod d", "sum d^3"
SWEEPS = (
    Sweep("statistics", _PRODUCTS, 3, _D2, 1536, statistics, 2),
    Sweep("statistics", _PRODUCTS, 4, _D3, 512, statistics, 3),
    Sweep("update", _PRODUCTS, 3, (*_SMALL, 512, 768, 1024, 1536, 2048), 512, update, 2),
    Sweep("update", _PRODUCTS, 4, _D3, 384, update, 3),
    Sweep("inverses", _FACTORS, 3, _INVERSES, 5120, inverses, 2),
    Sweep("roots", _FACTORS, 3, (*_SMALL, 384, 512, 768, 1024), 256, roots, 2),
    Sweep("statistics", _PRODUCTS, 1, (1, 2, 3, 4, 5), 3, statistics, None),
    Sweep("update", _PRODUCTS, 1, (1, 2, 3, 4, 5), 3, update, None),
)


def measured(sweep: Sweep, device: torch.device, seconds: float) -> dict[str, Any]:
    """The times of one sweep, ``seconds`` for each value, and their exponent."""
    runs: dict[str, Run] = {}
    calls = []  # in one sample, so that it takes a hundredth of a second
    stopwatch = Stopwatch(device)
    for value in sweep.values:
        call = sweep.prepare(sweep.shape(value), device)
        call()
        calls.append(min(1000, max(1, math.ceil(SAMPLE_SECONDS / stopwatch(call)))))
        runs[str(value)] = _repeated(call, calls[-1])
    samples = alternate(runs, seconds=seconds * len(runs), device=device)
    times = [min(samples[name]) / count for name, count in zip(runs, calls, strict=True)]
    return fitted(sweep, times)


def _repeated(call: Run, count: int) -> Run:
    def run() -> None:
        for _ in range(count):
            call()

    return run


def fitted(sweep: Sweep, times: Sequence[float]) -> dict[str, Any]:
    """The row of a sweep with known times."""
    used = [
        (value, time)
        for value, time in zip(sweep.values, times, strict=True)
        if value >= sweep.fit_from and time >= LAUNCH_FACTOR * times[0]
    ]
    return {
        "part": sweep.part,
        "over": sweep.variable + ("" if sweep.k is None else f", k = {sweep.k}"),
        "term": sweep.term,
        "predicted": sweep.predicted,
        "fitted": exponent([(sweep.abscissa(value), time) for value, time in used]),
        "fitted_values": [value for value, _ in used],
        "values": list(sweep.values),
        "seconds": list(times),
    }


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of the logarithms by least squares; None with too few points."""
    if len(points) < LEAST_POINTS:
        return None
    xs, ys = zip(*((math.log2(x), math.log2(y)) for x, y in points), strict=True)
    return linear_regression(xs, ys).slope


MEMORY = [(method, k) for k in (1, 2, 3) for method in ("TNT", "Shampoo", "Adam")] + [("KFAC", 2)]
MEMORY_D = (2, 4, 8)  # the count is exact at any size


def counted(method: str, k: int) -> dict[str, Any]:
    """The state of one tensor of k modes beyond SGD-m's, and what Table 2 says, at every d.

    Both statistics and inverses count. Adam has one more number for each parameter.
    """
    return {
        "method": method,
        "k": k,
        "term": "prod d" if method == "Adam" else "sum d^2",
        "values": list(MEMORY_D),
        "bytes": [_beyond_momentum(method, d, k) for d in MEMORY_D],
        "formula_bytes": [4 * (d**k if method == "Adam" else 2 * k * d**2) for d in MEMORY_D],
    }


def _beyond_momentum(method: str, d: int, k: int) -> int:
    weight = nn.Parameter(torch.randn((d,) * k))
    weight.grad = torch.randn_like(weight)
    optimizer: torch.optim.Optimizer
    match method:
        case "TNT":
            optimizer = TNT.paper([weight], likelihood=None)
        case "Shampoo":
            optimizer = Shampoo.paper([weight])
        case "Adam":
            optimizer = torch.optim.Adam([weight])
        case _:
            layer = nn.Linear(d, d, bias=False)
            layer.weight = weight
            optimizer = KFAC.paper(layer, likelihood="gaussian")
            optimizer.observe(layer(torch.randn(1, d)))
    optimizer.step()
    return state_bytes(optimizer) - weight.nbytes


def page(record: Mapping[str, Any]) -> str:
    """The page of a record."""
    header = ["time of", "cost in Table 2", "over", "predicted", "fitted", ""]
    header += ["fitted range (points)", "slowest point, ms"]
    times = [
        [
            *(row["part"], row["term"], row["over"], f"{row['predicted']:g}"),
            "" if row["fitted"] is None else f"{row['fitted']:.2f}",
            _agreement(row),
            _span(row["fitted_values"]),
            milliseconds(max(row["seconds"])),
        ]
        for row in record["rows"]
    ]
    memory_header = ["state of", "modes", "size in Table 2", "d", "bytes", "by the formula"]
    memory = [
        [row["method"], row["k"], row["term"]]
        + [", ".join(map(str, row[name])) for name in ("values", "bytes", "formula_bytes")]
        for row in record["memory"]
    ]
    text = [
        "# Complexity of the operators",
        "",
        *origin(record),
        "Table 2 of Ren & Goldfarb 2021 on one tensor of k modes of size d. An exponent agrees if "
        f"it is within {WITHIN} of the predicted one. The fit leaves out sizes below the first one "
        f"of the fit, chosen beforehand, and times below {LAUNCH_FACTOR:g} times that of the "
        f"smallest size: a call's fixed cost. No exponent from fewer than {LEAST_POINTS} points.",
        "",
        *table(header, times),
        "States are what an optimizer keeps beyond the momentum of SGD-m.",
        "",
        *table(memory_header, memory),
    ]
    return "\n".join(text).rstrip() + "\n"


def _agreement(row: Mapping[str, Any]) -> str:
    if row["fitted"] is None:
        return "too few points"
    return "agrees" if abs(row["fitted"] - row["predicted"]) <= WITHIN else "**off**"


def _span(values: Sequence[int]) -> str:
    return f"{values[0]} to {values[-1]} ({len(values)})" if values else ""


def main(
    out: Annotated[Path, typer.Option(help="the record; its page next to it")] = Path(
        "results/complexity.json"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seconds: Annotated[float, typer.Option(help="for each size")] = 0.3,
    threads: Annotated[int | None, typer.Option(help="(default: PyTorch's own)")] = None,
) -> None:
    """Measure how the operators' times and the optimizers' states grow with d and k."""
    if threads:
        torch.set_num_threads(threads)
    record = new_record(out, device, seconds=seconds)
    record["memory"] = [counted(method, k) for method, k in MEMORY]
    for sweep in tqdm(SWEEPS, "complexity", disable=None):
        record["rows"].append(measured(sweep, torch.device(device), seconds))
    write(out, record, page)
    typer.echo(f"wrote {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    typer.run(main)
