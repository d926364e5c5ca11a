"""``gram_ema_`` against (i) einsum and lerp_, and (ii) addmm_ on the unfolded tensor."""

from __future__ import annotations

from collections.abc import Callable

from bench.kernels import baselines
from bench.kernels.inputs import copies, flat, generator, normal, symmetric_modes
from bench.kernels.timing import OURS, Candidate, Comparison
from bench.kernels.work import gram_work
from tnt_kernels import gram_ema_, reference
from tools.measuring.parameter_sets import DEFAULT_SETS, ParameterSet

SETS = DEFAULT_SETS
DECAY = 0.9  # beta in the paper


def test_gram_ema(parameter_set: ParameterSet, compare: Comparison) -> None:
    """All statistics of the set refreshed once."""
    rng = generator()
    tensors = normal(parameter_set.views, rng)
    start = symmetric_modes(parameter_set, rng)
    # In float64: in float32 the reference's own sums over vgg16's 262144 columns are farther off
    # than the tolerance.
    expected = [[stat.double() for stat in row] for row in start]
    reference.gram_ema_(expected, [tensor.double() for tensor in tensors], DECAY)

    def candidate(name: str, update: Callable[..., None]) -> Candidate:
        stats = copies(start)
        return Candidate(
            name,
            run=lambda: update(stats, tensors, DECAY),
            results=lambda: flat(stats),
            moving=flat(stats),
        )

    compare(
        "gram_ema_",
        parameter_set,
        [
            candidate(OURS, gram_ema_),
            candidate("einsum + lerp_", baselines.gram_einsum_),
            candidate("addmm_", baselines.gram_addmm_),
        ],
        flat(expected),
        gram_work(parameter_set.views, parameter_set.diagonal),
        symmetric=True,
    )
