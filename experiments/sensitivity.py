"""How well one learning rate serves everything: `python -m experiments.sensitivity --help`.

TNT and Shampoo in the paper's form, and with grafting and relative damping: the learning rate is
tuned at one point, and kept while batch size, T2, damping and width change, on an autoencoder and
on a character transformer. Every form has as many learning rates at every point. A command that
was interrupted goes on from its file.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiments.runs.command_line import checked_output, positive_int, seed_int
from experiments.runs.comparison import aligned
from experiments.runs.pool import run_all
from experiments.runs.run_file import RunFile, RunFileError
from experiments.runs.settings import Settings
from experiments.sensitivities.measures import (
    TOLERANCE,
    axis_rows,
    common_rows,
    markdown,
    summary_rows,
    surface,
)
from experiments.sensitivities.plan import (
    BASES,
    CONTENDERS,
    FULL,
    QUICK,
    Scale,
    make_problem,
    protocol,
    wanted,
)
from experiments.sensitivities.plot import plot_sensitivity


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    # As in the pool's processes: a run's numbers must not depend on the number of jobs.
    torch.set_num_threads(1)
    scale = QUICK if arguments.quick else FULL
    problems, forms = list(dict.fromkeys(arguments.problems)), list(dict.fromkeys(arguments.forms))
    seeds = list(dict.fromkeys(arguments.seeds or scale.seeds))
    if arguments.text is not None and "language" not in problems:
        parser.error("argument --text: only the language problem has one")
    try:
        shared = protocol(problems, arguments.text, scale)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(f"argument {'--problems' if arguments.text is None else '--text'}: {error}")
    out = checked_output(parser, "--out", arguments.out)
    try:
        file = RunFile(out, "sensitivity", shared)
    except RunFileError as error:
        parser.error(f"argument --out: {error}")
    make_runs(file, forms, problems, seeds, scale, arguments.text, arguments.jobs)

    surfaces = {form: surface(file.runs, form, seeds) for form in forms}
    floors = {name: shared["problems"][name]["loss_floor"] for name in problems}
    refreshes = shared["refreshes"]
    tables = [
        (f"The rate tuned at the base point, at all other points ({_note()})",
         summary_rows(surfaces, floors)),
        *((f"{BASES[name].label}, axis by axis",
           axis_rows(surfaces, name, floors[name], refreshes[name]))
          for name in problems),
        ("One rate for several points, tried at all of them: the largest regret",
         common_rows(surfaces, floors)),
    ]  # fmt: skip
    for title, rows in tables:
        print(f"\n{title}\n{aligned(rows)}")
    picture, page = out.with_suffix(".png"), out.with_suffix(".md")
    drawn = f"Regret of every learning rate at every point, mean over {len(seeds)} seed(s)"
    title = f"{drawn}; framed: tuned at the base point"
    plot_sensitivity(surfaces, floors, refreshes, picture, title)
    page.write_text("\n".join(f"**{title}**\n\n{markdown(rows)}" for title, rows in tables))
    print(f"\nwrote {out}, {page} and {picture}")
    return 0


def make_runs(
    file: RunFile,
    forms: Sequence[str],
    problems: Sequence[str],
    seeds: Sequence[int],
    scale: Scale,
    text: Path | None,
    jobs: int,
) -> None:
    """Makes the runs that `file` lacks."""
    groups: dict[tuple[str, float], dict[Settings, dict[str, Any]]] = {}
    known = {tuple(run["key"].items()) for run in file.runs}
    for problem in problems:
        for point, settings, key in wanted(forms, problem, seeds, scale):
            if tuple(key.items()) not in known:
                groups.setdefault((problem, point.width), {})[settings] = key
    total = sum(map(len, groups.values()))
    with tqdm(total=total, desc="sensitivity", unit="run", disable=None) as bar:
        for (problem, width), missing in groups.items():

            def done(
                settings: Settings,
                record: dict[str, Any],
                keys: Mapping[Settings, dict[str, Any]] = missing,
                metric: str = BASES[problem].metric,
            ) -> None:
                file.add(keys[settings], _kept(record, metric))
                bar.update()

            maker = functools.partial(make_problem, problem, width, text, scale)
            run_all(maker, list(missing), jobs, done)


def _kept(record: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """What is kept of a run: thousands of them stand in one file."""
    last = record["epochs"][-1]["metrics"][metric]
    lost = record["diverged_at_step"]
    # Finite at its last step and not after it is diverged as well.
    loss = round(last, 5) if lost is None and math.isfinite(last) else None
    return {"loss": loss, "diverged_at_step": lost}


def _note() -> str:
    return f"rates within: with a regret of at most {100 * TOLERANCE:g} % or {TOLERANCE:g} nats"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sensitivity",
        description="Tune the learning rate of TNT and Shampoo, in the paper's form and with "
        "grafting and relative damping, at one point; then see what it loses where batch size, "
        "T2, damping or width is another one. Runs of every batch size see as many examples. "
        "Runs that are in the file already are not made again.",
    )
    parser.add_argument(
        "--problems", nargs="+", choices=tuple(BASES), default=list(BASES), help="default: both"
    )
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=tuple(CONTENDERS),
        default=list(CONTENDERS),
        help="default: all",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE.txt",
        help="for the transformer, in UTF-8 (default: the sources of Python's standard library, "
        "another text for every version of Python; the record has version and SHA-256)",
    )
    parser.add_argument(
        "--seeds",
        type=seed_int,
        nargs="+",
        metavar="N",
        help="a run from each, everywhere (default: 0 1; 0 with --quick)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a page of figures: short runs, every decade of the learning rates, one seed",
    )
    parser.add_argument(
        "--jobs",
        type=positive_int,
        default=2,
        metavar="N",
        help="processes, with one thread each (default: 2)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.json",
        help="the record; the tables are written beside it as .md, the heat maps as .png",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
