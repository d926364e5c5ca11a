"""The stage ``kernels``: every operator on every parameter set, against its baselines.

The comparisons that have targets come first, in PyTorch's default precision, then in TF32, then the
other operators: what a cut-off loses is the least. Every result is written as it is measured.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from bench.gpu.ceilings import measure_ceilings, precision
from bench.gpu.clocks import Clock, alternating, captured, clock_of
from bench.gpu.comparisons import COMPARISONS, Comparison
from bench.gpu.json_lines import JsonLines
from bench.gpu.launches import count_launches
from bench.gpu.origin import nvidia_smi, origin
from bench.gpu.stage_process import Job, present_gpu, run
from bench.kernels.checks import (
    BASELINE_TOLERANCE,
    check_close,
    check_finite,
    check_moved,
    relative_error,
)
from bench.kernels.timing import OURS
from tools.measuring.parameter_sets import PARAMETER_SETS, ParameterSet

SETS = ("resnet32", "mnist_ae", "faces_ae", "gpt2_full", "vgg16", "square4096")
# One root costs some hundred d^3 (see bench.kernels.test_inverse_root).
ROOT_SETS = ("resnet32", "mnist_ae", "vgg16_conv")
TARGETED = ("gram_ema_", "preconditioned_step_", "damped_inverse")

EAGER_SECONDS, GRAPH_SECONDS = 0.8, 0.4  # for all candidates of a comparison together
# Left for the ceilings' second measurement, and for counting launches.
KEPT_FOR_THE_END, KEPT_FOR_CEILINGS = 12.0, 3.0

# Of one run against float64: the largest difference relative to the largest expected entry of the
# same tensor. Sums of thousands on tensor cores are cut, not rounded, also in 3xTF32: up to 1e-4.
# In TF32 the operands have ten bits. Inverses amplify by a condition of up to d / 0.1, and are
# never allowed to be TF32's.
TOLERANCES = {
    "highest": {
        "gram_ema_": 1e-4,
        "mode_products": 1e-4,
        "preconditioned_step_": 1e-4,
        "damped_inverse": 1e-3,
        "inverse_root": 2e-3,
    },
    "high": {
        "gram_ema_": 4e-3,
        "mode_products": 1.2e-2,
        "preconditioned_step_": 1.2e-2,
        "damped_inverse": 1e-3,
        "inverse_root": 2e-3,
    },
}


@dataclass(frozen=True)
class Case:
    """One comparison: an operator, a parameter set, PyTorch's float32 matmul precision."""

    op: str
    parameter_set: ParameterSet
    precision: str

    def named(self) -> dict[str, str]:
        """As it is recorded."""
        return {"op": self.op, "set": self.parameter_set.name, "precision": self.precision}


def cases(sets: Sequence[str] = SETS, root_sets: Sequence[str] = ROOT_SETS) -> Iterator[Case]:
    """All of them, what matters most first."""
    for ops in (TARGETED, ("mode_products",)):
        for setting in TOLERANCES:
            for name in sets:
                for op in ops:
                    yield Case(op, PARAMETER_SETS[name], setting)
    for name in root_sets:
        yield Case("inverse_root", PARAMETER_SETS[name], "highest")


def time_kernels(job: Job) -> bool:
    """Measures on the present GPU."""
    return measure(job, present_gpu(), list(cases()))


def measure(job: Job, device: torch.device, planned: Sequence[Case], **ceilings: int) -> bool:
    """Measures ``planned`` as far as the time goes; returns whether nothing failed."""
    lines = JsonLines(job.folder / "kernels.jsonl")
    lines.add("origin", **origin(device, job.commit))
    clock = clock_of(device)
    with torch.no_grad():
        lines.add("ceilings", rates=measure_ceilings(clock, device, **ceilings))
        well = True
        for case in planned:
            if job.left() < KEPT_FOR_THE_END:
                lines.add("not run", **case.named(), why="out of time")
                continue
            well = _measured(lines, clock, case, device) and well
        for case in planned:
            if case.precision == "highest" and job.left() > KEPT_FOR_CEILINGS:
                _count(lines, case, device)
        lines.add("ceilings", rates=measure_ceilings(clock, device, **ceilings))
    lines.add("end", nvidia_smi=nvidia_smi(device))
    return well


def _measured(lines: JsonLines, clock: Clock, case: Case, device: torch.device) -> bool:
    try:
        with precision(case.precision):
            record = compare(clock, COMPARISONS[case.op](case.parameter_set, device), case)
    except torch.OutOfMemoryError as error:
        lines.add("not run", **case.named(), why=f"out of memory: {str(error).splitlines()[0]}")
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        lines.add("failed", **case.named(), why=why)
        _check_alive(device)
        return False
    else:
        lines.add("kernels", **case.named(), **record)
        print(_said(case, record), flush=True)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def compare(clock: Clock, comparison: Comparison, case: Case) -> dict[str, object]:
    """Checks, then times, all candidates.

    Raises:
        ValueError: a candidate does not compute what the reference does.
    """
    errors = {}
    for candidate in comparison.candidates:
        candidate.run()
        error = relative_error(candidate.results(), comparison.expected)
        slack = 1 if candidate.name == OURS else BASELINE_TOLERANCE
        check_close(candidate.name, error, TOLERANCES[case.precision][case.op] * slack)
        errors[candidate.name] = error
    before = [[tensor.clone() for tensor in c.moving] for c in comparison.candidates]
    eager = alternating(clock, {c.name: c.run for c in comparison.candidates}, EAGER_SECONDS)
    graphs, why = captured(clock, comparison.candidates, comparison.refused)
    replays = alternating(clock, graphs, GRAPH_SECONDS)
    for candidate, old in zip(comparison.candidates, before, strict=True):
        check_finite(candidate.name, candidate.results())
        check_moved(candidate.name, old, candidate.moving)
    notes = filter(None, (case.parameter_set.note, comparison.note))
    return {
        "note": "; ".join(notes),
        "work": asdict(comparison.work),
        "errors": errors,
        "eager": eager,
        "graph": replays,
        "no_graph": why,
    }


def _count(lines: JsonLines, case: Case, device: torch.device) -> None:
    try:
        comparison = COMPARISONS[case.op](case.parameter_set, device)
        for candidate in comparison.candidates:
            counts = count_launches(candidate.run, device)
            if counts is not None:
                lines.add("launches", **case.named(), candidate=candidate.name, **counts)
    except Exception as error:  # counts are extra: what was timed stays
        print(f"launches of {case.op} on {case.parameter_set.name} were not counted: {error}")


def _check_alive(device: torch.device) -> None:
    """Raises where the failure has left the device unusable: everything after it would be too."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.zeros((), device=device).item()


def _said(case: Case, record: dict[str, object]) -> str:
    eager, replays = record["eager"], record["graph"]
    assert isinstance(eager, dict) and isinstance(replays, dict)
    times = [
        f"{name} {values['median'] * 1e6:.0f}"
        + (f" ({replays[name]['median'] * 1e6:.0f})" if name in replays else "")
        for name, values in eager.items()
    ]
    return f"{case.op} {case.parameter_set.name} {case.precision}, us (graph): {', '.join(times)}"


if __name__ == "__main__":
    sys.exit(run(time_kernels))
