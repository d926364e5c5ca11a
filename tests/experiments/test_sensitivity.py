"""How well one learning rate serves: the plan, and the measures on losses by hand."""

import itertools
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from repeating_text import repeating_file

from experiments.sensitivity import (
    AXES,
    BASES,
    CONTENDERS,
    FULL,
    SMALL,
    MeasuredAutoencoder,
    Point,
    Scale,
    Surface,
    axis_points,
    common_rows,
    make_problem,
    points,
    regrets,
    run_settings,
    summary_rows,
    surface,
    wanted,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("scale", [FULL, SMALL])
@pytest.mark.parametrize("problem", BASES)
def test_every_form_has_the_same_number_of_runs_at_every_point(problem: str, scale: Scale) -> None:
    runs = list(wanted(list(CONTENDERS), problem, (0, 1), scale))
    counts = Counter((key["form"], point) for point, _, key in runs)
    assert set(counts) == set(itertools.product(CONTENDERS, points(problem)))
    assert set(counts.values()) == {2 * (11 if scale is FULL else 6)}
    assert len(points(problem)) == 1 + 2 * len(AXES), "the base point once"
    assert len({tuple(key.items()) for _, _, key in runs}) == len(runs)
    assert len({(point.width, settings) for point, settings, _ in runs}) == len(runs)


@pytest.mark.parametrize("problem", BASES)
def test_runs_of_every_batch_size_see_as_many_examples(problem: str, tmp_path: Path) -> None:
    made, seen = make_problem(problem, 1.0, repeating_file(tmp_path), FULL), []
    for point in axis_points(problem, "batch_size"):
        settings = run_settings("tnt", point, 0.1, 0, FULL)
        seen.append(settings.epochs * made.steps_per_epoch(settings.batch_size) * point.batch_size)
    assert min(seen) > 0.84 * max(seen), "the rest of the data that fills no batch is left out"


def test_settings_of_a_point() -> None:
    point = Point("language", 8, 80, damping=10, width=2)
    settings = run_settings("shampoo-grafted", point, 0.3, 5, FULL)
    assert (settings.optimizer, settings.graft, settings.relative_damping) == ("shampoo", "adam", 1)
    assert (settings.batch_size, settings.inverse_interval, settings.damping) == (8, 80, 0.01)
    assert (settings.lr, settings.seed, settings.epochs, settings.stat_interval) == (0.3, 5, 16, 1)
    paper = run_settings("tnt", BASES["digits"], 0.3, 5, FULL)
    assert (paper.damping, paper.graft, paper.relative_damping) == (0.03, None, False)
    assert (paper.stat_interval, paper.warm_start, paper.epochs) == (1, True, 15)


def test_width_leaves_the_images_and_the_code(tmp_path: Path) -> None:
    for width, hidden in ((0.5, (64, 32, 16, 8, 16, 32, 64)), (2, (256, 128, 64, 8, 64, 128, 256))):
        made = make_problem("digits", width, None, FULL)
        assert isinstance(made, MeasuredAutoencoder) and made.widths == (64, *hidden, 64)
    assert make_problem("language", 2, repeating_file(tmp_path), FULL).description()["width"] == 64
    few = MeasuredAutoencoder("digits", made.images[::20], made.widths)
    model = few.build()
    losses = [few.loss(model(image[None]), image[None]).item() for image in few.images]
    assert few.evaluate(model)["training_loss"] == pytest.approx(sum(losses) / len(losses))


# The measures

LOSSES = {0.01: 6.0, 0.03: 4.1, 0.1: 4.0, 0.3: 7.0, 1.0: math.inf}


def test_regrets() -> None:
    assert regrets(LOSSES, None) == pytest.approx({0.01: 2, 0.03: 0.1, 0.1: 0, 0.3: 3, 1: math.inf})
    halved = {0.01: 1, 0.03: 0.05, 0.1: 0, 0.3: 1.5, 1: math.inf}
    assert regrets(LOSSES, 2.0) == pytest.approx(halved), "of the excess of 2"
    assert regrets(dict.fromkeys(LOSSES, math.inf), 3.0) == {}


def made_surface(problem: str, shift: int = 0) -> Surface:
    """A parabola over six rates; its minimum is `shift` places higher at every next point."""
    tried = [10.0**place for place in range(-5, 1)]
    return {
        point: {lr: 4.0 + (place - 2 - shift * number) ** 2 for place, lr in enumerate(tried)}
        for number, point in enumerate(points(problem))
    }


def test_the_rate_tuned_at_the_base_point_along_every_axis() -> None:
    floors = {"digits": 3.0, "language": None}
    steady = {**made_surface("digits"), **made_surface("language")}
    lost = {point: dict.fromkeys(losses, math.inf) for point, losses in steady.items()}
    rows = summary_rows({"tnt": lost, "tnt-grafted": steady}, floors)
    assert rows[0][:3] == ["TNT, paper's form", "Autoencoder", "all diverged"]
    assert rows[1][2:] == ["0.001", "4.000", *["0 %"] * 4, "0 of 8", "0", "1.0 of 6"]
    assert {len(row) for row in rows} == {len(rows[1])}
    # The base point's rate is at place 2 and the minimum of point n at place 2 + n, of which 0 to 5
    # are tried. One rate diverges at the first point of the damping, all at the last.
    moved = made_surface("language", 1)
    damping = axis_points("language", "damping")
    moved[damping[0]] = {**moved[damping[0]], 0.001: math.inf}
    moved[damping[2]] = dict.fromkeys(moved[damping[2]], math.inf)
    (row,) = summary_rows({"tnt": moved}, {"language": None})
    axes = ["4.000 nats", "15.000 nats", "diverged", "39.000 nats"]
    assert row[2:] == ["0.001", "4.000", *axes, "2 of 8", "3", "0.9 of 6"]


def test_one_rate_for_all_points_has_the_least_of_the_largest_regrets() -> None:
    floors = {"digits": 3.0, "language": None}
    steady = {**made_surface("digits"), **made_surface("language")}
    lost = {point: dict.fromkeys(losses, math.inf) for point, losses in steady.items()}
    rows = common_rows({"tnt": lost, "tnt-grafted": steady}, floors)
    assert [row[1:] for row in rows] == [
        ["each diverges", "-", "-"],
        ["0.001", "0 %", "0.000 nats"],
    ]
    # Place 5 is best from the fourth point on, and loses 9 at the first; place 4 would lose 36 - 25
    # at the last.
    moved = {**made_surface("digits", 1), **made_surface("language", 1)}
    assert common_rows({"tnt": moved}, floors)[0][1:] == ["1", "900 %", "9.000 nats"]
    # Points at which all rates diverged do not count; rates that some point lacks do not serve.
    moved[BASES["digits"]] = dict.fromkeys(moved[BASES["digits"]], math.inf)
    assert common_rows({"tnt": moved}, floors)[0][1:] == ["1", "400 %", "9.000 nats"]
    moved[BASES["language"]] = {
        lr: loss for lr, loss in steady[BASES["language"]].items() if lr < 1
    }
    assert common_rows({"tnt": moved}, floors)[0][1] == "0.1"


def test_a_surface_is_the_mean_of_all_seeds() -> None:
    point = BASES["digits"]
    losses = {(0.1, 0): 2.0, (0.1, 1): 4.0, (0.3, 0): 1.0, (0.3, 1): None, (0.1, 2): 7.0}
    runs = [
        {"key": {"form": "tnt", **asdict(point), "lr": lr, "seed": seed}, "loss": loss}
        for (lr, seed), loss in losses.items()
    ]
    runs.append({"key": {"form": "shampoo", **asdict(point), "lr": 0.1, "seed": 0}, "loss": 7.0})
    assert surface(runs, "tnt", [0, 1]) == {point: {0.1: 3.0, 0.3: math.inf}}
    assert surface(runs, "tnt", [0]) == {point: {0.1: 2.0, 0.3: 1.0}}
