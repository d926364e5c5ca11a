"""Beyond the paper: a character-level transformer on tiny Shakespeare.

TNT, TNT-EF and Shampoo with steps of Adam's length and relative damping, or in the paper's form,
AdamW and Muon. `transformer_table.py` has the whole comparison with searched learning rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from experiments import options
from experiments.comparison import run_comparison
from experiments.methods import Settings, method_settings
from experiments.options import chosen, numbers, overridden, user_errors
from experiments.problems.language import EPOCH_STEPS, load_language

BATCH_SIZE = 32
SCHEDULE = "warmup-cosine"
INTERVALS = (5, 20)  # T1 and T2


@dataclass(frozen=True)
class Form:
    """One method in one form.

    Attributes:
        label: in tables and legends.
        optimizer: its name in `METHODS`.
        lr: the command's default, and the start of a search.
        damping: epsilon; Adam's epsilon; None for Muon.
        grafted: steps have the length of Adam's, and the damping is relative.
        momentum: mu; Adam's beta_1.
        stat_decay: beta; Adam's beta_2.
    """

    label: str
    optimizer: str
    lr: float
    damping: float | None
    grafted: bool = False
    momentum: float = 0.9
    stat_decay: float | None = None


# No weight decay: runs this short see each character a few times at most, so there is nothing to
# regularise. No warm start: the learning rate's warm-up covers the first steps. AdamW's second
# moments decay by 0.99, as in Muon's AdamW and in the grafts. The dampings of TNT, TNT-EF and
# Shampoo are the best of a few tried by hand at width 64, without a record; AdamW and Muon had no
# second setting tried. Only learning rates are searched, with as many trials for every form.
FORMS: Mapping[str, Form] = {
    "tnt": Form("TNT, paper's form", "tnt", 1e-7, 1e-4),
    "tnt-grafted": Form("TNT, grafted", "tnt", 1e-2, 0.1, grafted=True),
    "tnt-ef": Form("TNT-EF, paper's form", "tnt-ef", 3e-4, 0.01),
    "tnt-ef-grafted": Form("TNT-EF, grafted", "tnt-ef", 1e-2, 0.1, grafted=True),
    "shampoo": Form("Shampoo, paper's form", "shampoo", 1e-2, 1e-4),
    "shampoo-grafted": Form("Shampoo, grafted", "shampoo", 1e-2, 1e-3, grafted=True),
    "adam": Form("AdamW", "adam", 3e-3, 1e-8, stat_decay=0.99),
    "muon": Form("Muon + AdamW", "muon", 1.8e-2, None, momentum=0.95),
}


def form_settings(
    name: str,
    epochs: int,
    seed: int = 0,
    lr: float | None = None,
    intervals: tuple[int, int] = INTERVALS,
) -> Settings:
    """The settings of one form's run.

    Args:
        name: one of `FORMS`.
        epochs: length of the run.
        seed: of the start, the batches and the samples.
        lr: the learning rate; None for the form's own.
        intervals: T1 and T2, for second-order methods.
    """
    form = FORMS[name]
    return method_settings(
        *(form.optimizer, form.lr if lr is None else lr, form.damping),
        momentum=form.momentum,
        stat_decay=form.stat_decay,
        intervals=intervals,
        warm_start=False,
        relative_damping=form.grafted,
        graft="adam" if form.grafted else None,
        schedule=SCHEDULE,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        seed=seed,
    )


def main(
    optimizer: options.Optimizers = "tnt-grafted,adam,muon",
    data: options.Data = None,
    width: Annotated[int, typer.Option("--width", min=4, help="A multiple of 4.")] = 128,
    steps: options.Steps = 400,
    seeds: options.Seeds = "0",
    changes: options.Overrides = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    out: options.Out = None,
) -> None:
    """Beyond the paper: a character transformer; optimizers in grafted and paper's forms."""
    where = options.set_machine(threads, device)
    epoch_steps = min(EPOCH_STEPS, steps)
    with user_errors():
        if steps % epoch_steps or width % 4:
            raise ValueError(f"--steps must be at most {EPOCH_STEPS} or a multiple, --width of 4")
        problem = load_language(data, width=width, epoch_steps=epoch_steps)
        each = [
            overridden(form_settings(name, steps // epoch_steps), changes)
            for name in chosen(optimizer, list(FORMS))
        ]
    wanted = [replace(settings, seed=seed) for seed in numbers(seeds) for settings in each]
    out = out or Path(f"results/transformer/width{width}.json")
    run_comparison("transformer", problem, wanted, out, where, metric="validation_loss")
