"""What the page of figures makes of records: every claim with every outcome, and the rules."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_records import (
    FULL,
    TIMES,
    VGG,
    autoencoders,
    complexity,
    cosines,
    idealized,
    language,
    losses,
    networks,
    noisy,
    search,
    sensitivity,
    steps,
    tuned,
)

from experiments.confidence import interval
from experiments.costs.step_sets import STEP_SETS
from experiments.figures.claims import CLAIMS
from experiments.figures.evidence import Record, by_method, is_tuned, load_folder
from experiments.figures.judge_training import sooner
from experiments.figures.stages import STAGES
from experiments.figures.subjects import SUBJECTS
from experiments.figures.tables import training_table
from experiments.figures.verdicts import (
    CANNOT_TELL,
    CONTRADICTS,
    SUPPORTS,
    Verdict,
    all_of,
    below,
    by_chance,
    inside,
    not_above,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# For every judge a record for each of its outcomes: supports, contradicts, cannot tell.
CASES: dict[str, tuple[Record, Record, Record]] = {
    "cosine-range": (
        cosines({"tnt": 0.75}),
        cosines({"tnt": 0.5}),
        cosines({"tnt": 0.75}, iterations=5),
    ),
    "cosine-shampoo": (
        cosines({"tnt": 0.75, "shampoo": 0.6}),
        cosines({"tnt": 0.5, "shampoo": 0.6}),
        cosines({"tnt": 0.75, "shampoo": 0.6}, iterations=5),
    ),
    "cosine-kfac": (
        cosines({"tnt": 0.75, "kfac": 0.77}),
        cosines({"tnt": 0.5, "kfac": 0.7}),
        cosines({"tnt": 0.75, "kfac": 0.77}, iterations=5),
    ),
    "cosine-first-order": (
        cosines({"tnt": 0.8, "kfac": 0.8, "shampoo": 0.7, "adam": 0.4, "sgd": 0.6}),
        cosines({"tnt": 0.5, "kfac": 0.5, "shampoo": 0.5, "adam": 0.6, "sgd": 0.9}),
        cosines({"tnt": 0.6, "kfac": 0.5, "shampoo": 0.4, "adam": 0.5, "sgd": 0.5}),
    ),
    "mnist-epochs": (autoencoders(losses(5.0)), autoencoders(losses(15.0)), noisy(9.0)),
    "mnist-time": (
        autoencoders(losses(5.0), seconds={"tnt": 2.0, "sgd": 6.0, "adam": 6.0}),
        autoencoders(losses(15.0), seconds={"tnt": 9.0}),
        autoencoders(losses(15.0), seconds={"tnt": 0.5}),
    ),
    "mnist-kfac": (autoencoders(losses(10.1)), autoencoders(losses(15.0)), noisy(10.0)),
    "mnist-shampoo": (
        autoencoders(losses(9.0)),
        autoencoders(losses(15.0)),
        autoencoders({"tnt": 5.0}),
    ),
    "mnist-ef": (
        autoencoders(losses(10.0)),
        autoencoders(losses(15.0)),
        autoencoders(losses(10.0), steps=20),
    ),
    "faces-ef": (
        autoencoders(losses(9.0), "faces"),
        autoencoders(losses(15.0), "faces"),
        autoencoders(losses(10.0), "faces"),
    ),
    "resnet32-accuracy": (
        networks(FULL),
        networks({**FULL, "tnt": 0.10}),
        networks(FULL, images=2560),
    ),
    "resnet32-same": (
        networks(FULL),
        networks({**FULL, "adam": 0.10}),
        networks(FULL, images=2560),
    ),
    "resnet32-time": (
        networks(FULL, tnt=1.0, sgd=1.0),
        networks(FULL, tnt=3.0, sgd=1.0),
        networks(FULL, images=2560),
    ),
    "resnet32-ef": (
        networks(FULL),
        networks({**FULL, "tnt": 0.10}),
        networks({"tnt": 0.07, "sgd": 0.07}),
    ),
    "vgg16-time": (
        networks(FULL, "vgg16", tnt=2.0, sgd=1.0),
        networks(FULL, "vgg16", tnt=9.0, sgd=1.0),
        networks(FULL, "vgg16", images=10),
    ),
    "vgg16-kfac": (
        networks(FULL, "vgg16", kfac_eigen=4.0),
        networks(FULL, "vgg16"),
        networks({"tnt": 0.07}, "vgg16"),
    ),
    "mnist-tuned-first-order": (tuned(5.0, 5.0), tuned(15.0, 15.0), tuned(5.0, 5.0, steps=500)),
    "mnist-tuned-second-order": (tuned(5.0, 5.0), tuned(5.0, 15.0), tuned(5.0, 5.0, steps=600)),
    "complexity-memory": (
        complexity(2.0, "memory"),
        complexity(2.0, "memory", equal=False),
        complexity(2.0, "time"),
    ),
    "complexity-time": (complexity(2.1), complexity(2.6), complexity(None)),
    "idealized-bound": (idealized(0.1), idealized(100.0), idealized(2.15, spread=20.0)),
    "step-authors": (steps(TIMES), steps({("mnist_ae", "tnt"): 4.0}), steps(TIMES, busy=0.5)),
    "step-moderate": (steps(VGG), steps({("resnet32", "tnt"): 3.0}), steps(VGG, spread=1.0)),
    "step-kfac": (steps(TIMES), steps({**TIMES, ("mnist_ae", "kfac"): 1.0}), steps(TIMES, 1.5)),
    "step-kfac-vgg16": (steps(VGG), steps({**VGG, ("vgg16", "kfac-eigen"): 1.0}), steps(TIMES)),
    "search-lower": (search(15.0), search(25.0), search(20.0)),
    "language-adamw": (language(1.8), language(2.2), language(1.8, length=100)),
    "language-muon": (language(1.8), language(2.2), language(2.0)),
    "sensitivity-serves": (
        sensitivity(0.01, 0.5),
        sensitivity(0.5, 0.5),
        sensitivity(0.05, 0.5),
    ),
    "sensitivity-better": (
        sensitivity(0.01, math.inf),
        sensitivity(0.5, 0.1),
        sensitivity(0.1, 0.1),
    ),
}
# What another subject's case has judged: the same judge, on other data.
SAME = {
    **{f"faces-{name}": f"mnist-{name}" for name in ("epochs", "time", "kfac", "shampoo")},
    **{f"vgg16-{name}": f"resnet32-{name}" for name in ("accuracy", "same", "ef")},
    **{f"faces-tuned-{n}-order": f"mnist-tuned-{n}-order" for n in ("first", "second")},
    **{
        f"{data}-{name}-beside": f"mnist-{name}"
        for data in ("digits", "curves")
        for name in ("epochs", "time", "kfac", "shampoo", "ef")
    },
}


def judge(name: str) -> Callable[[Record], Verdict]:
    return next(claim.judge for claim in CLAIMS if claim.name == name)


@pytest.mark.parametrize("outcome", [SUPPORTS, CONTRADICTS, CANNOT_TELL])
@pytest.mark.parametrize("name", [*CASES, *SAME])
def test_every_claim_has_every_outcome(name: str, outcome: str) -> None:
    cases = CASES[SAME.get(name, name)]
    case = cases[[SUPPORTS, CONTRADICTS, CANNOT_TELL].index(outcome)]
    verdict = judge(name)(case)
    assert verdict.outcome == outcome, verdict.why
    assert verdict.why


def test_every_claim_is_tested_and_has_a_section() -> None:
    names = [claim.name for claim in CLAIMS]
    assert len(names) == len(set(names))
    assert set(names) == {*CASES, *SAME}
    assert {claim.subject for claim in CLAIMS} <= {subject.name for subject in SUBJECTS}
    assert {stage.name for stage in STAGES} <= {subject.name for subject in SUBJECTS}


# The rules.


def test_intervals_are_students() -> None:
    """As many false alarms as are said, from few seeds, too."""
    rng = random.Random(0)
    for count in (2, 3, 5):
        draws = [interval([rng.gauss(0, 1) for _ in range(count)]) for _ in range(4000)]
        wrong = sum(found.low > 0 or found.high < 0 for found in draws) / len(draws)
        assert 0.04 < wrong < 0.06, count
    assert interval([1.0, 3.0]).high == pytest.approx(2 + 12.706, abs=1e-3)
    # Three standard errors from zero, which two seeds are too few for.
    assert below("a", {0: 1.0, 1: 2.0}, "b", {0: 2.0, 1: 4.0}).outcome == CANNOT_TELL


def test_the_page_says_what_chance_makes() -> None:
    judged = [Verdict(SUPPORTS, "")] * 30 + [Verdict(CONTRADICTS, "")] * 10
    text = by_chance([*judged, Verdict(CANNOT_TELL, "")])
    assert "5 % into a verdict: here 2.0 of the 40 claims" in text


def test_one_seed_tells_nothing() -> None:
    assert below("a", {0: 1.0}, "b", {0: 9.0}).outcome == CANNOT_TELL
    assert not_above("a", {0: 1.0}, "b", {0: 9.0}).outcome == CANNOT_TELL
    assert inside("a", [0.5], 0, 1).outcome == CANNOT_TELL


def test_differences_are_paired_by_seed() -> None:
    """The starts differ by far more than the methods, which does not hide the methods'."""
    own, other = {0: 1.0, 1: 50.0, 2: 99.0}, {0: 2.0, 1: 51.1, 2: 99.9, 3: -1000.0}
    verdict = below("a", own, "b", other)
    assert verdict.outcome == SUPPORTS
    assert "3 seeds" in verdict.why


