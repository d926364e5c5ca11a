"""Step times: which steps are of which kind, what a mean step is made of, and what is recorded."""

import copy
import doctest
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import tnt_optim.kfac.kfac
import tnt_optim.shampoo
import tnt_optim.tnt
import tnt_optim.update
from experiments import step_times
from experiments.costs import step_kinds, step_sets
from experiments.costs.step_kinds import (
    NEVER,
    PLAIN,
    START,
    Kind,
    Plan,
    TrainingStep,
    amortised,
    check_moved,
    components,
    kind_at,
    shares,
    state_bytes,
    summary,
    time_kinds,
)
from experiments.costs.step_sets import STEP_SETS, StepSet, factor_sizes
from experiments.costs.step_times_report import plot_step_times, step_times_page
from experiments.models import CharacterTransformer, autoencoder, reconstruction_loss
from experiments.runs.methods import METHODS
from experiments.runs.run_file import RunFile, load_runs
from tnt_optim.kfac.inverses import INVERSES

CPU = torch.device("cpu")
STATISTICS, INVERSES_ALONE, BOTH = Kind(True, False), Kind(False, True), Kind(True, True)
QUICK = Plan(0.0, fewest=2, most=2)
WIDTHS = (6, 5, 3, 5, 6)
SIZES = list(zip(WIDTHS[1:], WIDTHS[:-1], strict=True))  # (out, in) of each layer


def draw(count: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.rand(count, 6, generator=rng)
    return images, images


TINY = StepSet(
    *("mnist_ae", lambda: autoencoder(WIDTHS), draw, 8),
    *(reconstruction_loss, "bernoulli", "kfac", (1, 20)),
)


@pytest.fixture(autouse=True)
def quiet(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "busy_share", lambda: 0.0)


@pytest.mark.parametrize("module", [step_kinds, step_sets], ids=lambda m: m.__name__)
def test_examples(module: Any) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted > 0 and failed == 0


# Arithmetic.


@pytest.mark.parametrize("pair", [(1, 1), (1, 20), (10, 100), (2, 3), (3, 2), (20, 5), (7, 1)])
def test_shares_are_those_of_a_period(pair: tuple[int, int]) -> None:
    steps = 4200
    counted = Counter(kind_at(t, *pair) for t in range(steps))
    assert {kind: Fraction(n, steps) for kind, n in counted.items()} == shares(*pair)


def test_a_mean_step_is_the_mean_of_a_period() -> None:
    seconds = {PLAIN: 1.0, STATISTICS: 3.0, INVERSES_ALONE: 8.0, BOTH: 10.0}
    assert amortised(seconds, shares(1, 20)) == pytest.approx((19 * 3 + 10) / 20)
    assert amortised(seconds, shares(10, 100)) == pytest.approx((90 + 9 * 3 + 10) / 100)
    assert amortised(seconds, shares(3, 2)) == pytest.approx((10 + 3 + 2 * 8 + 2 * 1) / 6)
    for pair in ((1, 20), (10, 100), (3, 2)):
        assert sum(components(seconds, shares(*pair))) == pytest.approx(
            amortised(seconds, shares(*pair))
        )
    assert components(seconds, shares(1, 20)) == pytest.approx((1, 2, 7 / 20))
    assert components(seconds, shares(3, 2)) == pytest.approx((1, 2 / 3, 7 / 2))


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (-1, 5)])
def test_intervals_must_be_positive(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="intervals must be positive"):
        shares(*pair)


def test_summary_of_few_samples() -> None:
    assert summary([2.0, 4.0]) == {"median": 3.0, "quartiles": [2.5, 3.5], "samples": [2.0, 4.0]}
    assert summary([2.0])["median"] == 2.0


def test_the_number_of_rounds() -> None:
    plan = Plan(10.0, fewest=3, most=20)
    assert [plan.rounds(s) for s in (0.0, 0.1, 2.0, 3.5, 100.0)] == [20, 20, 5, 3, 3]


# Kinds.


