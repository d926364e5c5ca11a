"""Candidates of one benchmark: checked against the right results, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tnt_kernels import backends
from tnt_kernels.benchmark.clock import Run, ratios, summary
from tnt_kernels.benchmark.inputs import TensorSet
from tnt_kernels.benchmark.work import Work

OURS = "tnt_kernels"
# The largest difference from the float64 reference, relative to the largest expected entry of the
# same tensor. Inverses amplify rounding by a condition of up to d / 0.1; they are never computed in
# TF32. Tensor cores truncate sums of thousands instead of rounding them, also in 3xTF32: up to
# 1e-4. TF32's operands have ten bits.
TOLERANCES = {
    "gram_ema_": {"cpu": 1e-5, "cuda": 1e-4, "reduced precision": 4e-3},
    "gram_ema_ whitened": {"cpu": 1e-5, "cuda": 1e-4, "reduced precision": 1.2e-2},
    "mode_products": {"cpu": 1e-5, "cuda": 1e-4, "reduced precision": 1.2e-2},
    "preconditioned_step_": {"cpu": 1e-5, "cuda": 1e-4, "reduced precision": 1.2e-2},
    "grafted_directions_": {"cpu": 1e-5, "cuda": 1e-4, "reduced precision": 1.2e-2},
    "scaled_step_": {"cpu": 1e-6, "cuda": 1e-6, "reduced precision": 1e-6},
    "damped_inverse": {"cpu": 1e-3, "cuda": 1e-3, "reduced precision": 1e-3},
    "inverse_root": {"cpu": 2e-3, "cuda": 2e-3, "reduced precision": 2e-3},
    # How far whole steps move the parameters. A bias has a statistic of rank 1 along its own
    # gradient, the direction in which its inverse is least accurate.
    "TNT.step": {"cpu": 2e-3, "cuda": 5e-2},
}
# A baseline may be this much less accurate: it sums in float32, and the record has its error.
BASELINE_TOLERANCE = 10


@dataclass(frozen=True)
class Candidate:
    """One way to compute the same result."""

    name: str  # as in the tables
    run: Callable[[], object]  # computes once, on its own copies of the tensors that it changes
    # The computed tensors, compared with the expected ones and checked to stay finite
    results: Callable[[], Sequence[Tensor]]
    updated: Sequence[Tensor] = ()  # tensors that every run must change
    compared: bool = True  # False if it computes something else than the reference
    # False if no CUDA graph can hold the run: it reads a number on the host.
    graph: bool = True


@dataclass(frozen=True)
class Comparison:
    """Checks, times and records candidates."""

    device: torch.device  # where the candidates compute
    precision: str  # PyTorch's float32 matmul precision, already set
    # Seconds of each round, by name: candidates take turns. None: there are only the checks.
    timed: Callable[[Mapping[str, Run]], dict[str, list[float]] | None]
    add_rows: Callable[[list[dict[str, Any]]], None]  # gets one row for each candidate

    def __call__(
        self,
        op: str,
        tensor_set: TensorSet,
        candidates: Sequence[Candidate],
        expected: Sequence[Tensor] = (),
        work: Work | None = None,
        *,
        kind: str = "",
        steps: int = 1,
    ) -> None:
        """Compare ``candidates``; the first one is the base of all ratios.

        ``expected`` are the right results of one run, in float64. A run makes ``steps`` steps;
        times and work are recorded for one. Notes stand below the table.

        Raises:
            ValueError: a candidate computes a number that is not finite, or nothing, or ours
                another result. A baseline with another result is left out, with a note.
        """
        arithmetic = self.device.type if self.precision == "highest" else "reduced precision"
        errors: dict[str, float] = {}
        notes = [tensor_set.note]
        for candidate in list(candidates):
            candidate.run()
            if not (candidate.compared and expected):
                continue
            is_ours = candidate is candidates[0]
            tolerance = TOLERANCES[op][arithmetic] * (1 if is_ours else BASELINE_TOLERANCE)
            error = relative_error(candidate.results(), expected)
            if not (error <= tolerance or is_ours):
                # In TF32, for example: PyTorch's inverses and roots use it too; ours do not.
                notes.append(
                    f"{candidate.name} is left out at {self.precision!r}: error {error:.0e}"
                )
                candidates = [other for other in candidates if other is not candidate]
                continue
            check_close(candidate.name, error, tolerance)
            errors[candidate.name] = error
        ran = engine(candidates[0].run, self.device)
        before = [[tensor.clone() for tensor in c.updated] for c in candidates]
        runs = {candidate.name: candidate.run for candidate in candidates}
        notes += self._add_graphs(runs, candidates)
        samples = self.timed(runs)
        for candidate, old in zip(candidates, before, strict=True):
            check_finite(candidate.name, candidate.results())
            check_updated(candidate.name, old, candidate.updated)
        if samples is None:
            return
        key = {"op": op, "set": tensor_set.name, "kind": kind, "precision": self.precision}
        base = next(iter(samples.values()))
        baselines = {candidate.name for candidate in candidates[1:] if candidate.compared}
        rows: list[dict[str, Any]] = []
        for name, seconds in samples.items():
            row = {**key, "candidate": name, **summary([second / steps for second in seconds])}
            ratio = summary(ratios(seconds, base))
            # Median and quartiles of the ratios of each round.
            row["ratio"] = [ratio["median"], *ratio["quartiles"]]
            if name in errors:
                row["error"] = errors[name]
            if name.removesuffix(", graph") == OURS:
                row["engine"] = ran
            if name.removesuffix(", graph") in baselines:
                row["baseline"] = True
            rows.append(row)
        if work is not None:
            rows[0]["work"] = [work.flops // steps, work.bytes // steps, work.symmetric]
        if any(notes):
            rows[0]["note"] = "; ".join(filter(None, notes))
        self.add_rows(rows)

    def _add_graphs(
        self, runs: dict[str, Callable[[], object]], candidates: Sequence[Candidate]
    ) -> list[str]:
        """On a GPU, add a replay of every candidate as a CUDA graph; return why some have none."""
        why: list[str] = []
        if self.device.type != "cuda":
            return why
        for candidate in candidates:
            if not candidate.graph:
                continue
            try:
                runs[f"{candidate.name}, graph"] = captured(candidate.run)
            except RuntimeError as error:
                # Raises, and ends the run, if the failed capture left the device unusable.
                torch.zeros((), device=self.device).item()
                first = (str(error).splitlines() or [""])[0]
                why.append(f"no graph of {candidate.name}: {first[:150]}")
        return why


def engine(run: Callable[[], object], device: torch.device) -> str:
    """What computes in one of our runs, which on a GPU runs once more."""
    served = backends().ops["mode_products"]["cuda" if device.type == "cuda" else "cpu"]
    if served != "Triton":
        return served
    from tnt_kernels.triton import cublas  # it imports Triton

    with mock.patch.object(cublas, "chain", wraps=cublas.chain) as chain:
        run()
    return "Triton, cuBLAS" if chain.called else served


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The replay of one run as a CUDA graph, after two warm-ups on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def relative_error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference relative to the largest expected entry of the same tensor."""
    errors = [
        float((result.to(wanted.dtype) - wanted).abs().max() / wanted.abs().max())
        for result, wanted in zip(results, expected, strict=True)
    ]
    return float(torch.tensor(errors).max())  # NaN if one error is NaN


def check_close(name: str, error: float, tolerance: float) -> None:
    """Raise ValueError if the error is above the tolerance, or NaN."""
    if not error <= tolerance:
        raise ValueError(f"{name}: error must be at most {tolerance:.0e}, got {error:.1e}")


def check_finite(name: str, results: Sequence[Tensor]) -> None:
    """Raise ValueError if a result is not finite."""
    for t, result in enumerate(results):
        if not bool(result.isfinite().all()):
            raise ValueError(f"{name}: tensor {t} is no longer finite")


def check_updated(name: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Raise ValueError if a tensor that a run must change did not change."""
    for t, (old, new) in enumerate(zip(before, after, strict=True)):
        if torch.equal(old, new):
            raise ValueError(f"{name}: tensor {t} did not change")
