"""Table 2 for whole methods: memory and time per iteration beyond SGD with momentum.

Whole training steps on one tensor variable of k modes of size d. A time is the least of several
rounds in which the method and SGD-m alternate; the exponent is fitted to their difference. The
benchmarks' complexity table has the operators alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments import options
from experiments.methods import DecoupledSGD
from experiments.models import seeded
from experiments.models.autoencoder import squared_error
from experiments.options import Quick, user_errors
from experiments.run_files import RunFile
from experiments.steps import BOTH, KINDS, PLAIN, STATISTICS, TrainingStep, state_bytes
from tnt_optim import KFAC, TNT, Shampoo
from tools.measuring.clock import alternate, busy_share
from tools.measuring.fits import LEAST_EXCESS, agreement, exponent, launch_bound
from tools.measuring.tables import milliseconds, span, table

QUICK = [Quick("table2", "--quick")]

# Seconds of a sweep and its fewest rounds; a quick run leaves out the largest sizes.
FULL, SMALL, LEFT_OUT = (30.0, 3), (4.0, 2), 2
_LR, _DAMPING = 1e-6, 0.1


@dataclass(frozen=True)
class Sweep:
    """One variable varied. T1 and T2 only set the shares of the kinds (`steps.shares`)."""

    method: str  # a key of BUILDERS
    k: int  # number of modes
    due: str  # label of the kind of step
    over: str  # d or m
    term: str  # the dominating term of Table 2
    predicted: float  # its exponent of the variable
    values: Sequence[int]  # of the variable, from small to large
    # The least value of the fit, fixed beforehand: below it products have not reached the BLAS's
    # full rate, or other terms are as large.
    fit_from: int = 1
    d: int = 0  # if it does not vary
    m: int = 1  # number of examples, if it does not vary


_ALL = "sum d prod d + sum d^3"
_M = (256, 512, 1024, 2048, 4096, 8192, 16384)
_D = (128, 256, 512, 1024, 1536, 2048, 3072)
_LARGE = (256, 512, 1024, 2048, 3072, 4096)
SWEEPS = (
    Sweep("TNT", 1, BOTH.label, "d", "sum d^3", 3, (*_LARGE, 6144, 8192), 4096),
    Sweep("TNT", 2, BOTH.label, "d", _ALL, 3, _D, 1536),
    Sweep("TNT", 3, BOTH.label, "d", "sum d prod d", 4, (32, 64, 128, 256, 320, 384, 512), 320),
    Sweep("TNT", 2, STATISTICS.label, "m", "m prod d", 1, _M, 2048, d=256),
    Sweep("Shampoo", 2, BOTH.label, "d", _ALL, 3, (32, 64, 128, 256, 384, 512, 768), 256),
    Sweep("Shampoo", 2, STATISTICS.label, "m", "no m", 0, (1, 4, 16, 64, 128), d=768),
    Sweep("Adam", 2, PLAIN.label, "d", "prod d", 2, (*_LARGE, 5120, 6144, 8192), 4096),
    Sweep("KFAC", 2, BOTH.label, "d", _ALL, 3, _D, 1536),
    Sweep("KFAC", 2, STATISTICS.label, "m", "m sum d^2", 1, _M, 2048, d=256),
)
MEMORY_D = (2, 4, 8)  # the count is exact at any size
MEMORY = [(method, k) for method in ("TNT", "Shampoo", "Adam") for k in (1, 2, 3)] + [("KFAC", 2)]

_BOTH: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 1}
BUILDERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD-m": lambda model: DecoupledSGD(model.parameters(), lr=_LR, momentum=0.9),
    "TNT": lambda model: TNT(
        model.parameters(), lr=_LR, damping=_DAMPING, likelihood="gaussian", **_BOTH
    ),
    "Shampoo": lambda model: Shampoo(model.parameters(), lr=_LR, damping=_DAMPING, **_BOTH),
    "Adam": lambda model: torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0),
    "KFAC": lambda model: KFAC(model, lr=_LR, damping=_DAMPING, likelihood="gaussian", **_BOTH),
}


class InnerProducts(nn.Module):
    """<W, X_n> for every example X_n, with W of shape (d,) * k."""

    def __init__(self, d: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*(d,) * k))

    def forward(self, inputs: Tensor) -> Tensor:
        """(m, prod d) to (m, 1)."""
        return (inputs @ self.weight.flatten()).unsqueeze(1)


def one_tensor_step(method: str, d: int, k: int, m: int) -> TrainingStep:
    """A method's training step on one tensor of k modes of size d, on m examples.

    The model is linear in the tensor, so forward and backward cost m prod d, as the paper says of
    SGD: for two modes a linear layer, otherwise the inner product with every example.
    """
    build = (lambda: nn.Linear(d, d, bias=False)) if k == 2 else (lambda: InnerProducts(d, k))
    model: nn.Module = seeded(build, 0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(m, d if k == 2 else d**k, generator=generator)
    targets = torch.randn(m, d if k == 2 else 1, generator=generator)
    # Gradients of size about 1 a number, for every size.
    inputs /= d ** (0.5 if k == 2 else k / 2)
    return TrainingStep(
        *(model, BUILDERS[method](model), inputs, targets, squared_error),
        observes=method in ("TNT", "KFAC"),
    )


def predicted_bytes(method: str, d: int, k: int) -> int:
    """The state beyond SGD with momentum by Table 2, in float32.

    Statistics and their inverses count both. Adam has one more number for each parameter.
    """
    return 4 * (d**k if method == "Adam" else 2 * k * d**2)


def measure_memory(method: str, k: int) -> dict[str, Any]:
    """Count the state after one step, beyond SGD-m's, at every d, and fit its exponent."""
    counted = []
    for d in MEMORY_D:
        steps = [one_tensor_step(name, d, k, m=2) for name in (method, "SGD-m")]
        for step in steps:
            step()
        counted.append(state_bytes(steps[0].optimizer) - state_bytes(steps[1].optimizer))
    formula = [predicted_bytes(method, d, k) for d in MEMORY_D]
    return {
        "predicted": k if method == "Adam" else 2,
        "fitted": exponent(MEMORY_D, counted),
        "bytes": counted,
        "formula_bytes": formula,
    }


