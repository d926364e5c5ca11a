"""What training runs say of the paper's claims: autoencoders and convolutional networks."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from experiments.figures.evidence import Record, by_method, is_tuned, trainings
from experiments.figures.verdicts import (
    CANNOT_TELL,
    CONTRADICTS,
    SUPPORTS,
    Verdict,
    all_of,
    below,
    inside,
    not_above,
    not_comparable,
    unless,
)
from experiments.problems.autoencoders import DIGITS_SEARCH
from experiments.runs.methods import LABELS
from experiments.runs.run_file import load_runs
from experiments.runs.training import Run

Judge = Callable[[Record], Verdict]
FIRST_ORDER = ("adam", "sgd")

# A run with fewer refreshes of the inverses than that is mostly start.
_LEAST_REFRESHES = 3
# With momentum or decay b a method looks back 1/(1 - b) steps; a run should be so many times that.
_MEMORIES = 3
# Of the paper's own experiments: ten epochs of its MNIST autoencoder, the shorter of the two.
_PAPERS, _LEAST_STEPS = ("mnist", "faces", "resnet32", "vgg16"), 600
# Of the paper's runs.
_EPOCHS, _IMAGES = {"second": 100, "first": 200}, 50_000
_ERROR_MARGIN = 0.01  # of validation errors: one point
_FASTER = (1.5, 2.5)  # "roughly twice as fast"
_EQUAL = (2 / 3, 1.5)  # "equally as fast"


def lower_loss(others: Sequence[str], own: str = "tnt") -> Judge:
    """After as many epochs, the smoothed training loss is below the others'."""
    return _each(others, own, below)


def as_low_loss(others: Sequence[str], own: str = "tnt") -> Judge:
    """After as many epochs, the smoothed training loss is at most the others', within 2 %."""
    return _each(others, own, not_above)


def sooner(others: Sequence[str], own: str = "tnt") -> Judge:
    """The others' last loss is reached in fewer seconds than they took, warm start included."""

    def judge(record: Record) -> Verdict:
        methods = by_method(record)
        runs = methods.get(own, {})
        verdicts = []
        for name in others:
            rival = methods.get(name, {})
            verdicts.append(unless(doubt(record, runs, rival), _sooner(own, runs, name, rival)))
        return all_of(verdicts)

    return judge


def second_order_alike(record: Record) -> Verdict:
    """With extensive tuning, second-order methods end alike: within 5 % of TNT's loss."""
    methods = by_method(record)
    tnt = methods.get("tnt", {})
    verdicts = []
    for name in ("kfac", "shampoo"):
        runs = methods.get(name, {})
        own, other = _after_as_many(tnt, runs)
        verdict = not_comparable("TNT", own, LABELS[name], other)
        if verdict is None:
            ratios = [own[seed] / other[seed] for seed in sorted(own.keys() & other.keys())]
            verdict = inside(f"TNT's loss over {LABELS[name]}'s", ratios, 0.95, 1.05)
        verdicts.append(unless(doubt(record, tnt, runs), verdict))
    return all_of(verdicts)


def usually_better(record: Record) -> Verdict:
    """Second-order methods usually end below well-tuned first-order ones.

    Every pair of them is judged; "usually" is more than half of those that could be.
    """
    methods = by_method(record)
    second = [name for name in ("tnt", "kfac", "shampoo") if name in methods]
    verdicts = [
        unless(
            doubt(record, methods[name], methods[other]),
            below(LABELS[name], losses[0], LABELS[other], losses[1]),
        )
        for name in second
        for other in FIRST_ORDER
        if other in methods
        for losses in [_after_as_many(methods[name], methods[other])]
    ]
    yes = sum(verdict.outcome == SUPPORTS for verdict in verdicts)
    no = sum(verdict.outcome == CONTRADICTS for verdict in verdicts)
    half = len(verdicts) / 2
    outcome = SUPPORTS if yes > half else CONTRADICTS if no > half else CANNOT_TELL
    why = f"{yes} of {len(verdicts)} pairs below, {no} above: "
    why += "; ".join(verdict.why for verdict in verdicts)
    return Verdict(outcome, why)


def as_low_error(own: str, other: str) -> Judge:
    """The validation error after the last epoch is at most the other's, within a point."""

    def judge(record: Record) -> Verdict:
        methods = by_method(record)
        errors = [
            {seed: _last_error(run) for seed, run in methods.get(name, {}).items()}
            for name in (own, other)
        ]
        verdict = not_above(LABELS[own], errors[0], LABELS[other], errors[1], _ERROR_MARGIN)
        return unless(scaled_down(record), verdict)

    return judge