def test_what_diverged_is_not_better() -> None:
    good, lost = {0: 1.0, 1: 1.1}, {0: 1.0, 1: math.inf}
    assert below("a", lost, "b", good).outcome == CONTRADICTS
    assert below("a", good, "b", lost).outcome == CANNOT_TELL
    assert not_above("a", lost, "b", good).outcome == CONTRADICTS
    assert below("a", {}, "b", good) == Verdict(CANNOT_TELL, "a was not run beside it")
    assert inside("a", [math.nan], 0, 1).outcome == CANNOT_TELL
    assert inside("a", [0.5, 0.5, math.inf], 0, 1).outcome == CONTRADICTS


@pytest.mark.parametrize(("own", "rival"), [("kfac", "tnt"), ("tnt", "kfac")])
def test_what_diverged_is_neither_alike_nor_left_out(own: str, rival: str) -> None:
    made = autoencoders({own: math.inf, rival: 5.0, "shampoo": 5.0}, steps=6000, table=5)
    verdict = judge("mnist-tuned-second-order")(made)
    assert verdict.outcome == (CONTRADICTS if own == "tnt" else CANNOT_TELL)
    assert "diverged in 3 of 3" in verdict.why
    made = networks({**FULL, "sgd": math.inf})
    verdict = judge("resnet32-same")(made)
    assert verdict.outcome == CANNOT_TELL and "SGD-m diverged in 3 of 3" in verdict.why
    made = networks({**FULL, "kfac-eigen": math.inf})
    assert judge("resnet32-same")(made).outcome == CONTRADICTS


