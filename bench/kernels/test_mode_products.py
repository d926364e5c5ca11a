"""``mode_products`` against a chain of tensordots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from bench.kernels import baselines
from bench.kernels.inputs import Modes, flat, generator, normal, symmetric_modes
from bench.kernels.timing import OURS, Candidate, Comparison
from bench.kernels.work import products_work
from tnt_kernels import mode_products, reference
from tools.measuring.parameter_sets import DEFAULT_SETS, ParameterSet

SETS = DEFAULT_SETS


def test_mode_products(parameter_set: ParameterSet, compare: Comparison) -> None:
    """Every tensor of the set multiplied by its factors once, into new tensors."""
    rng = generator()
    tensors = normal(parameter_set.views, rng)
    factors = symmetric_modes(parameter_set, rng)

    def candidate(
        name: str, multiply: Callable[[Sequence[Tensor], Modes], list[Tensor]]
    ) -> Candidate:
        kept: list[list[Tensor]] = [[]]

        def run() -> None:
            kept[0] = []  # as in a step, where the last directions are gone
            kept[0] = multiply(tensors, factors)

        return Candidate(name, run, lambda: kept[0])

    compare(
        "mode_products",
        parameter_set,
        [
            candidate(OURS, mode_products),
            candidate("tensordot", baselines.products_tensordot),
        ],
        flat([reference.mode_products(tensors, factors)]),
        products_work(parameter_set.views, parameter_set.diagonal),
    )
