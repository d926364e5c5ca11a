"""The character transformer: its problem and its command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from repeating_text import CODES, repeating_file, repeating_problem
from torch import nn
from torch.nn import functional

from experiments import transformer
from experiments.data import Text
from experiments.language.forms import FORMS, form_settings
from experiments.problems.language import Language, load_language
from experiments.problems.problem import seeded_model
from experiments.runs.training import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def problem() -> Language:
    return repeating_problem()


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return repeating_file(tmp_path)


# The problem


def test_a_batch_is_windows_and_the_same_shifted_by_one(problem: Language) -> None:
    starts = torch.tensor([0, 17, problem.examples - 1])
    inputs, targets = problem.batch(starts, torch.Generator())
    assert problem.examples == 254
    for row, start in enumerate(starts.tolist()):
        assert inputs[row].tolist() == CODES[start : start + 6].tolist()
        assert targets[6 * row : 6 * row + 6].tolist() == CODES[start + 1 : start + 7].tolist()
    # The last window's last target is the last character to train on: none is of the validation.
    assert targets[-1] == CODES[259]


def test_batches_are_random_windows_that_the_generator_gives(problem: Language) -> None:
    orders = [problem.order(16, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]
    assert orders[0].shape == (4, 16)
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])
    many = torch.cat([problem.order(1000, torch.Generator().manual_seed(s)) for s in range(3)])
    assert (many.min().item(), many.max().item()) == (0, problem.examples - 1)
    warm = problem.warm_start_order(16)
    assert torch.equal(warm, problem.warm_start_order(16)) and warm.shape == (20, 16)
    assert warm.max() < problem.examples


def test_the_validation_loss_is_the_mean_over_windows_that_lie_apart(problem: Language) -> None:
    # 40 characters: 5 windows of 6 and the character after.
    assert problem.validation_starts.tolist() == [0, 8, 16, 24, 33]
    model = nn.Sequential(seeded_model(problem, 1), nn.Dropout(0.5))
    model.train()
    before = torch.get_rng_state()
    found = problem.evaluate(model)
    assert list(found) == ["validation_loss"]
    assert model.training and model[1].training
    assert torch.equal(torch.get_rng_state(), before), "dropout must be off"
    losses = []
    for start in (0, 8, 16, 24, 33):
        window = CODES[260 + start : 260 + start + 7]
        logits = model[0](window[None, :-1])
        losses.append(functional.cross_entropy(logits, window[1:]).item())
    assert found["validation_loss"] == pytest.approx(sum(losses) / 5, rel=1e-6)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("characters", "wanted", "starts"),
    [(7, 5, [0]), (12, 5, [0]), (13, 5, [0, 6]), (14, 5, [0, 7]), (100, 3, [0, 46, 93])],
)
def test_validation_windows_fit_whatever_the_text(
    characters: int, wanted: int, starts: list[int]
) -> None:
    text = Text(CODES[:50], CODES[:characters], "abcdefghijk")
    spread = Language(text, 8, 1, 2, context=6, validation_windows=wanted).validation_starts
    assert spread.tolist() == starts


def test_training_is_the_same_each_time_and_batches_are_for_every_method(
    problem: Language,
) -> None:
    settings = {name: replace(form_settings(name, 2), batch_size=4) for name in FORMS}
    runs = {name: train(problem, one, report_every=0) for name, one in settings.items()}
    again = train(problem, settings["tnt-grafted"], report_every=0)
    assert again.step_losses == runs["tnt-grafted"].step_losses
    assert [e.metrics for e in again.epochs] == [e.metrics for e in runs["tnt-grafted"].epochs]
    assert {run.step_losses[0] for run in runs.values()} == {again.step_losses[0]}
    assert all(len(run.step_losses) == 8 for run in runs.values())
    # Rates so small that the losses are those of the start, batch by batch.
    first = [
        train(problem, replace(one, lr=1e-6), report_every=0).step_losses
        for one in (settings["adam"], settings["tnt-ef-grafted"], settings["muon"])
    ]
    assert torch.tensor(first[0]).std() > 1e-3, "batches must differ for this to see their order"
    wanted = torch.tensor([first[0]] * 2)
    torch.testing.assert_close(torch.tensor(first[1:]), wanted, rtol=0, atol=1e-4)


def test_grafted_tnt_learns_the_repeating_text(problem: Language) -> None:
    run = train(problem, replace(form_settings("tnt-grafted", 25), batch_size=16), report_every=0)
    assert run.epochs[-1].metrics["validation_loss"] < 1.0 < run.step_losses[0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context": 40}, r"260 and 40, got 40"),
        ({"context": 0}, "context must be positive, got 0"),
        ({"epoch_steps": 0}, "epoch_steps must be positive, got 0"),
        ({"validation_windows": 0}, "validation_windows must be positive, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Language(Text(CODES[:260], CODES[260:], "abcdefghijk"), 8, 1, 2, **sizes)
    with pytest.raises(ValueError, match="batch_size must be positive"):
        Language(Text(CODES, CODES, "abcdefghijk"), 8, 1, 2).steps_per_epoch(0)


def test_broken_texts_are_named(tmp_path: Path, text_file: Path) -> None:
    assert load_language(text_file, width=8, heads=2, context=6).source == "text.txt"
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_language(tmp_path / "none.txt")
    for content, message in (("ab" * 30, "got 64"), ("a" * 900, "two different"), ("a", "short")):
        (tmp_path / "bad.txt").write_text(content)
        with pytest.raises(ValueError, match=rf"bad\.txt: .*{message}"):
            load_language(tmp_path / "bad.txt")


# The command


def arguments(text_file: Path, out: Path, *more: str) -> list[str]:
    sizes = ["--width", "8", "--layers", "1", "--heads", "2", "--context", "6", "--steps", "6"]
    return ["--data", str(text_file), *sizes, "--batch-size", "4", "--out", str(out), *more]


def test_the_command_trains_and_goes_on(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.json"
    given = arguments(text_file, out, "--optimizer", "tnt", "adam", "--seeds", "0", "1")
    assert transformer.main(given) == 0
    printed = capsys.readouterr().out
    assert "validation loss" in printed and "TNT (grafted, relative damping)" in printed
    assert out.with_suffix(".png").exists()
    made = json.loads(out.read_text())
    assert [run["key"]["optimizer"] for run in made["runs"]] == ["tnt", "adam", "tnt", "adam"]
    assert made["runs"][0]["key"]["graft"] == "adam"
    assert made["runs"][0]["steps_per_epoch"] == 6
    assert transformer.main(given) == 0
    paper = arguments(text_file, out, "--optimizer", "tnt", "--paper-form", "--warm-start")
    assert transformer.main(paper) == 0
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 5 and runs[-1]["key"]["graft"] is None
    assert runs[-1]["warm_start_seconds"] > 0

    capsys.readouterr()
    other = arguments(text_file, out, "--optimizer", "adam", "--width", "16")
    with pytest.raises(SystemExit):
        transformer.main(other)
    assert "width was 8 and is 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--optimizer", "adam", "--steps", "70"], "--steps: must be at most 50 or a multiple"),
        (["--optimizer", "adam", "--epochs", "3"], "--epochs: give --steps instead"),
        (["--optimizer", "adam", "--heads", "3"], "--heads: must divide the width, 8, got 3"),
        (["--optimizer", "adam", "--context", "60"], "context must be below"),
        (["--optimizer", "adam", "--data", "none.txt"], "--data: no such file"),
        (["--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--optimizer", "muon", "--damping", "1"], "--damping: Muon + AdamW has no such setting"),
    ],
)
def test_the_commands_arguments_are_checked(
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        transformer.main(arguments(text_file, tmp_path / "runs.json", *extra))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
