"""Beyond the paper: the table of all forms on the character transformer, at widths and lengths.

First the learning rates are searched, with as many trials for every form, from a seed that the
final runs do not use; then the final runs, and those of TNT at other T1 and T2; last the seconds of
each kind of step, measured alone, since the runs share the machine.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from matplotlib import pyplot

from experiments import options
from experiments.confidence import interval
from experiments.methods import METHODS, Settings, has_statistics
from experiments.options import Quick, user_errors
from experiments.plots import DASHES, band, plain_axes, save
from experiments.pool import make_runs
from experiments.problems.language import CONTEXT, EPOCH_STEPS, Language, load_language
from experiments.run_files import RunFile
from experiments.search import lowest
from experiments.steps import PLAIN, Kind, problem_step, time_kinds
from experiments.tasks import BATCH_SIZE, FORMS, INTERVALS, form_settings
from tools.measuring.clock import summary
from tools.measuring.tables import table

QUICK = [Quick("transformer-table", "--quick --threads 1 --jobs 2", needs_data=True)]

# Not a seed of the final runs: a rate must not win by the luck of a start.
TUNING_SEED = 100
# The form with runs at other T1 and T2.
VARIED = "tnt-grafted"
# The timed steps have a tenth of the forms' rates, at which all stay finite.
TIMED_RATE = 0.1
BASELINES = ("adam", "muon")
# Learning rates are 10^(k/4): 1, 1.8, 3.2, 5.6, 10. A search starts with every second one.
COARSE = 2


@dataclass(frozen=True)
class Scale:
    """The size of the comparison.

    Attributes:
        widths: of the models.
        lengths: steps of the runs.
        trials: learning rates for every form at each length. The search at a later length starts
            from the best rate of the one before.
        seeds: of the final runs.
        intervals: further (T1, T2) for `VARIED`.
        rounds: of timing each kind of step.
    """

    widths: tuple[int, ...] = (64, 128)
    lengths: tuple[int, ...] = (400, 1000)
    trials: tuple[int, ...] = (5, 3)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    intervals: tuple[tuple[int, int], ...] = ((1, 5), (10, 100))
    rounds: int = 20


FULL = Scale()
SMALL = Scale((64,), (200,), (3,), (0, 1, 2), ((1, 5),), 5)


@dataclass(frozen=True)
class Variant:
    """One row of the table: a form with its T1 and T2, at one width and length."""

    width: int
    steps: int
    form: str
    intervals: tuple[int, int] = INTERVALS

    @property
    def label(self) -> str:
        """The form's name, with T1 and T2 if they are not the usual ones."""
        t1, t2 = self.intervals
        intervals = "" if self.intervals == INTERVALS else f", T1 = {t1}, T2 = {t2}"
        return FORMS[self.form].label + intervals

    def settings(self, seed: int, lr: float) -> Settings:
        """The settings of one of its runs."""
        return form_settings(self.form, self.steps // EPOCH_STEPS, seed, lr, self.intervals)

    def kinds(self) -> list[Kind]:
        """The kind of each of its steps."""
        second_order = has_statistics(FORMS[self.form].optimizer)
        return run_kinds(self.steps, self.intervals if second_order else None)


def variants(scale: Scale, width: int, steps: int) -> list[Variant]:
    """The final runs of one width and length."""
    return [
        Variant(width, steps, form, intervals)
        for form in FORMS
        for intervals in (INTERVALS, *(scale.intervals if form == VARIED else ()))
    ]


def main(
    data: options.Data = None,
    quick: options.QuickRun = False,
    jobs: options.Jobs = 2,
    threads: options.Threads = 2,
    out: options.Out = None,
) -> None:
    """Beyond the paper: all forms on the transformer, with learning rates searched alike.

    `--threads` are those of the timed steps; each training has one.
    """
    scale = SMALL if quick else FULL
    out = out or Path("results/transformer/table.json")
    # As in the processes of the pool: a run's numbers must not depend on the number of jobs.
    options.set_machine(1)
    with user_errors():
        problem = load_language(data, width=scale.widths[0])
        file = RunFile(out, "transformer table", protocol(problem, scale))
    for width in scale.widths:
        maker = functools.partial(load_language, data, width=width)
        for place, steps in enumerate(scale.lengths):
            _tune(file, maker, scale, width, place, jobs)
            wanted = {}
            for variant in variants(scale, width, steps):
                lr = best_rate(file.runs, width, steps, variant.form)
                for seed in scale.seeds:
                    settings = variant.settings(seed, lr)
                    wanted[settings] = _key("final", variant, settings)
            make_runs(file, maker, wanted, kept, jobs)
        _measure(file, maker, scale, width, threads or 1)
    found = rows(file.runs, threads or 1)
    for width, steps in itertools.product(scale.widths, scale.lengths):
        own = [r for r in found if (r.variant.width, r.variant.steps) == (width, steps)]
        text = "\n".join(table(HEADER, map(cells, own)))
        print(f"\nwidth {width}, {steps} steps\n{text}")
        plot(own, file.runs, out.with_name(f"{out.stem}-width{width}-steps{steps}.png"))
    print(f"wrote {out} and its pictures")


def protocol(problem: Language, scale: Scale) -> dict[str, Any]:
    """What all runs of one file share; more seeds can be added."""
    shared = {name: value for name, value in problem.description().items() if name != "width"}
    return {
        **shared,
        "batch_size": BATCH_SIZE,
        "widths": scale.widths,
        "lengths": scale.lengths,
        "trials": scale.trials,
        "tuning_seed": TUNING_SEED,
        "criterion": "lowest validation loss after the last step, from the tuning seed",
        "forms": {name: asdict(form) for name, form in FORMS.items()},
    }


# The search of the learning rates.


def rate(place: int) -> float:
    """The learning rate at a place of the grid, to two significant digits.

    >>> [rate(place) for place in range(-8, -3)]
    [0.01, 0.018, 0.032, 0.056, 0.1]
    """
    return float(f"{10 ** (place / 4):.1e}")


def place_of(lr: float) -> int:
    """The place of the grid nearest to a learning rate."""
    return round(4 * math.log10(lr))


def next_places(tried: Mapping[int, float], centre: int, trials: int) -> list[int]:
    """The places to try next; empty after the last trial.

    First the centre and its coarse neighbours. If the best is an end of the tried places, the
    coarse neighbour beyond it; otherwise the nearest untried place to it, on the side of its better
    neighbour first. So every method has the same number of trials, and a bad centre costs precision
    before it costs the optimum.

    Args:
        tried: loss by place; infinite for a run that diverged.
        centre: the first guess.
        trials: their number in all.
    """
    left = trials - len(tried)
    if left <= 0:
        return []
    start = [p for p in (centre, centre - COARSE, centre + COARSE) if p not in tried]
    if start:
        return start[:left]
    best = lowest(tried)
    if best is None:  # all diverged: lower
        return [min(tried) - COARSE]
    if best == max(tried):
        return [best + COARSE]
    if best == min(tried):
        return [best - COARSE]
    below = max(p for p in tried if p < best)
    above = min(p for p in tried if p > best)
    sides = [-1, 1] if tried[below] < tried[above] else [1, -1]
    nearest = (best + side * distance for distance in itertools.count(1) for side in sides)
    return [next(place for place in nearest if place not in tried)]


def tried_rates(
    runs: Iterable[Mapping[str, Any]], width: int, steps: int, form: str
) -> dict[int, float]:
    """The losses of a form's searched learning rates, by their place on the grid."""
    return {
        place_of(run["key"]["settings"]["lr"]): final_loss(run)
        for run in runs
        if run["key"]["stage"] == "tuning"
        and (run["key"]["width"], run["key"]["steps"], run["key"]["form"]) == (width, steps, form)
    }


def best_rate(runs: Iterable[Mapping[str, Any]], width: int, steps: int, form: str) -> float:
    """The best of a form's learning rates; the lowest if all diverged."""
    tried = tried_rates(runs, width, steps, form)
    best = lowest(tried)
    return rate(min(tried) if best is None else best)


def _tune(
    file: RunFile,
    maker: functools.partial[Language],
    scale: Scale,
    width: int,
    place: int,
    jobs: int,
) -> None:
    steps = scale.lengths[place]
    while True:
        wanted: dict[Settings, dict[str, Any]] = {}
        for form in FORMS:
            centre = FORMS[form].lr
            if place:
                centre = best_rate(file.runs, width, scale.lengths[place - 1], form)
            tried = tried_rates(file.runs, width, steps, form)
            for place_ in next_places(tried, place_of(centre), scale.trials[place]):
                variant = Variant(width, steps, form)
                settings = variant.settings(TUNING_SEED, rate(place_))
                wanted[settings] = _key("tuning", variant, settings)
        if not wanted:
            return
        make_runs(file, maker, wanted, kept, jobs)


def _key(stage: str, variant: Variant, settings: Settings) -> dict[str, Any]:
    return {"stage": stage, **asdict(variant), "settings": asdict(settings)}


def kept(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's record that the table keeps: not the seconds of a shared machine."""
    losses = [epoch["metrics"]["validation_loss"] for epoch in record["epochs"]]
    names = ("steps_per_epoch", "final_smoothed_loss", "diverged_at_step")
    rounded = [round(loss, 6) if math.isfinite(loss) else None for loss in losses]
    return {"validation_losses": rounded, **{name: record[name] for name in names}}


# The seconds.


def _measure(
    file: RunFile, maker: functools.partial[Language], scale: Scale, width: int, threads: int
) -> None:
    # All forms of a width in one entry: times of different hours do not compare.
    key = {"stage": "seconds", "width": width, "threads": threads}
    if file.find(key) is not None:
        return
    problem = maker()
    settings = {
        name: form_settings(name, 1, TUNING_SEED, TIMED_RATE * form.lr)
        for name, form in FORMS.items()
    }
    rows_of_width = [v for steps in scale.lengths for v in variants(scale, width, steps)]
    kinds = sorted({kind for variant in rows_of_width for kind in variant.kinds()})
    torch.set_num_threads(threads)
    steps = {name: problem_step(problem, one) for name, one in settings.items()}
    for step in steps.values():
        step()  # the first one makes the state, statistics and inverses
    samples = time_kinds(steps, kinds, 0.0, scale.rounds, scale.rounds)
    torch.set_num_threads(1)
    found = {
        name: {kind.label: summary(taken) for kind, taken in own.items()}
        for name, own in samples.items()
    }
    file.add(key, {"forms": found})


def run_kinds(steps: int, intervals: tuple[int, int] | None) -> list[Kind]:
    """The kind of each step of a run, by the optimizers' rule.

    Statistics at t % T1 == 0; inverses at t % T2 == 0, and with every statistic while t < T2.

    >>> [kind.label for kind in run_kinds(7, (2, 3))][:4]
    ['statistics and inverses', 'plain', 'statistics and inverses', 'inverses']
    """
    if intervals is None:
        return [PLAIN] * steps
    t1, t2 = intervals
    return [Kind(t % t1 == 0, t % t2 == 0 or (t % t1 == 0 and t < t2)) for t in range(steps)]


def seconds_at(clock: Sequence[float], step: float) -> float:
    """The seconds after a number of steps, linear within a step; infinite for infinite steps."""
    return float(numpy.interp(step, range(len(clock)), clock, right=math.inf))


# The table.


class Difference(NamedTuple):
    """A mean difference between runs of the same seeds; negative is better."""

    mean: float
    error: float | None  # standard error of the mean; None from one seed
    verdict: str

    def text(self) -> str:
        """For the table."""
        if not math.isfinite(self.mean):
            return self.verdict
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.mean:+.3f}{error}, {self.verdict}"


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """The difference of two methods' losses, paired by seed: the same start and batches.

    "below" or "above" if the 95 % interval of the mean difference excludes 0, else "cannot tell".

    Args:
        own: loss by seed; infinite for a run that diverged.
        other: of the baseline.
    """
    values = [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]
    if not values or not all(math.isfinite(value) for value in values):
        return Difference(math.nan, None, "diverged" if values else "not measured")
    found = interval(values)
    verdict = "below" if found.high < 0 else "above" if found.low > 0 else "cannot tell"
    return Difference(found.mean, found.error, verdict)


def steps_to(curve: Sequence[float], epoch_steps: int, loss: float) -> float:
    """The steps until the validation loss is at most `loss`; infinite if it never is."""
    for number, value in enumerate(curve):
        if value <= loss:
            if number == 0:
                return float(epoch_steps)
            before = curve[number - 1]
            return epoch_steps * (number + (before - loss) / (before - value))
    return math.inf


# The runs of every variant by seed.
Finals = Mapping[Variant, Mapping[int, Mapping[str, Any]]]


@dataclass(frozen=True)
class Row:
    """The results of one variant.

    Attributes:
        variant: of the row.
        lr: its learning rate, from the search.
        interior: whether that is no end of the search, beyond which a better one may lie.
        final: the last validation loss by seed; infinite for a run that diverged.
        clock: the seconds after 0, 1, ... steps; None if they were not measured.
        tokens: the difference from each baseline at equal tokens.
        speed: the seconds to each baseline's mean last loss over those of its whole run; infinite
            if that loss is not reached, None if times were not measured.
    """

    variant: Variant
    lr: float
    interior: bool
    final: dict[int, float]
    clock: Sequence[float] | None
    tokens: dict[str, Difference]
    speed: dict[str, float | None]


def rows(runs: Sequence[Mapping[str, Any]], threads: int) -> list[Row]:
    """The rows of a record, one for each variant with final runs.

    Args:
        runs: of the record.
        threads: of the times; others are not used.
    """
    finals, order = final_runs(runs), list(FORMS)
    clocks: dict[Variant, list[float]] = {}
    for run in runs:
        if run["key"]["stage"] == "seconds" and run["key"]["threads"] == threads:
            for variant in finals:
                if variant.width == run["key"]["width"] and variant.form in run["forms"]:
                    known = run["forms"][variant.form]
                    each = (known[kind.label]["median"] for kind in variant.kinds())
                    clocks[variant] = [0.0, *itertools.accumulate(each)]
    variants = sorted(finals, key=lambda v: (v.width, v.steps, order.index(v.form), v.intervals))
    return [_row(variant, runs, finals, clocks) for variant in variants]


def final_runs(runs: Iterable[Mapping[str, Any]]) -> Finals:
    """The final runs of a record, by variant and seed."""
    finals: dict[Variant, dict[int, Mapping[str, Any]]] = {}
    for key, run in ((run["key"], run) for run in runs):
        if key["stage"] == "final":
            variant = Variant(key["width"], key["steps"], key["form"], tuple(key["intervals"]))
            finals.setdefault(variant, {})[key["settings"]["seed"]] = run
    return finals


def final_loss(run: Mapping[str, Any]) -> float:
    """A run's last validation loss; infinite if it diverged."""
    if run["diverged_at_step"] is not None or run["validation_losses"][-1] is None:
        return math.inf
    return float(run["validation_losses"][-1])


def curve_of(run: Mapping[str, Any]) -> list[float]:
    """A run's validation losses, with NaN for None."""
    return [math.nan if loss is None else loss for loss in run["validation_losses"]]


def _row(
    variant: Variant,
    runs: Sequence[Mapping[str, Any]],
    finals: Finals,
    clocks: Mapping[Variant, Sequence[float]],
) -> Row:
    own, clock = finals[variant], clocks.get(variant)
    final = {seed: final_loss(run) for seed, run in own.items()}
    lr = next(iter(own.values()))["key"]["settings"]["lr"]
    tried = tried_rates(runs, variant.width, variant.steps, variant.form)
    tokens: dict[str, Difference] = {}
    speed: dict[str, float | None] = dict.fromkeys(BASELINES)
    for name in BASELINES:
        base = replace(variant, form=name, intervals=INTERVALS)
        last = {seed: final_loss(run) for seed, run in finals.get(base, {}).items()}
        tokens[name] = paired(final, last)
        if clock is not None and base in clocks:
            goal = statistics.mean(last.values())
            needed = statistics.mean(
                seconds_at(clock, steps_to(curve_of(run), run["steps_per_epoch"], goal))
                for run in own.values()
            )
            speed[name] = needed / clocks[base][-1] if math.isfinite(goal) else math.inf
    interior = bool(tried) and min(tried) < place_of(lr) < max(tried)
    return Row(variant, lr, interior, final, clock, tokens, speed)


HEADER = (
    *("method", "learning rate", "validation loss", "against AdamW", "against Muon", "ms/step"),
    *("time to AdamW's loss", "to Muon's"),
)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, under `HEADER`."""
    values = list(row.final.values())
    lost = sum(not math.isfinite(value) for value in values)
    loss = f"diverged ({lost} of {len(values)})" if lost else f"{statistics.mean(values):.3f}"
    if not lost and len(values) > 1:
        loss += f" ± {statistics.stdev(values):.3f}"
    pace = "-" if row.clock is None else f"{1000 * row.clock[-1] / row.variant.steps:.1f}"
    speeds = []
    for name in BASELINES:
        value = row.speed[name]
        if row.variant.form == name or value is None:
            speeds.append("-")
        else:
            speeds.append(f"{value:.2f} of it" if math.isfinite(value) else "not reached")
    return (
        row.variant.label,
        f"{row.lr:g}" + ("" if row.interior else " (end of the search)"),
        loss,
        *("-" if row.variant.form == name else row.tokens[name].text() for name in BASELINES),
        pace,
        *speeds,
    )


def plot(table: Sequence[Row], runs: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw the validation loss of one width and length against characters and seconds.

    Lines are means over the seeds, bands a standard deviation to both sides. Methods with a run
    that diverged are left out.
    """
    finals = final_runs(runs)
    figure, (by_token, by_second) = pyplot.subplots(
        1, 2, figsize=(11, 4.8), sharey=True, layout="constrained"
    )
    for row in table:
        if not all(math.isfinite(loss) for loss in row.final.values()):
            continue
        form, members = FORMS[row.variant.form], list(finals[row.variant].values())
        # The paper's forms dashed, other T1 and T2 dotted.
        dash = 0 if form.grafted or form.optimizer in BASELINES else 1
        dash = dash if row.variant.intervals == INTERVALS else 2 + (row.variant.intervals[0] > 1)
        columns = list(zip(*(curve_of(run) for run in members), strict=True))
        steps = [members[0]["steps_per_epoch"] * number for number in range(1, len(columns) + 1)]
        places = [(by_token, [step * BATCH_SIZE * CONTEXT / 1e6 for step in steps])]
        if row.clock is not None:
            places.append((by_second, [row.clock[step] for step in steps]))
        for axes, x in places:
            colour = METHODS[form.optimizer].colour
            label = row.variant.label
            band(axes, x, columns, color=colour, linestyle=DASHES[dash], linewidth=1.6, label=label)
    by_token.set_ylabel("validation loss [nats per character]")
    by_token.set_xlabel("characters trained on [million]")
    by_second.set_xlabel("training time [s], from kinds of steps measured alone")
    for axes in (by_token, by_second):
        axes.set_xlim(left=0)
        # Characters drawn at their own frequencies cost 3.3 nats: no higher curve is of interest.
        axes.set_ylim(top=min(3.0, axes.get_ylim()[1]))
        plain_axes(axes)
    by_token.legend(frameon=False, fontsize=7)
    first = table[0].variant
    save(figure, path, f"Character transformer, width {first.width}, {first.steps} steps")
