"""Every operator against the same in plain torch, on every parameter set."""

from __future__ import annotations

import pytest
import torch

from tnt_kernels import reference
from tnt_kernels.benchmark.comparison import Candidate, Comparison
from tnt_kernels.benchmark.inputs import generator, gram_statistics
from tnt_kernels.benchmark.operators import DAMPING, OPERATORS, writing
from tools.measuring.parameter_sets import ParameterSet

# Newton's root in torch costs some hundred d^3: with modes of 2000 to 4096, or the hundred modes of
# gpt2, a round takes minutes.
ROOT_SETS = ("mnist_ae", "resnet32", "vgg16_conv")


def newton(parameter_set: ParameterSet, device: torch.device) -> Candidate:
    """The definition of ``inverse_root`` as one more baseline."""
    stats = gram_statistics(parameter_set, generator(device))
    roots = [2 * len(view) for view in parameter_set.views]
    return writing(
        "coupled Newton in torch",
        lambda out: reference.inverse_root(stats, DAMPING, roots, out),
        stats,
        graph=False,
    )


@pytest.mark.parametrize("op", OPERATORS)
@torch.no_grad()
def test_operator(
    op: str, parameter_set: ParameterSet, device: torch.device, compare: Comparison
) -> None:
    """One call of the operator on the whole parameter set."""
    if op == "inverse_root" and parameter_set.name not in ROOT_SETS:
        pytest.skip("a round of roots would take minutes")
    if op != "inverse_root" and parameter_set.name == "vgg16_conv":
        pytest.skip("a part of vgg16, for the roots only")
    problem, work = OPERATORS[op].problem(parameter_set, device), OPERATORS[op].work(parameter_set)
    if op == "inverse_root":
        problem.candidates.append(newton(parameter_set, device))
    compare(op, parameter_set, problem.candidates, problem.expected, work)
