"""Block Fisher: Figure 1's reference, held against loops over examples and dense solves."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import block_fisher
from experiments.block_fisher import (
    BlockFisher,
    classifier,
    damped_solution,
    layer_vector,
    linear_layers,
)
from experiments.models import seeded

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = (5, 4, 3, 3, 4)


def seeded_classifier(widths: tuple[int, ...], seed: int) -> nn.Sequential:
    return seeded(lambda: classifier(widths), seed)


def batch_of(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, WIDTHS[0], dtype=torch.float64, generator=generator)
    return inputs, torch.randint(WIDTHS[-1], (count,), generator=generator)


def gradient_vectors(model: nn.Sequential, loss: Tensor) -> list[Tensor]:
    """Every layer's gradient as a vector, by plain autograd."""
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return [layer_vector(w, b) for w, b in zip(grads[::2], grads[1::2], strict=True)]


def fishers_by_loops(
    model: nn.Sequential, inputs: Tensor, seed_of: torch.Generator
) -> list[Tensor]:
    """Every layer's Fisher matrix, an example at a time, at the labels the generator draws."""
    labels = torch.multinomial(model(inputs).detach().softmax(1), 1, generator=seed_of).squeeze(1)
    totals = [torch.zeros(1, dtype=torch.float64)] * len(linear_layers(model))
    for x, y in zip(inputs, labels, strict=True):
        vectors = gradient_vectors(model, functional.cross_entropy(model(x[None]), y[None]))
        outers = [torch.outer(v, v) / len(inputs) for v in vectors]
        totals = [total + outer for total, outer in zip(totals, outers, strict=True)]
    return totals


def test_the_network_is_the_papers() -> None:
    model = classifier(block_fisher.FIGURE_WIDTHS)
    sizes = [(layer.in_features, layer.out_features) for layer in linear_layers(model)]
    assert sizes == [(256, 20), (20, 20), (20, 20), (20, 20), (20, 20), (20, 10)]
    kinds = "".join("T" if isinstance(m, nn.Tanh) else "L" for m in model)
    assert kinds == "LTLTLTLTLTL", "tanh between the layers, none after the last"


def test_matrices_are_moving_averages_of_the_batches_fisher_matrices() -> None:
    model = seeded_classifier(WIDTHS, 0)
    batches = [batch_of(6, seed) for seed in range(4)]
    method = BlockFisher(model, damping=0.1, seed=9)
    method.warm_start(x for x, _ in batches[:2])
    generator = torch.Generator().manual_seed(9)
    first, second = (fishers_by_loops(model, x, generator) for x, _ in batches[:2])
    wanted = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(method.matrices, wanted)
    momenta = [torch.zeros(len(matrix), dtype=torch.float64) for matrix in wanted]
    for inputs, labels in batches[2:]:
        gradients = gradient_vectors(model, functional.cross_entropy(model(inputs), labels))
        directions, loss = method.directions(inputs, labels)
        assert loss == pytest.approx(functional.cross_entropy(model(inputs), labels).item())
        fresh = fishers_by_loops(model, inputs, generator)
        wanted = [0.9 * old + 0.1 * new for old, new in zip(wanted, fresh, strict=True)]
        torch.testing.assert_close(method.matrices, wanted)
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
        for matrix, momentum, direction in zip(wanted, momenta, directions, strict=True):
            damped = matrix + 0.1 * torch.eye(len(matrix), dtype=torch.float64)
            torch.testing.assert_close(direction, torch.linalg.solve(damped, momentum))
        before = [layer_vector(m.weight, m.bias).detach() for m in linear_layers(model)]
        method.step(0.3)
        after = [layer_vector(m.weight, m.bias).detach() for m in linear_layers(model)]
        moved = [(old - new) / 0.3 for old, new in zip(before, after, strict=True)]
        torch.testing.assert_close(moved, directions)


def test_damped_solutions_solve() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 21, dtype=torch.float64, generator=generator)
    matrix, right = rows.T @ rows / 9, torch.randn(21, dtype=torch.float64, generator=generator)
    before = matrix.clone()
    wanted = torch.linalg.solve(matrix + 0.01 * torch.eye(21, dtype=torch.float64), right)
    found = damped_solution(matrix, 0.01, right)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    assert torch.equal(matrix, before)


def test_what_is_not_finite_is_an_error() -> None:
    right = torch.arange(6, dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="the Fisher matrix is not finite"):
        damped_solution(torch.outer(right, right) / 0, 0.1, right)
    model, (inputs, labels) = seeded_classifier(WIDTHS, 0), batch_of(4, 3)
    method = BlockFisher(model, damping=0.1)
    with torch.no_grad():
        linear_layers(model)[-1].bias.fill_(math.inf)
    with pytest.raises(ArithmeticError, match="the loss is nan: is the learning rate"):
        method.directions(inputs, labels)
    assert method.matrices == []
