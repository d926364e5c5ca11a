"""The ratios to reach on a CPU with two cores in float32, set before the kernels were written."""

from __future__ import annotations

from typing import Any

from bench.kernels.timing import OURS

CYCLE = "T1 = 1, T2 = 20"
INVERSE_SETS = ("mnist_ae", "faces_ae", "resnet32", "vgg16", "gpt2", "square4096")

# (operator, kind, baseline) -> set -> how many times the baseline's median is to be ours.
TARGETS: dict[tuple[str, str, str], dict[str, float]] = {
    ("gram_ema_", "", "einsum + lerp_"): {
        "mnist_ae": 3.0,
        "faces_ae": 3.0,
        "vgg16": 3.0,
        "resnet32": 6.0,
    },
    ("gram_ema_", "", "addmm_"): {"mnist_ae": 2.8, "faces_ae": 2.8, "vgg16": 2.5, "resnet32": 4.0},
    ("preconditioned_step_", "", "tensordot + foreach"): {
        "mnist_ae": 2.2,
        "faces_ae": 2.2,
        "vgg16": 2.2,
        "resnet32": 5.0,
    },
    ("damped_inverse", "", "linalg.inv"): dict.fromkeys(INVERSE_SETS, 4.0),
    ("damped_inverse", "", "cholesky_inverse"): dict.fromkeys(INVERSE_SETS, 2.0),
    ("TNT.step", CYCLE, "plain torch"): {"mnist_ae": 2.5},
}


def target(op: str, kind: str, baseline: str, set_name: str) -> float | None:
    """The ratio to reach, None where none was set."""
    return TARGETS.get((op, kind, baseline), {}).get(set_name)


def verdict(measured: float, wanted: float | None) -> str:
    """Says "reached" or "**missed**" by the unrounded ratio; "" where none was set.

    >>> verdict(2.1, 2.0), verdict(1.996, 2.0), verdict(0.5, None)
    ('reached', '**missed**', '')
    """
    if wanted is None:
        return ""
    return "reached" if measured >= wanted else "**missed**"


def ratio(benchmark: dict[str, Any], baseline: str) -> float:
    """The baseline's median over ours."""
    candidates = benchmark["candidates"]
    return float(candidates[baseline]["median"] / candidates[OURS]["median"])