def counted_calls(monkeypatch: pytest.MonkeyPatch, method: str) -> Counter[str]:
    """Counts the method's own refreshes from here on."""
    calls: Counter[str] = Counter()

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return counting

    def patch(module: Any, attribute: str, name: str) -> None:
        monkeypatch.setattr(module, attribute, count(name, getattr(module, attribute)))

    if method == "kfac":
        patch(tnt_optim.kfac.kfac, "blend", "statistics")
        made = copy.copy(INVERSES["damped"])
        object.__setattr__(made, "make", count("inverses", made.make))
        monkeypatch.setitem(INVERSES, "damped", made)
        return calls
    module = tnt_optim.shampoo if method == "shampoo" else tnt_optim.tnt
    # Where the steps after the first blend the statistics.
    patch(tnt_optim.update, "gram_ema_", "statistics")
    patch(module, "inverse_root" if method == "shampoo" else "damped_inverse", "inverses")
    return calls


@pytest.mark.parametrize("method", ["tnt", "tnt-ef", "shampoo", "kfac"])
@pytest.mark.parametrize("pair", [(1, 20), (10, 100), (2, 3), (3, 2)])
def test_kinds_are_what_the_optimizer_does(
    monkeypatch: pytest.MonkeyPatch, method: str, pair: tuple[int, int]
) -> None:
    step = TINY.training_step(method, CPU)
    step()
    calls = counted_calls(monkeypatch, method)
    first = START + 7
    step.set_intervals(*pair, step=first)
    for t in range(first, first + 25):
        calls.clear()
        step()
        assert Kind(calls["statistics"] > 0, calls["inverses"] > 0) == kind_at(t, *pair)


@pytest.mark.parametrize("method", ["tnt", "tnt-ef", "shampoo", "kfac"])
def test_a_kind_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    step = TINY.training_step(method, CPU)
    step()
    calls = counted_calls(monkeypatch, method)
    for kind in (PLAIN, STATISTICS, PLAIN, INVERSES_ALONE, BOTH, PLAIN):
        calls.clear()
        step.set_due(kind)
        step()
        assert Kind(calls["statistics"] > 0, calls["inverses"] > 0) == kind
    # Nothing of the first T2 steps, in which every statistics step remakes the inverses.
    assert START % NEVER != 0 and START > NEVER


def test_a_whole_period_holds_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = TINY.training_step("tnt", CPU)
    step()
    calls = counted_calls(monkeypatch, "tnt")
    assert step.period_seconds(2, 6) > 0
    # What a step calls is called once: one group, one device.
    assert calls == {"statistics": 3, "inverses": 1}
    assert step.optimizer.param_groups[0]["step"] % 6 == 0


# Timing.


def test_every_method_is_timed_in_its_kinds() -> None:
    steps = {method: TINY.training_step(method, CPU) for method in TINY.methods()}
    assert list(steps) == ["sgd", "adam", "muon", "tnt", "tnt-ef", "kfac", "shampoo"]
    for step in steps.values():
        step()
    samples = time_kinds(steps, [PLAIN, STATISTICS, BOTH], QUICK)
    for method, own in samples.items():
        second_order = METHODS[method].statistics is not None
        assert list(own) == ([PLAIN, STATISTICS, BOTH] if second_order else [PLAIN])
        assert all(len(taken) == 2 and min(taken) > 0 for taken in own.values())


def test_what_is_slow_is_timed_less_often() -> None:
    steps = {"sgd": TINY.training_step("sgd", CPU)}
    steps["sgd"]()
    plan = Plan(0.0, fewest=4, slow=0.0, slow_rounds=1)
    assert len(time_kinds(steps, [PLAIN], plan)["sgd"][PLAIN]) == 1


