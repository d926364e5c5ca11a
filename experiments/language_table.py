"""The comparison beyond the paper as one command: `python -m experiments.language_table`.

Every form of every method on the character transformer, at several widths and lengths. First the
learning rates are searched, as many trials for every form, from a start that the final runs do not
use; then the final runs, and TNT's at other T1 and T2; last the seconds of each kind of step,
measured alone, since the runs themselves share the machine. A command that was interrupted goes on
from its file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiments.language.forms import FORMS, INTERVALS, form_settings
from experiments.language.plots import plot_table
from experiments.language.results import (
    CUT,
    HEADER,
    Variant,
    cells,
    conclusions,
    final_loss,
    rows,
)
from experiments.language.seconds import kind_seconds
from experiments.problems.language import (
    BATCH_SIZE,
    CONTEXT,
    EPOCH_STEPS,
    Language,
    load_language,
)
from experiments.runs.command_line import checked_output, positive_int, seed_int
from experiments.runs.comparison import aligned
from experiments.runs.pool import run_all
from experiments.runs.run_file import RunFile
from experiments.runs.settings import Settings
from experiments.tuning.rate_search import best_place, next_places, place_of, rate

# Not one of the final runs': a rate must not win by the luck of a start.
TUNING_SEED = 100
# The form that is also run at other T1 and T2.
VARIED = "tnt-grafted"
# Steps are timed at a tenth of the forms' rates, with which all of them stay finite: but for the
# number of Newton's iterations, what a step takes does not depend on it.
TIMED_RATE = 0.1


@dataclass(frozen=True)
class Scale:
    """How much is compared.

    Attributes:
        widths: of the models.
        lengths: steps of the runs; multiples of `epoch_steps`.
        trials: learning rates for every form at each length, the search at a later length starting
            from the rate that was best at the one before.
        seeds: of the final runs.
        intervals: further (T1, T2) for `VARIED`.
        rounds: of timing each kind of step.
        layers, heads, context, epoch_steps: of every problem.
    """

    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    trials: tuple[int, ...]
    seeds: tuple[int, ...]
    intervals: tuple[tuple[int, int], ...]
    rounds: int
    layers: int = 2
    heads: int = 4
    context: int = CONTEXT
    epoch_steps: int = EPOCH_STEPS

    def variants(self) -> list[Variant]:
        """What the final runs are of."""
        return [
            Variant(width, steps, form, intervals)
            for width, steps, form in itertools.product(self.widths, self.lengths, FORMS)
            for intervals in (INTERVALS, *(self.intervals if form == VARIED else ()))
        ]

    def runs(self) -> int:
        """How many runs there are in all."""
        searched = len(self.widths) * len(FORMS) * sum(self.trials)
        return searched + len(self.variants()) * len(self.seeds)


SCALES = {
    "full": Scale(
        widths=(64, 128),
        lengths=(400, 1000),
        trials=(5, 3),
        seeds=(0, 1, 2, 3, 4),
        intervals=((1, 5), (10, 100)),
        rounds=20,
    ),
    "small": Scale(
        widths=(64,), lengths=(100,), trials=(3,), seeds=(0, 1), intervals=((1, 5),), rounds=5
    ),
}


class Table:
    """The comparison and its file.

    Args:
        data: the text's path.
        scale: how much is compared.
        file: where runs go, and where those that are made already are found.
        jobs: processes to train in.
    """

    def __init__(self, data: str, scale: Scale, file: RunFile, jobs: int) -> None:
        self.data, self.scale, self.file, self.jobs = data, scale, file, jobs

    def run(self, timing_threads: int) -> None:
        """Makes everything that the file lacks."""
        done = sum(run["key"]["stage"] != "seconds" for run in self.file.runs)
        with tqdm(
            total=self.scale.runs(),
            initial=done,
            desc="transformer table",
            unit="run",
            disable=None,
        ) as bar:
            for width in self.scale.widths:
                for place, steps in enumerate(self.scale.lengths):
                    self._tune(width, place, steps, bar)
                    self._final(width, steps, bar)
        for width in tqdm(self.scale.widths, "seconds of steps", unit="width", disable=None):
            self._measure(width, timing_threads)

    def tried(self, width: int, steps: int, form: str) -> dict[int, float]:
        """The losses of a form's learning rates so far, by their place on the grid."""
        return {
            place_of(run["key"]["settings"]["lr"]): final_loss(run)
            for run in self.file.runs
            if run["key"]["stage"] == "tuning"
            and (run["key"]["width"], run["key"]["steps"], run["key"]["form"])
            == (width, steps, form)
        }

    def best_rate(self, width: int, steps: int, form: str) -> float:
        """The best of a form's learning rates; the lowest where all diverged."""
        tried = self.tried(width, steps, form)
        best = best_place(tried)
        return rate(min(tried) if best is None else best)

    def _tune(self, width: int, place: int, steps: int, bar: Any) -> None:
        trials = self.scale.trials[place]
        while True:
            wanted: dict[Settings, dict[str, Any]] = {}
            for form in FORMS:
                centre = FORMS[form].lr
                if place:
                    centre = self.best_rate(width, self.scale.lengths[place - 1], form)
                tried = self.tried(width, steps, form)
                for next_place in next_places(tried, place_of(centre), trials):
                    settings = self._settings(form, steps, TUNING_SEED, rate(next_place))
                    wanted[settings] = _key("tuning", Variant(width, steps, form), settings)
            if not wanted:
                return
            self._train(width, wanted, bar)

    def _final(self, width: int, steps: int, bar: Any) -> None:
        wanted = {}
        for variant in self.scale.variants():
            if (variant.width, variant.steps) != (width, steps):
                continue
            lr = self.best_rate(width, steps, variant.form)
            for seed in self.scale.seeds:
                settings = self._settings(variant.form, steps, seed, lr, variant.intervals)
                wanted[settings] = _key("final", variant, settings)
        self._train(width, wanted, bar)

    def _settings(
        self,
        form: str,
        steps: int,
        seed: int,
        lr: float,
        intervals: tuple[int, int] = INTERVALS,
    ) -> Settings:
        return form_settings(form, steps // self.scale.epoch_steps, seed, lr, intervals)

    def _train(self, width: int, wanted: Mapping[Settings, dict[str, Any]], bar: Any) -> None:
        missing = [settings for settings, key in wanted.items() if self.file.find(key) is None]

        def done(settings: Settings, record: dict[str, Any]) -> None:
            self.file.add(wanted[settings], _kept(record))
            bar.update()

        run_all(problem_maker(self.data, self.scale, width), missing, self.jobs, done)

    def _measure(self, width: int, threads: int) -> None:
        # All forms of a width in one entry: times of different hours must not stand side by side.
        key = {"stage": "seconds", "width": width, "threads": threads}
        if self.file.find(key) is not None:
            return
        settings = {
            name: form_settings(name, 1, TUNING_SEED, TIMED_RATE * form.lr)
            for name, form in FORMS.items()
        }
        kinds = sorted({kind for variant in self.scale.variants() for kind in variant.kinds()})
        problem = problem_maker(self.data, self.scale, width)()
        found = kind_seconds(problem, settings, kinds, self.scale.rounds, threads)
        self.file.add(key, {"forms": found})


def problem_maker(data: str, scale: Scale, width: int) -> functools.partial[Language]:
    """What makes the problem of one width, in any process."""
    return functools.partial(
        load_language,
        data,
        width=width,
        layers=scale.layers,
        heads=scale.heads,
        context=scale.context,
        epoch_steps=scale.epoch_steps,
    )


def protocol(problem: Language, scale: Scale) -> dict[str, Any]:
    """What all runs of one file share. More seeds can be added to a file."""
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
        "tuning": "learning rates only, as many trials for every form. Not recorded: dampings of "
        "TNT, TNT-EF and Shampoo, the best of a few tried by hand at width 64; AdamW and Muon had "
        "no such trials",
        "seconds": "medians of each kind of step, all forms alternating in one process, on one "
        "batch; a run's by its schedule, with the more frequent inverses of its first T2 steps. At "
        f"equal seconds: {CUT}, its learning rate not yet down",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    scale = _scale(parser, arguments)
    # As in the pool's processes: a run's numbers must not depend on the number of jobs.
    torch.set_num_threads(1)
    try:
        problem = problem_maker(arguments.data, scale, scale.widths[0])()
    except (OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")
    out = checked_output(parser, "--out", arguments.out)
    try:
        file = RunFile(out, "transformer table", protocol(problem, scale))
    except ValueError as error:
        parser.error(f"argument --out: {error}")
    Table(arguments.data, scale, file, arguments.jobs).run(arguments.timing_threads)

    table = rows(file.runs, arguments.timing_threads)
    for width, steps in itertools.product(scale.widths, scale.lengths):
        own = [r for r in table if (r.variant.width, r.variant.steps) == (width, steps)]
        print(f"\nwidth {width}, {steps} steps\n{aligned([HEADER, *map(cells, own)])}")
    print("", *conclusions(table), sep="\n")
    tokens = BATCH_SIZE * scale.context
    pictures = plot_table(file.runs, out, tokens, arguments.timing_threads)
    print(f"\nwrote {out} and {', '.join(str(picture) for picture in pictures)}")
    return 0


def _key(stage: str, variant: Variant, settings: Settings) -> dict[str, Any]:
    return {"stage": stage, **asdict(variant), "settings": asdict(settings)}


def _kept(record: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run: not its seconds, which were those of a shared machine."""
    losses = [epoch["metrics"]["validation_loss"] for epoch in record["epochs"]]
    return {
        "validation_losses": [round(loss, 6) if math.isfinite(loss) else None for loss in losses],
        **{
            name: record[name]
            for name in ("steps_per_epoch", "final_smoothed_loss", "diverged_at_step")
        },
    }


def _scale(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Scale:
    """The scale with what the command line says instead."""
    scale = SCALES[arguments.scale]
    names = ("widths", "lengths", "trials", "seeds")
    given: dict[str, Any] = {n: tuple(v) for n in names if (v := getattr(arguments, n)) is not None}
    scale = replace(scale, **given)
    if len(scale.trials) != len(scale.lengths):
        parser.error(
            f"argument --trials: give one number for each length, {len(scale.lengths)}, "
            f"got {len(scale.trials)}"
        )
    for steps in scale.lengths:
        if steps % scale.epoch_steps:
            parser.error(
                f"argument --lengths: must be multiples of {scale.epoch_steps}, got {steps}"
            )
    for width in scale.widths:
        if width % scale.heads:
            parser.error(f"argument --widths: must be multiples of {scale.heads}, got {width}")
    if TUNING_SEED in scale.seeds:
        parser.error(f"argument --seeds: {TUNING_SEED} is the search's")
    for name in names:
        if name != "trials" and len(set(getattr(scale, name))) < len(getattr(scale, name)):
            parser.error(f"argument --{name}: must differ from each other")
    return scale


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.language_table",
        description="Compare every form of every method on the character transformer: learning "
        "rates searched with equal budgets, final runs from several seeds, seconds measured apart.",
    )
    parser.add_argument("--data", required=True, metavar="FILE.txt", help="a text in UTF-8")
    parser.add_argument("--scale", choices=tuple(SCALES), default="full")
    for name, kind, text in (
        ("widths", positive_int, "of the models"),
        ("lengths", positive_int, f"steps, in multiples of {EPOCH_STEPS}"),
        ("trials", positive_int, "learning rates for every form, a number for each length"),
        ("seeds", seed_int, "of the final runs"),
    ):
        parser.add_argument(
            f"--{name}", type=kind, nargs="+", metavar="N", help=f"{text} (default: the scale's)"
        )
    parser.add_argument(
        "--jobs",
        type=positive_int,
        default=2,
        metavar="N",
        help="processes to train in, one thread each (default: 2)",
    )
    parser.add_argument(
        "--timing-threads",
        type=positive_int,
        default=2,
        metavar="N",
        help="threads while the seconds of steps are measured (default: 2)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/transformer/table.json"),
        metavar="FILE.json",
        help="the record; plots are written beside it (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
