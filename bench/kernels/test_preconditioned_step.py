"""``preconditioned_step_`` against (iii): tensordots between foreach momentum and update."""

from __future__ import annotations

from collections.abc import Callable

from bench.kernels import baselines
from bench.kernels.inputs import generator, normal, symmetric_modes
from bench.kernels.timing import OURS, Candidate, Comparison
from bench.kernels.work import step_work
from tnt_kernels import preconditioned_step_, reference
from tools.measuring.parameter_sets import DEFAULT_SETS, ParameterSet

SETS = DEFAULT_SETS
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 0.1


def test_preconditioned_step(parameter_set: ParameterSet, compare: Comparison) -> None:
    """All parameters of the set moved once."""
    rng = generator()
    views = parameter_set.views
    weights, momenta, grads = normal(views, rng, 0.1), normal(views, rng), normal(views, rng)
    factors = symmetric_modes(parameter_set, rng)

    def candidate(name: str, step: Callable[..., None]) -> Candidate:
        own_weights = [weight.clone() for weight in weights]
        own_momenta = [momentum.clone() for momentum in momenta]
        return Candidate(
            name,
            run=lambda: step(own_weights, own_momenta, grads, factors, LR, MOMENTUM, WEIGHT_DECAY),
            results=lambda: [*own_weights, *own_momenta],
            moving=own_weights,
        )

    expected = candidate("reference", reference.preconditioned_step_)
    expected.run()
    compare(
        "preconditioned_step_",
        parameter_set,
        [
            candidate(OURS, preconditioned_step_),
            candidate("tensordot + foreach", baselines.step_tensordot_),
        ],
        expected.results(),
        step_work(views, parameter_set.diagonal),
    )
