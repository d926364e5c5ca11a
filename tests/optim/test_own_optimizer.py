"""An optimizer of one's own (examples/one_sided_shampoo.py) against its dense definition."""

import runpy
from pathlib import Path

import pytest
import torch
from optimizers import through_a_file
from oracle_shampoo import eigen_root
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_sided_shampoo.py"
ONE_SIDED_SHAMPOO = runpy.run_path(str(EXAMPLE))["OneSidedShampoo"]
SHAPES = [(4, 3), (5,), (3, 2, 2, 2), (1, 7)]
SETTINGS = {"lr": 0.03, "damping": 0.05, "weight_decay": 0.1, "stat_interval": 2}
T1, T2 = SETTINGS["stat_interval"], 4


def weights() -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=rng, dtype=torch.float64) / s[0]) for s in SHAPES]


def gradients(step: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s, generator=rng, dtype=torch.float64) for s in SHAPES]


def train(opt: torch.optim.Optimizer, params: list[nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        for param, gradient in zip(params, gradients(step), strict=True):
            param.grad = gradient
        opt.step()


def dense_trajectory(steps: int) -> list[Tensor]:
    """The definition with every preconditioner formed by eigenvalues."""
    found = []
    for number, start in enumerate(weights()):
        w = start.detach().reshape(start.shape[0], -1)
        m, stat, root = torch.zeros_like(w), None, torch.empty(0)
        for step in range(steps):
            g = gradients(step)[number].reshape(w.shape)
            if step % T1 == 0:
                stat = g @ g.T if stat is None else 0.9 * stat + 0.1 * g @ g.T
            if step % T2 == 0 or (step % T1 == 0 and step < T2):
                assert stat is not None
                root = eigen_root(stat + SETTINGS["damping"] * torch.eye(len(w)).double(), 2)
            m = 0.9 * m + g
            w = w - SETTINGS["lr"] * (root @ m + SETTINGS["weight_decay"] * w)
        found.append(w.reshape(start.shape))
    return found


def test_steps_are_the_definition() -> None:
    params = weights()
    opt = ONE_SIDED_SHAMPOO(params, inverse_interval=T2, **SETTINGS)
    train(opt, params, 0, 9)
    for param, start, wanted in zip(params, weights(), dense_trajectory(9), strict=True):
        moved = float((wanted - start.detach()).norm())
        assert moved > 0.1
        assert float((param - wanted).detach().norm()) <= FLOAT64_TRAJECTORY * moved


def test_resumed_training_is_the_training() -> None:
    params = weights()
    opt = ONE_SIDED_SHAMPOO(params, inverse_interval=T2, **SETTINGS)
    train(opt, params, 0, 5)
    saved, state = through_a_file([[p.detach() for p in params], opt.state_dict()])
    train(opt, params, 5, 11)
    others = [nn.Parameter(p) for p in saved]
    again = ONE_SIDED_SHAMPOO(others, inverse_interval=T2, **SETTINGS)
    again.load_state_dict(state)
    train(again, others, 5, 11)
    assert all(map(torch.equal, params, others))


def test_the_table_serves_it() -> None:
    """Its options are checked and documented, and a saved state knows the method."""
    with pytest.raises(ValueError, match="damping must be a finite number >= 0, got -1"):
        ONE_SIDED_SHAMPOO(weights(), damping=-1.0)
    assert "mu in the paper: m <- mu m + g" in ONE_SIDED_SHAMPOO.__doc__
    assert ONE_SIDED_SHAMPOO(weights()).state_dict()["method"] == "OneSidedShampoo"


def test_the_paper_has_settings_of_its_own_methods_only() -> None:
    """Its form is there for every method."""
    assert ONE_SIDED_SHAMPOO.paper(weights()).param_groups[0]["relative_damping"] is False
    message = "^problem must be left out: the paper has no settings for .*, got 'mnist'$"
    with pytest.raises(ValueError, match=message):
        ONE_SIDED_SHAMPOO.paper(weights(), "mnist")
