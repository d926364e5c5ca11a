"""Figures 3 and 5: settings, problem and training, on a tiny network and generated images."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.data.cifar import Cifar, crop_and_flip
from experiments.methods import METHODS, Settings, has_statistics
from experiments.models import seeded
from experiments.problems import classifiers
from experiments.problems.classifiers import NETWORKS, Classifier
from experiments.tasks import TABLE_4, convnet_settings
from experiments.training import train

# (learning rate, damping, weight decay) that suit the tiny network.
RATES: dict[str, tuple[float, float | None, float]] = {
    "tnt": (0.01, 0.1, 0.01),
    "tnt-ef": (0.01, 0.1, 0.01),
    "kfac-eigen": (0.1, 0.1, 0.01),
    "shampoo": (0.03, 0.1, 0.01),
    "adam": (0.03, 1e-8, 0.01),
    "sgd": (0.3, None, 0.01),
}


def tiny(classes: int) -> nn.Module:
    """A convolution, batch norm and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 4, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, classes),
    )


@pytest.fixture(autouse=True)
def tiny_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called ResNet-32 is the tiny network, in float32."""
    small = replace(NETWORKS["resnet32"], build=tiny, autocast=False)
    monkeypatch.setitem(NETWORKS, "resnet32", small)
    monkeypatch.setitem(NETWORKS, "vgg16-cifar10", replace(NETWORKS["vgg16-cifar10"], build=tiny))


def drawn_images(count: int, generator: torch.Generator, colours: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy images, each class with its own colours at the left and at the right; never black."""
    labels = torch.randint(0, len(colours), (count,), generator=generator)
    noise = 40 * torch.randn(count, 3, 32, 32, generator=generator)
    shown = colours[labels].repeat_interleave(16, dim=3).expand(-1, -1, 32, -1)
    return (shown + noise).clamp(1, 255).to(torch.uint8), labels


@pytest.fixture(scope="module")
def data() -> Cifar:
    """85 images to train on and 37 to validate with."""
    generator = torch.Generator().manual_seed(0)
    colours = 255 * torch.rand(10, 3, 1, 2, generator=generator)
    return Cifar(
        *drawn_images(85, generator, colours), *drawn_images(37, generator, colours), classes=10
    )


@pytest.fixture
def problem(data: Cifar) -> Classifier:
    return Classifier("resnet32", data)


def settings(optimizer: str, **changes: Any) -> Settings:
    """Settings that train the tiny network in a moment."""
    lr, damping, weight_decay = RATES[optimizer]
    base = convnet_settings("resnet32", optimizer, epochs=4)
    base = replace(base, lr=lr, damping=damping, weight_decay=weight_decay, batch_size=16)
    if has_statistics(optimizer):
        base = replace(base, stat_interval=2, inverse_interval=5)
    return replace(base, **changes)


# Training


@pytest.mark.parametrize("optimizer", TABLE_4["resnet32"])
def test_training_lowers_loss_and_error_the_same_way_each_time(
    problem: Classifier, optimizer: str
) -> None:
    chosen = settings(optimizer, epochs=5, schedule="constant")
    run, again = (train(problem, chosen, report_every=0) for _ in range(2))
    assert run.steps_per_epoch == 5, "85 images make 5 batches of 16, and the rest is dropped"
    assert len(run.step_losses) == 25 and run.step_losses == again.step_losses
    assert [e.metrics for e in run.epochs] == [e.metrics for e in again.epochs]
    last = run.epochs[-1]
    assert last.smoothed_loss < run.step_losses[0] - 0.6
    assert last.metrics["validation_error"] < 0.7, "9 of 10 is chance"
    assert last.metrics["validation_loss"] < math.log(10)
    assert (run.warm_start_seconds is not None) == has_statistics(optimizer)


def test_autocast_rounds_the_forward_pass_and_nothing_else(data: Cifar) -> None:
    exact, rounded = Classifier("resnet32", data), Classifier("vgg16-cifar10", data)
    assert rounded.description()["precision"] == "bfloat16 autocast"
    model = seeded(rounded.build, 0)
    inputs, _ = rounded.batch(torch.arange(16), torch.Generator().manual_seed(0))
    logits, wanted = rounded.outputs(model, inputs), exact.outputs(model, inputs)
    assert logits.dtype == torch.float32
    assert 1e-5 < float((logits - wanted).detach().norm() / wanted.detach().norm()) < 0.02
    for optimizer in ("tnt", "kfac-eigen"):
        runs = [train(one, settings(optimizer), report_every=0) for one in (exact, rounded)]
        losses = [run.epochs[-1].smoothed_loss for run in runs]
        assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)


# The problem


def test_batches_are_cropped_and_flipped_before_they_are_normalised(problem: Classifier) -> None:
    indices = torch.tensor([3, 50, 3, 84])
    images, labels = problem.batch(indices, torch.Generator().manual_seed(1))
    assert torch.equal(labels, problem.data.train_labels[indices])
    views = crop_and_flip(problem.data.train_images[indices], torch.Generator().manual_seed(1))
    network = NETWORKS["resnet32"]
    mean, std = (torch.tensor(x)[:, None, None] for x in (network.mean, network.std))
    torch.testing.assert_close(images, (views / 255 - mean) / std)


