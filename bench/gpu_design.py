"""``python -m bench.gpu_design``: what would refute the design of the GPU kernels, in five minutes.

Each line has a measured number, the limit that it must keep, and PASS or FAIL. PyTorch's profiler
gives the times of kernels. All other times are those of replayed CUDA graphs, with a flushed L2
cache, or of eager calls. The record is written after every line.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tnt_kernels import gram_ema_, mode_products, reference
from tnt_kernels.benchmark.clock import alternate, ratios
from tnt_kernels.benchmark.comparison import OURS, captured, engine, relative_error
from tnt_kernels.benchmark.inputs import (
    TensorSet,
    generator,
    in_float64,
    normal,
    poisoned,
    symmetric_modes,
)
from tnt_kernels.benchmark.limits import matmul_precision
from tnt_kernels.benchmark.operators import OPERATORS
from tnt_kernels.benchmark.provenance import provenance
from tnt_kernels.benchmark.records import check_writable, write_json
from tools.measuring.parameter_sets import PARAMETER_SETS

# Sizes of 128-tiles, of odd tiles, short modes, vectors, three modes.
SHAPES = (
    *((128, 128), (256, 384), (1000, 784), (625, 2000), (129, 625), (70, 37), (1, 300)),
    *((64, 64, 9), (16, 3, 9), (9, 512), (50257, 16), (768,), (5, 6, 7, 8), (4097, 130)),
)
SIZES = (1024, 2048, 4096, 8192)
SETS = ("mnist_ae", "resnet32", "faces_ae", "vgg16", "gpt2_full", "square4096")
SET_OPERATORS = ("gram_ema_", "gram_ema_ whitened", "mode_products", "preconditioned_step_")
EAGER = ("scaled_step_", "preconditioned_step_", "gram_ema_")
PRECISIONS = {"highest": "3xTF32", "high": "TF32"}
ERRORS = {"highest": 1e-4, "high": 2e-3}
# Useful TFLOP/s: a Gram matrix counts one triangle. From the measured rates of the same loop.
RATES = {("gram", "highest"): 72.0, ("gram", "high"): 220.0, ("product", "highest"): 72.0}

# What `damped_inverse` took as a graph before its products were packed, milliseconds, on an H200
# (results/gpu/operators.json).
INVERSES_BEFORE = {"mnist_ae": 1.31, "gpt2_full": 48.3, "square4096": 6.73}


@dataclass(frozen=True)
class Line:
    """One measured number; without a limit it is for information."""

    section: str
    what: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def said(self) -> str:
        """PASS, FAIL, or nothing without a limit."""
        if self.at_least is None and self.at_most is None:
            return ""
        enough = self.at_least is None or self.value >= self.at_least
        return "PASS" if enough and (self.at_most is None or self.value <= self.at_most) else "FAIL"

    def __str__(self) -> str:
        limit = f">= {self.at_least:g}" if self.at_least is not None else ""
        limit = f"<= {self.at_most:g}" if self.at_most is not None else limit
        return f"{self.said:4}  {self.what:58}  {self.value:10.3g} {self.unit:8} {limit}"


def errors(device: torch.device) -> Iterator[Line]:
    """Gram matrices and products against the reference in float64."""
    rng = generator(device)
    for precision, limit in ERRORS.items():
        with matmul_precision(precision):
            for shape in SHAPES:
                one = TensorSet("one", (shape,))
                tensors, (stats,) = normal([shape], rng), poisoned(symmetric_modes(one, rng))
                factors, wide = symmetric_modes(one, rng), [tensors[0].double()]
                (grams,) = poisoned(in_float64([stats]))
                gram_ema_([stats], tensors, 0.0)
                reference.gram_ema_([grams], wide, 0.0)
                products = mode_products(tensors, factors)
                exact = reference.mode_products(wide, in_float64(factors))
                for name, found, expected in (
                    ("gram_ema_", stats, grams),
                    ("mode_products", products, exact),
                ):
                    what = f"{name} {tuple(shape)}, {PRECISIONS[precision]}"
                    error = relative_error(found, expected)
                    yield Line("errors", what, error, "", at_most=limit)


def loops(device: torch.device) -> Iterator[Line]:
    """The kernels themselves on one square matrix: TFLOP/s of the products, TB/s of the packs."""
    for size in SIZES:
        square = TensorSet("square", ((size, size),))
        for precision, label in PRECISIONS.items():
            with matmul_precision(precision):
                for name, kernel, operations in (
                    ("gram_ema_", "gram", 2 * size**2 * (size + 1)),
                    ("mode_products", "product", 4 * size**3),
                ):
                    run = OPERATORS[name].problem(square, device).candidates[0].run
                    seconds = kernel_seconds(run, device)
                    what = f"{name} {size}, {label}"
                    if f"{kernel}_kernel" in seconds:  # else cuBLAS multiplies
                        rate = operations / seconds[f"{kernel}_kernel"] / 1e12
                        least = RATES.get((kernel, precision)) if size >= 2048 else None
                        yield Line("loops", what, rate, "TFLOP/s", at_least=least)
                    if "pack_kernel" in seconds:
                        parts = 2 if precision == "highest" else 1
                        moved = 4 * size**2 * (1 + parts) * (2 if kernel == "gram" else 3)
                        rate = moved / seconds["pack_kernel"] / 1e12
                        least = 2.0 if size >= 4096 else None
                        yield Line("loops", f"{what}: packs", rate, "TB/s", at_least=least)


def kernel_seconds(
    run: Callable[[], object], device: torch.device, runs: int = 10
) -> dict[str, float]:
    """Seconds of each kernel in one run, the mean of several back to back."""
    if device.type != "cuda":
        return {}
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total / 1e6 / runs for event in profiled.key_averages()
    }


def cublas(device: torch.device) -> Iterator[Line]:
    """PyTorch's own products in TF32; the rule of ``triton/cublas.py`` needs the first to win."""
    size = max(SIZES) // 2
    a, b, g = normal([(size, size)] * 3, generator(device))
    square = TensorSet("square", ((size, size),))
    ours = OPERATORS["mode_products"].problem(square, device).candidates[0]
    with matmul_precision("high"):
        runs: dict[str, Callable[[], object]] = {
            "mm TN": lambda: a @ b.mT,
            "mm NN": lambda: a @ b,
            "mm NT": lambda: a.mT @ b,
            "A @ G @ B": lambda: a @ g @ b,
            "addmm_ (Gram)": lambda: a.addmm_(g, g.mT, beta=0.9),
            f"mode_products ({engine(ours.run, device)})": ours.run,
        }
        for name, samples in _timed(runs, device).items():
            products = 2 if name.startswith(("A @", "mode")) else 1
            rate = products * 2 * size**3 / statistics.median(samples) / 1e12
            yield Line("cuBLAS", f"{name}, {size}, TF32", rate, "TFLOP/s")


