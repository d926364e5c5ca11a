"""Figure 1: block Fisher, the methods' directions along its run, and the chosen dampings."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import figure1
from experiments.block_fisher import (
    BlockFisher,
    classifier,
    damped_solution,
    layer_vector,
    linear_layers,
)
from experiments.figure1 import (
    GRIDS,
    Follower,
    Scale,
    best_pair,
    layer_means,
    most_similar,
    search_keys,
    similarity,
)
from experiments.methods import METHODS
from experiments.models import seeded
from tests.oracle import DenseTNT
from tnt_optim.likelihoods import sampled_loss, stream_seed

WIDTHS = (5, 4, 3, 3, 4)


def seeded_classifier(seed: int) -> nn.Sequential:
    return seeded(lambda: classifier(WIDTHS), seed)


def batch_of(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, WIDTHS[0], dtype=torch.float64, generator=generator)
    return inputs, torch.randint(WIDTHS[-1], (count,), generator=generator)


# Block Fisher


def layer_vectors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A vector for each layer, from its weight and its bias."""
    return [layer_vector(w, b) for w, b in zip(tensors[::2], tensors[1::2], strict=True)]


def own_gradients(model: nn.Sequential, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    loss = functional.cross_entropy(model(inputs), labels)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def fishers_by_loops(
    model: nn.Sequential, inputs: Tensor, seed_of: torch.Generator
) -> list[Tensor]:
    """Every layer's Fisher matrix, an example at a time, at the labels the generator draws."""
    labels = torch.multinomial(model(inputs).detach().softmax(1), 1, generator=seed_of).squeeze(1)
    totals = [torch.zeros(1, dtype=torch.float64)] * len(linear_layers(model))
    for x, y in zip(inputs, labels, strict=True):
        vectors = layer_vectors(own_gradients(model, x[None], y[None]))
        outers = [torch.outer(v, v) / len(inputs) for v in vectors]
        totals = [total + outer for total, outer in zip(totals, outers, strict=True)]
    return totals


def test_matrices_are_moving_averages_of_the_batches_fisher_matrices() -> None:
    model = seeded_classifier(0)
    batches = [batch_of(6, seed) for seed in range(4)]
    method = BlockFisher(model, 0.3, 0.1, seed=9)
    method.warm_start(x for x, _ in batches[:2])
    generator = torch.Generator().manual_seed(9)
    first, second = (fishers_by_loops(model, x, generator) for x, _ in batches[:2])
    wanted = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(method.matrices, wanted)
    momenta = [torch.zeros(len(matrix), dtype=torch.float64) for matrix in wanted]
    for inputs, labels in batches[2:]:
        gradients = layer_vectors(own_gradients(model, inputs, labels))
        directions, loss = method.directions(inputs, labels)
        assert loss == pytest.approx(functional.cross_entropy(model(inputs), labels).item())
        fresh = fishers_by_loops(model, inputs, generator)
        wanted = [0.9 * old + 0.1 * new for old, new in zip(wanted, fresh, strict=True)]
        torch.testing.assert_close(method.matrices, wanted)
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
        for matrix, momentum, direction in zip(wanted, momenta, directions, strict=True):
            damped = matrix + 0.1 * torch.eye(len(matrix), dtype=torch.float64)
            torch.testing.assert_close(direction, torch.linalg.solve(damped, momentum))
        before = layer_vectors([p.detach().clone() for p in model.parameters()])
        method.step()
        after = layer_vectors([p.detach() for p in model.parameters()])
        moved = [(old - new) / 0.3 for old, new in zip(before, after, strict=True)]
        torch.testing.assert_close(moved, directions)


def test_what_is_not_finite_is_an_error() -> None:
    right = torch.arange(6, dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="the Fisher matrix is not finite"):
        damped_solution(torch.outer(right, right) / 0, 0.1, right)
    model, (inputs, labels) = seeded_classifier(0), batch_of(4, 3)
    method = BlockFisher(model, 0.3, 0.1)
    with torch.no_grad():
        linear_layers(model)[-1].bias.fill_(math.inf)
    with pytest.raises(ArithmeticError, match="the loss is nan: is the learning rate"):
        method.directions(inputs, labels)
    assert method.matrices == []


# The other methods' directions


def points(count: int) -> list[tuple[nn.Sequential, Tensor, Tensor]]:
    """Models along a run that is none of the compared methods', each with a batch."""
    return [(seeded_classifier(10 + t), *batch_of(6, t)) for t in range(count)]


def test_tnts_direction_is_the_dense_definitions() -> None:
    start = seeded_classifier(0)
    follower = Follower("tnt", 0.03, start, seed=4)
    params = [p.detach().clone() for p in start.parameters()]
    dense = DenseTNT(params, lr=1.0, damping=0.03)
    for t, (model, inputs, labels) in enumerate(points(3)):
        outputs = model(inputs)
        drawn = sampled_loss(
            "categorical", outputs, torch.Generator().manual_seed(stream_seed(4, "step", t, 0))
        )
        sampled = torch.autograd.grad(drawn, list(model.parameters()))
        before = [p.detach().clone() for p in model.parameters()]
        for param, value in zip(params, before, strict=True):
            param.copy_(value)
        dense.step(own_gradients(model, inputs, labels), sampled)
        moved = [old - new for old, new in zip(before, params, strict=True)]
        wanted = layer_vectors(moved)
        found = follower.directions(model, inputs, labels)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", GRIDS)
def test_directions_do_not_depend_on_the_follower_having_moved(method: str) -> None:
    (model, inputs, labels), *_ = points(1)
    start = [p.detach().clone() for p in model.parameters()]
    damping = GRIDS[method].dampings[-1]
    found = Follower(method, damping, model, seed=1)
    found.warm_start([batch_of(6, 5), batch_of(6, 6)])
    directions = found.directions(model, inputs, labels)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), start, strict=True))
    gradients = layer_vectors(own_gradients(model, inputs, labels))
    for direction, gradient in zip(directions, gradients, strict=True):
        assert direction.dtype == torch.float64
        assert direction @ gradient > 0, "the first direction goes down the loss"
    elsewhere = Follower(method, damping, seeded_classifier(77), seed=1)
    if METHODS[method].statistics is None:
        torch.testing.assert_close(elsewhere.directions(model, inputs, labels), directions)


