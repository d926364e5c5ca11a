"""The training loop of the experiments, on a tiny autoencoder."""

import importlib.util
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments import training
from experiments.methods import (
    METHODS,
    AuthorsAdam,
    Settings,
    build_optimizer,
    has_statistics,
    lr_multiplier,
    method_settings,
)
from experiments.pool import make_runs
from experiments.problems.autoencoders import Autoencoder
from experiments.run_files import RunFile
from experiments.tasks import TABLE_3, modern_settings
from experiments.training import Run, _Training, smoothed, train, train_in_turn
from tnt_kernels.benchmark.records import write_json

RATES: dict[str, tuple[float, float | None]] = {
    "tnt": (3e-3, 0.3),
    "tnt-ef": (3e-3, 0.3),
    "kfac": (0.1, 1.0),
    "shampoo": (1e-2, 1e-3),
    "sgd": (0.05, None),
    "adam": (1e-2, 1e-8),
    "normuon": (3e-2, None),
    "soap": (1e-2, 1e-8),
    "kl-shampoo": (3e-2, 1e-8),
    "psgd": (1e-2, None),
}


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs the package {package}")


needs_soap, needs_heavyball = needs("pytorch_optimizer"), needs("heavyball")
LIBRARIES = [
    pytest.param("normuon", marks=needs_soap),
    pytest.param("soap", marks=needs_soap),
    pytest.param("kl-shampoo", marks=needs_heavyball),
    pytest.param("psgd", marks=needs_heavyball),
]
TRAINED = [*TABLE_3["digits"], *LIBRARIES]


