"""What must hold before and after a candidate is timed, and within which tolerance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Of each operator in float32 against ``tnt_kernels.reference`` on the same inputs, in float32 too
# but for ``gram_ema_``: the largest difference relative to the largest expected entry of the same
# tensor.
TOLERANCES = {
    "gram_ema_": 1e-5,
    # Rounding times the condition number: of a vector's statistic, rank 1 and damped, d / 0.1.
    "damped_inverse": 1e-3,
    # Rounding of the largest eigenvalue, up to d, beside the damping of 0.1.
    "inverse_root": 2e-3,
    "mode_products": 1e-5,
    "preconditioned_step_": 1e-5,
    # How far the parameters have moved. A bias has a statistic of rank 1 along its own gradient:
    # the direction in which the inverse, of condition d / 0.1, is least accurate, in the float32
    # reference as in the candidates.
    "TNT.step": 5e-2,
}

# Baselines are allowed this many times as much: what they lose by summing in float32 is theirs, and
# recorded.
BASELINE_TOLERANCE = 10


def relative_error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference relative to the largest expected entry of the same tensor."""
    errors = [
        float((result - wanted).abs().max() / wanted.abs().max())
        for result, wanted in zip(results, expected, strict=True)
    ]
    return float(torch.tensor(errors).max())  # NaN where one is


def check_close(name: str, error: float, tolerance: float) -> None:
    """Refuses to time what computes something else.

    Raises:
        ValueError: the error is above the tolerance, or NaN.
    """
    if not error <= tolerance:
        raise ValueError(f"{name} is {error:.1e} from the reference, {tolerance:.0e} is allowed")


def check_finite(name: str, results: Sequence[Tensor]) -> None:
    """After any number of rounds everything must still be finite.

    Raises:
        ValueError: something is not.
    """
    for t, result in enumerate(results):
        if not bool(result.isfinite().all()):
            raise ValueError(f"{name}: tensor {t} is no longer finite")


def check_moved(name: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """What a step is there to move must have moved.

    Raises:
        ValueError: a tensor is what it was.
    """
    for t, (old, new) in enumerate(zip(before, after, strict=True)):
        if torch.equal(old, new):
            raise ValueError(f"{name}: tensor {t} has not moved")
