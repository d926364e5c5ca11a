"""What the language comparison found: means, paired differences, verdicts, loss at equal time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.confidence import interval
from experiments.costs.step_kinds import Kind
from experiments.language.forms import FORMS, INTERVALS
from experiments.language.seconds import KINDS, elapsed, run_kinds, seconds_at, steps_within
from experiments.runs.methods import has_statistics

BASELINES = ("adam", "muon")
# What is said of losses at equal seconds, wherever they stand.
CUT = "the slower run cut mid-schedule"


@dataclass(frozen=True)
class Variant:
    """One row of the table: a form with its T1 and T2, at one width and length."""

    width: int
    steps: int
    form: str
    intervals: tuple[int, int] = INTERVALS

    @property
    def label(self) -> str:
        """The form's name, with T1 and T2 where they are not the usual ones."""
        label = FORMS[self.form].label
        if self.intervals == INTERVALS:
            return label
        return f"{label}, T1 = {self.intervals[0]}, T2 = {self.intervals[1]}"

    def kinds(self) -> list[Kind]:
        """What is due at each of its steps."""
        second_order = has_statistics(FORMS[self.form].optimizer)
        return run_kinds(self.steps, self.intervals if second_order else None)


@dataclass(frozen=True)
class Difference:
    """A mean difference between runs of the same seeds; negative is better."""

    mean: float
    error: float | None  # standard error of the mean; None from one seed
    verdict: str

    def text(self) -> str:
        """As it stands in the table."""
        if not math.isfinite(self.mean):
            return self.verdict
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.mean:+.3f}{error}, {self.verdict}"


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """The difference of two methods' losses, paired by seed: the same start and batches.

    "below" or "above" where the mean difference's 95 % interval by Student's t leaves out 0, else
    "cannot tell", as with one seed. "diverged" where a run of either did.

    Args:
        own: loss by seed; infinite for a run that diverged.
        other: of the baseline.
    """
    seeds = sorted(own.keys() & other.keys())
    values = [own[seed] - other[seed] for seed in seeds]
    if not values or not all(math.isfinite(value) for value in values):
        return Difference(math.nan, None, "diverged" if values else "not measured")
    found = interval(values)
    verdict = "below" if found.high < 0 else "above" if found.low > 0 else "cannot tell"
    return Difference(found.mean, found.error, verdict)


def loss_at(curve: Sequence[float], epoch_steps: int, step: float) -> float:
    """The validation loss after `step` steps: linear between measurements, the last one after.

    Infinite before the first measurement, and for a run that diverged.

    Args:
        curve: validation losses, one every `epoch_steps` steps.
        epoch_steps: steps between them.
        step: where.
    """
    if not all(math.isfinite(value) for value in curve):
        return math.inf
    place = step / epoch_steps - 1
    if place < 0:
        return math.inf
    if place >= len(curve) - 1:
        return curve[-1]
    before = int(place)
    return curve[before] + (place - before) * (curve[before + 1] - curve[before])


def steps_to(curve: Sequence[float], epoch_steps: int, loss: float) -> float:
    """After how many steps the validation loss first was at most `loss`; infinite if never."""
    for number, value in enumerate(curve):
        if value <= loss:
            if number == 0:
                return float(epoch_steps)
            before = curve[number - 1]
            return epoch_steps * (number + (before - loss) / (before - value))
    return math.inf


@dataclass(frozen=True)
class Ends:
    """Who may do better with a learning rate beyond those that were searched.

    Attributes:
        own: a row's label if its best rate is an end of its search, else None.
        baselines: likewise each baseline's, at the same width and length; None without runs.
    """

    own: str | None
    baselines: Mapping[str, str | None]


@dataclass(frozen=True)
class Row:
    """What is known of one variant.

    Attributes:
        variant: which.
        lr: its learning rate, from the search.
        final: the last validation loss by seed; infinite for a run that diverged.
        clock: the seconds after 0, 1, ... steps, from each kind of step's, measured alone; None
            where they were not measured.
        threads: with which they were measured.
        tokens: at equal tokens, against each baseline.
        seconds: the loss at the moment at which each baseline's run ends, against its last.
        speed: the seconds to each baseline's mean last loss, by those of its whole run; infinite
            if that loss is not reached, None where times were not measured.
        ends: the labels of those whose best rate is an end of its search, beyond which they may do
            better: this row's own and each baseline's.
    """

    variant: Variant
    lr: float
    final: dict[int, float]
    clock: Sequence[float] | None
    threads: int | None
    tokens: dict[str, Difference]
    seconds: dict[str, Difference]
    speed: dict[str, float | None]
    ends: Ends

    def doubt(self, name: str, difference: Difference) -> str | None:
        """Why a difference from a baseline does not count; None where it does.

        A better learning rate beyond the end of a search could overturn it: the baseline's where
        this row is below, this row's where it is above. With the other's it would only grow.
        """
        suspects = {
            "below": [self.ends.baselines[name]],
            "above": [self.ends.own],
        }.get(difference.verdict, [self.ends.own, self.ends.baselines[name]])
        at_an_end = dict.fromkeys(label for label in suspects if label)
        if not at_an_end:
            return None
        return f"the best learning rate of {' and '.join(at_an_end)} is an end of its search"

    @property
    def seconds_per_step(self) -> float | None:
        """The mean over the run, its more frequent inverses at the start included."""
        return None if self.clock is None else self.clock[-1] / self.variant.steps