@pytest.fixture(scope="module")
def problem() -> Autoencoder:
    """Sixteen pixels that two numbers explain, 104 times."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(104, 2, generator=generator)
    images = (4 * codes @ torch.randn(2, 16, generator=generator)).sigmoid()
    return Autoencoder("digits", images, (16, 12, 2, 12, 16))


def settings(optimizer: str, **changes: Any) -> Settings:
    """Settings that train the tiny problem in a moment."""
    base = method_settings(optimizer, *RATES[optimizer], batch_size=20, epochs=12)
    return replace(base, **changes)


@pytest.mark.parametrize("optimizer", TRAINED)
def test_training_lowers_the_loss_the_same_way_each_time(
    problem: Autoencoder, optimizer: str
) -> None:
    run, again = (train(problem, settings(optimizer), report_every=0) for _ in range(2))
    assert run.steps_per_epoch == 5, "104 images make 5 batches of 20, and the rest is dropped"
    assert len(run.step_losses) == 60
    assert run.step_losses == again.step_losses
    assert run.final_loss < run.step_losses[0] - 0.5
    assert run.final_loss > run.loss_floor
    assert (run.warm_start_seconds is not None) == has_statistics(optimizer)


def test_every_optimizer_has_the_same_start_and_batches(problem: Autoencoder) -> None:
    # Steps so small that the losses are those of the start, batch by batch.
    runs = [
        train(
            problem,
            settings(optimizer, lr=1e-6, damping=None if optimizer == "sgd" else 1.0),
            report_every=0,
        )
        for optimizer in TABLE_3["digits"]
    ]
    first = torch.tensor(runs[0].step_losses)
    assert first.std() > 0.05, "batches must differ for this test to see their order"
    for run in runs[1:]:
        assert run.step_losses[0] == runs[0].step_losses[0]
        torch.testing.assert_close(torch.tensor(run.step_losses), first, rtol=0, atol=1e-3)


def test_smoothing_starts_at_the_first_loss_and_goes_on_across_epochs(problem: Autoencoder) -> None:
    assert smoothed([10.0, 20.0, 0.0]) == pytest.approx([10.0, 11.0, 9.9])
    run = train(problem, settings("sgd", epochs=3), report_every=0)
    curve = smoothed(run.step_losses)
    assert [epoch.smoothed_loss for epoch in run.epochs] == pytest.approx(curve[4::5])


def test_times_to_a_loss_count_the_warm_start(problem: Autoencoder) -> None:
    run = train(problem, settings("tnt", epochs=4), report_every=0)
    warm = run.warm_start_seconds
    assert warm is not None and warm > 0
    assert run.epochs[-1].elapsed_seconds == pytest.approx(
        warm + sum(epoch.seconds for epoch in run.epochs)
    )
    assert run.seconds_to(run.step_losses[0]) == pytest.approx(warm)
    reached = run.seconds_to(run.epochs[1].smoothed_loss)
    assert reached is not None
    assert run.epochs[0].elapsed_seconds < reached <= run.epochs[1].elapsed_seconds
    assert run.seconds_to(0.0) is None


def test_divergence_ends_the_run_and_is_recorded(problem: Autoencoder, tmp_path: Path) -> None:
    run = train(problem, settings("sgd", lr=1e30), report_every=0)
    assert run.diverged_at_step is not None and run.diverged_at_step <= 5
    assert len(run.epochs) == 1
    assert run.final_loss == math.inf
    write_json(tmp_path / "run.json", run.record())
    assert json.loads((tmp_path / "run.json").read_text())["final_smoothed_loss"] is None


def test_parameters_that_do_not_move_are_an_error(
    problem: Autoencoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def still(model: nn.Module, *_: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    monkeypatch.setattr(training, "build_optimizer", still)
    with pytest.raises(
        training.StationaryParametersError, match=r"did not change parameters.*0\.weight"
    ):
        train(problem, settings("sgd"), report_every=0)
    run = train(problem, settings("sgd"), report_every=0, check_moved=False)
    assert len(run.epochs) == 12, "a search may try a rate that rounds to nothing"


@pytest.mark.parametrize("optimizer", TRAINED)
def test_an_interrupted_run_goes_on_bit_for_bit(
    problem: Autoencoder, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SECONDS_BETWEEN", 0.0)
    chosen = settings(optimizer, epochs=6, schedule="warmup-cosine")
    whole = train(problem, chosen, report_every=0)
    path = tmp_path / "run.partial.pt"

    def stops(run: Run) -> str:
        if len(run.epochs) == 4:
            raise KeyboardInterrupt
        return ""

    with monkeypatch.context() as context:
        context.setattr(training, "_epoch_line", stops)
        with pytest.raises(KeyboardInterrupt):
            train(problem, chosen, checkpoint=path)
    assert path.exists()
    with pytest.raises(ValueError, match=r"of a run with other settings \(lr\): delete it"):
        train(problem, replace(chosen, lr=0.5), report_every=0, checkpoint=path)
    fewer = Autoencoder("digits", problem.images[:100], problem.widths)
    with pytest.raises(ValueError, match=r"with other settings \(examples\)"):
        train(fewer, chosen, report_every=0, checkpoint=path)
    saved = path.read_bytes()
    torch.save(torch.load(path) | {"part": {"losses": [1.0]}}, path)
    with pytest.raises(ValueError, match="it is of the middle of an epoch.*delete it"):
        train(problem, chosen, report_every=0, checkpoint=path)
    path.write_bytes(saved)
    resumed = train(problem, chosen, report_every=0, checkpoint=path)
    # PSGD-Kron's bounds are in float64, which loading makes float32.
    rounding = 1e-5 if optimizer == "psgd" else 0.0
    assert resumed.step_losses == pytest.approx(whole.step_losses, rel=rounding, abs=0.0)
    assert [e.number for e in resumed.epochs] == [1, 2, 3, 4, 5, 6]
    assert resumed.resumed_after == [3] and whole.resumed_after == []
    assert (resumed.warm_start_seconds is not None) == has_statistics(optimizer)
    assert list(tmp_path.iterdir()) == []


def test_runs_in_turn_are_the_runs_alone(
    problem: Autoencoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [settings("tnt", epochs=3), settings("sgd", lr=1e30), settings("kfac", epochs=2)]
    alone = [train(problem, one, report_every=0) for one in wanted]
    turns, epoch = [], _Training._pass

    def noted(one: _Training, *arguments: Any) -> list[float]:
        turns.append(one.run.label)
        return epoch(one, *arguments)

    monkeypatch.setattr(_Training, "_pass", noted)
    files = [tmp_path / f"{number}.pt" for number in range(3)]
    ended = list(train_in_turn(problem, wanted, report_every=0, checkpoints=files))
    assert turns == ["TNT", "SGD-m", "KFAC", "TNT", "KFAC", "TNT"]
    assert [run.settings.optimizer for run in ended] == ["sgd", "kfac", "tnt"]
    for run in ended:
        same = alone[wanted.index(run.settings)]
        assert json.dumps(run.step_losses) == json.dumps(same.step_losses)
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_runs_goes_on_where_it_was_stopped(
    problem: Autoencoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings("tnt", epochs=3)
    file, key = RunFile(tmp_path / "runs.json", "many runs", {}), asdict(wanted)

    def make() -> None:
        make_runs(file, lambda: problem, {wanted: key}, lambda record: record, jobs=1)

    def stops(one: _Training, batch: torch.Tensor) -> torch.Tensor:
        if len(one.run.epochs) == 2:
            raise KeyboardInterrupt
        return step(one, batch)

    step = _Training._step
    monkeypatch.setattr(training, "SECONDS_BETWEEN", 0.0)
    with monkeypatch.context() as context:
        context.setattr(_Training, "_step", stops)
        with pytest.raises(KeyboardInterrupt):
            make()
    assert list(tmp_path.iterdir()) == [file.checkpoint(key)]
    make()
    (made,) = file.runs
    assert made["resumed_after"] == [2] and not file.checkpoint(key).exists()
    whole = train(problem, wanted, report_every=0).record()
    assert made["step_losses"] == whole["step_losses"]


def test_a_record_gives_its_run_back(problem: Autoencoder) -> None:
    run = train(problem, settings("tnt", epochs=2), report_every=0)
    again = Run.from_record(json.loads(json.dumps(run.record())))
    # The record keeps nine digits, enough for a float32.
    wanted = run.record() | {"initial_loss": pytest.approx(run.step_losses[0], rel=1e-8)}
    assert again.record() == wanted
    assert again.seconds_to(run.final_loss) == pytest.approx(run.seconds_to(run.final_loss))


# Schedules and labels


def test_schedules() -> None:
    steps = [lr_multiplier("step:3", step, 10, 90) for step in range(90)]
    assert steps[:30] == [1.0] * 30 and steps[30:60] == [0.1] * 30 and steps[60:] == [0.01] * 30
    warm = [lr_multiplier("warmup-cosine", step, 10, 100) for step in range(100)]
    assert warm[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert warm[5] == 1.0 and 0 < warm[-1] < 1e-3
    assert all(a > b for a, b in zip(warm[5:], warm[6:], strict=False))
    assert lr_multiplier("constant", 5, 10, 100) == 1.0
    for name in ("step", "step:0", "step:x", "linear", ""):
        with pytest.raises(ValueError, match="schedule must be 'constant'"):
            lr_multiplier(name, 0, 1, 1)


# First-order methods


def test_the_decay_of_sgd_is_decoupled() -> None:
    generator = torch.Generator().manual_seed(3)
    model = nn.Linear(3, 2)
    start = [p.detach().clone() for p in model.parameters()]
    chosen = settings("sgd", lr=0.1, weight_decay=0.5)
    optimizer = METHODS["sgd"].build(model, chosen, "bernoulli")
    wanted, momenta = start, [torch.zeros_like(p) for p in start]
    for _ in range(3):
        grads = [torch.randn(p.shape, generator=generator) for p in start]
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        momenta = [0.9 * m + g for m, g in zip(momenta, grads, strict=True)]
        wanted = [w - 0.1 * (m + 0.5 * w) for w, m in zip(wanted, momenta, strict=True)]
    for p, w in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), w)


def test_the_authors_adam_scales_with_the_second_moment_of_its_momentum() -> None:
    start, generator = torch.tensor([1.0, -2.0, 3.0]), torch.Generator().manual_seed(0)
    weight = nn.Parameter(start.clone())
    opt = AuthorsAdam([weight], lr=0.1, betas=(0.5, 0.75), eps=0.01)
    m, v, wanted = torch.zeros(3), torch.zeros(3), start.clone()
    for t in range(1, 5):
        weight.grad = torch.randn(3, generator=generator)
        opt.step()
        m = 0.5 * m + 0.5 * weight.grad
        n = m / (1 - 0.5**t)
        v = 0.75 * v + 0.25 * n**2
        wanted -= 0.1 * n / ((v / (1 - 0.75**t)).sqrt() + 0.01)
        torch.testing.assert_close(weight.detach(), wanted)


def test_muon_serves_hidden_matrices_and_adamw_the_rest() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    chosen = replace(settings("sgd", lr=0.01), optimizer="muon", momentum=0.95)
    optimizer = METHODS["muon"].build(model, chosen, "categorical")
    owned = [[p.shape for p in group["params"]] for group in optimizer.param_groups]
    assert owned == [[(6, 4)], [(5, 4), (6,), (5, 6), (5,)]]
    tokens = torch.tensor([0, 1, 2, 3, 4])
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    for p, was in zip(model.parameters(), before, strict=True):
        assert not torch.equal(p.detach(), was)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.0
    hidden = model[1].weight.detach().clone()
    optimizer.step(closure)
    assert torch.equal(model[1].weight.detach(), hidden), "a rate set from outside is the part's"
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    with pytest.raises(ValueError, match="matrix in a hidden layer"):
        METHODS["muon"].build(nn.Linear(2, 2), chosen, "categorical")


# Rivals of other libraries


def rival(name: str, model: nn.Module, **changes: Any) -> torch.optim.Optimizer:
    chosen = replace(modern_settings(name, 1), lr=0.01, batch_size=20)
    return build_optimizer(model, replace(chosen, **changes), "bernoulli")


def gradients(model: nn.Module, generator: torch.Generator) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_rate_counts_from_its_step_on(name: str) -> None:
    moved = []
    for rate in (0.01, 0.03):
        torch.manual_seed(5)
        model, generator = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), torch.Generator()
        optimizer = rival(name, model)
        for step in range(4):
            start = [p.detach().clone() for p in model.parameters()]
            for group in optimizer.param_groups:
                group["lr"] = rate if step == 3 else 0.02
            gradients(model, generator.manual_seed(step))
            optimizer.step()
        moved.append([p.detach() - s for p, s in zip(model.parameters(), start, strict=True)])
    for slow, fast in zip(*moved, strict=True):
        torch.testing.assert_close(fast, 3 * slow, rtol=1e-3, atol=1e-6)


def test_a_rival_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ValueError, match="soap.*python -m pip install pytorch-optimizer"):
        rival("soap", nn.Linear(2, 2))