def test_one_contradiction_is_enough_and_one_doubt() -> None:
    yes, no, open_ = Verdict(SUPPORTS, "y"), Verdict(CONTRADICTS, "n"), Verdict(CANNOT_TELL, "c")
    assert all_of([yes, yes]).outcome == SUPPORTS
    assert all_of([yes, open_]).outcome == CANNOT_TELL
    assert all_of([yes, open_, no]).outcome == CONTRADICTS
    assert all_of([]).outcome == CANNOT_TELL


def test_a_method_in_no_form_of_the_paper_is_not_the_papers() -> None:
    made = autoencoders(losses(5.0), graft="adam", relative_damping=True)
    assert judge("mnist-epochs")(made).outcome == CANNOT_TELL


def test_of_several_settings_the_papers_count_even_if_others_do_better() -> None:
    paper, other = autoencoders(losses(15.0)), autoencoders({"tnt": 1.0}, lr=7.0)
    both = Record(paper.path, {**paper.content, "runs": [*other.runs, *paper.runs]})
    assert judge("mnist-epochs")(both).outcome == CONTRADICTS
    labels = [str(row[0]) for row in training_table(both).rows]
    assert sum(label.endswith(", not judged") for label in labels) == 1
    # Where the other ones alone were run, nothing is judged.
    assert judge("mnist-epochs")(other).why.startswith("TNT was not run beside it")