@dataclass(frozen=True)
class _Known:
    """A record's runs, sorted.

    Attributes:
        finals: by variant and seed.
        tried: the learning rates that were searched, by width, steps and form.
        clocks: the seconds after 0, 1, ... steps.
        threads: with which those were measured.
    """

    finals: Mapping[Variant, Mapping[int, Mapping[str, Any]]]
    tried: Mapping[tuple[int, int, str], Sequence[float]]
    clocks: Mapping[Variant, Sequence[float]]
    threads: int | None

    def lr(self, variant: Variant) -> float:
        rate: float = next(iter(self.finals[variant].values()))["key"]["settings"]["lr"]
        return rate

    def interior(self, variant: Variant) -> bool:
        tried = self.tried.get((variant.width, variant.steps, variant.form), ())
        return bool(tried) and min(tried) < self.lr(variant) < max(tried)


def rows(runs: Iterable[Mapping[str, Any]], threads: int | None = None) -> list[Row]:
    """The table of a record's runs: one row for each variant with final runs.

    Args:
        runs: the record's.
        threads: of the times that count; times with other threads never stand beside them. None
            for the fewest that there are.
    """
    finals: dict[Variant, dict[int, Mapping[str, Any]]] = {}
    tried: dict[tuple[int, int, str], list[float]] = {}
    times: dict[int, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        key = run["key"]
        if key["stage"] == "final":
            finals.setdefault(variant_of(key), {})[key["settings"]["seed"]] = run
        elif key["stage"] == "tuning":
            place = key["width"], key["steps"], key["form"]
            tried.setdefault(place, []).append(key["settings"]["lr"])
        else:
            times.setdefault(key["threads"], {})[key["width"]] = run["forms"]
    if threads is None:
        threads = min(times, default=None)
    measured = {} if threads is None else times.get(threads, {})
    clocks = {
        variant: elapsed(seconds, variant.kinds())
        for variant in finals
        if (seconds := _kinds(measured.get(variant.width, {}), variant.form)).keys()
        >= set(variant.kinds())
    }
    known = _Known(finals, tried, clocks, threads)
    return [_row(variant, known) for variant in sorted(finals, key=_order)]


def _kinds(forms: Mapping[str, Any], form: str) -> dict[Kind, float]:
    """The seconds of every kind of step that was measured of a form."""
    return {KINDS[label]: found["median"] for label, found in forms.get(form, {}).items()}


def variant_of(key: Mapping[str, Any]) -> Variant:
    """The variant of a run's key."""
    return Variant(key["width"], key["steps"], key["form"], tuple(key["intervals"]))


def final_loss(run: Mapping[str, Any]) -> float:
    """A recorded run's last validation loss; infinite where it diverged."""
    if run["diverged_at_step"] is not None or run["validation_losses"][-1] is None:
        return math.inf
    return float(run["validation_losses"][-1])


def curve_of(run: Mapping[str, Any]) -> list[float]:
    """A recorded run's validation losses, NaN where there is none."""
    return [math.nan if loss is None else loss for loss in run["validation_losses"]]


def _order(variant: Variant) -> tuple[int, int, int, tuple[int, int]]:
    return variant.width, variant.steps, list(FORMS).index(variant.form), variant.intervals


def _row(variant: Variant, known: _Known) -> Row:
    final = {seed: final_loss(run) for seed, run in known.finals[variant].items()}
    tokens: dict[str, Difference] = {}
    seconds: dict[str, Difference] = {}
    speed: dict[str, float | None] = {}
    ends: dict[str, str | None] = {}
    for name in BASELINES:
        base = Variant(variant.width, variant.steps, name)
        last = {seed: final_loss(run) for seed, run in known.finals.get(base, {}).items()}
        tokens[name] = paired(final, last)
        seconds[name], speed[name] = _at_equal_seconds(variant, base, last, known)
        ends[name] = base.label if last and not known.interior(base) else None
    clock = known.clocks.get(variant)
    return Row(
        variant=variant,
        lr=known.lr(variant),
        final=final,
        clock=clock,
        threads=None if clock is None else known.threads,
        tokens=tokens,
        seconds=seconds,
        speed=speed,
        ends=Ends(None if known.interior(variant) else variant.label, ends),
    )


def _at_equal_seconds(
    variant: Variant, base: Variant, last: Mapping[int, float], known: _Known
) -> tuple[Difference, float | None]:
    """A row's `seconds` and `speed` against a baseline, whose last losses are given."""
    clock, base_clock = known.clocks.get(variant), known.clocks.get(base)
    if clock is None or base_clock is None:
        return Difference(math.nan, None, "not measured"), None
    own = known.finals[variant]
    reached = steps_within(clock, base_clock[-1])
    then = {
        seed: loss_at(curve_of(run), run["steps_per_epoch"], reached)
        if math.isfinite(final_loss(run))
        else math.inf
        for seed, run in own.items()
    }
    difference = paired(then, last)
    if reached < min(run["steps_per_epoch"] for run in own.values()):
        difference = Difference(math.nan, None, "not measured")  # nothing is, so early
    goal = statistics.mean(last.values())
    if not math.isfinite(goal):
        return difference, math.inf
    needed = [
        seconds_at(clock, steps_to(curve_of(run), run["steps_per_epoch"], goal))
        for run in own.values()
    ]
    return difference, statistics.mean(needed) / base_clock[-1]


HEADER = (
    "method",
    "learning rate",
    "validation loss",
    "against AdamW",
    "against Muon",
    "ms/step",
    f"at AdamW's seconds, {CUT}",
    f"at Muon's seconds, {CUT}",
    "time to AdamW's loss",
    "to Muon's",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, under `HEADER`."""
    values = list(row.final.values())
    lost = sum(not math.isfinite(value) for value in values)
    if lost:
        loss = f"diverged ({lost} of {len(values)})"
    else:
        loss = f"{statistics.mean(values):.3f}"
        loss += f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    pace = "-"
    if row.seconds_per_step is not None:
        pace = f"{1000 * row.seconds_per_step:.1f}, threads: {row.threads}"
    return (
        row.variant.label,
        f"{row.lr:g}" + (" (end of the search)" if row.ends.own else ""),
        loss,
        *(_against(row, name, row.tokens) for name in BASELINES),
        pace,
        *(_against(row, name, row.seconds) for name in BASELINES),
        *(_time(row, name) for name in BASELINES),
    )


def _against(row: Row, name: str, differences: Mapping[str, Difference]) -> str:
    return "-" if row.variant.form == name else differences[name].text()


def _time(row: Row, name: str) -> str:
    value = row.speed[name]
    if row.variant.form == name or value is None:
        return "-"
    return f"{value:.2f} of it" if math.isfinite(value) else "not reached"


def conclusions(table: Sequence[Row], form: str = "tnt-grafted") -> list[str]:
    """Whether a form is below the baselines and by how much, at each width and length and in all.

    The probe of the algorithm's page said so of grafted TNT, from one seed: below AdamW by far, and
    below or level with Muon. What `Row.doubt` has something against does not count.
    """
    own = [r for r in table if r.variant.form == form and r.variant.intervals == INTERVALS]
    lines = []
    for row in own:
        parts = [
            f"{kind} {differences[name].text()} against {FORMS[name].label}"
            for kind, differences in (("tokens:", row.tokens), (f"seconds, {CUT}:", row.seconds))
            for name in BASELINES
        ]
        doubts = [
            row.doubt(name, differences[name])
            for differences in (row.tokens, row.seconds)
            for name in BASELINES
        ]
        parts += dict.fromkeys(f"not counted: {doubt}" for doubt in doubts if doubt)
        where = f"width {row.variant.width}, {row.variant.steps} steps"
        lines.append(f"{row.variant.label}, {where}: {'; '.join(parts)}")
    for name in BASELINES if own else ():
        at_tokens, at_seconds = (
            sum(
                difference.verdict == "below" and row.doubt(name, difference) is None
                for row, difference in column
            )
            for column in (
                [(row, row.tokens[name]) for row in own],
                [(row, row.seconds[name]) for row in own],
            )
        )
        lines.append(
            f"{FORMS[form].label} is below {FORMS[name].label} at {at_tokens} of {len(own)} widths "
            f"and lengths in tokens, and at {at_seconds} in seconds, {CUT}"
        )
    return lines
