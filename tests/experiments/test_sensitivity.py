"""How well one learning rate serves: the plan, the measures on losses by hand, the command."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import sensitivity
from experiments.language.forms import FORMS
from experiments.models import DIGITS_WIDTHS
from experiments.problems import Problem, seeded_model
from experiments.problems.autoencoders import default_settings
from experiments.runs.run_file import load_runs
from experiments.runs.settings import Settings
from experiments.runs.training import train
from experiments.sensitivities import plan as sensitivity_plan
from experiments.sensitivities.measures import (
    Surface,
    amount,
    axis_rows,
    best_rate,
    common_rate,
    common_rows,
    rates_in_common,
    regret,
    serving,
    summary_rows,
    surface,
    transfer,
)
from experiments.sensitivities.plan import (
    AXES,
    BASES,
    CONTENDERS,
    FULL,
    QUICK,
    MeasuredAutoencoder,
    Point,
    Scale,
    axis_points,
    make_problem,
    points,
    rates,
    refreshes,
    run_key,
    run_settings,
    wanted,
)
from tnt_optim import Shampoo

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Scale(epochs={"digits": 1, "language": 4}, rate_step=2, seeds=(0,), width=8, epoch_steps=1)


# The plan


@pytest.mark.parametrize("scale", [FULL, QUICK])
@pytest.mark.parametrize("problem", BASES)
def test_every_form_has_the_same_number_of_runs_at_every_point(problem: str, scale: Scale) -> None:
    seeds = (0, 1)
    runs = list(wanted(list(CONTENDERS), problem, seeds, scale))
    each = len(seeds) * (11 if scale is FULL else 6)
    counts = Counter((key["form"], point) for point, _, key in runs)
    assert set(counts) == set(itertools.product(CONTENDERS, points(problem)))
    assert set(counts.values()) == {each}
    assert len(points(problem)) == 1 + 2 * len(AXES), "the base point once"
    told_apart = {(point.width, settings) for point, settings, _ in runs}
    assert len(told_apart) == len(runs), "the pool, called for each width, returns settings"
    assert len({tuple(key.items()) for _, _, key in runs}) == len(runs)


@pytest.mark.parametrize("problem", BASES)
@pytest.mark.parametrize("form", CONTENDERS)
def test_rates_are_half_decades_of_equal_number(form: str, problem: str) -> None:
    tried = rates(form, problem, FULL)
    assert len(tried) == 11
    for lower, higher in itertools.pairwise(tried):
        assert higher / lower == pytest.approx(10**0.5, rel=0.06)
    assert rates(form, problem, QUICK) == tried[::2]


@pytest.mark.parametrize("form", ["tnt", "tnt-grafted", "shampoo", "shampoo-grafted"])
def test_the_texts_settings_are_the_language_comparisons(form: str) -> None:
    own, theirs = CONTENDERS[form], FORMS[form]
    assert (own.optimizer, own.damping["language"]) == (theirs.optimizer, theirs.damping)
    assert (own.graft == "adam") == own.relative_damping == theirs.grafted
    for scale in (FULL, QUICK):
        tried = rates(form, "language", scale)
        assert min(tried) <= theirs.lr / 10 and theirs.lr * 10 <= max(tried)


@pytest.mark.parametrize("form", ["tnt", "shampoo"])
def test_the_digits_settings_are_the_recorded_searchs(form: str) -> None:
    theirs = default_settings("digits", form)
    assert CONTENDERS[form].damping["digits"] == theirs.damping
    for scale in (FULL, QUICK):
        tried = rates(form, "digits", scale)
        assert min(tried) <= theirs.lr / 10 and theirs.lr * 10 <= max(tried)


@pytest.mark.parametrize("form", CONTENDERS)
def test_a_relative_damping_is_one_for_both_problems(form: str) -> None:
    dampings = CONTENDERS[form].damping
    assert (dampings["digits"] == dampings["language"]) == CONTENDERS[form].relative_damping


@pytest.mark.parametrize("scale", [FULL, QUICK])
@pytest.mark.parametrize("form", CONTENDERS)
def test_one_rate_for_both_problems_can_be_one_of_several(form: str, scale: Scale) -> None:
    digits, language = (rates(form, problem, scale) for problem in BASES)
    shared = sorted({*digits} & {*language})
    assert max(shared) / min(shared) >= 999, "over three decades"
    for own in (digits, language):
        assert shared == [lr for lr in own if min(shared) <= lr <= max(shared)], "without gaps"


@pytest.mark.parametrize("problem", BASES)
def test_axes_cross_in_the_base_point(problem: str) -> None:
    base = BASES[problem]
    for axis in AXES:
        low, middle, high = axis_points(problem, axis)
        assert middle == base.point
        for point in (low, high):
            assert replace(point, **{axis: getattr(base.point, axis)}) == base.point
            assert getattr(point, axis) in base.values[axis]


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("steps", "stat_interval", "inverse_interval", "count"),
    [(28, 1, 1, 28), (28, 1, 6, 10), (28, 1, 20, 21), (24, 5, 20, 5), (30, 4, 6, 6), (9, 3, 20, 3)],
)
def test_refreshes_are_counted_as_the_optimizers_make_factors(
    steps: int, stat_interval: int, inverse_interval: int, count: int, warm: bool
) -> None:
    made = []

    class Counting(Shampoo):
        def _factors(self, *arguments: Any) -> Any:
            made.append(self.param_groups[0]["step"])
            return super()._factors(*arguments)

    weight = torch.nn.Parameter(torch.randn(3, 2))
    target = torch.randn(3, 2)
    intervals = {"stat_interval": stat_interval, "inverse_interval": inverse_interval}
    optimizer = Counting([weight], lr=0.01, damping=0.1, **intervals)
    if warm:
        optimizer.warm_start([(weight - target).square().sum()])
        made.clear()
    for _ in range(steps):
        optimizer.zero_grad()
        (weight - target).square().sum().backward()
        optimizer.step()
    assert len(made) == refreshes(steps, stat_interval, inverse_interval) == count


@pytest.mark.parametrize("scale", [FULL, QUICK])
@pytest.mark.parametrize("problem", BASES)
def test_a_larger_interval_makes_fewer_factors(problem: str, scale: Scale) -> None:
    made = make_problem(problem, 1.0, None, scale)
    recorded = sensitivity_plan.protocol([problem], None, scale)["refreshes"][problem]
    counts = []
    for point in axis_points(problem, "inverse_interval"):
        settings = run_settings("tnt", point, 0.1, 0, scale)
        steps = settings.epochs * made.steps_per_epoch(settings.batch_size)
        assert settings.stat_interval is not None
        counts.append(refreshes(steps, settings.stat_interval, point.inverse_interval))
    assert recorded == counts
    # a quarter fewer at least: no two points are nearly the same runs
    assert all(fewer <= 0.75 * more for more, fewer in itertools.pairwise(counts))


@pytest.mark.parametrize("scale", [FULL, QUICK])
@pytest.mark.parametrize("problem", BASES)
def test_runs_of_every_batch_size_see_as_many_examples(problem: str, scale: Scale) -> None:
    made = make_problem(problem, 1.0, None, scale)
    seen = []
    for point in axis_points(problem, "batch_size"):
        settings = run_settings("tnt", point, 0.1, 0, scale)
        steps = settings.epochs * made.steps_per_epoch(settings.batch_size)
        seen.append(steps * settings.batch_size)
    # what does not fill a batch of the data is left out
    assert min(seen) > 0.84 * max(seen)
    if problem == "language":
        assert len(set(seen)) == 1
        with pytest.raises(ValueError, match="must be divisible by 128, got 3"):
            run_settings("tnt", point, 0.1, 0, replace(scale, epochs={"language": 3}))


def test_settings_of_a_point() -> None:
    point = Point("language", 8, 80, damping=10, width=2)
    settings = run_settings("shampoo-grafted", point, 0.3, 5, FULL)
    assert (settings.optimizer, settings.graft, settings.relative_damping) == (
        *("shampoo", "adam"),
        True,
    )
    assert (settings.batch_size, settings.inverse_interval, settings.damping) == (8, 80, 0.01)
    assert (settings.lr, settings.seed, settings.epochs, settings.stat_interval) == (0.3, 5, 16, 1)
    paper = run_settings("tnt", BASES["digits"].point, 0.3, 5, FULL)
    assert (paper.damping, paper.graft, paper.relative_damping) == (0.03, None, False)
    assert (paper.stat_interval, paper.warm_start, paper.epochs) == (1, True, FULL.epochs["digits"])


def test_width_leaves_the_images_and_the_code() -> None:
    assert DIGITS_WIDTHS == (64, 128, 64, 32, 8, 32, 64, 128, 64)
    for width, hidden in ((0.5, (64, 32, 16, 8, 16, 32, 64)), (2, (256, 128, 64, 8, 64, 128, 256))):
        made = make_problem("digits", width, None, FULL)
        assert isinstance(made, MeasuredAutoencoder)
        assert made.widths == (64, *hidden, 64)
        assert made.to(torch.device("cpu")).evaluate(made.build()).keys() == {"training_loss"}
    assert make_problem("language", 2, None, FULL).description()["width"] == 64


def test_the_autoencoders_loss_is_of_all_images() -> None:
    made = make_problem("digits", 0.5, None, FULL)
    assert isinstance(made, MeasuredAutoencoder)
    model = made.build()
    losses = [made.loss(model(image[None]), image[None]).item() for image in made.images[::20]]
    few = MeasuredAutoencoder("digits", made.images[::20], made.widths)
    assert few.evaluate(model)["training_loss"] == pytest.approx(sum(losses) / len(losses))


def test_the_default_text_is_named_with_its_version() -> None:
    shared = sensitivity_plan.protocol(["language"], None, FULL)["problems"]["language"]
    assert "Python 3." in shared["source"]
    assert shared["characters_to_train_on"] == 1_800_000
    assert shared["alphabet"] <= 128
    assert len(shared["sha256"]) == 64


def test_a_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity_plan.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match="have 0 characters here.*give a text"):
        make_problem("language", 1, None, FULL)


# The measures

LOSSES = {0.01: 6.0, 0.03: 4.1, 0.1: 4.0, 0.3: 7.0, 1.0: math.inf}
LOST = {lr: math.inf for lr in LOSSES}


def test_regret() -> None:
    assert best_rate(LOSSES) == 0.1
    assert regret(LOSSES, 0.01, None) == 2.0
    assert regret(LOSSES, 0.01, 3.0) == 2.0
    assert regret(LOSSES, 0.01, 2.0) == 1.0, "of the excess of 2"
    assert regret(LOSSES, 0.1, 3.0) == 0.0
    assert regret(LOSSES, 1.0, 3.0) == math.inf
    assert best_rate(LOST) is None
    assert math.isnan(regret(LOST, 0.1, 3.0))


def test_rates_that_serve() -> None:
    assert serving(LOSSES, 3.0) == {0.1}
    assert serving(LOSSES, 2.0) == {0.03, 0.1}, "exactly the tolerance serves"
    assert serving(LOSSES, None) == {0.1}
    assert serving(LOSSES, None, tolerance=2.5) == {0.01, 0.03, 0.1}
    assert serving(LOST, None) == set()


def test_the_common_rate_has_the_least_of_the_largest_regrets() -> None:
    first = {0.01: 1.0, 0.1: 1.5, 1.0: 2.5}
    second = {0.01: 3.0, 0.1: 1.25, 1.0: 1.0}
    assert common_rate([(first, None), (second, None)]) == (0.1, [0.5, 0.25])
    # in fractions of an excess of 0.1 the second problem's regrets weigh ten times as much
    assert common_rate([(first, None), (second, 0.9)]) == (1.0, [1.5, 0.0])
    assert common_rate([(first, None), ({**second, 0.1: math.inf}, None)]) == (1.0, [1.5, 0.0])
    assert common_rate([({0.1: 1.0, 1.0: math.inf}, None), ({0.1: math.inf, 1.0: 1.0}, None)]) is (
        None
    )
    # tried at one of two points does not count, even where it is best
    fewer = {lr: loss for lr, loss in second.items() if lr < 1}
    assert rates_in_common([first, fewer]) == [0.01, 0.1]
    assert rates_in_common([first, {3.0: 1.0}]) == rates_in_common([]) == []
    assert common_rate([({**first, 1.0: 0.5}, None), (fewer, None)]) == (0.1, [1.0, 0.0])
    assert common_rate([(first, None), ({3.0: 1.0}, None)]) is None
    found = common_rate([(first, None), ({lr: math.inf for lr in first}, None)])
    assert found is not None and found[0] == 0.01 and math.isnan(found[1][1])


def made_surface(problem: str, shift: int = 0) -> Surface:
    """A parabola over five decades; its minimum moves by `shift` places with every point."""
    tried = [10.0**place for place in range(-5, 1)]
    return {
        point: {lr: 4.0 + (place - 2 - shift * number) ** 2 for place, lr in enumerate(tried)}
        for number, point in enumerate(points(problem))
    }


def test_transfer_along_an_axis() -> None:
    losses = dict(made_surface("digits"))
    low, base, high = axis_points("digits", "damping")
    losses[low] = {lr: loss + 1 for lr, loss in losses[low].items()}
    losses[high] = {1e-5: math.inf, 1e-4: math.inf, 1e-3: 7.0, 1e-2: 6.0, 1e-1: 5.0, 1.0: 6.5}
    tuned, found = transfer(losses, "digits", "damping", 3.0)
    assert tuned == 1e-3
    assert found.values == (0.1, 1, 10)
    assert found.regrets == (0.0, 0.0, 1.0), "7 against 5, with an excess of 2"
    assert found.best == (1e-3, 1e-3, 1e-1)
    assert (found.shift, found.worst, found.at_an_end) == (4, 1.0, False)
    assert (found.serving, found.at_all) == ((1, 1, 1), 0)
    losses[high] = {lr: math.inf for lr in losses[high]}
    _, found = transfer(losses, "digits", "damping", 3.0)
    assert math.isnan(found.regrets[2]) and found.worst == 0.0 and found.shift == 0
    losses[high] = {**losses[base], 1e-3: math.inf}
    assert transfer(losses, "digits", "damping", 3.0)[1].worst == math.inf
    losses[high] = {**losses[base], 1.0: 0.0}
    _, found = transfer(losses, "digits", "damping", None)
    assert (found.shift, found.at_an_end) == (6, True)
    losses[base] = {lr: math.inf for lr in losses[base]}
    tuned, found = transfer(losses, "digits", "damping", 3.0)
    assert tuned is None and all(map(math.isnan, found.regrets))


def test_the_tables() -> None:
    floors = {"digits": 3.0, "language": None}
    steady = {**made_surface("digits"), **made_surface("language")}
    lost = {point: {lr: math.inf for lr in losses} for point, losses in steady.items()}
    surfaces: dict[str, Surface] = {"tnt": lost, "tnt-grafted": steady}
    header, *rows = summary_rows(surfaces, floors)
    assert [len(row) for row in rows] == [len(header)] * 4
    assert rows[0][:3] == ("TNT, paper's form", "Autoencoder", "all diverged")
    assert rows[1] == (
        *("TNT, grafted, relative", "Autoencoder", "0.001", "4.000", "0 %", "0 %"),
        *("0 of 8", "1.0 of 6"),
    )
    assert rows[3][4] == "0.000 nats"
    header, *rows = axis_rows(surfaces, "digits", 3.0, [9, 5, 2])
    names = ("batch size", "T2 (9, 5, 2 refreshes)", "damping ×", "width ×")
    assert [row[1] for row in rows] == [name for name in names for _ in surfaces]
    assert rows[1][2:] == ("32: 0 %, 512: 0 %", "0 decades", "1 1 1", "1")
    assert rows[0][2:] == ("all diverged", "-", "0 0 0", "0")
    header, *rows = common_rows(surfaces, floors)
    assert header[2:] == ("of the rates", "lr", "Autoencoder", "Transformer")
    assert rows[0][2:] == ("1e-05 to 1", "each diverges", "-", "-")
    assert rows[3][2:] == ("1e-05 to 1", "0.001", "0 %", "0.000 nats")
    moving = {**made_surface("digits", 1), **made_surface("language", 1)}
    # minima at places 2, 3, ..., 10, of which 0 to 5 are tried: place 5 is best from the fourth
    # point on, and loses 9 at the first; place 4 would lose 36 - 25 at the last
    assert common_rows({"tnt": moving}, floors)[2][3:] == ("1", "900 %", "9.000 nats")


@pytest.mark.parametrize(
    ("value", "floor", "text"),
    [
        (0.1234, 1.0, "12.3 %"),
        (0.1234, None, "0.123 nats"),
        (math.inf, None, "diverged"),
        (math.nan, 1.0, "all diverged"),
    ],
)
def test_amounts(value: float, floor: float | None, text: str) -> None:
    assert amount(value, floor) == text


def test_a_surface_is_the_mean_of_all_seeds() -> None:
    point = BASES["digits"].point
    losses = {(0.1, 0): 2.0, (0.1, 1): 4.0, (0.3, 0): 1.0, (0.3, 1): None, (1.0, 0): 1.0}
    runs = [
        {"key": json.loads(json.dumps(run_key("tnt", point, lr, seed))), "loss": loss}
        for (lr, seed), loss in losses.items()
    ]
    runs.append({"key": run_key("shampoo", point, 0.1, 0), "loss": 7.0})
    assert surface(runs, "tnt", [0, 1]) == {point: {0.1: 3.0, 0.3: math.inf}}
    assert surface(runs, "tnt", [0]) == {point: {0.1: 2.0, 0.3: 1.0, 1.0: 1.0}}


def test_what_is_kept_of_a_run() -> None:
    def record(loss: float, lost: int | None) -> dict[str, Any]:
        return {"epochs": [{"metrics": {"training_loss": loss}}], "diverged_at_step": lost}

    kept = [
        sensitivity._kept(record(*outcome), "training_loss")["loss"]
        for outcome in ((1.0, None), (math.nan, None), (1.0, 3))
    ]
    assert kept == [1.0, None, None]


# The command


def tiny_problem(name: str, width: float, text: Path | None, scale: Scale) -> Problem:
    """Sixteen pixels that two numbers explain, 520 times."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(520, 2, generator=generator)
    images = (4 * codes @ torch.randn(2, 16, generator=generator)).sigmoid()
    return MeasuredAutoencoder("digits", images, (16, round(6 * width), 2, round(6 * width), 16))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One epoch of the tiny problem; rates from which nothing diverges."""
    for module in (sensitivity, sensitivity_plan):
        monkeypatch.setattr(module, "make_problem", tiny_problem)
    monkeypatch.setattr(sensitivity, "QUICK", TINY)
    for name, contender in CONTENDERS.items():
        few = replace(contender, rates=dict.fromkeys(BASES, (1e-6, 1e-4)))
        monkeypatch.setitem(CONTENDERS, name, few)


def command(out: Path, *more: str) -> list[str]:
    given = "--quick --problems digits --forms tnt-grafted shampoo --jobs 1"
    return [*given.split(), "--out", str(out), *more]


def test_the_command_goes_on_where_it_stopped(
    tiny: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "sensitivity.json"
    run_all = sensitivity.run_all
    calls: list[Settings] = []

    def stops(maker: Any, todo: list[Settings], jobs: int, done: Any) -> None:
        def counted(settings: Settings, record: dict[str, Any]) -> None:
            if len(calls) == 45:
                raise KeyboardInterrupt
            calls.append(settings)
            done(settings, record)

        run_all(maker, todo, jobs, counted)

    with monkeypatch.context() as context:
        context.setattr(sensitivity, "run_all", stops)
        with pytest.raises(KeyboardInterrupt):
            sensitivity.main(command(out))
    assert len(load_runs(out)["runs"]) == 45
    assert [path.name for path in tmp_path.iterdir()] == ["sensitivity.json"]
    assert sensitivity.main(command(out)) == 0
    record = load_runs(out)
    # 9 points, 2 forms, 3 rates, 1 seed
    assert len(record["runs"]) == 9 * 2 * 3
    assert len({json.dumps(run["key"]) for run in record["runs"]}) == 9 * 2 * 3
    assert all(run["loss"] > 0 for run in record["runs"])
    printed = capsys.readouterr().out
    for title in ("The rate tuned at the base point", "Autoencoder, axis by axis", "One rate for"):
        assert title in printed and title in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    before = out.read_bytes()
    assert sensitivity.main(command(out)) == 0
    assert out.read_bytes() == before, "nothing is run again"
    assert sensitivity.main(command(out, "--seeds", "0", "1")) == 0
    assert len(load_runs(out)["runs"]) == 9 * 2 * 3 * 2, "seeds can be added"
    monkeypatch.setattr(sensitivity, "QUICK", replace(TINY, epochs={"digits": 2}))
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        sensitivity.main(command(out))
    assert "epochs was {'digits': 1} and is {'digits': 2}" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_recorded_loss_is_that_of_the_training(tiny: None, tmp_path: Path) -> None:
    out = tmp_path / "sensitivity.json"
    assert sensitivity.main(command(out)) == 0
    point = axis_points("digits", "width")[2]
    key = run_key("shampoo", point, 1e-4, 0)
    found = next(run for run in load_runs(out)["runs"] if run["key"] == key)
    problem = tiny_problem("digits", 2.0, None, TINY)
    settings = run_settings("shampoo", point, 1e-4, 0, TINY)
    run = train(problem, settings, "cpu", report_every=0)
    assert found["loss"] == round(run.epochs[-1].metrics["training_loss"], 5)


def test_the_transformer_on_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("she sells sea shells by the sea shore. " * 60)
    monkeypatch.setattr(sensitivity, "QUICK", TINY)
    grafted = replace(CONTENDERS["tnt-grafted"], rates={"language": (1e-3, 1e-2)})
    monkeypatch.setitem(CONTENDERS, "tnt-grafted", grafted)
    out = tmp_path / "sensitivity.json"
    given = ["--problems", "language", "--forms", "tnt-grafted", "--text", str(text), "--jobs", "1"]
    assert sensitivity.main(["--quick", *given, "--out", str(out)]) == 0
    record = load_runs(out)
    assert len(record["runs"]) == 9 * 2
    assert all(0 < run["loss"] < 6 for run in record["runs"])
    assert record["protocol"]["problems"]["language"]["source"] == "text.txt"
    # the same text with another end is another text
    text.write_text("she sells sea shells by the sea shore. " * 59 + "she sells sea shells by the ")
    with pytest.raises(SystemExit):
        sensitivity.main(["--quick", *given, "--out", str(out)])


def test_a_rate_that_moves_nothing_has_the_starts_loss(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = replace(CONTENDERS["shampoo"], rates={"digits": (1e-32, 1e-30)})
    monkeypatch.setitem(CONTENDERS, "shampoo", still)
    out = tmp_path / "sensitivity.json"
    given = "--quick --problems digits --forms shampoo --jobs 1 --out"
    assert sensitivity.main([*given.split(), str(out)]) == 0
    problem = tiny_problem("digits", 1.0, None, TINY)
    assert isinstance(problem, MeasuredAutoencoder)
    start = problem.evaluate(seeded_model(problem, 0))["training_loss"]
    runs = load_runs(out)["runs"]
    assert len(runs) == 9 * 3
    assert {run["loss"] for run in runs if run["key"]["width"] == 1} == {round(start, 5)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--text nowhere.txt", "argument --text: no such file: nowhere.txt"),
        ("--text nowhere.txt --problems digits", "only the language problem has one"),
        ("--forms newton", "invalid choice: 'newton'"),
        ("--problems mnist", "invalid choice: 'mnist'"),
        ("--jobs 0", "argument --jobs: must be at least 1, got 0"),
        ("--seeds -1", "argument --seeds: must be at least 0"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        sensitivity.main(["--out", str(tmp_path / "out.json"), *arguments.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_another_experiments_file_is_left_alone(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text('{"experiment": "search", "protocol": {}, "runs": [], "provenance": []}')
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        sensitivity.main(command(out))
    assert "holds runs of 'search'" in capsys.readouterr().err
    assert out.read_bytes() == before
