"""The autoencoder experiments: problems, defaults, commands."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments import autoencoder, demo
from experiments.models import MNIST_WIDTHS, loss_floor, reconstruction_loss
from experiments.models import autoencoder as autoencoder_model
from experiments.problems import Autoencoder, load_autoencoder
from experiments.problems.autoencoders import OPTIMIZERS, default_settings
from experiments.runs import comparison
from experiments.runs.methods import METHODS, has_statistics

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def problem() -> Autoencoder:
    """Sixteen pixels that two numbers explain, 104 times."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(104, 2, generator=generator)
    images = (4 * codes @ torch.randn(2, 16, generator=generator)).sigmoid()
    return Autoencoder("digits", images, (16, 12, 2, 12, 16))


# Models and losses


def test_the_mnist_model_is_the_papers() -> None:
    model = autoencoder_model(MNIST_WIDTHS)
    linears = [m for m in model if isinstance(m, nn.Linear)]
    sizes = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    assert [m.in_features for m in linears] + [linears[-1].out_features] == sizes
    kinds = "".join("R" if isinstance(m, nn.ReLU) else "L" for m in model)
    assert kinds == "LRLRLRL" + "LRLRLRL", "no ReLU after the code and after the output"


@pytest.mark.parametrize("widths", [(3,), (3, 2), (3, 2, 2, 3), (3, 0, 3)])
def test_widths_without_a_middle_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"widths must be .* got"):
        autoencoder_model(widths)


def test_the_loss_is_summed_over_pixels_and_bounded_by_the_entropy() -> None:
    images = torch.rand(6, 5, dtype=torch.float64)
    logits = torch.randn(6, 5, dtype=torch.float64)
    p = logits.sigmoid()
    by_hand = -(images * p.log() + (1 - images) * (1 - p).log()).sum(dim=1).mean()
    assert reconstruction_loss(logits, images).item() == pytest.approx(by_hand.item())
    perfect = reconstruction_loss(images.logit(), images).item()
    assert loss_floor(images) == pytest.approx(perfect)
    assert loss_floor(torch.tensor([[0.0, 1.0]])) == 0


# Settings and the recorded search


def test_mnist_and_faces_defaults_are_the_papers() -> None:
    def found(problem: str, table: int) -> dict[str, tuple[object, ...]]:
        methods = [o for o in OPTIMIZERS if table == 3 or o != "tnt-ef"]
        all_of_them = {name: default_settings(problem, name, table) for name in methods}
        return {n: (s.lr, s.damping, s.momentum, s.stat_decay) for n, s in all_of_them.items()}

    assert found("mnist", 3) == {
        "tnt": (1e-4, 0.1, 0.9, 0.9),
        "tnt-ef": (3e-6, 0.01, 0.9, 0.9),
        "kfac": (0.003, 0.3, 0.9, 0.9),
        "shampoo": (3e-4, 3e-4, 0.9, 0.9),
        "adam": (1e-4, 1e-4, 0.9, 0.999),
        "sgd": (0.003, None, 0.9, None),
    }
    assert found("faces", 3) == {
        "tnt": (1e-6, 0.003, 0.9, 0.9),
        "tnt-ef": (3e-6, 0.01, 0.9, 0.9),
        "kfac": (0.1, 10, 0.9, 0.9),
        "shampoo": (3e-4, 3e-4, 0.9, 0.9),
        "adam": (1e-4, 1e-4, 0.9, 0.999),
        "sgd": (0.001, None, 0.9, None),
    }
    assert found("mnist", 5) == {
        "tnt": (1e-4, 0.1, 0.9, 0.9),
        "kfac": (3e-5, 0.01, 0.999, 0.999),
        "shampoo": (1e-4, 3e-4, 0.99, 0.99),
        "adam": (1e-4, 1e-4, 0.99, 0.99),
        "sgd": (0.001, None, 0.99, None),
    }
    assert found("faces", 5) == {
        "tnt": (1e-6, 0.003, 0.9, 0.9),
        "kfac": (0.01, 3, 0.99, 0.99),
        "shampoo": (1e-4, 3e-4, 0.99, 0.999),
        "adam": (1e-4, 1e-4, 0.9, 0.9),
        "sgd": (0.001, None, 0.9, None),
    }
    assert found("curves", 3) == found("mnist", 3)
    for problem in ("mnist", "faces"):
        for name in OPTIMIZERS:
            s = default_settings(problem, name)
            assert (s.batch_size, s.weight_decay, s.schedule, s.seed) == (1000, 0, "constant", 0)
            intervals = (1, 20, True) if has_statistics(name) else (None, None, None)
            assert (s.stat_interval, s.inverse_interval, s.warm_start) == intervals
    with pytest.raises(ValueError, match="Table 5 has tnt, kfac, shampoo, adam, sgd"):
        default_settings("mnist", "tnt-ef", 5)


