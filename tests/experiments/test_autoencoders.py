"""Figures 2, 4 and 6: the settings are the paper's, and the problems fit their data."""

from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.autoencoders import OPTIMIZERS, TABLE_5, autoencoder_settings
from experiments.data import DataMissingError
from experiments.methods import has_statistics
from experiments.models.autoencoder import (
    MNIST_WIDTHS,
    autoencoder,
    loss_floor,
    reconstruction_loss,
)
from experiments.problems.autoencoders import Autoencoder, load_autoencoder

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_mnist_model_is_the_papers() -> None:
    model = autoencoder(MNIST_WIDTHS)
    linears = [m for m in model if isinstance(m, nn.Linear)]
    sizes = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    assert [m.in_features for m in linears] + [linears[-1].out_features] == sizes
    kinds = "".join("R" if isinstance(m, nn.ReLU) else "L" for m in model)
    assert kinds == "LRLRLRL" + "LRLRLRL", "no ReLU after the code and after the output"


def found(problem: str, table: int = 3) -> dict[str, tuple[object, ...]]:
    names = OPTIMIZERS if table == 3 else TABLE_5["mnist"]
    all_of_them = {name: autoencoder_settings(problem, name, table) for name in names}
    return {n: (s.lr, s.damping, s.momentum, s.stat_decay) for n, s in all_of_them.items()}


def test_settings_are_the_papers() -> None:
    assert (
        found("mnist")
        == found("curves")
        == {
            "tnt": (1e-4, 0.1, 0.9, 0.9),
            "tnt-ef": (3e-6, 0.01, 0.9, 0.9),
            "kfac": (0.003, 0.3, 0.9, 0.9),
            "shampoo": (3e-4, 3e-4, 0.9, 0.9),
            "adam": (1e-4, 1e-4, 0.9, 0.999),
            "sgd": (0.003, None, 0.9, None),
        }
    )
    assert found("faces") == {
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
    for problem in ("mnist", "faces"):
        for name in OPTIMIZERS:
            s = autoencoder_settings(problem, name)
            assert (s.batch_size, s.weight_decay, s.schedule, s.seed) == (1000, 0, "constant", 0)
            intervals = (1, 20, True) if has_statistics(name) else (None, None, None)
            assert (s.stat_interval, s.inverse_interval, s.warm_start) == intervals
    with pytest.raises(ValueError, match="Table 5 on mnist has tnt, kfac, shampoo, adam, sgd"):
        autoencoder_settings("mnist", "tnt-ef", 5)


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
    curves = load_autoencoder("curves", examples=30)
    assert (curves.name, curves.examples, curves.widths[0]) == ("curves", 30, 784)
    digits = load_autoencoder("digits", examples=40)
    assert torch.equal(digits.images, load_autoencoder("digits").images[:40])
    with pytest.raises(ValueError, match="examples must be from 1 to 1797, got 1798"):
        load_autoencoder("digits", examples=1798)
    with pytest.raises(DataMissingError, match="must hold one of train-images"):
        load_autoencoder("mnist", tmp_path)
    monkeypatch.setenv("TNT_DATA", str(tmp_path))
    with pytest.raises(DataMissingError, match="no mnist: TNT_DATA names"):
        load_autoencoder("mnist")
    monkeypatch.delenv("TNT_DATA")
    with pytest.raises(DataMissingError, match="no olivetti: give --data, or set TNT_DATA"):
        load_autoencoder("faces")