def test_similarity() -> None:
    vector = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, (inputs, labels) = seeded_classifier(0), batch_of(6, 0)
    directions, _ = BlockFisher(model, 1.0, 1e-6).directions(inputs, labels)
    for direction in (*directions, vector, 1e-9 * vector):
        assert similarity(direction, direction) == pytest.approx(1)
        assert similarity(direction, -7 * direction) == pytest.approx(-1)
    assert similarity(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.5**0.5)
    assert math.isnan(similarity(vector, 0 * vector))


def test_the_most_similar_damping_is_that_of_the_mean_over_layers_and_runs() -> None:
    def run(shift: float) -> dict[str, Any]:
        """TNT's similarity falls with its damping, the others' grows."""
        return {
            "similarity": {
                name: {
                    figure1._name(damping): [[(-place if name == "tnt" else place) + shift, None]]
                    * 4
                    for place, damping in enumerate(method.dampings)
                }
                for name, method in GRIDS.items()
            }
        }

    found = most_similar([run(0.0), run(0.5)])
    assert found == {
        name: method.dampings[0 if name == "tnt" else -1] for name, method in GRIDS.items()
    }
    assert layer_means([run(0.0), run(0.5)], "shampoo", 1e-3) == [2.25] * 4


def test_the_shown_damping_is_the_one_that_trained_best() -> None:
    runs = [
        {"key": key, "smoothed_loss": 2.0 + index}
        for index, key in enumerate(search_keys(figure1.FULL))
    ]
    chosen = next(r for r in runs if (r["key"]["method"], r["key"]["damping"]) == ("tnt", 0.03))
    chosen["smoothed_loss"] = 1.0
    next(r for r in runs if r["key"]["method"] == "adam")["smoothed_loss"] = None  # diverged
    assert best_pair(runs, "tnt", GRIDS["tnt"]) == (0.03, 1e-6)
    assert best_pair(runs, "sgd", GRIDS["sgd"]) == (None, 0.01), "no search"
    assert best_pair(runs, "adam", GRIDS["adam"]) == (1e-8, 0.003)
    assert best_pair(runs, "block Fisher", figure1.FULL.block_fisher) == (0.001, 0.01)
    for run in runs:
        run["smoothed_loss"] = None
    with pytest.raises(ValueError, match="tnt diverges with all"):
        best_pair(runs, "tnt", GRIDS["tnt"])


def test_similarities_are_of_every_damping_and_middle_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figure1, "FIGURE_WIDTHS", (16, 2, 3, 3, 3, 3, 10))
    for name, grid in GRIDS.items():
        monkeypatch.setitem(GRIDS, name, replace(grid, dampings=grid.dampings[:2]))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(60, 16, dtype=torch.float64, generator=generator)
    labels = torch.randint(10, (60,), generator=generator)
    scale = Scale(3, 20, 1)
    run, again = (figure1.similarities(inputs, labels, scale, 0, 0.01, 0.05) for _ in range(2))
    assert run["similarity"] == again["similarity"]
    for name, by_damping in run["similarity"].items():
        assert len(by_damping) == len(GRIDS[name].dampings)
        for series in by_damping.values():
            assert len(series) == 4, "the layers between the first and the last"
            assert all(len(s) == 3 and all(-1 <= v <= 1 for v in s) for s in series)
    for method in ("block Fisher", "sgd"):
        key = {"method": method, "damping": 0.01, "lr": 1e308}
        assert figure1.own_training(key, inputs, labels, scale)["smoothed_loss"] == math.inf
