"""The predictions of the roofline model as a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.kernels.devices import GPUS, PRECISIONS
from bench.kernels.planned_inverses import ITERATIONS, LIBRARY_SHARE
from bench.kernels.planned_work import RESIDENT
from bench.kernels.roofline import (
    EAGER_LAUNCH,
    GRAPH_LAUNCH,
    INVERSES,
    OPERATORS,
    PROGRAM_LATENCY,
    SETS,
    STEP_LATENCY,
    Prediction,
    floors,
    padding,
)
from tools.measuring.parameter_sets import PARAMETER_SETS
from tools.measuring.tables import table

MUCH = 1.5  # times its floor: then it is said what the time goes to
SMALL = 0.1  # of a prediction: not mentioned
PADDED = 1.3  # flops of whole tiles over the needed ones

_SAID = {"cache": "L2", "flops": "products"}


def microseconds(seconds: float) -> str:
    """Three significant digits, all digits before the point.

    >>> microseconds(1.234e-5), microseconds(0.0012345), microseconds(1.5e-7)
    ('12.3', '1234', '0.15')
    """
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def explained(p: Prediction) -> str:
    """What a prediction far above its floor goes to; empty where it is near it."""
    if p.ratio <= MUCH:
        return ""
    parts = [
        f"{_SAID.get(name, name)} {100 * seconds / p.seconds:.0f} %"
        for name, seconds in p.shares().items()
        if seconds >= SMALL * p.seconds
    ]
    if padding(p.launches) > PADDED:
        parts.append(f"tiles {padding(p.launches):.1f}×")
    return ", ".join(parts)


def page(origin: dict[str, Any], predictions: Sequence[Prediction]) -> str:
    """The whole page."""
    found = {(p.operator, p.set, p.device, p.precision): p for p in predictions}
    commit = (origin["commit"] or "unknown")[:12] + (" with changes" if origin["dirty"] else "")
    lines = [
        "# What the GPU kernels should take: a model, not a measurement",
        "",
        "**Every time on this page is a prediction. Nothing on it was measured on a GPU.** Of the "
        "constants below, those marked as assumed were chosen, not measured either.",
        "",
        f"Commit {commit}, {origin['date'][:10]}; `{origin['command']}`.",
        "",
        "The launches are those of the launchers' own plans, made for each GPU's number of "
        "multiprocessors: float32 tensors, contiguous and aligned, all statistics due. One launch "
        f"takes {microseconds(GRAPH_LAUNCH)} µs in a replayed graph (assumed), and then the "
        "longest of four:",
        "",
        "- *products*: whole tiles of 64 × 64 at the rate of the matrix units (3×TF32 at a third "
        "of TF32's), on the multiprocessor that has most to do;",
        "- *L2*: every operand of every tile read through the second-level cache. Float32 tiles of "
        "64 × 64 have 16 flops a byte;",
        "- *memory*: operands once where a launch's fit the second-level cache, else once for each "
        "wave of resident programs; results once; scratch memory and partial sums only where they "
        "do not fit;",
        f"- *latency*: {microseconds(PROGRAM_LATENCY)} µs for each program and "
        f"{microseconds(STEP_LATENCY)} µs for each of its steps (assumed), one program after the "
        "other where more wait than are resident "
        f"({', '.join(f'{k} {n}' for k, n in RESIDENT.items())} a multiprocessor).",
        "",
        "The floor is that of kernels.md: the later of the bytes at the memory's rate and the "
        "necessary flops at the same precision's. Where a prediction is above 1.5 times its floor "
        "the last columns say what the time goes to: launches, one of the four, and *tiles*, the "
        "flops of whole tiles over those needed (a 9 × 9 mode fills 2 % of its tile). One by one "
        f"from Python a launch costs the host some {microseconds(EAGER_LAUNCH)} µs (assumed): "
        "*eager* is no less than that for each.",
        "",
        "Not modelled: 4-byte copies of what is not aligned or is transposed, spills, the clock "
        "under load, other work on the device.",
        "",
        "## Devices",
        "",
        *_devices(),
        "## Floors",
        "",
        "One H200, all parameters of a set, µs. (The table of kernels.md has weights only, of "
        "GPT-2 without embeddings, and of VGG16 the convolutions and one layer from 512 to 100, "
        "where the set has layers 512-4096-4096-100: eleven times the flops.)",
        "",
        *_floors(),
    ]
    for operator in OPERATORS:
        lines += [f"## `{operator}`", "", "µs.", "", *_operator(operator, found)]
    lines += [
        "## The inverses",
        "",
        "µs. `damped_inverse` multiplies by float32 multiply-adds, and from n = 129 on calls "
        f"PyTorch's Cholesky routines, taken to reach {LIBRARY_SHARE:.0%} of their rate (assumed); "
        "they factor, and solve for the identity twice: 2.33 n³ flops where n³ would do, and each "
        "of their calls counts as one launch here. "
        f"`inverse_root`, with Shampoo's roots, is taken to need {ITERATIONS} iterations "
        "(assumed), of 3×TF32 products. Its eager launches are all of those iterations'.",
        "",
        *_inverses(found),
    ]
    lines += ["## Kernel by kernel", "", "µs, 3×TF32 / TF32; counts are those of the H200.", ""]
    return "\n".join([*lines, *_kernels(found)]).rstrip() + "\n"


def _devices() -> list[str]:
    header = ("", "multiprocessors", "memory, TB/s", "TF32, TFLOP/s", "bfloat16", "float32")
    rows = [
        (
            gpu.name,
            str(gpu.multiprocessors),
            f"{gpu.memory / 1e12:g}",
            *(f"{rate / 1e12:g}" for rate in (gpu.tf32, gpu.bf16, gpu.ffma)),
            f"{gpu.cache >> 20} MiB, {gpu.cache_rate / 1e12:g} TB/s",
            gpu.source,
        )
        for gpu in GPUS.values()
    ]
    return table((*header, "second-level cache", "source"), rows)


def _floors() -> list[str]:
    rows = []
    for operator in (*OPERATORS, "damped_inverse"):
        for name in SETS:
            s = PARAMETER_SETS[name]
            f = floors(s.views, s.diagonal, operator, GPUS["H200"])
            times = (f.memory, f.tf32, f.tf32x3, f.bf16, f.ffma)
            rows.append((f"`{operator}`", name, *(microseconds(t) for t in times)))
    return table(("", "set", "memory", "TF32", "3×TF32", "bfloat16", "float32"), rows)


Found = dict[tuple[str, str, str, str], Prediction]


def _operator(operator: str, found: Found) -> list[str]:
    header = ["set", "GPU", "launches"]
    for name in ("3×TF32", "TF32"):
        header += [name, "floor", "ratio"]
    rows = []
    for name in SETS:
        for device in GPUS:
            both = [found[operator, name, device, precision] for precision in PRECISIONS]
            row = [name, device, str(len(both[0].launches))]
            for p in both:
                row += [microseconds(p.seconds), microseconds(p.floor), f"{p.ratio:.2f}"]
            row.append(microseconds(both[0].eager_seconds))
            rows.append([*row, *(explained(p) for p in both)])
    return table((*header, "eager, 3×TF32", "3×TF32 goes to", "TF32 goes to"), rows)


def _inverses(found: Found) -> list[str]:
    rows = []
    for operator, precision in INVERSES.items():
        for name in SETS:
            for device in GPUS:
                p = found[operator, name, device, precision]
                times = [microseconds(t) for t in (p.seconds, p.floor)]
                counts = [f"`{operator}`", name, device, str(len(p.launches))]
                eager = microseconds(p.eager_seconds)
                rows.append([*counts, *times, f"{p.ratio:.2f}", eager, explained(p)])
    return table(
        ("", "set", "GPU", "launches", "predicted", "floor", "ratio", "eager", "goes to"), rows
    )


def _kernels(found: Found) -> list[str]:
    rows = []
    for operator in (OPERATORS[0], OPERATORS[2]):
        for name in SETS:
            here = found[operator, name, "H200", "tf32x3"].launches
            for kernel in dict.fromkeys(launch.kernel for launch in here):
                launches = [launch for launch in here if launch.kernel == kernel]
                row = [f"`{kernel}`", name, str(len(launches))]
                row.append(str(sum(launch.programs for launch in launches)))
                row.append(str(sum(launch.steps for launch in launches)))
                row.append(f"{padding(launches):.2f}" if launches[0].done else "")
                for device in GPUS:
                    times = []
                    for precision in PRECISIONS:
                        p = found[operator, name, device, precision]
                        mine = [launch for launch in p.launches if launch.kernel == kernel]
                        times.append(sum(launch.seconds for launch in mine))
                    row.append(" / ".join(microseconds(t) for t in times))
                slowest = max(launches, key=lambda launch: launch.seconds)
                rows.append([*row, _SAID.get(slowest.binds, slowest.binds)])
    header = ("kernel", "set", "launches", "programs", "steps", "tiles", *GPUS)
    return table((*header, "largest bound by"), rows)
