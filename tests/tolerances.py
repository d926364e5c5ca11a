"""Every tolerance of the optimizer tests, in one place, each with what it is relative to."""

import math
from collections.abc import Sequence

import torch

# Distance to the oracle's parameters, relative to how far the oracle has moved them so far.
FLOAT64_TRAJECTORY = 1e-10
FLOAT32_TRAJECTORY = 1e-4

# One formula evaluated twice in float64, relative to the largest entry of the expected value.
FLOAT64_FORMULA = 1e-11
# The same for the library in float32 against a float64 value.
FLOAT32_FORMULA = 1e-5

# An inequality of the paper may be missed by rounding only, relative to its right-hand side.
FLOAT64_BOUND = 1e-9

# Two orders of the same float64 sums (groups against separate optimizers, micro-batches against
# one batch), relative to the parameters.
FLOAT64_REORDERED = 1e-12

# A bfloat16 parameter keeps 8 bits: one rounding is half a spacing, 2^-8 relative; the library
# and the oracle may round to neighbouring values.
BFLOAT16_SPACING = 2.0**-7

# One operator against float64 on the same (rounded) inputs, relative to the largest entry of the
# expected value; inputs are well conditioned, and a sum has at most some thousand terms.
FLOAT64_OPERATOR = 1e-12
FLOAT32_OPERATOR = 1e-5
# The coupled Newton iteration stops at max |M - I| <= 1e-6 in every dtype, M = H^p (S + eps I): the
# root H is then off by about 1e-6 / p.
NEWTON_OPERATOR = 5e-6


# The property tests, whose sizes differ too much for one number. In units of eps, the dtype's
# spacing at 1, and relative to the largest expected entry (or term, where terms cancel):


def sum_rounding(dtype: torch.dtype, terms: int, repeats: int = 1) -> float:
    """A sum of so many terms. Roundings add as squares, but those of terms that are one and the
    same ``repeats`` times (an expanded tensor's) may all be alike."""
    return (32 + 2 * math.sqrt(terms * repeats)) * torch.finfo(dtype).eps


def product_rounding(dtype: torch.dtype, shape: Sequence[int]) -> float:
    """A product with a factor of condition 3 in every mode: a sum for each mode."""
    return sum_rounding(dtype, sum(shape))


def inverse_rounding(dtype: torch.dtype, condition: float) -> float:
    """A rounding of the matrix is one of its inverse, times the condition."""
    return 16 * condition * torch.finfo(dtype).eps


def newton_rounding(dtype: torch.dtype, condition: float) -> float:
    """The same for a root of it, plus those of the iteration and what it leaves when it stops."""
    return NEWTON_OPERATOR + (32 + 4 * condition) * torch.finfo(dtype).eps


# Shampoo's parameters against roots by eigenvalues, relative to how far these have moved them: the
# coupled Newton iteration leaves up to 1e-6 / 2k of each of k roots, half of 1e-6 of the direction
# (measured: 5e-7 at most), in any dtype; against the same iteration it is FLOAT64_TRAJECTORY.
NEWTON_TRAJECTORY = 2e-6

# A float32 root of statistics of training at the paper's damping for CNNs, relative to its largest
# entry (measured: 5e-6 at condition numbers up to 1000).
FLOAT32_ROOT = 1e-4


def root_rounding(dtype: torch.dtype, condition: float, root: int) -> float:
    """A rounding of the matrix is one of its p-th root, times the condition over p."""
    return NEWTON_OPERATOR + (32 + condition / root) * torch.finfo(dtype).eps


# A mean over random draws against its expectation, in its standard deviations: a right one is
# beyond them once in 500 million times for each entry (and the seeds are fixed).
SAMPLE_DEVIATIONS = 6.0


def half_statistics(dtype: torch.dtype) -> float:
    """Statistics of a pass in half precision against those of one in full, relative to their norm.

    A gradient of three layers has gone through about a dozen roundings on the way there and as many
    on the way back, each of up to eps/2; they add as squares, and a Gram matrix has the gradient
    twice. (Measured: 2.9 eps at most, of 4.9.)
    """
    return math.sqrt(24) * torch.finfo(dtype).eps
