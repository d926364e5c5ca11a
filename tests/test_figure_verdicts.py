"""What the page of figures makes of records: every claim with every outcome, and the rules."""

import math
from collections.abc import Callable

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

from bench.figures.claims import CLAIMS
from bench.figures.evidence import Record, is_tuned
from bench.figures.judge_training import sooner
from bench.figures.stages import STAGES
from bench.figures.subjects import SUBJECTS
from bench.figures.verdicts import (
    CANNOT_TELL,
    CONTRADICTS,
    SUPPORTS,
    Verdict,
    all_of,
    below,
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
    "mnist-tuned-first-order": (tuned(5.0, 5.0), tuned(15.0, 15.0), tuned(5.0, 5.0, steps=600)),
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


def test_one_contradiction_is_enough_and_one_doubt() -> None:
    yes, no, open_ = Verdict(SUPPORTS, "y"), Verdict(CONTRADICTS, "n"), Verdict(CANNOT_TELL, "c")
    assert all_of([yes, yes]).outcome == SUPPORTS
    assert all_of([yes, open_]).outcome == CANNOT_TELL
    assert all_of([yes, open_, no]).outcome == CONTRADICTS
    assert all_of([]).outcome == CANNOT_TELL


def test_a_method_in_no_form_of_the_paper_is_not_the_papers() -> None:
    made = autoencoders(losses(5.0), graft="adam", relative_damping=True)
    assert judge("mnist-epochs")(made).outcome == CANNOT_TELL


def test_of_several_settings_the_best_counts() -> None:
    good, bad = autoencoders(losses(5.0)), autoencoders({"tnt": 50.0}, lr=7.0)
    runs = [*good.runs, *bad.runs]
    both = Record(good.path, {**good.content, "runs": runs})
    assert judge("mnist-epochs")(both).outcome == SUPPORTS


def test_a_rival_at_the_end_of_its_grid_is_not_beaten() -> None:
    made = search(15.0)
    runs = [run for run in made.runs if run["key"]["lr"] != 0.2]
    verdict = judge("search-lower")(Record(made.path, {**made.content, "runs": runs}))
    assert verdict.outcome == CANNOT_TELL
    assert "SGD-m's best learning rate is an end of its grid" in verdict.why


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
