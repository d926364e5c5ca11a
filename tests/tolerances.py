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

# Two float64 sums of the same terms in different orders (groups and separate optimizers,
# micro-batches and one batch), relative to the parameters.
FLOAT64_REORDERED = 1e-12

# A bfloat16 number has 8 bits, and neighbours differ by up to 2^-7 of their size. The library and
# the oracle may round to neighbours.
BFLOAT16_SPACING = 2.0**-7

# One operator against float64 on the same (rounded) inputs, relative to the largest entry of the
# expected value. Inputs are well conditioned, and no sum has more than some thousand terms.
FLOAT64_OPERATOR = 1e-12
FLOAT32_OPERATOR = 1e-5
# The same with both operands of each product rounded to bfloat16, at most 2^-9 each; up to three
# products follow each other.
BFLOAT16_OPERATOR = 6 * 2.0**-9
# The coupled Newton iteration, of the reference and on a GPU, stops at max |M - I| <= 1e-6 in every
# dtype, with M = H^p (S + eps I). The error of the root H is then about 1e-6 / p.
NEWTON_OPERATOR = 5e-6


# The property tests have sizes too different for one number. Each bound is a multiple of eps (the
# dtype's spacing at 1), relative to the largest expected entry, or to the largest term if terms
# cancel.


def sum_rounding(dtype: torch.dtype, terms: int, repeats: int = 1) -> float:
    """A sum of so many terms. Roundings add as squares, except that ``repeats`` equal terms (of an
    expanded tensor) may all have the same rounding."""
    return (32 + 2 * math.sqrt(terms * repeats)) * torch.finfo(dtype).eps


def product_rounding(dtype: torch.dtype, shape: Sequence[int]) -> float:
    """A product with a factor of condition 3 in every mode: a sum for each mode."""
    return sum_rounding(dtype, sum(shape))


def inverse_rounding(dtype: torch.dtype, condition: float) -> float:
    """The condition multiplies a rounding of the matrix into an error of its inverse."""
    return 16 * condition * torch.finfo(dtype).eps


def newton_rounding(dtype: torch.dtype, condition: float) -> float:
    """The same for an inverse root: also the iteration's own roundings and its last error."""
    return NEWTON_OPERATOR + (32 + 4 * condition) * torch.finfo(dtype).eps


# A mean over random draws against its expectation, in standard deviations of the mean. An entry of
# a right mean exceeds them once in 500 million times; the seeds are fixed.
SAMPLE_DEVIATIONS = 6.0


def half_statistics(dtype: torch.dtype) -> float:
    """Statistics of a pass in half precision against those of one in full, relative to their norm.

    A gradient of three layers has about a dozen roundings from the forward and as many from the
    backward, each of up to eps/2. They add as squares, and a Gram matrix has the gradient twice.
    (Measured: 2.9 eps at most, of 4.9.)
    """
    return math.sqrt(24) * torch.finfo(dtype).eps