def sets(device: torch.device) -> Iterator[Line]:
    """Graphs of operators on whole models: the best of plain PyTorch over ours."""
    for name in SETS:
        for precision, label in PRECISIONS.items():
            for operator in SET_OPERATORS:
                with matmul_precision(precision):
                    yield _ratio("sets", name, operator, label, device, captured, 1.05)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def inverses(device: torch.device) -> Iterator[Line]:
    """``damped_inverse`` as a graph against the kernels before."""
    for name, before in INVERSES_BEFORE.items():
        run = OPERATORS["damped_inverse"].problem(PARAMETER_SETS[name], device).candidates[0].run
        samples = _timed({OURS: captured(run) if device.type == "cuda" else run}, device)[OURS]
        milliseconds = 1e3 * statistics.median(samples)
        yield Line("inverses", f"damped_inverse, {name}", milliseconds, "ms")
        ratio = before / milliseconds
        yield Line("inverses", f"damped_inverse, {name}: before over now", ratio, "times", 1.5)


def eager(device: torch.device) -> Iterator[Line]:
    """Eager calls against plain PyTorch, and what they take the host."""
    for name in ("resnet32", "mnist_ae"):
        for operator in EAGER:
            least = 1.0 if operator != "gram_ema_" else None
            yield _ratio("eager", name, operator, "3xTF32", device, lambda run: run, least)
            problem = OPERATORS[operator].problem(PARAMETER_SETS[name], device)
            run = problem.candidates[0].run
            run()
            start = time.perf_counter()
            for _ in range(50):
                run()
            micros = (time.perf_counter() - start) / 50 * 1e6
            yield Line("eager", f"{operator}, {name}: the host", micros, "us")


def _ratio(
    section: str,
    name: str,
    operator: str,
    label: str,
    device: torch.device,
    prepare: Callable[[Callable[[], object]], Callable[[], object]],
    least: float | None,
) -> Line:
    problem = OPERATORS[operator].problem(PARAMETER_SETS[name], device)
    candidates = [c for c in problem.candidates if c.graph or section == "eager"]
    on_gpu = device.type == "cuda"
    runs = {c.name: prepare(c.run) if on_gpu else c.run for c in candidates}
    samples = _timed(runs, device)
    best = min((n for n in samples if n != OURS), key=lambda n: statistics.median(samples[n]))
    ratio = statistics.median(ratios(samples[best], samples[OURS]))
    what = f"{operator}, {name}, {label}: {best} over ours"
    return Line(section, what, ratio, "times", at_least=least)


def _timed(
    runs: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, list[float]]:
    return alternate(runs, seconds=1.0, min_rounds=7, max_rounds=30, device=device)


SECTIONS: dict[str, Callable[[torch.device], Iterator[Line]]] = {
    "errors": errors,
    "loops": loops,
    "cuBLAS": cublas,
    "sets": sets,
    "inverses": inverses,
    "eager": eager,
}


def main() -> None:
    """Measures; the exit status is 1 if a line fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_design", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the record, FILE.json")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--seconds", type=float, default=300.0, help="no section begins later")
    options = parser.parse_args()
    out = check_writable(options.out)
    rows: list[dict[str, Any]] = []
    start, failed = time.monotonic(), 0
    record: dict[str, Any] = {"provenance": provenance(options.device), "rows": rows}
    for name, section in SECTIONS.items():
        if time.monotonic() - start > options.seconds:
            print(f"      {name}: not measured, the time is up", flush=True)
            continue
        try:
            for line in section(options.device):
                print(line, flush=True)
                failed += line.said == "FAIL"
                rows.append({**asdict(line), "said": line.said})
                record["seconds"] = time.monotonic() - start
                write_json(out, record)
        except Exception as error:  # the other sections go on
            failed += 1
            rows.append({"section": name, "error": str(error)})
            print(f"FAIL  {name}: {error}", flush=True)
            write_json(out, record)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    with torch.no_grad():
        main()
