"""An optimizer of one's own (examples/one_sided_shampoo.py) against its dense definition."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import through_a_file
from oracle_shampoo import eigen_root
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn

from tnt_optim.kronecker import KroneckerOptimizer
from tnt_optim.units import Units

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


# ------------------------------------------------------------------ Muon and SOAP

EXAMPLES = EXAMPLE.parent
MUON = runpy.run_path(str(EXAMPLES / "muon.py"))["Muon"]
SOAP = runpy.run_path(str(EXAMPLES / "soap.py"))["SOAP"]
MATRICES = [(6, 4), (3, 8), (5, 5)]


def drawn(shapes: list[tuple[int, ...]], seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes]


def steps(opt: torch.optim.Optimizer, params: list[nn.Parameter], those: range) -> None:
    shapes = [tuple(p.shape) for p in params]
    for step in those:
        for param, gradient in zip(params, drawn(shapes, step), strict=True):
            param.grad = gradient
        opt.step()


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(nesterov: bool) -> None:
    """Up to bfloat16's rounding of momenta that differ by a factor."""
    settings = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.3}
    starts = drawn(MATRICES, 50)
    runs = []
    for make in (MUON, torch.optim.Muon):
        params = [nn.Parameter(p.clone()) for p in starts]
        steps(make(params, **settings), params, range(30))
        runs.append(params)
    for own, other, start in zip(*runs, starts, strict=True):
        assert float((own - other).detach().norm()) < 0.01 * float((other - start).detach().norm())


def defined_soap(start: Tensor, those: range, lr: float, refresh: int, eps: float) -> Tensor:
    """The definition, for a matrix."""
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    left = right = torch.empty(0)
    q_left = q_right = torch.empty(0)
    for t in those:
        (g,) = drawn([tuple(start.shape)], t)
        left = g @ g.T if t == 0 else 0.95 * left + 0.05 * g @ g.T
        right = g.T @ g if t == 0 else 0.95 * right + 0.05 * g.T @ g
        # In the first steps, whose statistics change fast, at every one.
        if t % refresh == 0 or t < refresh:
            q_left, q_right = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
        m = 0.95 * m + 0.05 * g
        v = 0.95 * v + 0.05 * (q_left.T @ g @ q_right).square()
        average = q_left.T @ m @ q_right / (1 - 0.95 ** (t + 1))
        step = average / ((v / (1 - 0.95 ** (t + 1))).sqrt() + eps)
        w = w - lr * (q_left @ step @ q_right.T + 0.01 * w)
    return w


def test_soap_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first gradient is diagonal in its own eigenbasis: 1e-8 would divide roundings of zeros.
    monkeypatch.setitem(SOAP._directions.__globals__, "EPS", 1e-3)
    (start,) = drawn([(5, 5)], 50)  # statistics of full rank have one eigenbasis
    params = [nn.Parameter(start.clone())]
    opt = SOAP(params, lr=0.02, inverse_interval=7)
    steps(opt, params, range(30))
    wanted = defined_soap(start, range(30), 0.02, 7, eps=1e-3)
    moved = float((wanted - start).norm())
    assert float((params[0] - wanted).detach().norm()) <= FLOAT64_TRAJECTORY * moved


@pytest.mark.parametrize("make", [MUON, SOAP])
def test_muon_and_soap_resume_bit_for_bit(make: Any) -> None:
    params = [nn.Parameter(p) for p in drawn(MATRICES, 50)]
    opt = make(params)
    steps(opt, params, range(9))
    saved, state = through_a_file([[p.detach() for p in params], opt.state_dict()])
    steps(opt, params, range(9, 15))
    others = [nn.Parameter(p) for p in saved]
    again = make(others)
    again.load_state_dict(state)
    steps(again, others, range(9, 15))
    assert all(map(torch.equal, params, others))
    assert again.failures()["unreached"] == 0
    assert again.memory_estimate()["total"] > 0


def test_units_of_several_parameters_are_not_recorded() -> None:
    """A graph has numbers on the device for the groups of weights, not for those of biases."""

    class Layers(KroneckerOptimizer):
        def __init__(self, layer: nn.Linear) -> None:
            self._units = Units({layer.weight: layer.bias})
            super().__init__(layer.parameters(), {"capturable": True})

    with pytest.raises(ValueError, match="^capturable must be False for layers"):
        Layers(nn.Linear(3, 4))