class Still(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_steps_that_move_nothing_are_refused() -> None:
    moving = TINY.training_step("sgd", CPU)
    parts = (moving.model, Still(moving.model.parameters(), lr=1.0), moving.inputs, moving.targets)
    step = TrainingStep(*parts, reconstruction_loss, observes=False)
    with pytest.raises(ValueError, match=r"sgd: 0\.weight was not moved"):
        time_kinds({"sgd": step}, [PLAIN], QUICK)
    start = [p.detach().clone() for p in step.model.parameters()]
    with torch.no_grad():
        step.model[0].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"sgd: 0\.weight is no longer finite"):
        check_moved("sgd", step.model, start)


# State.

NUMBERS = sum(out * (columns + 1) for out, columns in SIZES)
# Statistics and what is made of them: out and in of the weight, out of the bias.
MODES = sum(out**2 + columns**2 + out**2 for out, columns in SIZES)
LAYERS = sum(out**2 + (columns + 1) ** 2 for out, columns in SIZES)


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("sgd", NUMBERS),
        ("adam", 2 * NUMBERS),
        # AdamW has the last layer and the biases, Muon only a momentum.
        ("muon", 2 * NUMBERS - sum(out * columns for out, columns in SIZES[:-1])),
        ("tnt", NUMBERS + 2 * MODES),
        ("tnt-ef", NUMBERS + 2 * MODES),
        ("shampoo", NUMBERS + 2 * MODES),
        ("kfac", NUMBERS + 2 * LAYERS),
        ("kfac-eigen", NUMBERS + 2 * LAYERS + NUMBERS),
    ],
)
def test_bytes_of_the_state(method: str, numbers: int) -> None:
    step = TINY.training_step(method, CPU)
    step()
    assert state_bytes(step.optimizer) == 4 * numbers


def test_sizes_of_factors() -> None:
    model = autoencoder(WIDTHS)
    assert sum(d**2 for d in factor_sizes(model, "shampoo")) == MODES
    assert sum(d**2 for d in factor_sizes(model, "kfac-eigen")) == LAYERS
    large = torch.nn.Embedding(9000, 3)
    assert factor_sizes(large, "shampoo") == [3]  # the other mode is diagonal


def test_the_estimate_grows_with_the_cubes() -> None:
    assert step_times.refresh_estimate(TINY, "shampoo") == 0.0  # small
    assert step_times.refresh_estimate(STEP_SETS["vgg16"], "tnt") == 0.0  # quick
    assert step_times.refresh_estimate(STEP_SETS["vgg16"], "shampoo") > 1.0


# Sets.


def test_sets_have_the_kernels_shapes() -> None:
    from tools.measuring.parameter_sets import PARAMETER_SETS

    for name in ("mnist_ae", "faces_ae", "resnet32", "vgg16", "square4096"):
        with torch.device("meta"):
            shapes = tuple(tuple(p.shape) for p in STEP_SETS[name].build().parameters())
        assert shapes == PARAMETER_SETS[name].shapes
    assert "muon" not in STEP_SETS["resnet32"].methods()  # no matrix in a hidden layer
    assert STEP_SETS["resnet32"].methods()[-2] == "kfac-eigen"


def test_batches_fit_the_models() -> None:
    characters = STEP_SETS["characters"]
    inputs, targets = characters.examples(2, torch.Generator().manual_seed(0))
    outputs = CharacterTransformer(65, 8, 1, 2, 64)(inputs)
    assert characters.loss(outputs, targets).isfinite()
    images, labels = STEP_SETS["resnet32"].examples(3, torch.Generator())
    assert images.shape == (3, 3, 32, 32) and labels.shape == (3,)


# Records.


def measured(path: Path, methods: tuple[str, ...] = ("sgd", "tnt"), **options: Any) -> RunFile:
    runs = RunFile(path, "step times", {"quick": True})
    step_times.measure_set(runs, TINY, methods, QUICK, CPU, **options)
    return runs