def measure_time(
    sweep: Sweep, values: Sequence[int], seconds: float, rounds: int
) -> dict[str, Any]:
    """Time every value of a sweep, all alternating, and fit the exponent.

    All sizes are in memory at once, up to some 8 GB in the largest sweep (TNT, k = 3).
    """
    due = KINDS[sweep.due]
    steps: dict[str, TrainingStep] = {}
    for value in values:
        d, m = (value, sweep.m) if sweep.over == "d" else (sweep.d, value)
        for name, method in (("own", sweep.method), ("bare", "SGD-m")):
            one = one_tensor_step(method, d, sweep.k, m)
            one()  # makes the state
            steps[f"{name} {value}"] = one
    samples = alternate(
        steps, seconds=seconds, min_rounds=rounds, setup=lambda name: steps[name].set_due(due)
    )
    own, bare = ([min(samples[f"{name} {value}"]) for value in values] for name in ("own", "bare"))
    return fitted(sweep, values, own, bare)


def fitted(
    sweep: Sweep, values: Sequence[int], times: Sequence[float], bare: Sequence[float]
) -> dict[str, Any]:
    """The record of a sweep, from the seconds of the method's steps and of SGD-m's (`bare`).

    The fit leaves out values below `fit_from`, sizes whose time is mostly the cost of launching,
    and differences that are lost in noise.
    """
    excess = [own - less for own, less in zip(times, bare, strict=True)]
    small = launch_bound(excess) if sweep.over == "d" else [False] * len(values)
    used = [
        (value, own)
        for value, own, less, bound in zip(values, excess, bare, small, strict=True)
        if own >= LEAST_EXCESS * less and not bound and value >= sweep.fit_from
    ]
    return {
        "fitted": exponent(*zip(*used, strict=True)) if used else None,
        "fitted_values": [value for value, _ in used],
        "values": list(values),
        "seconds": list(times),
        "excess_seconds": excess,
    }


def main(
    quick: options.QuickRun = False,
    threads: options.Threads = None,
    out: options.Out = None,
) -> None:
    """Table 2: memory and time per iteration of whole methods, over d and m."""
    options.set_machine(threads)
    out = out or Path("results/table2.json")
    with user_errors():
        file = RunFile(out, "table 2", {"quick": quick, "threads": torch.get_num_threads()})
        file.check_same_machine()
    for method, k in MEMORY:
        key = {"of": "memory", "method": method, "k": k}
        if file.find(key) is None:
            file.add(key, measure_memory(method, k))
    for sweep in tqdm(SWEEPS, "table 2", unit="sweep", disable=None):
        key = {"of": "time", **asdict(sweep)}
        if file.find(key) is None:
            sizes = sweep.values[:-LEFT_OUT] if quick else sweep.values
            busy = {"busy_before": busy_share(0.3)}
            file.add(key, busy | measure_time(sweep, sizes, *(SMALL if quick else FULL)))
    text = page(file.runs)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwrote {out} and {out.with_suffix('.md')}")


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The record as Markdown tables."""
    memory = [
        [run["key"]["method"], run["key"]["k"], run["predicted"], run["fitted"]]
        + [run["bytes"][-1], run["formula_bytes"][-1]]
        for run in runs
        if run["key"]["of"] == "memory"
    ]
    times = [_time_row(run) for run in runs if run["key"]["of"] == "time"]
    lines = [
        "# Table 2 for whole methods",
        "",
        "An exponent is the slope of the logarithms of bytes or seconds beyond SGD-m's.",
        "",
    ]
    header = ["memory of", "modes", "predicted", "counted", "bytes at d = 8", "by the formula"]
    lines += table(header, memory)
    header = ["time of", "k", "due", "over", "term", "predicted", "fitted", ""]
    lines += table([*header, "range (points)", "slowest, ms"], times)
    return "\n".join(lines)


def _time_row(run: Mapping[str, Any]) -> list[str]:
    key, value = run["key"], run["fitted"]
    return [
        *(key["method"], str(key["k"]), key["due"], key["over"], key["term"]),
        *(f"{key['predicted']:g}", "-" if value is None else f"{value:.2f}"),
        *(agreement(key["predicted"], value), span(run["fitted_values"])),
        milliseconds(max(run["seconds"])),
    ]
