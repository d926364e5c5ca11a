"""Figure 1's experiment: the methods' directions along another's run, and the command."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import cosine
from experiments.cosine import similarity
from experiments.directions.block_fisher import BlockFisher, layer_vector, seeded_classifier
from experiments.directions.followers import (
    COMPARED,
    Follower,
    own_training_loss,
    shuffled_batches,
)
from experiments.directions.report import damping_name, layer_means, most_similar
from experiments.runs.training import smoothed
from tests.oracle import DenseTNT
from tnt_optim import PreconditionerError
from tnt_optim.likelihoods import sampled_loss, stream_seed

# Shampoo's Newton iteration gives up on some small matrices; the earlier root is then kept.
kept_roots = pytest.mark.filterwarnings("ignore:mode . could not be inverted:RuntimeWarning")

WIDTHS = (5, 4, 3, 3, 4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for a second thread, the more where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("method", COMPARED)
def test_directions_do_not_depend_on_the_follower_having_moved(method: str) -> None:
    (model, inputs, labels), *_ = points(1)
    start = [p.detach().clone() for p in model.parameters()]
    damping = COMPARED[method].dampings[-1]
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
    if COMPARED[method].statistics is None:
        torch.testing.assert_close(elsewhere.directions(model, inputs, labels), directions)


def test_a_refused_step_is_counted_and_has_no_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, inputs, labels), *_ = points(1)
    follower = Follower("shampoo", 0.01, model, seed=0)

    def refuses(*_: object, **__: object) -> None:
        raise PreconditionerError("no root")

    monkeypatch.setattr(follower.optimizer, "step", refuses)
    monkeypatch.setattr(follower.optimizer, "warm_start", refuses)
    follower.warm_start([(inputs, labels)])
    directions = follower.directions(model, inputs, labels)
    assert follower.refusals == 2
    assert all(math.isnan(similarity(direction, direction)) for direction in directions)


def test_similarity() -> None:
    vector = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, (inputs, labels) = seeded_classifier(WIDTHS, 0), batch_of(6, 0)
    directions, _ = BlockFisher(model, damping=1e-6).directions(inputs, labels)
    for direction in (*directions, vector, 1e-9 * vector):
        assert similarity(direction, direction) == pytest.approx(1)
        assert similarity(direction, -7 * direction) == pytest.approx(-1)
    assert similarity(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.5**0.5)
    assert math.isnan(similarity(vector, 0 * vector))


@kept_roots
def test_own_training() -> None:
    model, generator = seeded_classifier(WIDTHS, 0), torch.Generator().manual_seed(0)
    inputs, _ = batch_of(40, 0)
    stream = shuffled_batches(inputs, inputs[:, :4].argmax(dim=1), 20, generator)
    batches = [next(stream) for _ in range(40)]
    start = functional.cross_entropy(model(batches[0][0]), batches[0][1]).item()
    for method in COMPARED:
        damping, lr = COMPARED[method].dampings[-1], COMPARED[method].rates[-1]
        loss = own_training_loss(method, damping, lr, model, batches[:2], batches, 0)
        assert loss < start, method
    assert own_training_loss("sgd", None, math.inf, model, [], batches, 0) == math.inf


def test_smoothing_starts_at_the_first_loss() -> None:
    assert smoothed([10.0])[-1] == 10.0
    assert smoothed([10.0, 20.0, 0.0])[-1] == pytest.approx(9.9)


def test_batches_are_whole_epochs() -> None:
    inputs = torch.arange(10.0).unsqueeze(1)
    stream = shuffled_batches(inputs, torch.arange(10), 3, torch.Generator().manual_seed(0))
    for _ in range(2):
        epoch = [next(stream) for _ in range(3)]
        assert all(torch.equal(x.flatten().long(), y) for x, y in epoch)
        assert len({int(y) for _, labels in epoch for y in labels}) == 9


# The command


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A net of few units, random images, and two dampings and rates a method."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(60, 256, generator=generator)
    labels = torch.randint(10, (60,), generator=generator)
    monkeypatch.setattr(cosine, "mnist_16x16", lambda _: images)
    monkeypatch.setattr(cosine, "mnist_labels", lambda _: labels)
    monkeypatch.setattr(cosine, "FIGURE_WIDTHS", (256, 2, 3, 3, 3, 3, 10))
    for name, method in COMPARED.items():
        few = replace(method, dampings=method.dampings[:2], rates=method.rates[:1])
        monkeypatch.setitem(COMPARED, name, few)


def command(out: Path, *more: str) -> list[str]:
    given = "--data x --iterations 3 --batch-size 20 --warm-batches 1 --threads 1 --lr 0.01 0.05"
    given += " --damping 0.01"
    return [*given.split(), "--out", str(out), *more]


def comparable(path: Path) -> list[dict[str, Any]]:
    runs = json.loads(path.read_text())["runs"]
    return [{k: v for k, v in run.items() if k not in ("seconds", "provenance")} for run in runs]


@kept_roots
def test_the_command_records_every_method_and_goes_on_where_it_stopped(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parted = tmp_path / "whole.json", tmp_path / "parted.json"
    assert cosine.main(command(whole, "--seeds", "0", "1")) == 0
    out = capsys.readouterr().out
    assert "block Fisher itself, with damping 0.01 and lr 0.0" in out
    assert "TNT's mean similarity" in out and f"wrote {whole}" in out
    assert "With the most similar dampings: TNT's mean similarity" in out
    assert whole.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    runs = json.loads(whole.read_text())["runs"]
    compared = [run for run in runs if run["key"]["part"] == "similarity"]
    assert [run["key"]["seed"] for run in compared] == [0, 1]
    assert len(runs) - 4 == 2 * 4, "SGD-m has no damping to choose"
    trained = {
        r["key"]["lr"]: r["smoothed_loss"] for r in runs if r["key"]["part"] == "block Fisher"
    }
    best = {"damping": 0.01, "lr": min(trained, key=lambda lr: trained[lr])}
    assert sorted(trained) == [0.01, 0.05] and trained[0.01] != trained[0.05]
    assert all(run["block_fisher"] == best for run in compared)
    for run in compared:
        assert list(run["similarity"]) == list(COMPARED)
        for name, by_damping in run["similarity"].items():
            assert len(by_damping) == len(COMPARED[name].dampings)
            for series in by_damping.values():
                assert len(series) == 4, "the layers between the first and the last"
                assert all(len(s) == 3 and all(-1 <= v <= 1 for v in s) for s in series)
    assert compared[0]["similarity"] != compared[1]["similarity"]

    with monkeypatch.context() as patch:
        patch.setattr(cosine, "similarities", lambda *_: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            cosine.main(command(parted, "--seeds", "0"))
    assert len(comparable(parted)) == 10
    assert cosine.main(command(parted, "--seeds", "0")) == 0
    with monkeypatch.context() as patch:
        patch.setattr(cosine, "_search_run", lambda *_: pytest.fail("searched again"))
        assert cosine.main(command(parted, "--seeds", "0", "1")) == 0
    assert comparable(parted) == comparable(whole)


def test_a_rate_with_which_block_fisher_diverges_is_recorded_and_left(
    small: None, tmp_path: Path
) -> None:
    out = tmp_path / "run.json"
    assert cosine.main(command(out, "--seeds", "0", "--lr", "1e308", "0.01")) == 0
    runs = json.loads(out.read_text())["runs"]
    tried = [run for run in runs if run["key"]["part"] == "block Fisher"]
    losses = {run["key"]["lr"]: run["smoothed_loss"] for run in tried}
    assert losses[1e308] is None and losses[0.01] > 0
    assert runs[-1]["block_fisher"] == {"damping": 0.01, "lr": 0.01}


def test_the_most_similar_damping_is_that_of_the_mean_over_layers_and_runs() -> None:
    def run(shift: float) -> dict[str, Any]:
        """TNT's similarity falls with its damping, the others' grows."""
        return {
            "similarity": {
                name: {
                    damping_name(damping): [[(-place if name == "tnt" else place) + shift, None]]
                    * 4
                    for place, damping in enumerate(method.dampings)
                }
                for name, method in COMPARED.items()
            }
        }

    found = most_similar([run(0.0), run(0.5)])
    assert found == {
        name: method.dampings[0 if name == "tnt" else -1] for name, method in COMPARED.items()
    }
    assert layer_means([run(0.0), run(0.5)], "shampoo", 1e-3) == [2.25] * 4


def test_the_shown_damping_is_the_one_that_trained_best() -> None:
    runs = [
        {"key": key, "smoothed_loss": 2.0 + index} for index, key in enumerate(cosine.search_keys())
    ]
    chosen = next(r for r in runs if (r["key"]["method"], r["key"]["damping"]) == ("tnt", 0.03))
    chosen["smoothed_loss"] = 1.0
    next(r for r in runs if r["key"]["method"] == "adam")["smoothed_loss"] = None  # diverged
    best = cosine.best_settings(runs)
    assert best["tnt"] == {"damping": 0.03, "lr": chosen["key"]["lr"], "smoothed_loss": 1.0}
    assert best["adam"]["lr"] == COMPARED["adam"].rates[1]
    assert best["sgd"]["damping"] is None
    for run in runs:
        run["smoothed_loss"] = None
    with pytest.raises(ValueError, match="TNT diverges with all"):
        cosine.best_settings(runs)


@kept_roots
def test_other_settings_are_refused_and_the_file_kept(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    cosine.main(command(out, "--seeds", "0"))
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        cosine.main(command(out, "--seeds", "0", "--damping", "0.5"))
    assert "block_fisher was" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", "run.png"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere"], "argument --data: no such folder: nowhere"),
        (["--batch-size", "0"], "argument --batch-size: must be at least 1"),
        (["--lr", "-1"], "argument --lr: must be positive"),
        (["--seeds", "0", "1000"], "argument --seeds: 1000 is the search's"),
        (["--out", "run.txt"], "argument --out: cannot write there: must end in .json"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        cosine.main(command(tmp_path / "run.json", *more))
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(30, 784), torch.zeros(30), "images must have 256 pixels, got 784"),
        (torch.zeros(30, 256), torch.zeros(29), r"there are 30 images, but labels \(29,\)"),
        (torch.zeros(9, 256), torch.zeros(9), "a batch of 20 needs as many images, got 9"),
    ],
)
def test_data_that_do_not_fit_are_refused(images: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosine.checked_examples(images, labels, 20)