def test_rivals_with_more_epochs_are_judged_after_as_many() -> None:
    """The longer run's loss is below TNT's at its own end, and was above it after two epochs."""
    made = autoencoders({"tnt": 5.0, "sgd": 9.0, "adam": 9.0})
    runs = [dict(run) for run in made.runs]
    for run in runs:
        if run["key"]["optimizer"] != "tnt":
            run["key"] = run["settings"] = {**run["key"], "epochs": 3}
            run["epochs"] = [*run["epochs"], {**run["epochs"][-1], "number": 3}]
            run["epochs"][-1]["smoothed_loss"] = run["final_smoothed_loss"] = 1.0
    longer = Record(made.path, {**made.content, "runs": runs})
    verdict = judge("mnist-epochs")(longer)
    assert verdict.outcome == SUPPORTS
    assert "TNT 5, SGD-m 9," in verdict.why or "TNT 5, Adam 9," in verdict.why
    assert [row[7] for row in training_table(longer).rows] == ["2", "3", "3"]
    # Both lengths in one record: the longer one counts, whatever their order.
    for several in ([*made.runs, *runs], [*runs, *made.runs]):
        found = by_method(Record(made.path, {**made.content, "runs": several}))
        assert [found[name][0].settings.epochs for name in ("tnt", "sgd", "adam")] == [2, 3, 3]


def test_networks_are_judged_with_the_papers_settings_for_their_length() -> None:
    made = networks({**FULL, "tnt": 0.20}, images=50_000)
    changed = [dict(run) for run in made.runs]
    for run in changed:
        if run["key"]["optimizer"] == "tnt":
            run["key"] = run["settings"] = {**run["key"], "lr": 0.5}
    other = Record(made.path, {**made.content, "runs": changed})
    assert judge("resnet32-accuracy")(made).outcome == CONTRADICTS
    assert judge("resnet32-accuracy")(other).why == "TNT was not run beside it"


def test_the_papers_own_experiments_need_as_many_steps_as_ten_epochs() -> None:
    for problem in ("mnist", "faces"):
        for steps_, outcome in ((598, CANNOT_TELL), (600, SUPPORTS)):
            made = autoencoders(losses(5.0), problem, steps=steps_)
            assert judge("mnist-epochs")(made).outcome == outcome
    assert judge("mnist-epochs")(autoencoders(losses(5.0), "curves", steps=60)).outcome == SUPPORTS
    assert "598 steps are fewer" in judge("mnist-epochs")(autoencoders(losses(5.0), steps=598)).why


@pytest.mark.parametrize("short", ["tnt", "kfac"])
def test_two_methods_are_compared_only_after_as_many_steps_as_are_needed(short: str) -> None:
    made = autoencoders({"tnt": 5.0, "kfac": 15.0})
    runs = [dict(run) for run in made.runs]
    for run in runs:
        if run["key"]["optimizer"] == short:
            run["step_losses"] = run["step_losses"][:60]
    assert judge("mnist-kfac")(made).outcome == SUPPORTS
    verdict = judge("mnist-kfac")(Record(made.path, {**made.content, "runs": runs}))
    assert verdict.outcome == CANNOT_TELL
    assert "60 steps are fewer" in verdict.why


