"""The Poisson equation, bags of words, fine-tuning and PPO: problems, and how they are counted."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from repeating_text import repeating_problem
from torch import Tensor, nn

from experiments import ppo
from experiments.data.text import Text
from experiments.defaults import TASKS, _untuned, cells, root_steps, rows
from experiments.methods import build_optimizer, lr_multiplier
from experiments.models import seeded
from experiments.problems import finetuning
from experiments.problems.finetuning import FineTuning, LowRank
from experiments.problems.poisson import BOUNDARY_FACTOR, Poisson, PoissonNetwork, solution
from experiments.problems.words import WINDOW, Words
from experiments.tasks import modern_settings
from experiments.training import train

# The Poisson equation


class Known(nn.Module):
    """The solution, plus a multiple of x² y, whose Laplacian is 2 y."""

    def __init__(self, multiple: float) -> None:
        super().__init__()
        self.multiple = nn.Parameter(torch.tensor(multiple, dtype=torch.float64))

    def forward(self, points: Tensor) -> Tensor:
        x, y = points.unbind(1)
        return (solution(points) + self.multiple * x**2 * y)[:, None]


def network(multiple: float) -> PoissonNetwork:
    made = PoissonNetwork(width=4, layers=1)
    made.u = Known(multiple)  # type: ignore[assignment]
    return made


def test_residuals_are_those_of_the_equation() -> None:
    points = torch.rand(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    points[12:, 0], points[16:, 0] = 1, 0
    x, y = points.unbind(1)
    added = network(0.5)(points).squeeze(1) - network(0.0)(points).squeeze(1)
    assert network(0.0)(points).abs().max() < 1e-9
    torch.testing.assert_close(added[:12], -y[:12])
    torch.testing.assert_close(added[12:], BOUNDARY_FACTOR * 0.5 * (x**2 * y)[12:])


def test_points_are_drawn_anew_inside_and_on_the_edge() -> None:
    problem, draw = Poisson(), torch.Generator().manual_seed(0)
    indices = problem.order(50, draw)[0]
    (first, zeros), (second, _) = (problem.batch(indices, draw) for _ in range(2))
    edge = ((first == 0) | (first == 1)).any(1)
    assert edge.tolist() == 40 * [False] + 10 * [True]
    assert first.min() >= 0 and first.max() <= 1 and not torch.equal(first, second)
    assert problem.loss(problem.build()(first), zeros).dtype == torch.float64
    assert not zeros.any() and zeros.shape == (50, 1)


def test_the_relative_error_is_the_solutions() -> None:
    problem = Poisson()
    assert problem.evaluate(network(0.0))["relative_error"] == 0
    zero = network(0.0)
    zero.u = nn.Linear(2, 1, dtype=torch.float64)
    nn.init.zeros_(zero.u.weight), nn.init.zeros_(zero.u.bias)
    assert problem.evaluate(zero)["relative_error"] == pytest.approx(1)


def test_the_equation_is_learned() -> None:
    problem = Poisson(width=32, layers=2, epoch_steps=40)
    settings = replace(modern_settings("tnt", 10, 0.03, 256), damping=0.003)
    assert train(problem, settings, report_every=0).epochs[-1].metrics["relative_error"] < 0.2


# Bags of words


def test_neighbours_and_the_word_between_them() -> None:
    text = " ".join(f"w{number % 7}" for number in range(400)) + " rare(x"
    problem = Words(text, "x.txt", vocabulary=8, width=4, epoch_steps=3)
    inputs, targets = problem.batch(torch.tensor([5, 20]), torch.Generator())
    for row, place in enumerate((5, 20)):
        window = problem.codes[place : place + 2 * WINDOW + 1].tolist()
        assert targets[row] == window.pop(WINDOW) and inputs[row].tolist() == window
    # Seven words, and one code for the three others.
    assert problem.vocabulary == 8 and problem.codes[-3:].tolist() == [7, 7, 7]
    assert problem.order(16, torch.Generator()).max() < problem.examples
    windows = problem.validation[:, None] + torch.arange(2 * WINDOW + 1)
    assert windows.min() >= problem.examples + 2 * WINDOW
    assert windows.max() == len(problem.codes) - 1
    loss = problem.evaluate(problem.build())["validation_loss"]
    assert train(problem, modern_settings("tnt-ef", 8, 0.1, 16), report_every=0).final_loss < loss


# Fine-tuning


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> tuple[Text, Text]:
    monkeypatch.setattr(finetuning, "FIRST_STEPS", 3)
    text = repeating_problem().text
    return text, replace(text, train=text.train.flip(0))


SIZES: dict[str, Any] = {
    **{"width": 8, "layers": 1, "heads": 2, "context": 6},
    **{"epoch_steps": 4, "validation_windows": 5},
}


@pytest.mark.parametrize("low_rank", [False, True])
def test_fine_tuning_starts_from_the_first_training(
    texts: tuple[Text, Text], low_rank: bool
) -> None:
    problem = FineTuning(*texts, low_rank, **SIZES)
    model, tokens = seeded(problem.build, 5), torch.arange(12).reshape(2, 6) % 11
    plain = seeded(repeating_problem().build, 5)
    assert not torch.equal(model(tokens), plain(tokens))
    plain.load_state_dict(problem.start)
    assert torch.equal(model(tokens), plain(tokens))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    adapted = [module for module in model.modules() if isinstance(module, LowRank)]
    assert len(adapted) == (6 if low_rank else 0)
    assert all(name.endswith(("down.weight", "up.weight")) for name in trained) == low_rank
    assert problem.description()["first"]["loss"] == pytest.approx(
        repeating_loss(plain, problem), abs=1e-4
    )


def repeating_loss(model: nn.Module, problem: FineTuning) -> float:
    return problem.metrics(model.eval())["validation_loss"]


def test_low_rank_updates_are_all_that_is_trained(texts: tuple[Text, Text]) -> None:
    problem = FineTuning(*texts, True, **SIZES)
    model = problem.build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = modern_settings("tnt-ef", 1, None, 4)
    opt = build_optimizer(model, settings, problem.likelihood)
    for indices in problem.order(4, torch.Generator().manual_seed(0)):
        inputs, targets = problem.batch(indices, torch.Generator())
        opt.zero_grad()
        problem.loss(model(inputs), targets).backward()
        opt.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name


# Tables


def test_early_roots_are_counted_as_the_optimizer_takes_them() -> None:
    problem, settings = repeating_problem(), modern_settings("tnt-ef", 10, None, 4)
    counted = root_steps(problem, settings)
    model = seeded(problem.build, settings.seed)
    opt = build_optimizer(model, settings, problem.likelihood)
    shuffle, taken = torch.Generator().manual_seed(settings.seed), 0
    order = torch.cat([problem.order(4, shuffle) for _ in range(settings.epochs)])
    for step, indices in enumerate(order):
        opt.param_groups[0]["lr"] = settings.lr * lr_multiplier(settings.schedule, step, 4, 40)
        inputs, targets = problem.batch(indices, torch.Generator())
        opt.zero_grad()
        problem.loss(model(inputs), targets).backward()
        opt.step()
        taken += opt.param_groups[0]["takes_roots"]
    assert counted == taken and 0 < counted < 40


def test_settings_to_begin_with_have_a_row_of_their_own() -> None:
    task = replace(TASKS["poisson"], epochs=1, seeds=range(1), centres={}, untuned=("tnt-ef",))
    runs: list[dict[str, Any]] = [
        {
            "key": {"task": "t", "settings": asdict(settings)},
            "losses": [value],
            "epoch_steps": 4,
            "diverged_at_step": None,
        }
        for settings, value in zip(_untuned("tnt-ef", task, 0), (0.5, 0.0123), strict=True)
    ]
    kinds = ("plain", "statistics", "inverses", "statistics and inverses")
    seconds = {**dict.fromkeys(kinds, 1.0), "statistics and inverses and roots": 3.0}
    times = {"median_seconds": {"tnt-ef": seconds}, "root_steps": {"tnt-ef": 2}}
    runs.append({"key": {"task": "t", "settings": None}, **times})
    default, begin = rows(runs, "t", task)
    assert cells(default, [])[1:] == ("default", "0.500", "2000.0")
    assert cells(begin, [])[1:3] == ("lr 0.03, damping 0.003", "1.2e-02")
    assert default.clock == [0.0, 3.0, 6.0, 7.0, 8.0]


def test_ppo_compares_at_searched_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.setattr(ppo, "UNTUNED", ("tnt",))
    monkeypatch.setattr(ppo, "RIVALS", {"adam": 0.01})
    monkeypatch.setattr(ppo, "TUNING_SEEDS", range(100, 101))
    monkeypatch.setattr(ppo, "SEEDS", range(10, 12))
    ppo.main(rollouts=1, jobs=1, out=tmp_path / "ppo.json")
    page = capsys.readouterr().out
    assert "| TNT " in page and "| AdamW " in page and "0 of 2" in page
    assert (tmp_path / "ppo.md").read_text() == page