def roughly_same_errors(record: Record) -> Verdict:
    """Second-order methods and Adam end within a point of SGD-m's validation error."""
    methods = by_method(record)
    base = {seed: _last_error(run) for seed, run in methods.get("sgd", {}).items()}
    verdicts = []
    for name, runs in methods.items():
        if name in ("sgd", "tnt-ef"):
            continue
        own = {seed: _last_error(run) for seed, run in runs.items()}
        verdict = not_comparable(LABELS[name], own, LABELS["sgd"], base)
        if verdict is None:
            gaps = [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]
            text = f"{LABELS[name]}'s error less SGD-m's"
            verdict = inside(text, gaps, -_ERROR_MARGIN, _ERROR_MARGIN)
        verdicts.append(verdict)
    return unless(scaled_down(record), all_of(verdicts))


def process_time(faster: bool) -> Judge:
    """SGD-m's 200 epochs over TNT's 100, in seconds: roughly twice as long, or as long.

    From the seconds of an epoch: a shorter run has them, too, but not what the epochs come to.
    """
    low, high = _FASTER if faster else _EQUAL

    def judge(record: Record) -> Verdict:
        methods = by_method(record)
        own, base = methods.get("tnt", {}), methods.get("sgd", {})
        ratios = []
        for seed in sorted(own.keys() & base.keys()):
            tnt = _EPOCHS["second"] * own[seed].seconds_per_epoch
            tnt += own[seed].warm_start_seconds or 0.0
            ratios.append(_EPOCHS["first"] * base[seed].seconds_per_epoch / tnt)
        verdict = inside("SGD-m's 200 epochs over TNT's 100", ratios, low, high)
        return unless(scaled_down(record), verdict)

    return judge


def slowest_epochs(record: Record) -> Verdict:
    """KFAC's epochs take much longer than TNT's and Shampoo's: more than 1.5 times as long."""
    methods = by_method(record)
    kfac = methods.get("kfac-eigen", {})
    verdicts = []
    for name in ("tnt", "shampoo"):
        runs = methods.get(name, {})
        seeds = sorted(kfac.keys() & runs.keys())
        ratios = [kfac[s].seconds_per_epoch / runs[s].seconds_per_epoch for s in seeds]
        text = f"KFAC's epoch over {LABELS[name]}'s"
        verdicts.append(inside(text, ratios, 1.5, math.inf, "more than 1.5"))
    return unless(fewer_steps(trainings(record)), all_of(verdicts))


def doubt(record: Record, *methods: Mapping[int, Run]) -> str | None:
    """Why these methods' runs of an autoencoder are none to compare, or None.

    What is compared is as long as the shortest of them that did not diverge.
    """
    runs = [run for own in methods for run in own.values()]
    return (
        selected_on(runs)
        or fewer_steps(runs)
        or _too_short(runs)
        or (_too_short_for_memory(runs) if is_tuned(record) else None)
    )


def selected_on(runs: Iterable[Run]) -> str | None:
    """Why runs cannot be judged that are from seeds by which their settings were chosen, or None.

    The paper's settings were chosen elsewhere; the digits' are the recorded search's.
    """
    used = {run.settings.seed for run in runs if run.problem == "digits"} & _search_seeds()
    if not used:
        return None
    return f"the settings were chosen by runs from seeds {' '.join(map(str, sorted(used)))}, too"


@functools.cache
def _search_seeds() -> frozenset[int]:
    return frozenset(run["key"]["seed"] for run in load_runs(DIGITS_SEARCH)["runs"])


def fewer_steps(runs: Iterable[Run]) -> str | None:
    """Why runs are too short to say anything of a paper's experiment, or None."""
    for run in runs:
        steps = len(run.step_losses)
        if run.problem in _PAPERS and run.diverged_at_step is None and steps < _LEAST_STEPS:
            return f"scaled down too far: {steps} steps are fewer than {_LEAST_STEPS}"
    return None


def _too_short(runs: Iterable[Run]) -> str | None:
    runs = list(runs)
    steps = _fewest_steps(runs)
    interval = max((run.settings.inverse_interval or 1 for run in runs), default=1)
    if steps < _LEAST_REFRESHES * interval:
        return f"scaled down too far: {steps} steps are fewer than {_LEAST_REFRESHES} T2"
    return None