def test_the_digits_are_judged_on_other_seeds_than_those_of_their_search() -> None:
    made = autoencoders(losses(5.0), "digits", seeds=(6, 7, 8))
    assert judge("mnist-epochs")(made).outcome == SUPPORTS
    verdict = judge("mnist-epochs")(autoencoders(losses(5.0), "digits", seeds=(5, 6, 7)))
    assert verdict.outcome == CANNOT_TELL
    assert "from seeds 5, too" in verdict.why
    digits = next(stage for stage in STAGES if stage.name == "digits").shown()
    assert "--seeds 6 7 8 9 10" in digits


def test_a_search_is_judged_on_seeds_that_did_not_choose() -> None:
    """A setting that is best by the luck of one seed is not judged on that one."""
    made = search(20.0)
    runs = [dict(run) for run in made.runs]
    for run in runs:
        key = run["key"]
        if key["optimizer"] == "tnt" and key["lr"] == 0.05:
            score = 1.0 if key["seed"] == 0 else 22.0
            run.update(final_smoothed_loss=score, diverged_at_step=None)
    verdict = judge("search-lower")(Record(made.path, {**made.content, "runs": runs}))
    assert "TNT 21.33, Adam 20," in verdict.why  # 20 and twice 22; in the search 15
    one = [run for run in runs if run["key"]["seed"] == 0]
    verdict = judge("search-lower")(Record(made.path, {**made.content, "runs": one}))
    assert verdict.why.startswith("one seed")


@pytest.mark.parametrize(
    ("loss", "at_an_end", "outcome"),
    [
        (1.8, "tnt-grafted", SUPPORTS),  # with a better rate it would be further below
        (1.8, "adam", CANNOT_TELL),
        (2.5, "tnt-grafted", CANNOT_TELL),
        (2.5, "adam", CONTRADICTS),
    ],
)
def test_no_language_verdict_that_the_end_of_a_search_could_overturn(
    loss: float, at_an_end: str, outcome: str
) -> None:
    made = language(loss, at_an_end=at_an_end)
    verdict = judge("language-adamw")(made)
    assert verdict.outcome == outcome
    assert ("is an end of its search" in verdict.why) == (outcome == CANNOT_TELL)
    if at_an_end == "adam":  # which has nothing to do with Muon
        assert "is an end of its search" not in judge("language-muon")(made).why


@pytest.mark.parametrize("name", [n for n, s in STEP_SETS.items() if s.kfac == "kfac"])
def test_kfacs_own_form_and_intervals_are_judged_on_every_set(name: str) -> None:
    for ratio, outcome in ((3.0, SUPPORTS), (1.0, CONTRADICTS)):
        made = steps({(name, "tnt"): 2.0, (name, "kfac"): ratio})
        verdict = judge("step-kfac")(made)
        assert verdict.outcome == outcome
        assert verdict.why.startswith(name)


def test_steps_of_different_hours_are_compared_by_what_each_ran_beside() -> None:
    """In the second hour everything took twice as long."""
    made = steps({("mnist_ae", "tnt"): 2.0, ("mnist_ae", "kfac"): 1.5})
    runs = [dict(run) for run in made.runs]
    runs[1] |= {"seconds": 3.0, "sgd_seconds": 2.0, "quartiles": [2.98, 3.02]}
    verdict = judge("step-kfac")(Record(made.path, {**made.content, "runs": runs}))
    assert verdict.outcome == CONTRADICTS
    assert verdict.why.startswith("mnist_ae: 0.75 times TNT's")


