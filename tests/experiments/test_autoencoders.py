"""Figures 2, 4 and 6: the settings are the paper's, and the problems fit their data."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.data import DataMissingError
from experiments.methods import has_statistics
from experiments.models.autoencoder import (
    loss_floor,
    reconstruction_loss,
)
from experiments.problems.autoencoders import Autoencoder, load_autoencoder
from experiments.tasks import TASKS, autoencoder_settings


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


def test_problems_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load_autoencoder("digits", examples=40)
    whole = load_autoencoder("digits").images
    assert (whole.min(), whole.max()) == (0, 1)
    assert torch.equal(digits.images, whole[:40])
    with pytest.raises(ValueError, match="examples must be from 1 to 1797, got 1798"):
        load_autoencoder("digits", examples=1798)
    with pytest.raises(DataMissingError, match="must hold train-images"):
        load_autoencoder("mnist", tmp_path)
    monkeypatch.setenv("TNT_DATA", str(tmp_path))
    with pytest.raises(DataMissingError, match="no mnist: TNT_DATA names"):
        load_autoencoder("mnist")
    monkeypatch.delenv("TNT_DATA")
    with pytest.raises(DataMissingError, match="no olivetti: give --data FOLDER, or set TNT_DATA"):
        load_autoencoder("faces")


def test_settings_take_learning_rate_damping_and_decays_from_their_table() -> None:
    first, tuned = (autoencoder_settings("mnist", "kfac", table=table) for table in (3, 5))
    assert (first.lr, first.damping, first.momentum, first.stat_decay) == (0.003, 0.3, 0.9, 0.9)
    assert (tuned.lr, tuned.damping, tuned.momentum, tuned.stat_decay) == (3e-5, 0.01, 0.999, 0.999)
    assert autoencoder_settings("faces", "adam").stat_decay == 0.999
    for problem in ("mnist", "faces"):
        for name in TASKS[problem].methods:
            s = autoencoder_settings(problem, name)
            assert (s.batch_size, s.weight_decay, s.schedule, s.seed) == (1000, 0, "constant", 0)
            intervals = (1, 20, True) if has_statistics(name) else (None, None, None)
            assert (s.stat_interval, s.inverse_interval, s.warm_start) == intervals
            assert (s.damping is None) == (name == "sgd")
    names = ["tnt", "kfac", "shampoo", "adam", "adam-authors", "sgd"]
    assert TASKS["mnist-tuned"].methods == names
    assert TASKS["mnist-tuned"].settings("kfac", 7) == replace(tuned, epochs=7)
