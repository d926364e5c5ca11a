"""``python -m tools.host_time``: what eager calls on a GPU cost the host, measured without a GPU.

The host's path of a GPU runs on CPU tensors: checks, keys, plans, tables of addresses, scalars and
the choice of compiled kernels. Kernels are compiled for sm_90 and not started. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import tnt_kernels
from tnt_kernels import calls, lists
from tnt_kernels.benchmark.clock import no_collection
from tnt_kernels.benchmark.provenance import provenance
from tnt_kernels.benchmark.records import check_writable, write_json
from tnt_kernels.benchmark.tables import table
from tnt_kernels.triton import launch
from tnt_optim import TNT
from tools.compile_report.machine_code import no_device
from tools.measuring.parameter_sets import PARAMETER_SETS

CAPABILITY = 90
SETS = ("resnet32", "mnist_ae")
REPEATS, ROUNDS = 20, 50


class _Stub:
    """A compiled kernel that does not start."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        _, _, _ = grid  # as Triton unpacks it
        return lambda *arguments: None


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within it, operators take the host's path of a GPU with CPU tensors, and compute nothing."""
    compile_ = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> _Stub:
        compile_(self, *arguments, grid=grid, warmup=True, **constants)
        return _Stub()

    def walked(given: list[Any]) -> list[Any]:
        return [
            lists.walked(a) if isinstance(a, list) and a and isinstance(a[0], Tensor) else a
            for a in given
        ]

    driver.set_active(no_device(CAPABILITY))
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(launch, "_compiled", {}),
        mock.patch.object(calls, "all_on_cpu", lambda given: False),
        mock.patch.object(calls, "_walked", walked),
    ):
        yield


def cases(name: str) -> dict[str, Callable[[], object]]:
    """The calls for one set of parameters; each has run once."""
    random = torch.Generator().manual_seed(0)
    shapes = PARAMETER_SETS[name].views
    params, grads, momenta, squares, out = (
        [torch.randn(shape, generator=random) for shape in shapes] for _ in range(5)
    )
    factors, stats = ([[torch.eye(d) for d in shape] for shape in shapes] for _ in range(2))
    counts = torch.ones(len(params), 2, dtype=torch.float64)
    weights = [nn.Parameter(param.clone()) for param in params]
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
    optimizer = TNT(weights, stat_interval=1 << 20, inverse_interval=1 << 20, early_roots=False)
    found: dict[str, Callable[[], object]] = {
        "scaled_step_": lambda: tnt_kernels.scaled_step_(params, grads, 0.1, 0.01),
        "gram_ema_": lambda: tnt_kernels.gram_ema_(stats, grads, 0.9),
        "preconditioned_step_": lambda: tnt_kernels.preconditioned_step_(
            params, momenta, grads, factors, 0.1, 0.9, 0.01
        ),
        "grafted_directions_": lambda: tnt_kernels.grafted_directions_(
            momenta, grads, factors, 0.9, squares, counts, out=out
        ),
        "TNT(params).step(), nothing due": optimizer.step,
    }
    optimizer.step()  # on the CPU: the first statistics and inverses are made of numbers
    return found


def microseconds(call: Callable[[], object]) -> float:
    """The median of rounds of repeated calls."""
    rounds = []
    with no_collection():
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(REPEATS):
                call()
            rounds.append((time.perf_counter() - start) / REPEATS * 1e6)
    return statistics.median(rounds)


def main() -> None:
    """Measures, prints a table and writes the record."""
    parser = argparse.ArgumentParser(prog="python -m tools.host_time", description=__doc__)
    default = Path(__file__).parents[1] / "bench" / "results" / "host_time.json"
    parser.add_argument("--out", type=Path, default=default, help="the record")
    out = check_writable(parser.parse_args().out)
    torch.set_num_threads(1)
    rows = []
    for name in SETS:
        given = cases(name)
        with as_on_a_gpu():
            for call, run in given.items():
                run()
                row = {"set": name, "call": call, "us": round(microseconds(run), 1)}
                rows.append(row)
    record = {"provenance": provenance(), "capability": CAPABILITY, "rows": rows}
    write_json(out, record)
    cells = [[r["set"], r["call"], f"{r['us']:.0f}"] for r in rows]
    sys.stdout.write("\n".join(table(["set", "call", "microseconds"], cells)) + "\n")


if __name__ == "__main__":
    main()