def test_files_that_claim_to_be_records_and_are_none_are_said(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    contents = {
        "below/broken.json": "{",
        "bytes.json": "\xff",
        "empty.json": '{"experiment": "x", "protocol": {}, "provenance": [], "runs": []}',
        "old.json": '{"experiment": "x", "losses": [1]}',
        "other.json": '{"kernels": [1]}',
        "list.json": "[1]",
    }
    for name, text in contents.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    records, unread = load_folder(tmp_path)
    assert records == []
    assert list(unread) == ["below/broken.json", "bytes.json", "empty.json", "old.json"]
    assert unread["empty.json"] == "it holds no runs"
    assert str(tmp_path) not in str(unread)


def test_a_rival_at_the_end_of_its_grid_is_not_beaten() -> None:
    made = search(15.0)
    runs = [run for run in made.runs if run["key"]["lr"] != 0.2]
    verdict = judge("search-lower")(Record(made.path, {**made.content, "runs": runs}))
    assert verdict.outcome == CANNOT_TELL
    assert "SGD-m's best learning rate is an end of its grid" in verdict.why


@pytest.mark.parametrize("method", ["sgd", "tnt"])
def test_a_damping_at_the_end_of_its_grid_may_be_too_high_or_low(method: str) -> None:
    """A rival's is in doubt; nothing is held against TNT's own where it is below all the same."""
    made = search(15.0)
    runs = [dict(run) for run in made.runs]
    for run in runs:
        if run["key"]["optimizer"] == method:
            run["key"] = {**run["key"], "damping": 0.01}
    worse = [
        {**run, "key": {**run["key"], "damping": 0.1}, "final_smoothed_loss": 99.0}
        for run in runs
        if run["key"]["optimizer"] == method
    ]
    verdict = judge("search-lower")(Record(made.path, {**made.content, "runs": [*runs, *worse]}))
    assert verdict.outcome == (SUPPORTS if method == "tnt" else CANNOT_TELL)
    assert ("SGD-m's best damping is an end of its grid" in verdict.why) == (method == "sgd")


@pytest.mark.parametrize(("loss", "outcome"), [(5.0, CANNOT_TELL), (15.0, CONTRADICTS)])
def test_a_loss_that_one_run_never_reaches_is_not_reached_sooner(loss: float, outcome: str) -> None:
    """What it took so far is less than what it takes: nothing to be found faster by."""
    seconds = {"tnt": 0.5, "sgd": 9.0}
    made = autoencoders({"tnt": loss, "sgd": 10.0}, seconds=seconds, seeds=tuple(range(10)))
    assert sooner(("sgd",))(made).outcome == (SUPPORTS if loss < 10 else CANNOT_TELL)
    runs = [dict(run) for run in made.runs]
    for run in runs:
        key = run["key"]
        if key["optimizer"] == "tnt" and (loss > 10 or key["seed"] == 2):
            above = {"smoothed_loss": 15.0}
            # at once below by others, but never within more seconds than SGD-m took
            run["epochs"] = [
                {**epoch, **above, "seconds": 9.5, "elapsed_seconds": 9.5 * epoch["number"]}
                for epoch in run["epochs"]
            ]
            run["step_losses"] = [15.0] * len(run["step_losses"])
            run["final_smoothed_loss"] = 15.0
    verdict = sooner(("sgd",))(Record(made.path, {**made.content, "runs": runs}))
    assert verdict.outcome == outcome
    assert "not reached in" in verdict.why


def test_divergence_in_time() -> None:
    made = sooner(("sgd",))(autoencoders({"tnt": math.inf, "sgd": 1.0}))
    assert made.outcome == CONTRADICTS
    made = sooner(("sgd",))(autoencoders({"tnt": 1.0, "sgd": math.inf}))
    assert made.outcome == CANNOT_TELL


def test_tables_tell_apart_by_their_momenta() -> None:
    assert not is_tuned(autoencoders(losses(5.0)))
    assert is_tuned(tuned(1.0, 1.0))
    subjects = {s.name: s for s in SUBJECTS}
    assert subjects["mnist-tuned"].matches(tuned(1.0, 1.0))
    assert not subjects["mnist"].matches(tuned(1.0, 1.0))
    assert subjects["mnist"].matches(autoencoders(losses(5.0)))
    assert not subjects["mnist"].matches(autoencoders(losses(5.0), lr=7.0))
    # One run with another momentum leaves a record what it is.
    made, odd = autoencoders(losses(5.0)), autoencoders({"sgd": 1.0}, momentum=0.95)
    both = Record(made.path, {**made.content, "runs": [*made.runs, *odd.runs]})
    assert subjects["mnist"].matches(both) and not subjects["mnist-tuned"].matches(both)