@pytest.mark.parametrize("name", ["faces", "mnist"])
def test_the_loss_and_the_likelihood_fit_the_data(name: str) -> None:
    images = torch.rand(6, 5, dtype=torch.float64)
    problem = Autoencoder(name, images, (5, 2, 5))
    outputs = torch.randn(6, 5, dtype=torch.float64)
    if name == "faces":
        wanted = 0.5 * (outputs - images).square().sum(dim=1).mean()
        assert (problem.likelihood, problem.loss_floor) == ("gaussian", None)
    else:
        wanted = reconstruction_loss(outputs, images)
        assert problem.likelihood == "bernoulli" and problem.loss_floor == loss_floor(images)
    assert problem.loss(outputs, images).item() == pytest.approx(wanted.item())
    inputs, targets = problem.batch(torch.tensor([3, 1]), torch.Generator())
    assert torch.equal(inputs, images[[3, 1]]) and torch.equal(targets, inputs)


def test_problems_are_found_by_their_data(tmp_path: Path) -> None:
    curves = load_autoencoder("curves", 30)
    assert (curves.name, curves.examples, curves.widths[0]) == ("curves", 30, 784)
    digits = load_autoencoder("digits", 40)
    assert torch.equal(digits.images, load_autoencoder("digits").images[:40])
    with pytest.raises(ValueError, match="count must be at most 1797, got 1798"):
        load_autoencoder("digits", 1798)
    with pytest.raises(FileNotFoundError, match="is empty: wanted train-images"):
        load_autoencoder(str(tmp_path))


# The commands