def test_evaluation_counts_and_leaves_the_model_as_it_was(
    problem: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(problem.build, 3)
    with torch.no_grad():
        model(torch.randn(50, 3, 32, 32))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    network = NETWORKS["resnet32"]
    mean, std = (torch.tensor(x)[:, None, None] for x in (network.mean, network.std))
    wrong, losses = 0, []
    for image, label in zip(problem.data.test_images, problem.data.test_labels, strict=True):
        with torch.no_grad():
            logits = model(((image / 255 - mean) / std)[None])[0].double()
        wrong += int(logits.argmax() != label)
        losses.append(float(logits.logsumexp(0) - logits[label]))
    assert 0 < wrong < 37, "all right or all wrong would test little"
    for training_mode in (True, False):
        model.train(training_mode)
        for at_once in (500, 10):
            monkeypatch.setattr(classifiers, "_EVALUATED_AT_ONCE", at_once)
            found = problem.evaluate(model)
            assert found == {
                "validation_error": wrong / 37,
                "validation_loss": pytest.approx(sum(losses) / 37, rel=1e-5),
            }
        assert all(module.training == training_mode for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_a_subset_is_the_first_of_every_class_in_their_order(problem: Classifier) -> None:
    labels = problem.data.train_labels
    counts = labels.bincount(minlength=10)
    for count in (1, 10, 43, 84, 85):
        few = problem.first(count)
        assert few.examples == len(few.data.train_images) == len(few.data.train_labels) == count
        assert torch.equal(few.data.test_images, problem.data.test_images)
        expected: list[int] = []
        place = 0
        while len(expected) < count:  # the first of each class, then the second of each, ...
            layer = [int((labels == c).nonzero()[place]) for c in range(10) if counts[c] > place]
            expected += sorted(layer)[: count - len(expected)]
            place += 1
        assert torch.equal(few.data.train_labels, labels[sorted(expected)])
        assert torch.equal(few.data.train_images, problem.data.train_images[sorted(expected)])
    assert problem.examples == 85 and few.description()["examples"] == 85


def test_a_part_of_the_validation_set_is_chosen_alike(problem: Classifier) -> None:
    data = problem.data
    swapped = Cifar(data.test_images, data.test_labels, data.train_images, data.train_labels, 10)
    few, wanted = problem.first(validation=20), Classifier("resnet32", swapped).first(20).data
    assert torch.equal(few.data.test_images, wanted.train_images)
    assert torch.equal(few.data.test_labels, wanted.train_labels)
    assert few.examples == 85 and few.description()["validation_examples"] == 20
    for count in (0, 38):
        with pytest.raises(ValueError, match=f"validation must be from 1 to 37, got {count}"):
            problem.first(validation=count)


@pytest.mark.parametrize("name", ["resnet8", "vit"])
def test_small_networks_learn_the_images(data: Cifar, name: str) -> None:
    problem = Classifier(name, data)
    chosen = replace(settings("adam", lr=3e-3, schedule="constant", epochs=4), weight_decay=0.0)
    run = train(problem, chosen, report_every=0)
    assert run.epochs[-1].metrics["validation_loss"] < math.log(10) - 0.1
    assert run.step_losses[-1] < run.step_losses[0] - 0.3


# The paper's settings


def test_defaults_are_the_papers() -> None:
    found = {
        (model, name): convnet_settings(model, name)
        for model in TABLE_4
        for name in TABLE_4["resnet32"]
    }
    damping = {"tnt": 0.01, "tnt-ef": 0.01, "kfac-eigen": 0.03, "shampoo": 0.01, "adam": 1e-8}
    for (_, name), s in found.items():
        assert s.optimizer == name and s.damping == damping.get(name)
        assert (s.batch_size, s.momentum, s.seed, s.graft) == (128, 0.9, 0, None)
        assert s.stat_decay == {"adam": 0.999, "sgd": None}.get(name, 0.9)
        course = (s.epochs, s.schedule, s.stat_interval, s.inverse_interval, s.warm_start)
        if METHODS[name].statistics is None:
            assert course == (200, "step:60", None, None, None)
        else:
            assert course == (100, "step:40", 10, 100, True)


@pytest.mark.parametrize(
    ("epochs", "first", "second"), [(1, 1, 1), (5, 2, 2), (10, 3, 4), (50, 15, 20), (200, 60, 80)]
)
def test_another_length_keeps_the_shape_of_the_schedule(
    epochs: int, first: int, second: int
) -> None:
    for name in TABLE_4["resnet32"]:
        s = convnet_settings("resnet32", name, epochs)
        assert s.epochs == epochs
        assert s.schedule == f"step:{second if has_statistics(name) else first}"
