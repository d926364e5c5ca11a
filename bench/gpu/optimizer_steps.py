"""The stage ``step``: the optimizer's whole step, against the same in plain torch and others.

Only the optimizer's work is timed: no forward, no backward. Given gradients also serve for the
statistics (``fisher="empirical"``); with sampled labels ``step`` does the same to another gradient.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.ceilings import precision
from bench.gpu.clocks import Clock, alternating, clock_of
from bench.gpu.json_lines import JsonLines
from bench.gpu.origin import origin
from bench.gpu.stage_process import Job, present_gpu, run
from bench.kernels.baselines import PlainTNT
from bench.kernels.checks import check_close, check_finite, check_moved, relative_error
from bench.kernels.inputs import normal
from bench.kernels.targets import CYCLE
from bench.kernels.timing import OURS
from tnt_kernels import reference
from tnt_optim import TNT
from tools.measuring.parameter_sets import PARAMETER_SETS, ParameterSet

SETS = ("mnist_ae", "resnet32", "faces_ae", "gpt2_full", "vgg16", "square4096")
LR, DAMPING, MOMENTUM, DECAY = 1e-3, 0.1, 0.9, 0.9
T2 = 20
SECONDS = 0.6  # for all candidates of a kind together

# How far the parameters have moved, against float64; see bench.kernels.checks. In TF32 the
# statistics themselves are off by 1e-3, which their inverses, of condition d / 0.1, amplify beyond
# comparing.
TOLERANCE = 5e-2
COMPARED = "highest"


@dataclass(frozen=True)
class Kind:
    """What is due at the steps that one run takes.

    Attributes:
        name: as in the tables.
        first_step: the number t of the first of them, beyond the additional inverses of the start.
        steps: how many.
        stat_interval: T1.
    """

    name: str
    first_step: int
    steps: int
    stat_interval: int


KINDS = (
    Kind(CYCLE, 2 * T2, T2, 1),
    Kind("nothing due", 2 * T2 + 1, 1, 10),
    Kind("statistics due", 2 * T2 + 1, 1, 1),
    Kind("statistics and inverses due", 2 * T2, 1, 1),
)
CHECKED = KINDS[-1]  # everything is due


@dataclass
class Stepper:
    """One optimizer on its own parameters, after its first step.

    Attributes:
        name: as in the tables.
        params: what it moves.
        run: takes the steps of a kind.
        compared: whether it is to move them as the reference does.
    """

    name: str
    params: list[nn.Parameter]
    run: Callable[[Kind], None]
    compared: bool


def time_steps(job: Job) -> bool:
    """Measures on the present GPU."""
    return measure(job, present_gpu(), SETS)


def measure(job: Job, device: torch.device, sets: Sequence[str]) -> bool:
    """Measures every set, in both precisions, as far as the time goes."""
    lines = JsonLines(job.folder / "step.jsonl")
    lines.add("origin", **origin(device, job.commit))
    clock = clock_of(device)
    well = True
    for setting in ("highest", "high"):
        for name in sets:
            case = {"set": name, "precision": setting}
            if job.left() < 3:
                lines.add("not run", **case, why="out of time")
                continue
            try:
                with precision(setting):
                    for record in steps_of(PARAMETER_SETS[name], setting, clock, device, job):
                        lines.add("step", op="TNT.step", **case, **record)
                        print(_said(name, setting, record), flush=True)
            except torch.OutOfMemoryError as error:
                why = f"out of memory: {str(error).splitlines()[0]}"
                lines.add("not run", **case, why=why)
            except Exception as error:
                traceback.print_exc(file=sys.stdout)
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                lines.add("failed", **case, why=why)
                well = False
                if device.type == "cuda":  # raises where nothing can be measured any more
                    torch.zeros((), device=device).item()
            finally:
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return well


def steps_of(
    parameter_set: ParameterSet, setting: str, clock: Clock, device: torch.device, job: Job
) -> Iterator[dict[str, object]]:
    """The records of one set: every kind of step for which there is time."""
    rng = torch.Generator(device).manual_seed(0)
    with device:
        start = normal(parameter_set.shapes, rng, LR)
        grads = normal(parameter_set.shapes, rng)
    errors: dict[str, float] = {}
    if setting == COMPARED:
        fresh = make_steppers(start, grads, CHECKED, device)
        errors = _checked(fresh, parameter_set, start, grads, CHECKED)
        del fresh
    for kind in KINDS:
        if job.left() < 1:
            return
        steppers = make_steppers(start, grads, kind, device)
        runs = {s.name: _bound(s, kind) for s in steppers}
        before = [[p.detach().clone() for p in s.params] for s in steppers]
        times = alternating(clock, runs, SECONDS)
        for stepper, old in zip(steppers, before, strict=True):
            moved = [p.detach() for p in stepper.params]
            check_finite(stepper.name, moved)
            check_moved(stepper.name, old, moved)
        yield {
            "kind_of_step": kind.name,
            "note": parameter_set.note,
            "errors": errors,
            "eager": {name: per_step(values, kind.steps) for name, values in times.items()},
        }


def make_steppers(
    start: Sequence[Tensor], grads: Sequence[Tensor], kind: Kind, device: torch.device
) -> list[Stepper]:
    """TNT, the same in plain torch, and first-order methods, each after one step."""

    def parameters() -> list[nn.Parameter]:
        params = [nn.Parameter(weight.clone()) for weight in start]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return params

    settings: dict[str, Any] = {
        **{"damping": DAMPING, "momentum": MOMENTUM, "stat_decay": DECAY},
        **{"stat_interval": kind.stat_interval, "inverse_interval": T2},
    }
    ours, plain, adamw, sgd = (parameters() for _ in range(4))
    tnt = TNT(ours, lr=LR, fisher="empirical", **settings)
    with device:
        in_torch = PlainTNT(plain, LR, **settings)
    others = (
        torch.optim.AdamW(adamw, lr=LR, fused=True),
        torch.optim.SGD(sgd, LR, MOMENTUM, foreach=True),
    )

    def run_tnt(kind: Kind) -> None:
        tnt.param_groups[0]["step"] = kind.first_step
        for _ in range(kind.steps):
            tnt.step()

    def run_plain(kind: Kind) -> None:
        in_torch.steps = kind.first_step
        for _ in range(kind.steps):
            in_torch.step()

    def runner(optimizer: torch.optim.Optimizer) -> Callable[[Kind], None]:
        def run_other(kind: Kind) -> None:
            for _ in range(kind.steps):
                optimizer.step()

        return run_other

    for optimizer in (tnt, in_torch, *others):
        optimizer.step()
    return [
        Stepper(OURS, ours, run_tnt, True),
        Stepper("plain torch", plain, run_plain, True),
        Stepper("AdamW, fused", adamw, runner(others[0]), False),
        Stepper("SGD, foreach", sgd, runner(others[1]), False),
    ]


def reference_movement(
    parameter_set: ParameterSet, start: Sequence[Tensor], grads: Sequence[Tensor], kind: Kind
) -> list[Tensor]:
    """How far the reference, in float64, moves every parameter in the first step and one run."""
    views, kinds = parameter_set.views, parameter_set.diagonal
    weights = [w.double().view(view) for w, view in zip(start, views, strict=True)]
    gradients = [g.double().view(view) for g, view in zip(grads, views, strict=True)]
    momenta = [torch.zeros_like(weight) for weight in weights]

    def matrices(value: float) -> list[list[Tensor]]:
        return [
            [
                torch.full((d,) if flat else (d, d), value, dtype=w.dtype, device=w.device)
                for d, flat in zip(view, diagonal, strict=True)
            ]
            for w, view, diagonal in zip(weights, views, kinds, strict=True)
        ]

    stats, factors = matrices(0.0), matrices(math.nan)
    for t in (0, *range(kind.first_step, kind.first_step + kind.steps)):
        if t % kind.stat_interval == 0:
            reference.gram_ema_(stats, gradients, DECAY if t else 0.0)
        if t % T2 == 0:
            reference.damped_inverse(stats, DAMPING, factors)
        reference.preconditioned_step_(weights, momenta, gradients, factors, LR, MOMENTUM, 0.0)
    return [w.view(s.shape) - s for w, s in zip(weights, start, strict=True)]


def per_step(values: dict[str, object], steps: int) -> dict[str, object]:
    """A run's summary divided by its steps."""

    def divided(value: object) -> object:
        if isinstance(value, list):
            return [divided(entry) for entry in value]
        assert isinstance(value, int | float)
        return value / steps

    return {name: divided(value) for name, value in values.items()}


def _checked(
    steppers: Sequence[Stepper],
    parameter_set: ParameterSet,
    start: Sequence[Tensor],
    grads: Sequence[Tensor],
    kind: Kind,
) -> dict[str, float]:
    expected = reference_movement(parameter_set, start, grads, kind)
    errors = {}
    for stepper in steppers:
        if stepper.compared:
            stepper.run(kind)
            moved = [p.detach() - s for p, s in zip(stepper.params, start, strict=True)]
            errors[stepper.name] = relative_error(moved, expected)
            check_close(stepper.name, errors[stepper.name], TOLERANCE)
    return errors


def _bound(stepper: Stepper, kind: Kind) -> Callable[[], None]:
    return lambda: stepper.run(kind)


def _said(name: str, setting: str, record: dict[str, object]) -> str:
    eager = record["eager"]
    assert isinstance(eager, dict)
    times = [f"{who} {values['median'] * 1e6:.0f}" for who, values in eager.items()]
    return f"{name} {setting}, {record['kind_of_step']}, us a step: {', '.join(times)}"


if __name__ == "__main__":
    sys.exit(run(time_steps))
