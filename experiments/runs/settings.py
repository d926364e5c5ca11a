"""Every setting of one training run, and the learning rate's course over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

# The first part of a run during which "warmup-cosine" raises the learning rate.
WARM_UP = 0.05


@dataclass(frozen=True)
class Settings:
    """Every setting of one run. What an optimizer does not have is None."""

    optimizer: str
    lr: float  # alpha in the paper
    damping: float | None  # epsilon in the paper, lambda for KFAC; Adam's epsilon
    momentum: float  # mu in the paper; Adam's beta_1
    stat_decay: float | None  # beta in the paper; Adam's beta_2
    weight_decay: float  # gamma in the paper, decoupled
    stat_interval: int | None  # T_1 in the paper
    inverse_interval: int | None  # T_2 in the paper
    warm_start: bool | None
    relative_damping: bool | None
    graft: str | None
    schedule: str  # "constant", "step:N" (a tenth every N epochs) or "warmup-cosine"
    batch_size: int
    epochs: int
    seed: int


def lr_multiplier(schedule: str, step: int, steps_per_epoch: int, steps: int) -> float:
    """What the learning rate is multiplied with at one step, counted from 0.

    Args:
        schedule: "constant"; "step:N", a tenth of it every N epochs; or "warmup-cosine", from 0 up
            in a line over the first twentieth of the steps, then down to 0 along a cosine.
        step: the step about to be taken.
        steps_per_epoch: the number of steps in an epoch.
        steps: the number of steps in the run.

    Raises:
        ValueError: there is no such schedule.

    >>> [lr_multiplier("step:2", step, 1, 6) for step in range(6)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    """
    if schedule == "constant":
        return 1.0
    if schedule == "warmup-cosine":
        warm = max(1, math.ceil(WARM_UP * steps))
        if step < warm:
            return (step + 1) / warm
        return (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2
    kind, _, number = schedule.partition(":")
    if kind == "step" and number.isdecimal() and int(number) > 0:
        return float(f"{0.1 ** (step // steps_per_epoch // int(number)):.6g}")
    raise ValueError(
        f"schedule must be 'constant', 'warmup-cosine' or 'step:N' with N > 0, got {schedule!r}"
    )


def variant(settings: Settings) -> tuple[tuple[str, object], ...]:
    """What runs of one curve share: every setting but the seed."""
    return tuple((name, value) for name, value in asdict(settings).items() if name != "seed")


_IN_LABELS = {
    "lr": "lr {:g}",
    "damping": "damping {:g}",
    "momentum": "momentum {:g}",
    "stat_decay": "β {:g}",
    "weight_decay": "decay {:g}",
    "stat_interval": "T1 = {}",
    "inverse_interval": "T2 = {}",
    "schedule": "{}",
    "batch_size": "batch {}",
    "epochs": "{} epochs",
}


def variant_labels(variants: Sequence[Settings], names: dict[str, str]) -> list[str]:
    """A label for each: the method's name, and what tells it from others of the same method.

    Args:
        variants: settings, each of another variant.
        names: the methods' names.
    """
    labels = []
    for settings in variants:
        label = names[settings.optimizer]
        parts = ["grafted"] if settings.graft else []
        if settings.relative_damping:
            parts.append("relative damping")
        like = [
            other
            for other in variants
            if (other.optimizer, other.graft, other.relative_damping)
            == (settings.optimizer, settings.graft, settings.relative_damping)
        ]
        for name, text in _IN_LABELS.items():
            values = {getattr(other, name) for other in like}
            value = getattr(settings, name)
            if len(values) > 1 and value is not None:
                parts.append(text.format(value))
        if len({other.warm_start for other in like}) > 1:
            parts.append("warm start" if settings.warm_start else "no warm start")
        labels.append(f"{label} ({', '.join(parts)})" if parts else label)
    return labels
