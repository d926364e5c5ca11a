"""The autoencoder experiments: the training loop, the commands, and the recorded search."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.experiments import autoencoder, demo, search, training
from bench.experiments.models import (
    MNIST_WIDTHS,
    loss_floor,
    reconstruction_loss,
    seeded_autoencoder,
)
from bench.experiments.models import autoencoder as autoencoder_model
from bench.experiments.problems import (
    OPTIMIZERS,
    Problem,
    Settings,
    default_settings,
    has_statistics,
    load_problem,
    problem_settings,
    recorded_search,
)
from bench.experiments.training import Run, smoothed, train
from bench.records import write_json

RATES: dict[str, tuple[float, float | None]] = {
    "tnt": (3e-3, 0.3),
    "tnt-ef": (3e-3, 0.3),
    "sgd": (0.05, None),
    "adam": (1e-2, 1e-8),
}


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Sixteen pixels that two numbers explain, 104 times."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(104, 2, generator=generator)
    images = (4 * codes @ torch.randn(2, 16, generator=generator)).sigmoid()
    return Problem("digits", images, (16, 12, 2, 12, 16))


def settings(optimizer: str, **changes: Any) -> Settings:
    """Settings that train the tiny problem in a moment."""
    base = problem_settings("digits", optimizer, *RATES[optimizer])
    return replace(base, **{"batch_size": 20, "epochs": 12, **changes})


# The loop


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_lowers_the_loss_the_same_way_each_time(problem: Problem, optimizer: str) -> None:
    run, again = (train(problem, settings(optimizer), report_every=0) for _ in range(2))
    assert run.steps_per_epoch == 5, "104 images make 5 batches of 20, and the rest is dropped"
    assert len(run.step_losses) == 60
    assert run.step_losses == again.step_losses
    assert run.final_loss < run.step_losses[0] - 0.5
    assert run.final_loss > run.loss_floor
    assert (run.warm_start_seconds is not None) == has_statistics(optimizer)


def test_every_optimizer_has_the_same_start_and_batches(problem: Problem) -> None:
    # Steps so small that the losses are those of the start, batch by batch.
    runs = [
        train(
            problem,
            settings(optimizer, lr=1e-6, damping=None if optimizer == "sgd" else 1.0),
            report_every=0,
        )
        for optimizer in OPTIMIZERS
    ]
    first = torch.tensor(runs[0].step_losses)
    assert first.std() > 0.05, "batches must differ for this test to see their order"
    for run in runs[1:]:
        assert run.step_losses[0] == runs[0].step_losses[0]
        torch.testing.assert_close(torch.tensor(run.step_losses), first, rtol=0, atol=1e-3)


def test_seeds_differ_and_the_callers_random_state_is_left_alone(problem: Problem) -> None:
    before = torch.get_rng_state()
    runs = [train(problem, settings("tnt", seed=seed, epochs=1), report_every=0) for seed in (0, 1)]
    assert runs[0].step_losses[0] != runs[1].step_losses[0]
    assert torch.equal(torch.get_rng_state(), before)


def test_smoothing_starts_at_the_first_loss_and_goes_on_across_epochs(problem: Problem) -> None:
    assert smoothed([10.0, 20.0, 0.0]) == pytest.approx([10.0, 11.0, 9.9])
    run = train(problem, settings("sgd", epochs=3), report_every=0)
    curve = smoothed(run.step_losses)
    assert [epoch.smoothed_loss for epoch in run.epochs] == pytest.approx(curve[4::5])


def test_losses_are_taken_before_the_update(problem: Problem) -> None:
    run = train(problem, settings("sgd", epochs=1), report_every=0)
    model = seeded_autoencoder(problem.widths, 0)
    batch = problem.images[torch.randperm(104, generator=torch.Generator().manual_seed(0))[:20]]
    assert run.step_losses[0] == pytest.approx(reconstruction_loss(model(batch), batch).item())


def test_times_to_a_loss_count_the_warm_start(problem: Problem) -> None:
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


def test_divergence_ends_the_run_and_is_recorded(problem: Problem, tmp_path: Path) -> None:
    run = train(problem, settings("sgd", lr=1e30), report_every=0)
    assert run.diverged_at_step is not None and run.diverged_at_step <= 5
    assert len(run.epochs) == 1
    assert run.final_loss == math.inf
    write_json(tmp_path / "run.json", run.record())
    assert json.loads((tmp_path / "run.json").read_text())["final_smoothed_loss"] is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("optimizer", ["tnt", "tnt-ef"])
def test_second_order_divergence_is_recorded_too(problem: Problem, optimizer: str) -> None:
    run = train(problem, settings(optimizer, lr=1e20), report_every=0)
    assert run.diverged_at_step is not None
    assert run.final_loss == math.inf


def test_parameters_that_do_not_move_are_an_error(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def still(model: nn.Module, _: Settings) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    monkeypatch.setattr(training, "build_optimizer", still)
    with pytest.raises(RuntimeError, match=r"left parameters where they were.*0\.weight"):
        train(problem, settings("sgd"), report_every=0)


def test_an_error_in_a_step_is_not_taken_for_divergence(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(torch.optim.SGD, "step", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        train(problem, settings("sgd"), report_every=0)


def test_epoch_lines_are_printed_off_a_terminal(
    problem: Problem, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(problem, settings("tnt"), report_every=5)
    out, error = capsys.readouterr()
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["TNT", "warm", "start:"],
        ["TNT", "epoch", "5/12"],
        ["TNT", "epoch", "10/12"],
        ["TNT", "epoch", "12/12"],
    ]
    assert f"smoothed loss {run.final_loss:8.3f}" in out
    assert error == ""


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


def test_mnist_defaults_are_the_papers() -> None:
    found = {name: default_settings("mnist", name) for name in OPTIMIZERS}
    assert {name: (s.lr, s.damping) for name, s in found.items()} == {
        "tnt": (1e-4, 0.1),
        "tnt-ef": (3e-6, 0.01),
        "sgd": (0.003, None),
        "adam": (1e-4, 1e-4),
    }
    assert {(s.batch_size, s.momentum, s.seed) for s in found.values()} == {(1000, 0.9, 0)}
    for s in found.values():
        schedule = (1, 20, True) if has_statistics(s.optimizer) else (None, None, None)
        assert (s.stat_interval, s.inverse_interval, s.warm_start) == schedule


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_digits_defaults_are_the_best_of_the_recorded_search(optimizer: str) -> None:
    tried = [e for e in recorded_search()["tried"] if e["optimizer"] == optimizer]
    losses = {(e["lr"], e["damping"]): e["mean_final_loss"] for e in tried}
    grid = {(s.lr, s.damping) for s in search.settings_of(optimizer)}
    assert set(losses) == grid and len(tried) == len(grid), "the record is of another grid"
    chosen = default_settings("digits", optimizer)
    best = min(loss for loss in losses.values() if loss is not None)
    assert losses[chosen.lr, chosen.damping] == best
    for values, value in zip(search.GRIDS[optimizer], (chosen.lr, chosen.damping), strict=True):
        assert value is None or value not in (values[0], values[-1]), "the grid ends at the best"


def test_the_recorded_search_gave_all_the_same_budget() -> None:
    record = recorded_search()
    counts = {name: sum(e["optimizer"] == name for e in record["tried"]) for name in OPTIMIZERS}
    assert set(counts.values()) == {35}
    assert record["protocol"] == search._protocol(load_problem("digits"))
    for name in OPTIMIZERS:
        s = default_settings("digits", name)
        assert (s.batch_size, s.epochs, s.momentum) == (128, 60, 0.9)
        assert s.seed not in search.SEEDS


def test_a_search_rules_out_what_diverges_from_one_start(problem: Problem) -> None:
    steady = search._try(problem, settings("sgd", epochs=2), torch.device("cpu"))
    assert steady["diverged"] is None and len(set(steady["final_losses"])) == len(search.SEEDS)
    mean = sum(steady["final_losses"]) / len(search.SEEDS)
    assert steady["mean_final_loss"] == pytest.approx(mean, abs=1e-4)
    wild = search._try(problem, settings("sgd", lr=1e30), torch.device("cpu"))
    assert wild["diverged"]["seed"] == search.SEEDS[0] and wild["mean_final_loss"] is None
    assert search.best_of([wild, steady])["sgd"]["lr"] == steady["lr"]


def test_a_search_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Problem
) -> None:
    calls: list[tuple[str, float]] = []

    def counted(_: Problem, chosen: Settings, *args: object, **kwargs: object) -> Run:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append((chosen.optimizer, chosen.lr))
        return train(problem, replace(chosen, epochs=1, batch_size=20), report_every=0)

    grids = {name: ((1e-4, 1e-3), (RATES[name][1],)) for name in OPTIMIZERS}
    monkeypatch.setattr(search, "GRIDS", grids)
    monkeypatch.setattr(search, "SEEDS", (1,))
    monkeypatch.setattr(search, "train", counted)
    out = tmp_path / "search.json"
    with pytest.raises(KeyboardInterrupt):
        search.main(["--out", str(out)])
    assert len(json.loads(out.read_text())["tried"]) == 3
    calls += [("out of the way", 0.0)]
    search.main(["--out", str(out)])
    assert calls[:3] + calls[4:] == [(n, lr) for n in OPTIMIZERS for lr in (1e-4, 1e-3)]
    record = json.loads(out.read_text())
    assert set(record["best"]) == set(OPTIMIZERS)
    assert not any(best["interior"] for best in record["best"].values())
    assert len(record["provenance"]) == 2


@pytest.mark.parametrize(
    ("text", "message"), [("{}", "not the record of a search"), ('{"protocol": 1}', "other epochs")]
)
def test_a_search_does_not_mix_protocols(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    out = tmp_path / "search.json"
    out.write_text(text)
    with pytest.raises(SystemExit):
        search.main(["--out", str(out)])
    assert message in capsys.readouterr().err
    assert out.read_text() == text


# The commands


@pytest.fixture
def digits_of_few(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> None:
    """The commands' digits are the tiny problem."""
    monkeypatch.setattr("bench.experiments.command_line.load_problem", lambda _: problem)


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_command_records_every_setting(
    digits_of_few: None, tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new folder" / "run.json"
    given = f"--epochs 2 --batch-size 30 --lr 1e-3 --momentum 0.8 --seed 5 --out {out}"
    arguments = ["--data", "digits", "--optimizer", optimizer, "--device", "cpu"]
    arguments += given.replace(str(out), "").split() + [str(out)]
    wanted = default_settings("digits", optimizer)
    wanted = replace(wanted, epochs=2, batch_size=30, lr=1e-3, momentum=0.8, seed=5)
    if has_statistics(optimizer):
        arguments += "--damping 0.5 --stat-interval 2 --inverse-interval 3 --no-warm-start".split()
        wanted = replace(wanted, damping=0.5, stat_interval=2, inverse_interval=3, warm_start=False)
    assert autoencoder.main(arguments) == 0
    record = json.loads(out.read_text())
    assert record["settings"] == asdict(wanted)
    assert record["optimizer_defaults"]["lr"] == 1e-3
    assert len(record["epochs"]) == 2 and len(record["step_losses"]) == 6
    assert record["final_smoothed_loss"] == record["epochs"][-1]["smoothed_loss"]
    assert record["provenance"]["versions"]["torch"] == torch.__version__
    assert record["warm_start_seconds"] is None
    assert is_picture(out.with_suffix(".png"))
    assert f"wrote {out}" in capsys.readouterr().out


def test_the_command_says_when_training_diverged(
    digits_of_few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    arguments = f"--data digits --optimizer sgd --lr 1e30 --batch-size 20 --out {out}".split()
    assert autoencoder.main(arguments) == 1
    assert "diverged: the loss of step" in capsys.readouterr().out
    assert json.loads(out.read_text())["diverged_at_step"] <= 5
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
    ("--optimizer sgd --stat-interval 2", "argument --stat-interval: SGD-m has no such setting"),
    ("--optimizer tnt --inverse-interval 0", "argument --inverse-interval: must be at least 1"),
    ("--optimizer sgd --momentum 1", "argument --momentum: must be at least 0 and below 1"),
    ("--optimizer sgd --epochs 0", "argument --epochs: must be at least 1, got 0"),
    ("--optimizer sgd --epochs 1.5", "argument --epochs: must be a whole number, got '1.5'"),
    ("--optimizer sgd --seed -1", "argument --seed: must be at least 0 and below 2**63, got -1"),
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
    monkeypatch.setattr(autoencoder, "train", lambda *_: pytest.fail("it trained"))
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


def test_flushing_is_set_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: calls.append(mode) or True)
    command = f"--data digits --optimizer sgd --epochs 1 --out {tmp_path / 'run.json'}"
    assert autoencoder.main(command.split()) == 0
    assert calls == []
    assert autoencoder.main([*command.split(), "--flush-subnormals"]) == 0
    assert calls == [True]