def _too_short_for_memory(runs: Iterable[Run]) -> str | None:
    runs = list(runs)
    slowest = max(
        (
            value
            for run in runs
            for value in (run.settings.momentum, run.settings.stat_decay or 0.0)
            if value < 0.999 or run.settings.optimizer != "adam"
        ),
        default=0.0,
    )
    steps = _fewest_steps(runs)
    if steps < round(_MEMORIES / (1 - slowest)):
        return f"scaled down too far: {steps} steps, with a momentum or decay of {slowest:g}"
    return None


def _fewest_steps(runs: Iterable[Run]) -> float:
    """Of runs that did not diverge; infinite where there are none."""
    lengths = (len(run.step_losses) for run in runs if run.diverged_at_step is None)
    return min(lengths, default=math.inf)


def scaled_down(record: Record) -> str | None:
    """Why a record of classifiers is not the paper's experiment, or None."""
    parts = []
    examples = record.protocol.get("examples")
    if examples != _IMAGES:
        parts.append(f"{examples} of {_IMAGES} images")
    epochs = sorted({run["key"]["epochs"] for run in record.runs})
    if epochs[0] < _EPOCHS["second"]:
        parts.append(f"{' and '.join(map(str, epochs))} epochs of 100 (first order: 200)")
    if parts:
        return f"scaled down too far: {', '.join(parts)}"
    return fewer_steps(trainings(record))


def _each(others: Sequence[str], own: str, compare: Callable[..., Verdict]) -> Judge:
    def judge(record: Record) -> Verdict:
        methods = by_method(record)
        runs = methods.get(own, {})
        verdicts = []
        for name in others:
            rival = methods.get(name, {})
            losses = _after_as_many(runs, rival)
            verdict = compare(LABELS[own], losses[0], LABELS[name], losses[1])
            verdicts.append(unless(doubt(record, runs, rival), verdict))
        return all_of(verdicts)

    return judge


def _sooner(own: str, runs: Mapping[int, Run], other: str, base: Mapping[int, Run]) -> Verdict:
    taken: dict[int, float] = {}
    whole: dict[int, float] = {}
    missed = 0
    if not runs.keys() & base.keys():
        return Verdict(CANNOT_TELL, f"{LABELS[other if runs else own]} was not run beside it")
    for seed in sorted(runs.keys() & base.keys()):
        run, rival = runs[seed], base[seed]
        if rival.diverged_at_step is not None:
            return Verdict(CANNOT_TELL, f"{LABELS[other]} diverged")
        whole[seed] = rival.epochs[-1].elapsed_seconds
        if run.diverged_at_step is not None:
            taken[seed] = math.inf
            continue
        reached = run.seconds_to(rival.final_loss)
        if reached is None:
            missed += 1
            reached = run.epochs[-1].elapsed_seconds  # at least
            if reached < whole[seed]:
                return Verdict(
                    CANNOT_TELL,
                    f"{LABELS[own]} ended at {reached:.3g} s above {LABELS[other]}'s last loss, "
                    f"which took {whole[seed]:.3g} s",
                )
        taken[seed] = reached
    name = f"{LABELS[own]}'s seconds to {LABELS[other]}'s last loss"
    verdict = below(name, taken, f"{LABELS[other]}'s own", whole)
    if missed:
        # Its seconds are at least those: enough to be found slower by, not to be found faster.
        outcome = CANNOT_TELL if verdict.outcome == SUPPORTS else verdict.outcome
        return Verdict(outcome, f"{verdict.why}, not reached in {missed}")
    return verdict


def _after_as_many(
    own: Mapping[int, Run], other: Mapping[int, Run]
) -> tuple[dict[int, float], dict[int, float]]:
    """Both methods' smoothed losses by seed, after as many epochs as the shortest run has."""
    epochs = min((run.settings.epochs for runs in (own, other) for run in runs.values()), default=0)
    own_losses, other_losses = (
        {seed: _loss_after(run, epochs) for seed, run in runs.items()} for runs in (own, other)
    )
    return own_losses, other_losses


def _loss_after(run: Run, epochs: int) -> float:
    if run.diverged_at_step is not None and len(run.epochs) <= epochs:
        return math.inf
    return run.epochs[epochs - 1].smoothed_loss


def _last_error(run: Run) -> float:
    if run.diverged_at_step is not None:
        return math.inf
    return run.epochs[-1].metrics["validation_error"]


def mean_text(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation over seeds, as tables show them."""
    good = [value for value in values if math.isfinite(value)]
    if len(good) < len(values):
        return f"diverged ({len(values) - len(good)} of {len(values)})"
    text = f"{statistics.mean(good):.{digits}f}"
    return text if len(good) == 1 else f"{text} ± {statistics.stdev(good):.{digits}f}"