def test_runs_hold_what_they_are_made_of(tmp_path: Path) -> None:
    runs = measured(tmp_path / "runs.json", period_seconds=100.0).runs
    keys = [tuple(run["key"].values()) for run in runs]
    assert keys == [
        ("mnist_ae", "sgd", None, None),
        ("mnist_ae", "tnt", 1, 20),
        ("mnist_ae", "tnt", 10, 100),
    ]
    sgd, often, seldom = runs
    assert sgd["ratio"] == 1.0 and list(sgd["kinds"]) == ["plain"]
    assert often["ratio"] == often["seconds"] / sgd["seconds"]
    assert {name: kind["share"] for name, kind in seldom["kinds"].items()} == {
        "plain": 0.9,
        "statistics": 0.09,
        "statistics and inverses": 0.01,
    }
    known = {name: kind["median"] for name, kind in often["kinds"].items()}
    expected = 0.95 * known["statistics"] + 0.05 * known["statistics and inverses"]
    assert often["seconds"] == pytest.approx(expected)
    assert sum(often["components"].values()) == pytest.approx(often["seconds"])
    assert often["state_bytes"] == 4 * (NUMBERS + 2 * MODES)
    assert often["parameter_bytes"] == 4 * NUMBERS
    assert often["whole_period_mean"] > 0 and seldom["whole_period_mean"] is None


def test_only_what_is_missing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.json"
    measured(path)
    before = load_runs(path)["runs"]
    runs = measured(path, ("sgd", "adam", "tnt"))
    assert runs.runs[:3] == before
    assert runs.runs[3]["key"]["method"] == "adam" and len(runs.runs) == 4
    assert runs.runs[3]["alternated_with"] == ["sgd", "adam"]
    monkeypatch.setattr(step_times, "time_kinds", None)  # not called
    measured(path, ("sgd", "adam", "tnt"))
    assert load_runs(path)["runs"] == runs.runs


def test_what_would_take_too_long_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimates = {"shampoo": 50.0}
    monkeypatch.setattr(
        step_times, "refresh_estimate", lambda step_set, method: estimates.get(method, 0.0)
    )
    runs = measured(tmp_path / "runs.json", ("sgd", "shampoo"), longest_refresh=40.0).runs
    sgd, often, seldom = runs
    assert "estimated at 50 s, above 40 s" in often["left_out"]
    assert often["ratio_at_least"] == pytest.approx(1 + 50 / 20 / sgd["seconds"])
    assert seldom["ratio_at_least"] == pytest.approx(1 + 50 / 100 / sgd["seconds"])
    page = step_times_page(runs, {"device": "cpu", "threads": 1, "data": "random"})
    assert "\\* Not measured. Shampoo: one refresh" in page
    plot_step_times(runs, tmp_path / "picture.png")


def test_the_page_has_the_authors_ratio(tmp_path: Path) -> None:
    runs = measured(tmp_path / "runs.json").runs
    page = step_times_page(runs, {"device": "cpu", "threads": 1, "data": "random"})
    (row,) = [line for line in page.splitlines() if line.startswith("| TNT | 1, 20 ")]
    assert "| 2.28 |" in row
    columns = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert len(columns) == 1


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(STEP_SETS, "mnist_ae", TINY)
    monkeypatch.setattr(step_times, "QUICK", QUICK)
    out = tmp_path / "runs.json"
    command = ["--quick", "--sets", "mnist_ae", "--methods", "tnt", "kfac", "--out", str(out)]
    command += ["--device", "cpu"]
    assert step_times.main(command) == 0
    assert "## mnist_ae" in capsys.readouterr().out
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".md", ".png"]
    # SGD-m was timed beside them, but was not asked for.
    assert {run["key"]["method"] for run in load_runs(out)["runs"]} == {"tnt", "kfac"}
    with pytest.raises(SystemExit):
        step_times.main([*command[1:]])  # not quick: another protocol
    assert "quick was True and is False" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sets", "imagenet"], "invalid choice: 'imagenet'"),
        (["--methods", "lbfgs"], "invalid choice: 'lbfgs'"),
        (["--out", "runs.txt"], "must end in .json"),
        (["--longest-refresh", "0"], "must be positive"),
        (["--threads", "0"], "must be at least 1"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        step_times.main([*arguments, "--device", "cpu"])
    assert message in capsys.readouterr().err
