"""The methods of the comparison beyond the paper, each in the forms that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.problems.language import BATCH_SIZE
from experiments.runs.methods import has_statistics, takes_graft
from experiments.runs.settings import Settings

SCHEDULE = "warmup-cosine"
# T1 and T2, as in the probe of the algorithm's page.
INTERVALS = (5, 20)


@dataclass(frozen=True)
class Form:
    """One method in one form.

    Attributes:
        label: its name in tables and legends.
        optimizer: its name in `METHODS`.
        lr: the learning rate that a search starts from, and the command's default.
        damping: epsilon; Adam's epsilon; None for Muon.
        grafted: whether steps have the length of Adam's and the damping is relative.
        momentum: mu; Adam's beta_1.
        stat_decay: beta; Adam's beta_2.
        dashes: of its curves; the colour is the optimizer's.
    """

    label: str
    optimizer: str
    lr: float
    damping: float | None
    grafted: bool = False
    momentum: float = 0.9
    stat_decay: float | None = 0.9
    dashes: str = "-"


# No method has weight decay: runs this short see each character a few times at most, so there is
# nothing to regularise, and a decay would be one more setting to search for each of them. None has
# a warm start: the learning rate's own warm-up covers the first steps. AdamW's second moments decay
# by 0.99, as in Muon's AdamW and in the grafts. The dampings of TNT, TNT-EF and Shampoo are the
# best of a few tried by hand at width 64, of which there is no record; AdamW and Muon had no second
# setting tried. Learning rates alone are searched, with as many trials for every form.
FORMS: Mapping[str, Form] = {
    "tnt": Form("TNT, paper's form", "tnt", 1e-7, 1e-4, dashes="--"),
    "tnt-grafted": Form("TNT, grafted", "tnt", 1e-2, 0.1, grafted=True),
    "tnt-ef": Form("TNT-EF, paper's form", "tnt-ef", 3e-4, 0.01, dashes="--"),
    "tnt-ef-grafted": Form("TNT-EF, grafted", "tnt-ef", 1e-2, 0.1, grafted=True),
    "shampoo": Form("Shampoo, paper's form", "shampoo", 1e-2, 1e-4, dashes="--"),
    "shampoo-grafted": Form("Shampoo, grafted", "shampoo", 1e-2, 1e-3, grafted=True),
    "adam": Form("AdamW", "adam", 3e-3, 1e-8, stat_decay=0.99),
    "muon": Form("Muon + AdamW", "muon", 1.8e-2, None, momentum=0.95, stat_decay=None),
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
        epochs: how long it is.
        seed: of the start, the batches and the samples.
        lr: the learning rate; None for the form's own.
        intervals: T1 and T2, for the methods that have them.

    Raises:
        ValueError: there is no such form; the message lists those there are.
    """
    if name not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {name!r}")
    form = FORMS[name]
    second_order = has_statistics(form.optimizer)
    return Settings(
        optimizer=form.optimizer,
        lr=form.lr if lr is None else lr,
        damping=form.damping,
        momentum=form.momentum,
        stat_decay=form.stat_decay,
        weight_decay=0.0,
        stat_interval=intervals[0] if second_order else None,
        inverse_interval=intervals[1] if second_order else None,
        warm_start=False if second_order else None,
        relative_damping=form.grafted if takes_graft(form.optimizer) else None,
        graft="adam" if form.grafted else None,
        schedule=SCHEDULE,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        seed=seed,
    )


def command_form(optimizer: str, paper: bool) -> str:
    """The form that a command means by an optimizer's name: the grafted one where there is one."""
    return f"{optimizer}-grafted" if takes_graft(optimizer) and not paper else optimizer
