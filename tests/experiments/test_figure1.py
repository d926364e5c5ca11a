"""Figure 1: the methods' directions along another method's run, and the chosen dampings."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import figure1
from experiments.block_fisher import BlockFisher, classifier, layer_vector
from experiments.figure1 import (
    GRIDS,
    Follower,
    Scale,
    best_dampings,
    layer_means,
    most_similar,
    search_keys,
    similarity,
)
from experiments.methods import METHODS
from experiments.models import seeded
from tests.oracle import DenseTNT
from tnt_optim.likelihoods import sampled_loss, stream_seed

# Shampoo's Newton iteration gives up on some small matrices; the earlier root is then kept.

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = (5, 4, 3, 3, 4)


def seeded_classifier(widths: tuple[int, ...], seed: int) -> nn.Sequential:
    return seeded(lambda: classifier(widths), seed)


def batch_of(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, WIDTHS[0], dtype=torch.float64, generator=generator)
    return inputs, torch.randint(WIDTHS[-1], (count,), generator=generator)


# The other methods' directions


def points(count: int) -> list[tuple[nn.Sequential, Tensor, Tensor]]:
    """Models along a run that is none of the compared methods', each with a batch."""
    return [(seeded_classifier(WIDTHS, 10 + t), *batch_of(6, t)) for t in range(count)]


def own_gradients(model: nn.Sequential, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    loss = functional.cross_entropy(model(inputs), labels)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_tnts_direction_is_the_dense_definitions() -> None:
    start = seeded_classifier(WIDTHS, 0)
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
        wanted = [layer_vector(w, b) for w, b in zip(moved[::2], moved[1::2], strict=True)]
        found = follower.directions(model, inputs, labels)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def sgd_by_hand(gradients: list[list[Tensor]]) -> list[Tensor]:
    total = [torch.zeros_like(g) for g in gradients[0]]
    for step in gradients:
        total = [0.9 * m + g for m, g in zip(total, step, strict=True)]
    return total


def adam_by_hand(gradients: list[list[Tensor]]) -> list[Tensor]:
    found, count = [], len(gradients)
    for column in zip(*gradients, strict=True):
        m = sum(0.1 * 0.9 ** (count - 1 - t) * g for t, g in enumerate(column))
        v = sum(0.001 * 0.999 ** (count - 1 - t) * g * g for t, g in enumerate(column))
        m, v = m / (1 - 0.9**count), v / (1 - 0.999**count)
        found.append(m / (v.sqrt() + 1e-4))
    return found


@pytest.mark.parametrize(
    ("method", "damping", "by_hand"),
    [("sgd", None, sgd_by_hand), ("adam", 1e-4, adam_by_hand)],
)
def test_first_order_directions_are_those_by_hand(
    method: str, damping: float | None, by_hand: Callable[[list[list[Tensor]]], list[Tensor]]
) -> None:
    follower = Follower(method, damping, seeded_classifier(WIDTHS, 0), seed=0)
    seen: list[list[Tensor]] = []
    for model, inputs, labels in points(3):
        seen.append(own_gradients(model, inputs, labels))
        flat = by_hand(seen)
        wanted = [layer_vector(w, b) for w, b in zip(flat[::2], flat[1::2], strict=True)]
        torch.testing.assert_close(follower.directions(model, inputs, labels), wanted)


@pytest.mark.parametrize("method", GRIDS)
def test_directions_do_not_depend_on_the_follower_having_moved(method: str) -> None:
    (model, inputs, labels), *_ = points(1)
    start = [p.detach().clone() for p in model.parameters()]
    damping = GRIDS[method].dampings[-1]
    found = Follower(method, damping, model, seed=1)
    found.warm_start([batch_of(6, 5), batch_of(6, 6)])
    directions = found.directions(model, inputs, labels)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), start, strict=True))
    flat = own_gradients(model, inputs, labels)
    gradients = [layer_vector(w, b) for w, b in zip(flat[::2], flat[1::2], strict=True)]
    for direction, gradient in zip(directions, gradients, strict=True):
        assert direction.dtype == torch.float64
        assert direction @ gradient > 0, "the first direction goes down the loss"
    elsewhere = Follower(method, damping, seeded_classifier(WIDTHS, 77), seed=1)
    if METHODS[method].statistics is None:
        torch.testing.assert_close(elsewhere.directions(model, inputs, labels), directions)


def test_similarity() -> None:
    vector = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, (inputs, labels) = seeded_classifier(WIDTHS, 0), batch_of(6, 0)
    directions, _ = BlockFisher(model, damping=1e-6).directions(inputs, labels)
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
    runs = [{"key": key, "smoothed_loss": 2.0 + index} for index, key in enumerate(search_keys())]
    chosen = next(r for r in runs if (r["key"]["method"], r["key"]["damping"]) == ("tnt", 0.03))
    chosen["smoothed_loss"] = 1.0
    next(r for r in runs if r["key"]["method"] == "adam")["smoothed_loss"] = None  # diverged
    best = best_dampings(runs)
    assert best["tnt"] == 0.03 and best["sgd"] is None
    assert best["adam"] == GRIDS["adam"].dampings[0]
    for run in runs:
        run["smoothed_loss"] = None
    with pytest.raises(ValueError, match="tnt diverges with all"):
        best_dampings(runs)


def test_similarities_are_of_every_damping_and_middle_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figure1, "FIGURE_WIDTHS", (16, 2, 3, 3, 3, 3, 10))
    for name, grid in GRIDS.items():
        monkeypatch.setitem(GRIDS, name, replace(grid, dampings=grid.dampings[:2]))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(60, 16, dtype=torch.float64, generator=generator)
    labels = torch.randint(10, (60,), generator=generator)
    scale = Scale(3, 20, 1, (0.05,), (0.01,))
    run, again = (figure1.similarities(inputs, labels, scale, 0, 0.01, 0.05) for _ in range(2))
    assert run["similarity"] == again["similarity"]
    for name, by_damping in run["similarity"].items():
        assert len(by_damping) == len(GRIDS[name].dampings)
        for series in by_damping.values():
            assert len(series) == 4, "the layers between the first and the last"
            assert all(len(s) == 3 and all(-1 <= v <= 1 for v in s) for s in series)
    assert figure1.reference_training(inputs, labels, scale, 0.01, 1e308)["smoothed_loss"] == (
        math.inf
    )
