"""The idealized TNT: exact expectations, valid constants, and Theorem 1's bound in a run."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from experiments.theorem1 import (
    Constants,
    SoftmaxRegression,
    constants,
    idealized_run,
    synthetic_problem,
)
from tests.oracle import contraction, damped_kron, vec

BETAS = (0.55, 0.75, 0.95)
DAMPING = 0.3


@pytest.fixture(scope="module")
def problem() -> SoftmaxRegression:
    return synthetic_problem(30, 4, 3, seed=1)


def weights_of(problem: SoftmaxRegression, scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(problem.shape, dtype=torch.float64, generator=generator)


def grams_at(problem: SoftmaxRegression, weights: Tensor) -> list[Tensor]:
    return problem.expected_grams(problem.example_slopes(weights)[0])


def fisher_by_loops(problem: SoftmaxRegression, weights: Tensor) -> Tensor:
    """E[vec(G) vec(G)^T] over every example and every label, G by autograd."""
    total = torch.zeros(2 * (weights.numel(),), dtype=torch.float64)
    for x in problem.inputs:
        chances = (weights @ x).softmax(dim=0)
        for y in range(problem.classes):
            leaf = weights.clone().requires_grad_()
            loss = functional.cross_entropy((leaf @ x)[None], torch.tensor([y]))
            gradient = vec(torch.autograd.grad(loss, leaf)[0])
            total += chances[y] / len(problem.inputs) * torch.outer(gradient, gradient)
    return total


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_expected_grams_are_those_of_loops_over_examples_and_labels(
    problem: SoftmaxRegression, scale: float
) -> None:
    weights = weights_of(problem, scale)
    wanted = [torch.zeros(2 * (d,), dtype=torch.float64) for d in problem.shape]
    for x in problem.inputs:
        chances = (weights @ x).softmax(dim=0)
        for y in range(problem.classes):
            gradient = torch.outer(chances - torch.eye(problem.classes)[y], x)
            for mode in (0, 1):
                share = chances[y] / len(problem.inputs)
                wanted[mode] += share * contraction(gradient, mode)
    found = grams_at(problem, weights)
    torch.testing.assert_close(found, wanted)
    trace = fisher_by_loops(problem, weights).trace()
    assert all(gram.trace().item() == pytest.approx(trace.item()) for gram in found)


# The constants


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
def test_constants_hold_at_any_weights(problem: SoftmaxRegression, scale: float) -> None:
    known = constants(problem, torch.zeros(problem.shape, dtype=torch.float64), 5, DAMPING)
    for seed in range(5):
        weights = weights_of(problem, scale, seed)
        preconditioner = torch.linalg.inv(damped_kron(grams_at(problem, weights), DAMPING, False))
        eigenvalues = torch.linalg.eigvalsh(preconditioner)
        assert known.kappa_low <= eigenvalues[0] and eigenvalues[-1] <= known.kappa_high

        leaf = weights.clone().requires_grad_()
        losses = functional.cross_entropy(problem.inputs @ leaf.T, problem.labels, reduction="none")
        assert losses.mean() >= known.lowest
        assert problem.loss(weights) == pytest.approx(losses.mean().item())
        gradients = torch.stack(
            [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in losses]
        )
        noise = (gradients - gradients.mean(dim=0)).square().sum(dim=(1, 2)).mean()
        assert noise <= known.noise

        def mean_loss(flat: Tensor) -> Tensor:
            logits = problem.inputs @ flat.reshape(problem.shape).T
            return functional.cross_entropy(logits, problem.labels)

        hessian = torch.autograd.functional.hessian(mean_loss, weights.flatten())
        torch.testing.assert_close(hessian, fisher_by_loops(problem, weights))
        assert torch.linalg.eigvalsh(hessian)[-1] <= known.lipschitz


@pytest.mark.parametrize("beta", BETAS)
def test_the_bound_is_the_theorems(beta: float) -> None:
    known = Constants(2.0, -1.0, 3.0, 5.0, 4, 0.1, 7.0)
    assert known.step_size(1, beta) == pytest.approx(0.1 / (2 * 49))
    assert known.step_size(10, beta) == pytest.approx(0.1 / (2 * 49) * 10**-beta)
    for count in (1, 7, 300):
        descent = 2 * 2.0 * (known.largest_loss(beta) + 1) * 49 / 0.01 * count ** (beta - 1)
        noise = 5 / ((1 - beta) * 4) * (count**-beta - 1 / count)
        assert known.bound(count, beta) == pytest.approx(descent + noise)
        # What the proof needs: sigma^2 / m times the average of t^-beta.
        needed = 5 / 4 / count * sum(t**-beta for t in range(1, count + 1))
        assert noise + 5 / (4 * count) >= needed
        if count < 300:
            assert noise < needed, "as it stands the theorem's second term alone is too small"
    squares = sum(t ** (-2 * beta) for t in range(1, 100_000))
    alpha = known.step_size(1, beta)
    assert known.largest_loss(beta) >= 3.0 + 2.0 * 49 * alpha**2 / 2 * 5 / 4 * squares


# The run


def test_steps_are_algorithm_1s_with_dense_matrices(problem: SoftmaxRegression) -> None:
    first = weights_of(problem, 1.0)
    known = constants(problem, first, 5, DAMPING)
    points = list(itertools.islice(idealized_run(problem, first, known, DAMPING, 0.6, 50.0, 3), 4))
    assert torch.equal(points[0].weights, first) and torch.equal(first, weights_of(problem, 1.0))
    generator = torch.Generator().manual_seed(3)
    weights = first
    for t, point in enumerate(points, 1):
        assert point.t == t
        torch.testing.assert_close(point.weights, weights)
        leaf = weights.clone().requires_grad_()
        loss = functional.cross_entropy(problem.inputs @ leaf.T, problem.labels)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert point.loss == pytest.approx(loss.item())
        assert point.squared_norm == pytest.approx(gradient.square().sum().item())
        batch = torch.randint(30, (5,), generator=generator)
        loss = functional.cross_entropy(problem.inputs[batch] @ leaf.T, problem.labels[batch])
        (noisy,) = torch.autograd.grad(loss, leaf)
        dense = damped_kron(grams_at(problem, weights), DAMPING, False)
        step = torch.linalg.solve(dense, vec(noisy)).reshape(problem.shape)
        weights = weights - 50 * known.step_size(t, 0.6) * step


@pytest.mark.parametrize("beta", BETAS)
def test_the_bound_holds_in_the_run(problem: SoftmaxRegression, beta: float) -> None:
    first = weights_of(problem, 0.0)
    known = constants(problem, first, 2, DAMPING)
    seeds, count = 3, 150
    runs = [
        list(itertools.islice(idealized_run(problem, first, known, DAMPING, beta, 1.0, s), count))
        for s in range(seeds)
    ]
    norms = torch.tensor([[point.squared_norm for point in run] for run in runs])
    losses = torch.tensor([[point.loss for point in run] for run in runs])
    averages = norms.mean(dim=0).cumsum(dim=0) / torch.arange(1, count + 1)
    for n, average in enumerate(averages.tolist(), 1):
        assert average <= known.bound(n, beta)
    assert losses.mean(dim=0).max() <= known.largest_loss(beta)
    assert losses[:, -1].mean() < losses[:, 0].mean(), "the run must get somewhere"
    assert not torch.equal(norms[0], norms[1])
