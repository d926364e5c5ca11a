"""What the language comparison found: means, paired differences, verdicts, loss at equal time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.experiments.language.forms import FORMS, INTERVALS

BASELINES = ("adam", "muon")
# A difference of so many standard errors is one.
ERRORS = 2


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

    "below" or "above" at two standard errors of the mean difference, else "cannot tell", as with
    one seed. "diverged" where a run of either did.

    Args:
        own: loss by seed; infinite for a run that diverged.
        other: of the baseline.
    """
    seeds = sorted(own.keys() & other.keys())
    values = [own[seed] - other[seed] for seed in seeds]
    if not values or not all(math.isfinite(value) for value in values):
        return Difference(math.nan, None, "diverged" if values else "not measured")
    mean = statistics.mean(values)
    if len(values) == 1:
        return Difference(mean, None, "cannot tell")
    error = statistics.stdev(values) / math.sqrt(len(values))
    if abs(mean) <= ERRORS * error:
        return Difference(mean, error, "cannot tell")
    return Difference(mean, error, "below" if mean < 0 else "above")


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
class Row:
    """What is known of one variant.

    Attributes:
        variant: which.
        lr: its learning rate, from the search.
        interior: whether that is in the interior of what was tried.
        final: the last validation loss by seed; infinite for a run that diverged.
        seconds_per_step: measured alone; None where it was not measured.
        tokens: at equal tokens, against each baseline.
        seconds: the loss at the moment at which each baseline's run ends, against its last.
        speed: the seconds to each baseline's mean last loss, by those of its whole run; infinite
            if that loss is not reached, None where times were not measured.
    """

    variant: Variant
    lr: float
    interior: bool
    final: dict[int, float]
    seconds_per_step: float | None
    tokens: dict[str, Difference]
    seconds: dict[str, Difference]
    speed: dict[str, float | None]


def rows(runs: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The table of a record's runs: one row for each variant with final runs."""
    runs = list(runs)
    finals: dict[Variant, dict[int, Mapping[str, Any]]] = {}
    tuned: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    times: dict[tuple[int, str, tuple[int, int]], float] = {}
    for run in runs:
        key = run["key"]
        if key["stage"] == "final":
            seeds = finals.setdefault(variant_of(key), {})
            seeds[key["settings"]["seed"]] = run
        elif key["stage"] == "tuning":
            tuned.setdefault((key["width"], key["steps"], key["form"]), []).append(run)
        else:
            name = (key["width"], key["form"], tuple(key["intervals"]))
            times[name] = run["seconds_per_step"]
    return [_row(variant, finals, tuned, times) for variant in sorted(finals, key=_order)]


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


def _row(
    variant: Variant,
    finals: Mapping[Variant, Mapping[int, Mapping[str, Any]]],
    tuned: Mapping[tuple[int, int, str], Sequence[Mapping[str, Any]]],
    times: Mapping[tuple[int, str, tuple[int, int]], float],
) -> Row:
    own = finals[variant]
    final = {seed: final_loss(run) for seed, run in own.items()}
    pace = times.get((variant.width, variant.form, variant.intervals))
    tokens: dict[str, Difference] = {}
    seconds: dict[str, Difference] = {}
    speed: dict[str, float | None] = {}
    for name in BASELINES:
        base = finals.get(Variant(variant.width, variant.steps, name), {})
        last = {seed: final_loss(run) for seed, run in base.items()}
        tokens[name] = paired(final, last)
        base_pace = times.get((variant.width, name, INTERVALS))
        if pace is None or base_pace is None or not base:
            seconds[name], speed[name] = Difference(math.nan, None, "not measured"), None
            continue
        reached = variant.steps * base_pace / pace
        then = {
            seed: loss_at(curve_of(run), run["steps_per_epoch"], reached)
            if math.isfinite(final[seed])
            else math.inf
            for seed, run in own.items()
        }
        if reached < min(run["steps_per_epoch"] for run in own.values()):
            seconds[name] = Difference(math.nan, None, "not measured")  # nothing is, so early
        else:
            seconds[name] = paired(then, last)
        speed[name] = _relative_time(own, last, pace / (base_pace * variant.steps))
    lr = next(iter(own.values()))["key"]["settings"]["lr"]
    losses = {
        run["key"]["settings"]["lr"]: final_loss(run)
        for run in tuned.get((variant.width, variant.steps, variant.form), ())
    }
    inside = bool(losses) and min(losses) < lr < max(losses)
    return Row(variant, lr, inside, final, pace, tokens, seconds, speed)


def _relative_time(
    own: Mapping[int, Mapping[str, Any]], last: Mapping[int, float], scale: float
) -> float:
    """Mean seconds to the baseline's mean last loss, by the baseline's; infinite if not reached."""
    goal = statistics.mean(last.values())
    needed = [steps_to(curve_of(run), run["steps_per_epoch"], goal) for run in own.values()]
    return statistics.mean(needed) * scale if math.isfinite(goal) else math.inf


HEADER = (
    "method",
    "learning rate",
    "validation loss",
    "against AdamW",
    "against Muon",
    "ms/step",
    "at AdamW's seconds",
    "at Muon's seconds",
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
    pace = "-" if row.seconds_per_step is None else f"{1000 * row.seconds_per_step:.1f}"
    return (
        row.variant.label,
        f"{row.lr:g}" + ("" if row.interior else " (end of the search)"),
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


def markdown(table: Sequence[Row]) -> list[str]:
    """Markdown lines: a table for every width and length, each under a line that names them."""
    lines = []
    for width, steps in dict.fromkeys((r.variant.width, r.variant.steps) for r in table):
        lines += [f"Width {width}, {steps} steps:", "", f"| {' | '.join(HEADER)} |"]
        lines.append("|---" * len(HEADER) + "|")
        lines += [
            f"| {' | '.join(cells(row))} |"
            for row in table
            if (row.variant.width, row.variant.steps) == (width, steps)
        ]
        lines.append("")
    return lines


def conclusions(table: Sequence[Row], form: str = "tnt-grafted") -> list[str]:
    """Whether a form is below the baselines and by how much, at each width and length and in all.

    The probe of the algorithm's page said so of grafted TNT, from one seed: below AdamW by far, and
    below or level with Muon.
    """
    own = [r for r in table if r.variant.form == form and r.variant.intervals == INTERVALS]
    lines = []
    for row in own:
        parts = [
            f"{kind} {differences[name].text()} against {FORMS[name].label}"
            for kind, differences in (("tokens:", row.tokens), ("seconds:", row.seconds))
            for name in BASELINES
        ]
        where = f"width {row.variant.width}, {row.variant.steps} steps"
        lines.append(f"{row.variant.label}, {where}: {'; '.join(parts)}")
    for name in BASELINES if own else ():
        at_tokens, at_seconds = (
            sum(differences[name].verdict == "below" for differences in column)
            for column in ([r.tokens for r in own], [r.seconds for r in own])
        )
        lines.append(
            f"{FORMS[form].label} is below {FORMS[name].label} at {at_tokens} of {len(own)} widths "
            f"and lengths in tokens, and at {at_seconds} in seconds"
        )
    return lines
