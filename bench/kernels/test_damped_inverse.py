"""``damped_inverse`` against (iv) torch.linalg.inv, and (v) cholesky_ex and cholesky_inverse."""

from __future__ import annotations

from collections.abc import Callable

from bench.kernels import baselines
from bench.kernels.inputs import Modes, empty_like, flat, generator, gram_statistics
from bench.kernels.timing import OURS, Candidate, Comparison
from bench.kernels.work import inverse_work
from tnt_kernels import damped_inverse, reference
from tools.measuring.parameter_sets import DEFAULT_SETS, ParameterSet

SETS = DEFAULT_SETS
DAMPING = 0.1  # epsilon in the paper, of its autoencoders


def test_damped_inverse(parameter_set: ParameterSet, compare: Comparison) -> None:
    """All inverses of the set remade once, into the old ones' place."""
    stats = gram_statistics(parameter_set, generator())
    expected, info = reference.damped_inverse(stats, DAMPING)
    assert not info.any()

    def candidate(name: str, invert: Callable[[Modes, float, Modes], object]) -> Candidate:
        out = empty_like(stats)
        return Candidate(name, lambda: invert(stats, DAMPING, out), lambda: flat(out))

    compare(
        "damped_inverse",
        parameter_set,
        [
            candidate(OURS, damped_inverse),
            candidate("linalg.inv", baselines.inverse_linalg),
            candidate("cholesky_inverse", baselines.inverse_cholesky),
        ],
        flat(expected),
        inverse_work(parameter_set.views, parameter_set.diagonal),
    )
