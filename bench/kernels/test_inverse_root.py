"""``inverse_root`` against eigenvalues (torch.linalg.eigh), and the iteration in plain torch."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.flop_counter import FlopCounterMode

from bench.kernels import baselines
from bench.kernels.inputs import Modes, empty_like, flat, generator, gram_statistics
from bench.kernels.timing import OURS, Candidate, Comparison
from bench.kernels.work import Work, factor_bytes
from tnt_kernels import inverse_root, reference
from tools.measuring.parameter_sets import ParameterSet

# One root costs some hundred d^3: with the modes of 2000 to 4096 of the other sets, or the hundred
# of gpt2, a round would take minutes.
SETS = ("mnist_ae", "resnet32", "vgg16_conv")
DAMPING = 0.1


def test_inverse_root(parameter_set: ParameterSet, compare: Comparison) -> None:
    """All roots of the set, 1 / 2k for k modes as in Shampoo, remade once."""
    stats = gram_statistics(parameter_set, generator())
    roots = [2 * len(view) for view in parameter_set.views]
    with FlopCounterMode(display=False) as counter:
        expected, info = reference.inverse_root(stats, DAMPING, roots)
    assert not info.any()
    # Every product of the iteration is symmetric: polynomials of one matrix commute.
    counted = counter.get_total_flops()
    work = Work(
        counted // 2, counted, 2 * factor_bytes(parameter_set.views, parameter_set.diagonal)
    )

    def candidate(name: str, root: Callable[[Modes, float, list[int], Modes], object]) -> Candidate:
        out = empty_like(stats)
        return Candidate(name, lambda: root(stats, DAMPING, roots, out), lambda: flat(out))

    compare(
        "inverse_root",
        parameter_set,
        [
            candidate(OURS, inverse_root),
            candidate("linalg.eigh", baselines.root_eigh),
            candidate("coupled Newton in torch", reference.inverse_root),
        ],
        flat(expected),
        work,
        note="flops are the reference iteration's",
    )
