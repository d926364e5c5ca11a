"""The convolutional networks' problem and command, on a tiny network and made-up images."""

import json
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments import cnn
from experiments.data import CIFAR10_MEAN, CIFAR10_STD, Cifar
from experiments.models import resnet32, seeded
from experiments.problems import classifiers, seeded_model
from experiments.problems.classifiers import (
    NETWORKS,
    OPTIMIZERS,
    Classifier,
    default_settings,
    load_classifier,
)
from experiments.runs import checkpoint, comparison, training
from experiments.runs.methods import METHODS, build_optimizer, has_statistics
from experiments.runs.settings import Settings
from experiments.runs.training import train

pytestmark = pytest.mark.usefixtures("one_thread")

SECOND_ORDER = [name for name in OPTIMIZERS if has_statistics(name)]
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
    """What is called ResNet-32 is the tiny network."""
    monkeypatch.setitem(NETWORKS, "resnet32", replace(NETWORKS["resnet32"], build=tiny))


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


@pytest.fixture(scope="module")
def folder(data: Cifar, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in files, as CIFAR-10's archive unpacks."""
    place = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-py"
    place.mkdir()
    parts = zip(data.train_images.chunk(5), data.train_labels.chunk(5), strict=True)
    files = {f"data_batch_{number}": part for number, part in enumerate(parts, 1)}
    for name, (images, labels) in {
        **files,
        "test_batch": (data.test_images, data.test_labels),
    }.items():
        content = {b"data": images.flatten(1).numpy().astype(np.uint8), b"labels": labels.tolist()}
        (place / name).write_bytes(pickle.dumps(content))
    return place.parent


@pytest.fixture
def problem(data: Cifar) -> Classifier:
    return Classifier("resnet32", data)


def settings(optimizer: str, **changes: Any) -> Settings:
    """Settings that train the tiny network in a moment."""
    lr, damping, weight_decay = RATES[optimizer]
    base = default_settings("resnet32", optimizer, epochs=4)
    base = replace(base, lr=lr, damping=damping, weight_decay=weight_decay, batch_size=16)
    if has_statistics(optimizer):
        base = replace(base, stat_interval=2, inverse_interval=5)
    return replace(base, **changes)


# Training


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
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


def test_every_method_has_the_same_start_batches_and_augmentation(
    problem: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    batch = Classifier.batch

    def noted(self: Classifier, *arguments: Any) -> tuple[Tensor, Tensor]:
        seen.append(batch(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(Classifier, "batch", noted)
    trained, first_losses = [], set()
    for optimizer in OPTIMIZERS:
        seen.clear()
        run = train(problem, settings(optimizer, epochs=2), report_every=0)
        first_losses.add(run.step_losses[0])
        warm = 5 if has_statistics(optimizer) else 0
        assert len(seen) == 1 + warm + 10, "one batch to wake, the warm start's, the training's"
        trained.append(seen[-10:])
    assert len(first_losses) == 1
    for batches in trained[1:]:
        for (images, labels), (others, other_labels) in zip(batches, trained[0], strict=True):
            assert torch.equal(images, others) and torch.equal(labels, other_labels)
    images = torch.cat([images for images, _ in trained[0]])
    assert len(images.unique(dim=0)) > 155, "nearly every view of an image must be another"


@pytest.mark.parametrize("optimizer", SECOND_ORDER)
def test_a_warm_start_leaves_buffers_and_parameters_alone(
    problem: Classifier, optimizer: str
) -> None:
    chosen = settings(optimizer)
    model = seeded_model(problem, 0)
    with torch.no_grad():
        model(torch.randn(8, 3, 32, 32))  # so that the running statistics are not the initial ones
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = build_optimizer(model, chosen, problem.likelihood)
    training._warm_start(made, model, problem, chosen, torch.device("cpu"), show=False)
    assert made.state, "the warm start must have left statistics"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("optimizer", ["tnt", "kfac-eigen"])
def test_resnet32_itself_trains(
    data: Cifar, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    monkeypatch.setitem(NETWORKS, "resnet32", replace(NETWORKS["resnet32"], build=resnet32))
    few = replace(data, test_images=data.test_images[:9], test_labels=data.test_labels[:9])
    paper = default_settings("resnet32", optimizer, epochs=1)
    run = train(Classifier("resnet32", few).first(8), replace(paper, batch_size=4), report_every=0)
    assert run.diverged_at_step is None and len(run.step_losses) == 2
    assert all(math.isfinite(loss) for loss in run.step_losses)


# Interrupted runs


class Killed(Exception):
    """What ends a run from outside."""


@pytest.fixture
def kill_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Runs leave a checkpoint at every epoch's end; the first is killed after so many."""
    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN", 0.0)
    evaluate = Classifier.evaluate

    def kill(epochs: int) -> None:
        calls = []

        def killing(self: Classifier, model: nn.Module) -> dict[str, float]:
            calls.append(model)
            if len(calls) == epochs + 1:
                raise Killed
            return evaluate(self, model)

        monkeypatch.setattr(Classifier, "evaluate", killing)

    return kill


def command(folder: Path, out: Path, optimizer: str, more: str = "") -> list[str]:
    """A command that trains the tiny network for four epochs."""
    lr, damping, decay = RATES[optimizer]
    options = f"--batch-size 16 --epochs 4 --lr {lr} --weight-decay {decay} --device cpu {more}"
    if damping is not None:
        options += f" --damping {damping}"
    if has_statistics(optimizer):
        options += " --stat-interval 2 --inverse-interval 5"
    names = ["--data", str(folder), "--model", "resnet32", "--out", str(out)]
    return [*names, "--optimizer", optimizer, *options.split()]


def names_in(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_run_goes_on_to_the_same_losses_bit_for_bit(
    folder: Path,
    tmp_path: Path,
    optimizer: str,
    kill_after: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = train(load_classifier("resnet32", folder), settings(optimizer), report_every=0)
    kill_after(2)
    out = tmp_path / "runs.json"
    with pytest.raises(Killed):
        cnn.main(command(folder, out, optimizer))
    assert names_in(tmp_path) == [f"runs-{optimizer}-seed0.partial.pt"]
    capsys.readouterr()
    assert cnn.main(command(folder, out, optimizer)) == 0
    assert re.findall(r"epoch +(\d/\d)", capsys.readouterr().out) == ["3/4", "4/4"]
    assert names_in(tmp_path) == ["runs.json", "runs.png"]
    (run,) = json.loads(out.read_text())["runs"]
    assert run["settings"] == asdict(whole.settings)
    assert torch.tensor(run["step_losses"]).equal(torch.tensor(whole.step_losses))
    assert [e["metrics"] for e in run["epochs"]] == [e.metrics for e in whole.epochs]


def test_a_killed_run_does_not_go_on_with_other_settings(
    folder: Path,
    tmp_path: Path,
    kill_after: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    kill_after(1)
    out = tmp_path / "runs.json"
    with pytest.raises(Killed):
        cnn.main(command(folder, out, "tnt"))
    left = (tmp_path / "runs-tnt-seed0.partial.pt").read_bytes()
    with pytest.raises(SystemExit):
        cnn.main([*command(folder, out, "tnt"), "--momentum", "0.5", "--graft", "sgd"])
    assert "was left by a run with other settings (graft, momentum)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cnn.main([*command(folder, out, "tnt"), "--threads", "2"])
    torch.set_num_threads(1)
    assert "was left by a run with other settings (threads)" in capsys.readouterr().err
    assert names_in(tmp_path) == ["runs-tnt-seed0.partial.pt"]
    assert (tmp_path / "runs-tnt-seed0.partial.pt").read_bytes() == left


# The problem


def test_batches_are_cropped_and_flipped_before_they_are_normalised(problem: Classifier) -> None:
    indices = torch.tensor([3, 50, 3, 84])
    images, labels = problem.batch(indices, torch.Generator().manual_seed(1))
    again, _ = problem.batch(indices, torch.Generator().manual_seed(1))
    other, _ = problem.batch(indices, torch.Generator().manual_seed(2))
    assert torch.equal(images, again) and not torch.equal(images, other)
    assert torch.equal(labels, problem.data.train_labels[indices])
    mean, std = (torch.tensor(x)[:, None, None] for x in (CIFAR10_MEAN, CIFAR10_STD))
    pixels = (images * std + mean) * 255
    torch.testing.assert_close(pixels, pixels.round(), rtol=0, atol=1e-3)
    # No pixel is black but those that cropping brought in, at most four rows and columns of them.
    for view, source in zip(
        pixels.round(), problem.data.train_images[indices].float(), strict=True
    ):
        inside = (view > 0).all(dim=0)
        rows, columns = inside.any(dim=1), inside.any(dim=0)
        assert 28 <= rows.sum() <= 32 and 28 <= columns.sum() <= 32
        kept = view[:, rows][:, :, columns]
        down, right = 32 - rows.sum(), 32 - columns.sum()
        parts = [
            image[:, top : top + rows.sum(), left : left + columns.sum()]
            for image in (source, source.flip(2))
            for top in {0, int(down)}
            for left in {0, int(right)}
        ]
        assert any(torch.equal(part, kept) for part in parts)


def test_evaluation_counts_and_leaves_the_model_as_it_was(
    problem: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded_model(problem, 3)
    with torch.no_grad():
        model(torch.randn(50, 3, 32, 32))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    mean, std = (torch.tensor(x)[:, None, None] for x in (CIFAR10_MEAN, CIFAR10_STD))
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


def test_a_failing_evaluation_leaves_the_mode_too(problem: Classifier) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(7, 10))
    with pytest.raises(RuntimeError):
        problem.evaluate(model)
    assert model.training


def test_the_network_is_channels_last_on_the_cpu_with_the_same_numbers(problem: Classifier) -> None:
    model, plain = seeded_model(problem, 1), seeded(lambda: tiny(10), 1)
    assert next(model.parameters()).is_contiguous(memory_format=torch.channels_last)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other)
    images = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(model(images), plain(images))


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


# The paper's settings


def test_defaults_are_the_papers() -> None:
    found = {
        (model, name): default_settings(model, name) for model in NETWORKS for name in OPTIMIZERS
    }
    rates = {key: (s.lr, s.weight_decay) for key, s in found.items()}
    assert rates == {
        ("resnet32", "tnt"): (1e-4, 10),
        ("resnet32", "tnt-ef"): (1e-4, 10),
        ("resnet32", "kfac-eigen"): (0.01, 0.1),
        ("resnet32", "shampoo"): (0.01, 0.1),
        ("resnet32", "adam"): (0.003, 0.1),
        ("resnet32", "sgd"): (0.03, 0.01),
        ("vgg16", "tnt"): (3e-5, 10),
        ("vgg16", "tnt-ef"): (3e-6, 100),
        ("vgg16", "kfac-eigen"): (3e-4, 0.1),
        ("vgg16", "shampoo"): (0.003, 0.1),
        ("vgg16", "adam"): (3e-5, 10),
        ("vgg16", "sgd"): (0.03, 0.01),
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
    for name in OPTIMIZERS:
        s = default_settings("resnet32", name, epochs)
        assert s.epochs == epochs
        assert s.schedule == f"step:{second if has_statistics(name) else first}"


# The command


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_the_command_records_runs_of_different_lengths_in_one_file(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(classifiers, "_FIRST_ORDER_COURSE", (4, 2))
    monkeypatch.setattr(classifiers, "_SECOND_ORDER_COURSE", (2, 1))
    out = tmp_path / "new folder" / "runs.json"
    given = ["--data", str(folder), "--model", "resnet32", "--out", str(out), "--device", "cpu"]
    given += "--subset 64 --batch-size 32 --seeds 0 1 --lr 1e-3".split()
    assert cnn.main([*given, "--optimizer", "sgd"]) == 0
    assert cnn.main([*given, "--optimizer", "sgd", "kfac-eigen"]) == 0
    text = capsys.readouterr().out
    assert "validation error %" in text and f"wrote {out} and {out.with_suffix('.png')}" in text
    record = json.loads(out.read_text())
    assert record["experiment"] == "cnn"
    assert record["protocol"] == {
        "problem": "resnet32",
        "source": "CIFAR-10",
        "examples": 64,
        "validation_examples": 37,
        "augmentation": "cropped after padding with 4 black pixels, flipped",
        "batch_size": 32,
    }
    wanted = [
        replace(default_settings("resnet32", name), batch_size=32, lr=1e-3, seed=seed)
        for name in ("sgd", "kfac-eigen")
        for seed in (0, 1)
    ]
    assert [s.schedule for s in wanted] == ["step:2"] * 2 + ["step:1"] * 2
    for run, chosen in zip(record["runs"], wanted, strict=True):
        assert run["settings"] == run["key"] == asdict(chosen)
        assert run["optimizer_defaults"]["lr"] == 1e-3
        assert len(run["epochs"]) == chosen.epochs
        assert len(run["step_losses"]) == 2 * chosen.epochs
        for epoch in run["epochs"]:
            assert set(epoch["metrics"]) == {"validation_error", "validation_loss"}
            assert 0 <= epoch["metrics"]["validation_error"] <= 1
    assert is_picture(out.with_suffix(".png"))


def test_the_tables_errors_are_means_over_the_seeds(problem: Classifier) -> None:
    runs = [train(problem, settings("sgd", seed=seed), report_every=0) for seed in (0, 1)]
    errors = [[100 * e.metrics["validation_error"] for e in run.epochs] for run in runs]
    head, line = (row.split() for row in cnn.validation_errors(runs).splitlines())
    assert head == ["validation", "error", "%", "last", "epoch", "least"]
    last, least = (torch.tensor(x) for x in ([e[-1] for e in errors], [min(e) for e in errors]))
    expected = [f"{x:.2f}" for x in (last.mean(), last.std(), least.mean(), least.std())]
    assert line == ["SGD-m", expected[0], "±", expected[1], expected[2], "±", expected[3]]


def test_the_command_says_when_training_diverged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.json"
    for _ in range(2):  # trained, and read from the file
        assert cnn.main([*command(folder, out, "sgd"), "--lr", "1e30"]) == 0
        assert "diverged" in capsys.readouterr().out
    (run,) = json.loads(out.read_text())["runs"]
    assert run["diverged_at_step"] <= 5 and run["final_smoothed_loss"] is None
    assert is_picture(out.with_suffix(".png"))


BAD_ARGUMENTS = [
    ("--model resnet50", "argument --model: invalid choice: 'resnet50'"),
    ("--data nowhere", "argument --data: no such folder: nowhere"),
    ("--data empty", "argument --data: "),
    ("--model vgg16", "argument --data: "),
    ("--subset 86", "argument --subset: must be from 1 to 85, the training images, got 86"),
    ("--subset 0", "argument --subset: must be at least 1, got 0"),
    (
        "--subset 20",
        "argument --batch-size: batch_size must be at most the number of examples, 20, got 128",
    ),
    ("--batch-size 86", "argument --batch-size: batch_size must be at most the number of examples"),
    ("--optimizer kfac", "argument --optimizer: invalid choice: 'kfac'"),
    ("--damping 0.1", "argument --damping: SGD-m has no such setting"),
    ("--schedule step:0", "argument --schedule: schedule must be"),
    ("--out run.txt", "argument --out: cannot write there: must end in .json"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_training(
    arguments: str,
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "train", lambda *_: pytest.fail("it trained"))
    (tmp_path / "empty").mkdir()
    given = ["--data", str(folder), "--model", "resnet32", "--optimizer", "sgd"]
    if "--subset" not in arguments and "--batch-size" not in arguments:
        given += ["--batch-size", "16"]
    with pytest.raises(SystemExit) as stopped:
        cnn.main([*given, *arguments.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert [name for name in names_in(tmp_path) if name != "results"] == ["empty"]


def test_a_file_of_another_subset_is_left_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.json"
    assert cnn.main(command(folder, out, "sgd", "--subset 40")) == 0
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        cnn.main(command(folder, out, "sgd", "--subset 41"))
    assert "examples was 40 and is 41" in capsys.readouterr().err
    assert out.read_bytes() == before and names_in(tmp_path) == ["runs.json", "runs.png"]
