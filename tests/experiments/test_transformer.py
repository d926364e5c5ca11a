"""The character transformer and the GRU: their problems, their training, their forms."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from repeating_text import CODES, repeating_file, repeating_problem
from torch import nn
from torch.nn import functional

from experiments.methods import build_optimizer
from experiments.models import seeded
from experiments.problems.language import Language, Recurrent, load_language
from experiments.tasks import RIVALS, UNTUNED, modern_settings
from experiments.training import train
from tnt_optim import KFAC, TNT, Shampoo


@pytest.fixture
def problem() -> Language:
    return repeating_problem()


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


def test_the_validation_loss_is_the_mean_over_windows_that_lie_apart(problem: Language) -> None:
    # 40 characters: 5 windows of 6 and the character after.
    assert problem.validation_starts.tolist() == [0, 8, 16, 24, 33]
    model = nn.Sequential(seeded(problem.build, 1), nn.Dropout(0.5))
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


def test_all_tensors_move_to_a_device(problem: Language) -> None:
    moved = problem.to(torch.device("meta"))
    assert moved.text.train.is_meta and moved.text.validation.is_meta
    assert moved.validation_starts.is_meta and moved.text.characters == problem.text.characters
    assert not problem.text.train.is_meta and not problem.validation_starts.is_meta


def test_grafted_tnt_learns_the_repeating_text(problem: Language) -> None:
    run = train(problem, replace(modern_settings("tnt", 25), batch_size=16), report_every=0)
    assert run.epochs[-1].metrics["validation_loss"] < 1.0 < run.step_losses[0]


def test_the_gru_starts_at_chance_and_learns_the_repeating_text(tmp_path: Path) -> None:
    problem = load_language(
        repeating_file(tmp_path), Recurrent, width=16, context=6, epoch_steps=20
    )
    assert (problem.name, problem.width) == ("gru", 16)
    assert not {"layers", "heads"} & set(problem.description())
    assert seeded(problem.build, 0)(torch.zeros(3, 5, dtype=torch.int64)).shape == (15, 11)
    settings = replace(modern_settings("adam", 3, lr=0.02), schedule="constant")
    run = train(problem, settings, report_every=0)
    assert run.step_losses[0] == pytest.approx(math.log(11), abs=0.15)
    assert run.epochs[-1].metrics["validation_loss"] < 0.5
    assert Recurrent(problem.text, context=6).width == 128
    with pytest.raises(TypeError, match="layers"):
        Recurrent(problem.text, layers=2)


# The settings and the texts


LIBRARIES = {
    **dict.fromkeys(("soap", "normuon"), "pytorch_optimizer"),
    **dict.fromkeys(("kl-shampoo", "psgd"), "heavyball"),
}


@pytest.mark.filterwarnings("ignore:KFAC updates:RuntimeWarning")  # embeddings and norms
def test_settings_are_the_defaults_and_the_rivals(problem: Language) -> None:
    model = seeded(problem.build, 0)
    for name in (*UNTUNED, *RIVALS):
        settings = modern_settings(name, 8, seed=3)
        assert (settings.schedule, settings.weight_decay) == ("warmup-cosine", 0.0)
        assert (settings.epochs, settings.seed, settings.warm_start) != (8, 3, True)
        if name in LIBRARIES:
            pytest.importorskip(LIBRARIES[name])
        optimizer = build_optimizer(model, settings, "categorical")
        assert all(group["lr"] == settings.lr for group in optimizer.param_groups)
        if name in UNTUNED:
            params = model if name == "kfac" else model.named_parameters()
            kind = {"shampoo": Shampoo, "kfac": KFAC}.get(name, TNT)
            own = {"likelihood": "categorical"} if name in ("tnt", "kfac") else {}
            plain = kind(params, **own)
            assert optimizer.defaults == plain.defaults
            assert getattr(optimizer, "likelihood", None) == getattr(plain, "likelihood", None)
    assert modern_settings("tnt", lr=0.5).lr == 0.5
    assert modern_settings("adam").stat_decay == 0.99


def test_broken_texts_are_named(tmp_path: Path) -> None:
    path = repeating_file(tmp_path)
    assert load_language(path, width=8, heads=2, context=6).source == "text.txt"
    for content, message in (("ab" * 30, "got 64"), ("a" * 900, "two different"), ("a", "got 0")):
        (tmp_path / "bad.txt").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_language(tmp_path / "bad.txt")