@pytest.fixture
def digits_of_few(monkeypatch: pytest.MonkeyPatch, problem: Autoencoder) -> None:
    """The commands' digits are the tiny problem."""
    monkeypatch.setattr(autoencoder, "load_autoencoder", lambda *_: problem)


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_command_records_every_setting(
    digits_of_few: None, tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new folder" / "run.json"
    given = "--epochs 2 --batch-size 30 --lr 1e-3 --momentum 0.8 --weight-decay 0.1 --seed 5"
    arguments = ["--data", "digits", "--optimizer", optimizer, "--device", "cpu", *given.split()]
    arguments += ["--schedule", "step:1", "--out", str(out)]
    wanted = replace(
        default_settings("digits", optimizer),
        epochs=2,
        batch_size=30,
        lr=1e-3,
        momentum=0.8,
        weight_decay=0.1,
        schedule="step:1",
        seed=5,
    )
    if has_statistics(optimizer):
        given = "--damping 0.5 --stat-decay 0.7 --stat-interval 2 --inverse-interval 3"
        arguments += [*given.split(), "--no-warm-start"]
        wanted = replace(wanted, damping=0.5, stat_decay=0.7, stat_interval=2, inverse_interval=3)
        wanted = replace(wanted, warm_start=False)
    if optimizer in ("tnt", "tnt-ef", "shampoo"):
        arguments += ["--graft", "sgd", "--relative-damping"]
        wanted = replace(wanted, graft="sgd", relative_damping=True)
    assert autoencoder.main(arguments) == 0
    record = json.loads(out.read_text())
    (run,) = record["runs"]
    assert run["settings"] == run["key"] == asdict(wanted)
    defaults = run["optimizer_defaults"]
    for name in ("lr", "damping", "stat_decay", "stat_interval", "inverse_interval", "graft"):
        if name in defaults:
            assert defaults[name] == getattr(wanted, name)
    assert defaults["decoupled_decay" if optimizer == "sgd" else "weight_decay"] == 0.1
    assert len(run["epochs"]) == 2 and len(run["step_losses"]) == 6
    assert run["final_smoothed_loss"] == run["epochs"][-1]["smoothed_loss"]
    assert record["provenance"][run["provenance"]]["versions"]["torch"] == torch.__version__
    assert run["warm_start_seconds"] is None
    assert record["protocol"]["batch_size"] == 30 and record["protocol"]["examples"] == 104
    assert is_picture(out.with_suffix(".png"))
    assert f"wrote {out}" in capsys.readouterr().out


def test_the_command_goes_on_with_its_file(
    digits_of_few: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[tuple[str, int]] = []
    train = comparison.train

    def noted(problem: Autoencoder, settings: Any, *arguments: Any, **more: Any) -> Any:
        made.append((settings.optimizer, settings.seed))
        return train(problem, settings, *arguments, **more)

    monkeypatch.setattr(comparison, "train", noted)
    out = tmp_path / "runs.json"
    command = f"--data digits --epochs 2 --batch-size 20 --out {out} --reach 9".split()
    assert autoencoder.main([*command, "--optimizer", "sgd", "adam", "--seeds", "0", "1"]) == 0
    assert made == [("sgd", 0), ("adam", 0), ("sgd", 1), ("adam", 1)]
    assert autoencoder.main([*command, "--optimizer", "all", "--seeds", "1", "2"]) == 0
    names = [(o, seed) for seed in (1, 2) for o in OPTIMIZERS]
    assert made[4:] == [name for name in names if name not in made[:4]]
    table = capsys.readouterr().out.partition("final loss")[2].rpartition("final loss")[2]
    assert [line.split()[0] for line in table.splitlines()[1:7]] == [
        METHODS[o].label for o in OPTIMIZERS
    ]
    assert "±" in table and "s to 9" in table.splitlines()[0]
    assert autoencoder.main([*command, "--optimizer", "sgd", "--epochs", "3"]) == 0
    assert made[-1] == ("sgd", 0)
    # The table, like the picture, is of all that the file holds.
    lines = capsys.readouterr().out.partition("final loss")[2].splitlines()
    assert "SGD-m (2 epochs)" in lines[6] and "SGD-m (3 epochs)" in lines[7]
    assert [line.split()[0] for line in lines[1:8]] == [
        *(METHODS[o].label for o in OPTIMIZERS),
        "SGD-m",
    ]
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        autoencoder.main([*command, "--optimizer", "sgd", "--batch-size", "30"])
    assert "holds runs with other settings (batch_size was 20 and is 30)" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs.json", "runs.png"]


def test_the_command_says_when_training_diverged(
    digits_of_few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    arguments = f"--data digits --optimizer sgd --lr 1e30 --batch-size 20 --out {out}".split()
    assert autoencoder.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "diverged: the loss of step" in printed and "diverged (1 of 1)" in printed
    assert json.loads(out.read_text())["runs"][0]["diverged_at_step"] <= 5
    assert is_picture(out.with_suffix(".png"))


BAD_ARGUMENTS = [
    ("--optimizer sgd --data nowhere", "argument --data: no such folder: nowhere"),
    ("--optimizer newton", "argument --optimizer: invalid choice: 'newton'"),
    ("--optimizer sgd --lr -0.1", "argument --lr: must be positive and finite, got -0.1"),
    ("--optimizer sgd --lr nan", "argument --lr: must be positive and finite, got nan"),
    ("--optimizer sgd --lr fast", "argument --lr: must be a number, got 'fast'"),
    ("--optimizer tnt --damping -1", "argument --damping: must be at least 0 and finite, got -1"),
    ("--optimizer sgd --damping 1", "argument --damping: SGD-m has no such setting"),
    ("--optimizer adam --no-warm-start", "argument --no-warm-start: Adam has no such setting"),
    ("--optimizer sgd --stat-decay 0.5", "argument --stat-decay: SGD-m has no such setting"),
    ("--optimizer kfac --graft adam", "argument --graft: KFAC has no such setting"),
    ("--optimizer tnt --graft newton", "argument --graft: invalid choice: 'newton'"),
    ("--optimizer tnt --schedule step:0", "argument --schedule: schedule must be 'constant'"),
    ("--optimizer tnt --examples 5", "must be at most the number of examples, 5, got 128"),
    ("--optimizer tnt --table 4", "argument --table: invalid choice: 4"),
    ("--optimizer sgd --stat-interval 2", "argument --stat-interval: SGD-m has no such setting"),
    ("--optimizer tnt --inverse-interval 0", "argument --inverse-interval: must be at least 1"),
    ("--optimizer sgd --momentum 1", "argument --momentum: must be at least 0 and below 1"),
    ("--optimizer sgd --epochs 0", "argument --epochs: must be at least 1, got 0"),
    ("--optimizer sgd --epochs 1.5", "argument --epochs: must be a whole number, got '1.5'"),
    (
        "--optimizer sgd --seed -1",
        "argument --seeds/--seed: must be at least 0 and below 2**63, got -1",
    ),
    (
        "--optimizer sgd --batch-size 1798",
        "argument --batch-size: batch_size must be at most the number of examples, 1797, got 1798",
    ),
    ("--optimizer sgd --threads 0", "argument --threads: must be at least 1, got 0"),
    ("--optimizer sgd --out run.txt", "argument --out: cannot write there: must end in .json"),
    ("--optimizer sgd --out file/run.json", "argument --out: cannot write there: "),
    ("--optimizer sgd --out folder.json", "cannot write there: must be a file, got a folder"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_training(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "train", lambda *_: pytest.fail("it trained"))
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(SystemExit) as stopped:
        autoencoder.main(["--data", "digits", *arguments.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "results") == [
        "file",
        "folder.json",
    ]


def test_a_gpu_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        autoencoder.main("--data digits --optimizer sgd --device cuda".split())
    assert "argument --device: cuda was asked for" in capsys.readouterr().err


def test_the_demo_compares_three_runs_from_one_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--epochs", "3", "--device", "cpu", "--out-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    heads = [line.split()[0] for line in out.partition("final loss")[2].splitlines()[1:4]]
    assert heads == ["SGD-m", "Adam", "TNT"]
    assert f"picture: {tmp_path / 'digits.png'}" in out
    assert is_picture(tmp_path / "digits.png")
    runs = json.loads((tmp_path / "digits.json").read_text())["runs"]
    assert [run["settings"]["optimizer"] for run in runs] == ["sgd", "adam", "tnt"]
    assert len({run["initial_loss"] for run in runs}) == 1
    assert runs[0]["seconds_to_sgd_final"] > 0


def test_a_rate_that_moves_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    with pytest.raises(SystemExit):
        autoencoder.main(f"--data digits --optimizer sgd --lr 1e-30 --epochs 1 --out {out}".split())
    assert "argument --lr: the first epoch left parameters where they were" in (
        capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


def test_flushing_is_set_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: calls.append(mode) or True)
    command = f"--data digits --optimizer sgd --epochs 1 --out {tmp_path / 'run.json'}"
    assert autoencoder.main(command.split()) == 0
    assert calls == []
    assert autoencoder.main([*command.split(), "--flush-subnormals"]) == 0
    assert calls == [True]
